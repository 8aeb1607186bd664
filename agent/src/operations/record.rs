//! What is known about one operation: told to clients, and kept on disk for a restarted agent.

use std::fmt;
use std::path::PathBuf;

use kybernate_packager::agent_api as api;
use kybernate_packager::claim::Claimant;
use kybernate_packager::progress::Snapshot;
use kybernate_spec::Digest;
use serde::{Deserialize, Serialize};

use super::CancelCause;
use crate::gpu::Held;
use crate::hooks::Hook;
use crate::staging::Tier;

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: String,
    pub(crate) kind: Kind,
    pub(crate) state: State,
    pub(crate) container: String,
    pub(crate) namespace: String,
    pub(crate) reference: String,
    #[serde(default)]
    pub(crate) digest: Option<Digest>,
    #[serde(default)]
    pub(crate) error: String,
    #[serde(default)]
    pub(crate) refused_by: Option<RefusedBy>,
    pub(crate) started_at: jiff::Timestamp,
    #[serde(default)]
    pub(crate) finished_at: Option<jiff::Timestamp>,
    #[serde(default)]
    pub(crate) restored_pid: u32,
    #[serde(default)]
    pub(crate) sizes: Sizes,
    #[serde(default)]
    pub(crate) times: Vec<StepTime>,
    /// What has to be undone should the agent die now, in the order it was made.
    #[serde(default)]
    pub(crate) made: Vec<Made>,
    #[serde(default)]
    pub(crate) tag: TagState,
    /// How it ends once everything is undone; kept when that does not work at once.
    #[serde(default)]
    pub(crate) conclusion: Option<Conclusion>,
    /// What a checkpoint was about to do when nothing but its tag was missing.
    #[serde(default)]
    pub(crate) tagging: Option<Tagging>,
    /// How a checkpoint ends once its source is stopped: it is in the registry.
    #[serde(default)]
    pub(crate) stored: Option<Conclusion>,
    /// When it is cancelled unless it has ended.
    #[serde(default)]
    pub(crate) deadline: Option<jiff::Timestamp>,
    /// Whether it was asked to end early.
    #[serde(default)]
    pub(crate) cancelled: Option<CancelCause>,
    /// What was taken away again, in that order, for people.
    #[serde(default)]
    pub(crate) undone: Vec<String>,
    /// Where it was staged, or taken from.
    #[serde(default)]
    pub(crate) tier: Option<Tier>,
    /// What went wrong and does not count, for people.
    #[serde(default)]
    pub(crate) warnings: Vec<String>,
    /// What the image is called in containerd that it provides.
    #[serde(default)]
    pub(crate) image: String,
    /// What it is an increment of.
    #[serde(default)]
    pub(crate) base: Option<Digest>,
    /// How long its source was paused.
    #[serde(default)]
    pub(crate) paused_microseconds: u64,
    /// What was suspended or resumed in place.
    #[serde(default)]
    pub(crate) suspension: Option<Suspension>,
}

/// A checkpoint is about to get its tag. Who has sent that and died has heard no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tagging {
    pub(crate) plain_http: bool,
    /// Whether its source is to be stopped then.
    pub(crate) stops: bool,
    /// How it ends if it has the tag.
    pub(crate) conclusion: Conclusion,
}

/// How an operation ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Conclusion {
    pub(crate) state: State,
    #[serde(default)]
    pub(crate) error: String,
    #[serde(default)]
    pub(crate) refused_by: Option<RefusedBy>,
    /// The first process of what was restored.
    #[serde(default)]
    pub(crate) restored_pid: u32,
    #[serde(default)]
    pub(crate) sizes: Sizes,
    #[serde(default)]
    pub(crate) tag: TagState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Checkpoint,
    Restore,
    Stage,
    Provide,
    Suspend,
    Resume,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Running,
    Done,
    Failed,
    Refused,
    Cancelled,
}

/// Whether a finished checkpoint can be found by its tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TagState {
    /// It is none, or not finished.
    #[default]
    None,
    Tagged,
    /// Whoever asked for it was to sign and tag it, and has not reported that.
    AwaitsSigner,
}

/// Which rule refused an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RefusedBy {
    /// It is not signed by a key that counts here.
    Signature,
    /// Its bytes are not what they should be.
    Integrity,
    /// This node cannot run it.
    Compatibility,
    /// Its processes would be more than the new container may be.
    Identity,
    /// A rule of this node's configuration, or of what a request may ask for.
    Policy,
    /// Somebody else has it, and it goes on in one place only.
    Claim,
}

