//! Would a checkpoint restore on a node, and if not, why: decided from a few KB of facts.
//!
//! [`Rule`] lists what is looked at, as `spec/artifact.md` does. [`examine`] answers every rule
//! with a sentence that has both values, for `kyb compat` and for the agent, which restores only
//! what this lets through.

use kybernate_spec::Digest;
use kybernate_spec::checkpoint::{CheckpointConfig, NodeFacts};
use serde::Serialize;

use crate::artifact::Checkpoint;

mod cpu;
mod gpu;
mod rule;
mod software;
mod surroundings;

pub use self::gpu::Pair;
pub use self::rule::{Rule, Severity};

/// What is to be restored.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// The checkpoint's facts.
    pub config: &'a CheckpointConfig,
    /// Digest of the checkpoint.
    pub index: Option<&'a Digest>,
    /// Digest of its runnable image, when it has one.
    pub runnable: Option<&'a Digest>,
    /// Destinations of the mounts whose content is part of it.
    pub volumes: Vec<&'a str>,
}

/// Where it is to be restored, and what is given to it there.
#[derive(Clone, Debug)]
pub struct Target<'a> {
    /// What the node is.
    pub node: &'a NodeFacts,
    /// The container image that the new container has; `None` when it is the checkpoint's own.
    pub image: Option<&'a Digest>,
    /// What of the node the new container gets.
    pub offer: Offer,
}

/// What of the node a new container gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// Destinations of mounts.
    pub mounts: Vec<String>,
    /// Devices, by path.
    pub devices: Vec<String>,
    /// Namespaces of the host: network, pid, ipc, uts.
    pub host_namespaces: Vec<String>,
}

/// How one rule turned out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// How it weighs.
    pub severity: Severity,
    /// Whether it holds.
    pub outcome: Outcome,
    /// What was compared, with both values.
    pub message: String,
}

/// Whether a rule holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It holds, or is about something the checkpoint does not have.
    Holds,
    /// It does not hold.
    Broken,
    /// A fact is missing.
    Unknown,
}

/// Whether the checkpoint restores there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Every rule that refuses holds.
    Compatible,
    /// A rule that refuses is broken.
    Incompatible,
    /// None is broken, and of one a fact is missing.
    Unknown,
}

/// How all rules turned out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// One finding per rule, in the order of the specification.
    pub findings: Vec<Finding>,
    /// Which GPU here takes the place of which, for CUDA's restore. Empty without device memory,
    /// and when not every GPU has a partner.
    pub gpu_pairs: Vec<Pair>,
}

/// What a check says.
type Answer = (Outcome, String);

impl<'a> Subject<'a> {
    /// Takes what the rules need from a checkpoint.
    pub fn of(checkpoint: &'a Checkpoint) -> Self {
        Self {
            config: &checkpoint.config,
            index: Some(&checkpoint.stored.descriptor.digest),
            runnable: checkpoint.runnable.as_ref().map(|runnable| &runnable.digest),
            volumes: checkpoint.volumes.iter().map(|volume| &*volume.destination).collect(),
        }
    }

    /// Returns the facts of the source's node, or the answer of every rule that needs them.
    fn node(&self) -> Result<&'a NodeFacts, Answer> {
        let text = "the checkpoint carries no facts of the node it was taken on";
        self.config.node.as_ref().ok_or_else(|| (Outcome::Unknown, text.to_owned()))
    }
}

/// Answers every rule.
pub fn examine(subject: &Subject<'_>, target: &Target<'_>) -> Report {
    let finding = |rule: Rule| {
        let (outcome, message) = answer(rule, subject, target);
        Finding { rule, severity: rule.severity(), outcome, message }
    };
    let findings = Rule::ALL.into_iter().map(finding).collect();
    Report { findings, gpu_pairs: gpu::pairs(subject, target.node).unwrap_or_default() }
}

fn answer(rule: Rule, subject: &Subject<'_>, target: &Target<'_>) -> Answer {
    match rule {
        Rule::Image => surroundings::image(subject, target),
        Rule::ImageDigest => surroundings::image_digest(subject, target),
        Rule::Mounts => surroundings::mounts(subject, target),
        Rule::Devices => surroundings::devices(subject, target),
        Rule::DevicesPresent => surroundings::devices_present(subject, target),
        Rule::Namespaces => surroundings::namespaces(subject, target),
        Rule::Seccomp => software::seccomp(subject.config, target.node),
        Rule::GpuCount
        | Rule::GpuModel
        | Rule::GpuCapability
        | Rule::GpuMemory
        | Rule::GpuDriver
        | Rule::GpuCuda
        | Rule::GpuUuid
        | Rule::GpuStorage => gpu::answer(rule, subject, target.node),
        _ => match subject.node() {
            Ok(there) => compare(rule, target.node, there),
            Err(unknown) => unknown,
        },
    }
}

