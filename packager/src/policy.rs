//! Who must have signed what before it is used: rules per repository and namespace, in a TOML file.
//!
//! ```toml
//! [[rule]]
//! name = "shop"
//! repositories = ["registry.example.com/shop/**"]   # `*` within a component, `**` across them
//! source_namespaces = ["shop", "shop-*"]            # any, when it is not there
//! target_namespaces = ["shop", "lab"]               # the source's own, when it is not there
//! keys = ["shop.pub"]                               # files beside this one, or whole PEM texts
//! mode = "enforce"                                  # or "warn", or "off"
//! not_after = 2027-01-01T00:00:00Z                  # the rule counts until then
//! ```
//!
//! What no rule speaks of is refused. Rules only ever add, in any order: of all that speak of a
//! checkpoint, one key is enough, and the mildest mode counts.

use std::fmt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use kybernate_spec::checkpoint::CheckpointConfig;
use kybernate_spec::{Digest, Location};

mod file;
mod pattern;
mod schema;

pub use self::file::Mistake;
pub use self::pattern::Patterns;
use crate::artifact::Checkpoint;
use crate::key::PublicKey;
use crate::store::Store;
use crate::verify::{Verified, VerifyError, verify_signature};

/// Rules, ready to be asked.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    rules: Vec<Rule>,
    /// What it was read from: the file and those of its keys.
    files: Vec<(PathBuf, Vec<u8>)>,
}

/// Whose signature counts for checkpoints of some repositories, taken in some namespaces, that go
/// into some namespaces.
#[derive(Clone, Debug)]
pub struct Rule {
    /// What messages call it.
    pub name: String,
    /// `host[:port]/name` of the repositories, or `oci:` and the absolute path of a layout.
    pub repositories: Patterns,
    /// Namespaces the checkpoint was taken in.
    pub source_namespaces: Patterns,
    /// Namespaces it may go into; the source's own when absent.
    pub target_namespaces: Option<Patterns>,
    /// Whose signature counts; one is enough.
    pub keys: Vec<PublicKey>,
    /// What happens without one.
    pub mode: Mode,
    /// The rule counts from then on.
    pub not_before: Option<Timestamp>,
    /// The rule counts until then, that moment included.
    pub not_after: Option<Timestamp>,
}

/// What happens with a checkpoint that no key of the rule has signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// It is refused.
    Enforce,
    /// It is used, and that is told.
    Warn,
    /// Signatures are not even looked at.
    Off,
}

/// What a policy is asked about.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The repository, as [`repository`] writes it.
    pub repository: &'a str,
    /// Where the checkpoint says that it was taken.
    pub source_namespace: &'a str,
    /// Where it goes.
    pub target_namespace: &'a str,
}

/// The rules that speak of a checkpoint; at least one.
#[derive(Clone, Debug)]
pub struct Demand<'p>(Vec<&'p Rule>);

/// Why a checkpoint may be used.
#[derive(Debug)]
pub enum Verdict {
    /// A key of this rule has signed it.
    Signed {
        /// The rule.
        rule: String,
        /// The signature.
        by: Verified,
    },
    /// It is not signed as it should be, and this rule only warns.
    Tolerated {
        /// The rule.
        rule: String,
        /// What is wrong.
        why: VerifyError,
    },
    /// This rule does not look at signatures.
    NotLooked {
        /// The rule.
        rule: String,
    },
}

/// Why a checkpoint may not be used, or is not known to be.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// No rule speaks of it.
    #[error(transparent)]
    Uncovered(#[from] Uncovered),
    /// It says itself that it is past its time.
    #[error(transparent)]
    Expired(#[from] Expired),
    /// No key of the rules that speak of it has signed it; or nothing is known, because its
    /// signatures could not be read.
    #[error("the policy wants a signature by a key of {}", named(.rules))]
    Signature {
        /// The rules.
        rules: Vec<String>,
        /// What is wrong.
        #[source]
        source: VerifyError,
    },
}

/// No rule speaks of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no rule of the policy lets checkpoints of {repository}, taken in namespace \
     {source_namespace:?}, into namespace {target_namespace:?}{}", told(.outdated, *.has_rules)
)]
pub struct Uncovered {
    /// The repository.
    pub repository: String,
    /// Where it says that it was taken.
    pub source_namespace: String,
    /// Where it was to go.
    pub target_namespace: String,
    /// Rules that would speak of it at another time.
    pub outdated: Vec<String>,
    /// Whether there is any rule.
    pub has_rules: bool,
}