/// Something an operation made and has to take away again when it fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Made {
    /// A directory with its content.
    Directory(PathBuf),
    /// Hooks that run behind it, and should it fail.
    Hooked(Vec<Hook>),
    /// The source is paused.
    Paused {
        pid: u32,
        /// When that process began; 0 in records of earlier agents.
        #[serde(default)]
        born: u64,
        /// The cgroup that the runtime has made for it, where it was written down.
        #[serde(default)]
        cgroup: Option<String>,
        /// Where its dump and CRIU's log go.
        directory: PathBuf,
    },
    /// A suspended source is dumped; it stays suspended.
    Dumped {
        pid: u32,
        /// The cgroup that the runtime has made for it, where it was written down.
        #[serde(default)]
        cgroup: Option<String>,
        /// Where its dump and CRIU's log go.
        directory: PathBuf,
    },
    /// CRIU is told something for one dump in this file.
    Told(PathBuf),
    /// The GPU memory of the source is in its processes, or in files.
    Gpu(Held),
    /// The directory with a container's captured mounts.
    Volume(PathBuf),
    /// kybernate-runc restores it.
    Claimed {
        /// Is there when the container runs.
        note: PathBuf,
    },
    /// Nobody else gets the checkpoint, in its registry.
    Taken {
        claimant: Claimant,
        /// Is there when the pod's container runs, whatever its id.
        note: PathBuf,
    },
    /// A lease of containerd.
    Lease(String),
    /// An image of containerd.
    Image(String),
    /// A writable snapshot.
    Snapshot { snapshotter: String, key: String },
    /// A container, by its id.
    Container(String),
    /// Its task.
    Task {
        container: String,
        /// The cgroup it was made in.
        cgroup: String,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_field_names, reason = "units are part of the names, here and in the API")]
pub(crate) struct Sizes {
    pub(crate) dump_bytes: u64,
    pub(crate) page_bytes: u64,
    #[serde(default)]
    pub(crate) transferred_bytes: u64,
}

/// What a suspension, or its end, has done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Suspension {
    /// Since when the container is suspended, or was, where that is known.
    pub(crate) since: Option<jiff::Timestamp>,
    /// Whether there was nothing to do.
    pub(crate) already: bool,
    /// Whether its GPU memory was moved, too.
    pub(crate) gpu: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StepTime {
    pub(crate) step: String,
    pub(crate) microseconds: u64,
}

impl RefusedBy {
    /// Returns the word of the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Signature => "signature",
            Self::Integrity => "integrity",
            Self::Compatibility => "compatibility",
            Self::Identity => "identity",
            Self::Policy => "policy",
            Self::Claim => "claim",
        }
    }
}

impl State {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Refused => "refused",
            Self::Cancelled => "cancelled",
        }
    }
}

/// How a source has ended that was to run on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceEnd {
    /// Its exit status, if anybody knows.
    pub(crate) status: Option<u32>,
}

impl SourceEnd {
    const WORDS: &str = "the source has ended";
}

impl fmt::Display for SourceEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::WORDS)?;
        self.status.map_or(Ok(()), |status| write!(f, ", with exit status {status}"))
    }
}

impl Made {
    /// Says that it was taken away.
    pub(crate) fn undone(&self) -> String {
        match self {
            Self::Hooked(_) => "its hooks for a failure ran".to_owned(),
            Self::Directory(_) => "its staging directory was removed".to_owned(),
            Self::Paused { .. } => "the source runs".to_owned(),
            Self::Dumped { .. } => "the source is suspended as it was".to_owned(),
            Self::Told(_) => "the container's CRIU configuration is as it was".to_owned(),
            Self::Gpu(_) => "the source has its GPU memory back".to_owned(),
            Self::Volume(_) => "the directory of its volumes was removed".to_owned(),
            Self::Claimed { .. } => "its pod has what it had".to_owned(),
            Self::Taken { .. } => "others can have the checkpoint".to_owned(),
            Self::Lease(id) => format!("lease {id:?} was ended"),
            Self::Image(name) => format!("image {name:?} was removed"),
            Self::Snapshot { key, .. } => format!("snapshot {key:?} was removed"),
            Self::Container(id) => format!("container {id:?} was deleted"),
            Self::Task { container, .. } => format!("the task of {container:?} was ended"),
        }
    }

    /// Whether processes may be at work in what was made before it.
    pub(crate) const fn has_processes(&self) -> bool {
        match self {
            Self::Paused { .. } | Self::Dumped { .. } | Self::Task { .. } => true,
            // What they had on GPUs is in files.
            Self::Gpu(held) => held.storage.is_some(),
            _ => false,
        }
    }
}