/// Answers the rules that compare two nodes.
fn compare(rule: Rule, here: &NodeFacts, there: &NodeFacts) -> Answer {
    match rule {
        Rule::Architecture => equal("CPU architecture", &here.architecture, &there.architecture),
        Rule::CpuVendor => equal("CPU vendor", &here.cpu.vendor, &there.cpu.vendor),
        Rule::CpuModel => equal("CPU model", &here.cpu.model, &there.cpu.model),
        Rule::CpuFpu => cpu::fpu(here, there),
        Rule::CpuFeatures => cpu::features(here, there),
        Rule::CpuFlags => cpu::flags(here, there),
        Rule::Kernel => not_older("kernel", (&here.kernel, &there.kernel), 2),
        Rule::PageSize => software::page_size(here.page_bytes, there.page_bytes),
        Rule::Cgroup => equal("cgroup version", &here.cgroup, &there.cgroup),
        Rule::Lsm => equal("Linux security module", &here.lsm, &there.lsm),
        // Measured: images of CRIU 4.2 fail on 4.1 in the middle of the restore ("vdso: ELF header
        // magic mismatch"); the other way round works.
        Rule::Criu => not_older("CRIU", (&here.criu, &there.criu), usize::MAX),
        Rule::RuntimeName => software::runtime_name(&here.runtime, &there.runtime),
        Rule::RuntimeVersion => software::runtime_version(&here.runtime, &there.runtime),
        Rule::Containerd => equal("version of containerd", &here.containerd, &there.containerd),
        // What is left is answered without the source's node, but for this one, which asks for it.
        _ => (Outcome::Holds, "the checkpoint carries facts of its node".to_owned()),
    }
}

impl Report {
    /// Returns what the findings amount to.
    pub fn verdict(&self) -> Verdict {
        let mut deciding = self.findings.iter().filter(|found| found.severity == Severity::Refuse);
        if deciding.clone().any(|found| found.outcome == Outcome::Broken) {
            Verdict::Incompatible
        } else if deciding.any(|found| found.outcome == Outcome::Unknown) {
            Verdict::Unknown
        } else {
            Verdict::Compatible
        }
    }

    /// Returns why it is not compatible, all of it: broken rules, and those that nothing is known
    /// of. A checkpoint without any facts of its node says that once.
    pub fn obstacles(&self) -> impl Iterator<Item = &Finding> {
        let is_unknown = |found: &Finding| found.outcome == Outcome::Unknown;
        let no_facts = self.findings.iter().any(|f| f.rule == Rule::Facts && is_unknown(f));
        self.findings.iter().filter(move |found| {
            found.severity == Severity::Refuse
                && match found.outcome {
                    Outcome::Holds => false,
                    Outcome::Broken => true,
                    Outcome::Unknown => !no_facts || found.rule == Rule::Facts,
                }
        })
    }
}

/// Writes a fact, or that it is missing.
fn shown(value: &str) -> String {
    if value.is_empty() { "not known".to_owned() } else { format!("{value:?}") }
}

fn told(what: &str, here: &str, there: &str) -> String {
    let (here, there) = (shown(here), shown(there));
    format!("the {what} is {here} here, and was {there} where the checkpoint was taken")
}

/// Two texts must be equal; an empty one is not known.
fn equal(what: &str, here: &str, there: &str) -> Answer {
    let outcome = if here.is_empty() || there.is_empty() {
        Outcome::Unknown
    } else {
        holds_if(here == there)
    };
    (outcome, told(what, here, there))
}

/// The version here must not be older than there; the first `parts` numbers count.
fn not_older(what: &str, (here, there): (&str, &str), parts: usize) -> Answer {
    let numbers =
        |text| -> Vec<u64> { crate::node::version(text).into_iter().take(parts).collect() };
    let (ours, theirs) = (numbers(here), numbers(there));
    if ours.is_empty() || theirs.is_empty() {
        return (Outcome::Unknown, told(&format!("version of {what}"), here, there));
    }
    // 4.2 is 4.2.0.
    let length = ours.len().max(theirs.len());
    let padded = |numbers: &[u64]| -> Vec<u64> {
        numbers.iter().copied().chain(std::iter::repeat(0)).take(length).collect()
    };
    if padded(&ours) < padded(&theirs) {
        let text = format!("{what} {here} here is older than {what} {there} of the checkpoint");
        return (Outcome::Broken, text);
    }
    (Outcome::Holds, told(&format!("version of {what}"), here, there))
}

const fn holds_if(yes: bool) -> Outcome {
    if yes { Outcome::Holds } else { Outcome::Broken }
}

#[cfg(test)]
mod tests;