/// A checkpoint is past the time that it names itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Expired {
    /// Its time is over.
    #[error("it was not to be restored after {0}")]
    After(Timestamp),
    /// What it says is no time.
    #[error("its last time of restore, {0:?}, is no time")]
    NoTime(String),
}

/// Why a policy objects, as one word of a few: for figures and programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objection {
    /// No rule speaks of it.
    NoRule,
    /// It has no signature that can be read.
    NotSigned,
    /// Others have signed it.
    OtherKey,
    /// It is past its time.
    Expired,
}

impl Policy {
    /// Reads a policy file and those of its keys; returns everything that is wrong at once.
    pub fn read(file: &Path) -> Result<Self, Vec<Mistake>> {
        file::read(file)
    }

    /// Returns the JSON schema of a policy file.
    pub fn schema() -> serde_json::Value {
        schema::schema()
    }

    /// Makes a policy of rules.
    pub const fn of(rules: Vec<Rule>) -> Self {
        Self { rules, files: Vec::new() }
    }

    /// Adds rules that do not come from a file.
    pub fn extend(&mut self, rules: impl IntoIterator<Item = Rule>) {
        self.rules.extend(rules);
    }

    /// Returns the rules.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Whether the files that it was read from still say the same.
    pub fn is_current(&self) -> bool {
        self.files.iter().all(|(path, content)| {
            crate::key::read_bounded(path, file::BYTES_MAX).is_ok_and(|now| now == *content)
        })
    }

    /// Finds the rules that speak of a checkpoint at this time.
    pub fn ask(&self, question: Question<'_>, now: Timestamp) -> Result<Demand<'_>, Uncovered> {
        let covering = self.rules.iter().filter(|rule| rule.covers(question));
        let (rules, outdated): (Vec<_>, Vec<_>) = covering.partition(|rule| rule.counts(now));
        if !rules.is_empty() {
            return Ok(Demand(rules));
        }
        Err(Uncovered {
            repository: question.repository.to_owned(),
            source_namespace: question.source_namespace.to_owned(),
            target_namespace: question.target_namespace.to_owned(),
            outdated: outdated.iter().map(|rule| rule.outdated(now)).collect(),
            has_rules: !self.rules.is_empty(),
        })
    }

    /// Decides whether a checkpoint may go into a namespace (its own, without one). What is read are
    /// signatures, nothing large. Where it was taken is what the checkpoint says, and is proven only
    /// by a signature.
    pub async fn judge(
        &self,
        store: &Store,
        checkpoint: &Checkpoint,
        location: &Location,
        target_namespace: Option<&str>,
    ) -> Result<Verdict, PolicyError> {
        let now = Timestamp::now();
        let repository = repository(location);
        let source_namespace = checkpoint.config.source.namespace.as_deref().unwrap_or_default();
        let target_namespace = target_namespace.unwrap_or(source_namespace);
        let demand = self
            .ask(Question { repository: &repository, source_namespace, target_namespace }, now)?;
        in_time(&checkpoint.config, now)?;
        demand.meet(store, &checkpoint.stored.descriptor.digest).await
    }
}

impl Rule {
    /// Returns a rule about one key: whatever `*` stands for in its patterns, `/` included.
    pub fn of_key(
        name: String,
        key: PublicKey,
        repository: &str,
        source_namespace: &str,
        target_namespace: Option<&str>,
    ) -> Self {
        Self {
            name,
            repositories: Patterns::stars(repository),
            source_namespaces: Patterns::stars(source_namespace),
            target_namespaces: target_namespace.map(Patterns::stars),
            keys: vec![key],
            mode: Mode::Enforce,
            not_before: None,
            not_after: None,
        }
    }

    /// Whether it speaks of this repository and these namespaces, at whatever time.
    fn covers(&self, question: Question<'_>) -> bool {
        let target = match &self.target_namespaces {
            Some(target) => target.matches(question.target_namespace),
            None => question.source_namespace == question.target_namespace,
        };
        target
            && self.repositories.matches(question.repository)
            && self.source_namespaces.matches(question.source_namespace)
    }

    fn counts(&self, now: Timestamp) -> bool {
        self.not_before.is_none_or(|begin| begin <= now)
            && self.not_after.is_none_or(|end| now <= end)
    }

