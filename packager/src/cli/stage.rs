//! `kyb stage` and `kyb evict`

use clap::{Args, ValueEnum};
use kybernate_packager::agent_api::{self as api, EvictRequest, StageRequest};
use kybernate_spec::{Digest, Location};
use serde_json::{Value, json};

use super::Failure;
use super::agent::{AgentSocket, refused};
use super::bring::{Bring, facts, received};
use super::identifier::identifier;
use crate::terminal::{Terminal, bytes};

/// Put a checkpoint where this node restores it from without copying a byte.
///
/// This node's agent verifies it as for a restore, then keeps its dump in memory or on disk, within
/// the budget that its configuration gives to the tier; what was used least recently goes for it. A
/// restore finds it by its digest. Ctrl-C cancels, a second Ctrl-C leaves it to the agent.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb stage registry.example.com/team/job:v1 --tier ram")]
pub(super) struct Stage {
    /// What to stage.
    #[arg(value_name = "REF")]
    reference: Location,
    /// Where it is kept: in memory or on disk.
    #[arg(long)]
    tier: Tier,
    /// containerd's namespace that it will be restored into, for the node's trust policy.
    #[arg(long, default_value = "default", value_parser = identifier)]
    namespace: String,
    /// It may have been packed without facts, or without one that a rule needs.
    #[arg(long)]
    allow_unknown_facts: bool,
    #[command(flatten)]
    bring: Bring,
}

/// Take a staged checkpoint away from this node's memory or disk.
///
/// It is found by its digest, or by the reference that it was staged by; no registry is asked. One
/// that a restore reads just now stays.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb evict registry.example.com/team/job:v1")]
pub(super) struct Evict {
    /// What to take away: a reference, or a digest.
    #[arg(value_name = "REF", value_parser = staged)]
    reference: String,
    /// Only from here.
    #[arg(long)]
    tier: Option<Tier>,
    #[command(flatten)]
    agent: AgentSocket,
}

/// Where checkpoints are kept ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tier {
    Ram,
    Nvme,
}

impl From<Tier> for api::Tier {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Ram => Self::Ram,
            Tier::Nvme => Self::Nvme,
        }
    }
}

impl Stage {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let asked = self.bring.ask(&self.reference).await?;
        let tier = api::Tier::from(self.tier);
        let request = StageRequest {
            reference: asked.reference,
            tier: tier.into(),
            containerd_namespace: self.namespace,
            plain_http: asked.plain_http,
            insecure_no_signature: asked.insecure_no_signature,
            public_keys: asked.public_keys,
            allow_unknown_facts: self.allow_unknown_facts,
            timeout_seconds: asked.timeout_seconds,
        };
        let mut client = self.bring.agent.connect().await?;
        let begun = client.stage(request).await.map_err(refused)?.into_inner();
        let done = self.bring.agent.follow(terminal, begun).await?;
        let own = json!({ "tier": word(tier) });
        let text = format!(
            "staged {}\nin     {}, {}",
            done.digest,
            word(tier).unwrap_or_default(),
            received(&done),
        );
        terminal.print(&facts(&done, own), &text).map_err(Failure::failed)
    }
}

impl Evict {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let tier = self.tier.map_or(api::Tier::Unspecified, api::Tier::from);
        let request = EvictRequest { reference: self.reference, tier: tier.into() };
        let mut client = self.agent.connect().await?;
        let evicted = client.evict(request).await.map_err(refused)?.into_inner().evicted;
        let facts = json!({ "evicted": evicted.iter().map(fact).collect::<Vec<_>>() });
        let line = |one: &api::StagedCheckpoint| {
            let tier = word(one.tier()).unwrap_or_default();
            format!("evicted {} from {tier}, {}\n", one.digest, bytes(one.bytes))
        };
        let text: String = evicted.iter().map(line).collect();
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}

/// Returns the word for a tier.
pub(super) const fn word(tier: api::Tier) -> Option<&'static str> {
    match tier {
        api::Tier::Unspecified => None,
        api::Tier::Ram => Some("ram"),
        api::Tier::Nvme => Some("nvme"),
    }
}

/// Tells of one staged checkpoint.
pub(super) fn fact(one: &api::StagedCheckpoint) -> Value {
    json!({
        "digest": one.digest,
        "references": one.references,
        "tier": word(one.tier()),
        "bytes": one.bytes,
        "pinned": one.pinned,
        "usedAt": one.used_at,
    })
}

/// Accepts what names a staged checkpoint.
fn staged(text: &str) -> Result<String, String> {
    if text.parse::<Digest>().is_ok() {
        return Ok(text.to_owned());
    }
    match text.parse::<Location>() {
        Ok(location) => Ok(location.to_string()),
        Err(error) => Err(kybernate_spec::chain(&error).to_string()),
    }
}