impl Sizes {
    /// What a checkpoint says of itself. How much moved is counted elsewhere.
    pub(crate) fn of(facts: &kybernate_spec::checkpoint::Sizes) -> Self {
        let (dump_bytes, page_bytes) = (facts.dump_bytes, facts.page_bytes);
        Self { dump_bytes, page_bytes, transferred_bytes: 0 }
    }
}

impl Kind {
    /// Returns the word for it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Stage => "stage",
            Self::Provide => "provide",
            Self::Suspend => "suspend",
            Self::Resume => "resume",
        }
    }

    /// Whether it changes a container in place: nothing is made that would have to be undone.
    pub(crate) const fn is_in_place(self) -> bool {
        matches!(self, Self::Suspend | Self::Resume)
    }
}

impl Suspension {
    fn to_api(&self) -> api::Suspension {
        let gpu = self.gpu.then(|| api::SuspendedPart::Gpu.into());
        api::Suspension {
            parts: std::iter::once(api::SuspendedPart::Cpu.into()).chain(gpu).collect(),
            since: self.since.as_ref().map(ToString::to_string).unwrap_or_default(),
            already: self.already,
        }
    }
}

impl Conclusion {
    /// Returns the word for how it failed, if it did.
    pub(crate) fn problem(&self) -> Option<&'static str> {
        match (self.state, self.refused_by) {
            (State::Running | State::Done, _) => None,
            (State::Refused, Some(rule)) => Some(rule.name()),
            (other, _) => Some(other.name()),
        }
    }

    /// An operation that did what it was to.
    pub(crate) fn done(sizes: Sizes) -> Self {
        Self {
            state: State::Done,
            error: String::new(),
            refused_by: None,
            restored_pid: 0,
            sizes,
            tag: TagState::None,
        }
    }

    /// An operation that failed, or that a rule refused.
    pub(crate) fn failed(error: String, refused_by: Option<RefusedBy>) -> Self {
        let state = if refused_by.is_some() { State::Refused } else { State::Failed };
        Self { state, error, refused_by, ..Self::done(Sizes::default()) }
    }

    /// An operation that whoever asked for it never learnt of.
    pub(crate) fn unheard() -> Self {
        let error = "whoever asked for it went away before it began".to_owned();
        Self { state: State::Cancelled, ..Self::failed(error, None) }
    }
}

impl Record {
    /// One that begins.
    pub(crate) fn new(id: String, kind: Kind, started_at: jiff::Timestamp) -> Self {
        Self {
            id,
            kind,
            state: State::Running,
            container: String::new(),
            namespace: String::new(),
            reference: String::new(),
            digest: None,
            error: String::new(),
            refused_by: None,
            started_at,
            finished_at: None,
            restored_pid: 0,
            sizes: Sizes::default(),
            times: Vec::new(),
            made: Vec::new(),
            tag: TagState::None,
            conclusion: None,
            tagging: None,
            stored: None,
            deadline: None,
            cancelled: None,
            undone: Vec::new(),
            tier: None,
            warnings: Vec::new(),
            image: String::new(),
            base: None,
            paused_microseconds: 0,
            suspension: None,
        }
    }

    /// Writes down how it ended.
    pub(crate) fn conclude(&mut self, conclusion: Conclusion) {
        let Conclusion { state, mut error, refused_by, restored_pid, sizes, tag } = conclusion;
        // Of one that was cancelled all that was undone is told.
        let end = self.undone.iter().find(|undone| undone.starts_with(SourceEnd::WORDS));
        if let Some(end) = end.filter(|_| state == State::Failed) {
            error = format!("{error}; {end}");
        }
        let Sizes { transferred_bytes, .. } = self.sizes;
        self.sizes = Sizes { transferred_bytes, ..sizes };
        (self.state, self.error, self.refused_by) = (state, error, refused_by);
        (self.restored_pid, self.tag) = (restored_pid, tag);
        (self.conclusion, self.tagging) = (None, None);
    }

    /// Writes down that it did what it was to and how it ends, when only what `is_temporary` has to be
    /// taken away.
    pub(crate) fn keep(
        &mut self,
        is_temporary: impl FnMut(&Made) -> bool,
        conclusion: &Conclusion,
    ) {
        self.made.retain(is_temporary);
        self.conclusion = Some(conclusion.clone());
    }