    fn outdated(&self, now: Timestamp) -> String {
        let Self { name, not_before, not_after, .. } = self;
        match (not_before, not_after) {
            (Some(begin), _) if now < *begin => format!("{name:?} counts from {begin} on"),
            (_, Some(end)) => format!("{name:?} counted until {end}"),
            _ => format!("{name:?} does not count now"),
        }
    }
}

impl Demand<'_> {
    /// Returns what happens without a signature: the mildest that one of the rules says.
    pub fn mode(&self) -> Mode {
        self.0.iter().map(|rule| rule.mode).max().unwrap_or(Mode::Enforce)
    }

    /// Returns whose signature counts.
    pub fn keys(&self) -> Vec<PublicKey> {
        self.0.iter().flat_map(|rule| rule.keys.iter().cloned()).collect()
    }

    /// Looks for a signature that counts.
    pub async fn meet(&self, store: &Store, digest: &Digest) -> Result<Verdict, PolicyError> {
        if let Some(rule) = self.of_mode(Mode::Off) {
            return Ok(Verdict::NotLooked { rule: rule.name.clone() });
        }
        let found = verify_signature(store, digest, &self.keys()).await;
        match (found, self.of_mode(Mode::Warn)) {
            (Ok(by), _) => Ok(Verdict::Signed { rule: self.rule_of(&by), by }),
            (Err(why), Some(rule)) if why.is_refusal() => {
                Ok(Verdict::Tolerated { rule: rule.name.clone(), why })
            }
            (Err(source), _) => {
                let rules = self.0.iter().map(|rule| rule.name.clone()).collect();
                Err(PolicyError::Signature { rules, source })
            }
        }
    }

    fn of_mode(&self, mode: Mode) -> Option<&Rule> {
        self.0.iter().find(|rule| rule.mode == mode).copied()
    }

    fn rule_of(&self, by: &Verified) -> String {
        let of_key = self.0.iter().find(|rule| rule.keys.iter().any(|key| key.hint() == by.key));
        of_key.map(|rule| rule.name.clone()).unwrap_or_default()
    }
}

impl PolicyError {
    /// Whether this is an answer, and not a failure to get one.
    pub const fn is_refusal(&self) -> bool {
        self.objection().is_some()
    }

    /// Returns the word for it; `None` when nothing is known.
    pub const fn objection(&self) -> Option<Objection> {
        match self {
            Self::Uncovered(_) => Some(Objection::NoRule),
            Self::Expired(_) => Some(Objection::Expired),
            Self::Signature { source, .. } => Objection::of(source),
        }
    }
}

impl Objection {
    /// Returns the word for what is wrong with signatures; `None` when they could not be read.
    pub const fn of(error: &VerifyError) -> Option<Self> {
        match error {
            VerifyError::NotSigned { .. } => Some(Self::NotSigned),
            VerifyError::OtherKeys { .. } => Some(Self::OtherKey),
            VerifyError::Store { .. } => None,
        }
    }

    /// Returns the word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoRule => "no-rule",
            Self::NotSigned => "not-signed",
            Self::OtherKey => "other-key",
            Self::Expired => "expired",
        }
    }
}

impl Mode {
    /// Returns the word that files have.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Warn => "warn",
            Self::Off => "off",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Returns the name of a repository as policies write it.
pub fn repository(location: &Location) -> String {
    match location {
        Location::Registry(reference) => {
            format!("{}/{}", reference.registry, reference.repository)
        }
        Location::Layout(layout) => {
            let absolute = std::path::absolute(&layout.directory);
            let directory = absolute.unwrap_or_else(|_| layout.directory.clone());
            format!("oci:{}", directory.display())
        }
    }
}

/// Refuses a checkpoint that is past the time which it names itself (`notAfter`). No mode of a rule
/// changes that: it is the wish of who took it.
pub fn in_time(facts: &CheckpointConfig, now: Timestamp) -> Result<(), Expired> {
    let Some(text) = &facts.not_after else { return Ok(()) };
    match text.parse::<Timestamp>() {
        Ok(end) if now <= end => Ok(()),
        Ok(end) => Err(Expired::After(end)),
        Err(_) => Err(Expired::NoTime(text.clone())),
    }
}

fn named(rules: &[String]) -> String {
    let names: Vec<String> = rules.iter().map(|name| format!("{name:?}")).collect();
    match names.len() {
        1 => format!("rule {}", names.concat()),
        _ => format!("one of the rules {}", names.join(", ")),
    }
}

fn told(rules: &[String], has_rules: bool) -> String {
    if !has_rules {
        return ": it has none; an agent's are [[trust]] and trust_policy in its configuration"
            .to_owned();
    }
    if rules.is_empty() { String::new() } else { format!("; rule {}", rules.join(", rule ")) }
}

#[cfg(test)]
mod tests;
