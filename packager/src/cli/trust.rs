//! Whose signature counts, as command lines say it.

use std::path::{Path, PathBuf};

use clap::Args;
use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::key::PublicKey;
use kybernate_packager::listing::Judge;
use kybernate_packager::policy::{Mistake, Policy, Verdict};
use kybernate_packager::store::{Store, StoredManifest};
use kybernate_packager::unpack::deep::Proven;
use kybernate_packager::verify::{Verified, verify_signature};
use kybernate_spec::{Digest, Location, chain};
use serde_json::{Value, json};

use super::{Failure, keys};

/// Whose signature counts.
#[derive(Debug, Args)]
pub(super) struct Trust {
    /// A public key that is trusted; may be given more than once.
    #[arg(long = "key", value_name = "FILE")]
    keys: Vec<PathBuf>,
    /// A policy file: which keys count for which repositories and namespaces.
    #[arg(long, value_name = "FILE", conflicts_with = "keys")]
    policy: Option<PathBuf>,
    /// The namespace it goes into, for the policy. Without it, the one it was taken in.
    #[arg(long, value_name = "NAME", requires = "policy", conflicts_with = "keys")]
    target_namespace: Option<String>,
}

/// Whose signature counts, with keys and policy read.
#[derive(Debug)]
pub(super) enum Trusted {
    /// One of these keys must have signed.
    Keys(Vec<PublicKey>),
    /// The policy decides.
    Policy(Policy, Option<String>),
}

/// What was found out.
#[derive(Debug)]
pub(super) struct Found {
    signature: Option<Verified>,
    rule: Option<String>,
    /// What a rule that only warns objects to.
    warning: Option<String>,
}

impl Trust {
    /// Trusts these keys, or what a policy says of something that goes into a namespace.
    pub(super) const fn of(
        keys: Vec<PathBuf>,
        policy: Option<PathBuf>,
        target_namespace: Option<String>,
    ) -> Self {
        Self { keys, policy, target_namespace }
    }

    /// Reads keys and policy.
    pub(super) async fn read(&self) -> Result<Trusted, Failure> {
        match &self.policy {
            None => Ok(Trusted::Keys(keys::read(&self.keys).await?)),
            Some(file) => {
                Ok(Trusted::Policy(read_policy(file).await?, self.target_namespace.clone()))
            }
        }
    }
}

/// Reads a policy file; tells everything that is wrong with it.
pub(super) async fn read_policy(file: &Path) -> Result<Policy, Failure> {
    let file = file.to_owned();
    let read = tokio::task::spawn_blocking(move || Policy::read(&file));
    read.await.map_err(Failure::failed)?.map_err(|wrong| {
        let wrong: Vec<String> = wrong.iter().map(Mistake::to_string).collect();
        Failure::usage(format!("the policy cannot be used:\n{}", wrong.join("\n")))
    })
}

impl Trusted {
    /// Returns who decides about checkpoints that are only listed.
    pub(super) fn judge<'a>(&'a self, location: &'a Location) -> Judge<'a> {
        match self {
            Self::Keys(keys) => Judge::Keys(keys),
            Self::Policy(policy, target) => Judge::Policy(policy, location, target.as_deref()),
        }
    }

    /// Decides whether what was found may be used, before anything large moves.
    pub(super) async fn check(
        &self,
        store: &Store,
        stored: &StoredManifest,
        location: &Location,
    ) -> Result<Found, Failure> {
        match self {
            Self::Keys(keys) => {
                let by = verify_signature(store, &stored.descriptor.digest, keys).await?;
                Ok(Found { signature: Some(by), rule: None, warning: None })
            }
            Self::Policy(policy, target) => {
                let name = location.to_string();
                let checkpoint = Checkpoint::of(store, stored.clone(), &name).await?;
                let verdict = policy.judge(store, &checkpoint, location, target.as_deref());
                Ok(verdict.await?.into())
            }
        }
    }
}

impl Found {
    /// Returns what people are told.
    pub(super) fn tell(&self) -> String {
        let key = self.signature.as_ref().map(|by| format!("key       {}", by.key));
        let rule = self.rule.as_ref().map(|rule| format!("rule      {rule}"));
        let warning = match (&self.warning, &self.signature) {
            (Some(warning), _) => Some(format!("warning   {warning}")),
            (None, None) => Some("warning   the rule does not look at signatures".to_owned()),
            (None, Some(_)) => None,
        };
        let lines: Vec<String> = [key, rule, warning].into_iter().flatten().collect();
        lines.join("\n")
    }

    /// Whether a key that counts has signed.
    pub(super) const fn is_signed(&self) -> bool {
        self.signature.is_some()
    }

    /// Returns what programs are told, with what was read when that was asked for.
    pub(super) fn facts(&self, digest: &Digest, read: Option<&Proven>) -> Value {
        json!({
            "digest": digest,
            "bytesRead": read.map(|read| read.bytes),
            "read": read,
            "key": self.signature.as_ref().map(|by| &by.key),
            "signature": self.signature.as_ref().map(|by| &by.signature),
            "rule": self.rule,
            "warning": self.warning,
        })
    }
}

impl From<Verdict> for Found {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Signed { rule, by } => {
                Self { signature: Some(by), rule: Some(rule), warning: None }
            }
            Verdict::Tolerated { rule, why } => {
                Self { signature: None, rule: Some(rule), warning: Some(chain(&why).to_string()) }
            }
            Verdict::NotLooked { rule } => {
                Self { signature: None, rule: Some(rule), warning: None }
            }
        }
    }
}