    /// Writes down that a hook has run, which is not to run again.
    pub(crate) fn ran(&mut self, hook: &Hook) {
        for made in &mut self.made {
            if let Made::Hooked(hooks) = made {
                hooks.retain(|one| one != hook);
            }
        }
        self.made.retain(|made| !matches!(made, Made::Hooked(hooks) if hooks.is_empty()));
    }

    /// Whether nothing will change any more.
    pub(crate) fn is_finished(&self) -> bool {
        self.state != State::Running
    }

    /// Whether its source may be paused.
    pub(crate) fn pauses(&self) -> bool {
        self.made.iter().any(|made| matches!(made, Made::Paused { .. }))
    }

    /// What went wrong, also while that is being undone.
    fn error(&self) -> &str {
        self.conclusion.as_ref().map_or(&self.error, |conclusion| &conclusion.error)
    }

    /// Returns what clients are told.
    pub(crate) fn to_api(&self, progress: &Snapshot) -> api::Operation {
        let (kind, restored) = match self.kind {
            Kind::Checkpoint => (api::OperationKind::Checkpoint, ""),
            Kind::Restore if self.restored_pid == 0 => (api::OperationKind::Restore, ""),
            Kind::Restore => (api::OperationKind::Restore, &*self.container),
            Kind::Stage => (api::OperationKind::Stage, ""),
            Kind::Provide => (api::OperationKind::Provide, ""),
            Kind::Suspend => (api::OperationKind::Suspend, ""),
            Kind::Resume => (api::OperationKind::Resume, ""),
        };
        let state = match self.state {
            State::Running => api::OperationState::Running,
            State::Done => api::OperationState::Done,
            State::Failed => api::OperationState::Failed,
            State::Refused => api::OperationState::Refused,
            State::Cancelled => api::OperationState::Cancelled,
        };
        let times = if self.is_finished() { self.times.clone() } else { step_times(progress) };
        api::Operation {
            id: self.id.clone(),
            kind: kind.into(),
            state: state.into(),
            container: self.container.clone(),
            containerd_namespace: self.namespace.clone(),
            reference: self.reference.clone(),
            step: progress.step.to_owned(),
            progress: Some(api::Progress {
                bytes_done: progress.done,
                bytes_total: progress.total,
                percent: percent(progress),
            }),
            digest: self.digest.as_ref().map(ToString::to_string).unwrap_or_default(),
            error: self.error().to_owned(),
            refused_by: self.refused_by.map(RefusedBy::name).unwrap_or_default().to_owned(),
            started_at: self.started_at.to_string(),
            finished_at: self.finished_at.as_ref().map(ToString::to_string).unwrap_or_default(),
            restored_container: restored.to_owned(),
            restored_pid: self.restored_pid,
            times: times
                .into_iter()
                .map(|time| api::StepTime { step: time.step, microseconds: time.microseconds })
                .collect(),
            sizes: Some(api::Sizes {
                dump_bytes: self.sizes.dump_bytes,
                page_bytes: self.sizes.page_bytes,
                transferred_bytes: self.sizes.transferred_bytes.max(progress.transferred),
            }),
            tag: match self.tag {
                TagState::None => api::TagState::Unspecified,
                TagState::Tagged => api::TagState::Tagged,
                TagState::AwaitsSigner => api::TagState::AwaitsSigner,
            }
            .into(),
            undone: self.undone.clone(),
            warnings: self.warnings.clone(),
            image: self.image.clone(),
            paused_microseconds: self.paused_microseconds,
            base: self.base.as_ref().map(ToString::to_string).unwrap_or_default(),
            cancelling: self.cancelled.is_some() && !self.is_finished(),
            deadline: self.deadline.as_ref().map(ToString::to_string).unwrap_or_default(),
            tier: self.tier.map_or(api::Tier::Unspecified, Tier::to_api).into(),
            waits_for: String::new(),
            suspension: self.suspension.as_ref().map(Suspension::to_api),
        }
    }
}

/// Returns how much of a step is done; what is only estimated may turn out to be more.
fn percent(progress: &Snapshot) -> Option<u32> {
    let done = progress.done.min(progress.total);
    u32::try_from(done.saturating_mul(100).checked_div(progress.total)?).ok()
}

/// Returns the times of the finished steps.
pub(crate) fn step_times(progress: &Snapshot) -> Vec<StepTime> {
    let time = |(step, time): &(&'static str, std::time::Duration)| StepTime {
        step: (*step).to_owned(),
        microseconds: u64::try_from(time.as_micros()).unwrap_or(u64::MAX),
    };
    progress.times.iter().map(time).collect()
}
