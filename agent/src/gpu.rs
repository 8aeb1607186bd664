//! GPUs: a container's GPU memory is moved into the memory of its processes, or into files beside the
//! dump, before they are frozen, and back after they run again. In between, the GPU is free, and dump
//! and files have everything.
//!
//! The driver is asked by a process of our own program ([`run`]) that lives for one request: its
//! calls block, may take minutes, and can hang; then that process is ended, and the agent goes on.
//! What a process is at is never remembered, but asked for anew, so that whoever brings it back, the
//! agent, the next one or the guardian, does so from wherever it is.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use kybernate_spec::checkpoint::GpuFacts;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

mod call;
mod child;
mod management;
pub(crate) mod plugin;
mod storage;
mod sys;
pub(crate) mod version;

pub use self::call::{Code, Failure, State};
use self::call::{Looked, Reply, Request, Storage, Work};
pub use self::child::run;
use crate::config::{GpuConfig, GpuMethod};
use crate::process;

/// There when NVIDIA's kernel module is loaded.
const LOADED: &str = "/proc/driver/nvidia/version";

/// Largest request: the processes of one container.
const REQUEST_BYTES_MAX: u64 = 4 << 20;

/// Largest answer.
const REPLY_BYTES_MAX: u64 = 4 << 20;

/// How long the driver may take to say how far processes are. It does not answer while it moves their
/// memory for somebody else, some 4 GB in a second.
const LOOK_LIMIT: Duration = Duration::from_secs(30);

/// How long a move may stand still at least that nobody waits for, whatever the limit is: given up, it
/// costs a process its GPU memory.
const PATIENCE_MIN: Duration = Duration::from_mins(1);

/// Asks the GPU's driver.
#[derive(Clone, Debug)]
pub struct Gpus {
    config: GpuConfig,
    /// The program that asks: our own.
    program: PathBuf,
    /// How long a move with files may stand still that nobody waits for.
    patience: Duration,
    /// How long a process between two states is looked at.
    look: Duration,
}

/// Processes whose GPU memory is, or is about to be, away from their GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The processes.
    pub processes: Vec<Process>,
    /// The GPUs they used.
    #[serde(default)]
    pub uses: Vec<Use>,
    /// The directory where their GPU memory is, or is about to be, in files of its own; in their own
    /// memory when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<PathBuf>,
}

/// One process, by what no other has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// When it began.
    pub born: u64,
}

/// A GPU that processes use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// Which.
    pub uuid: String,
    /// How many bytes of its memory they have; 0 when that is not known.
    pub bytes: u64,
}

/// One GPU takes the place of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    /// The one that was used.
    pub from: String,
    /// The one here.
    pub to: String,
}

/// Why a GPU's driver did not do something.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The process that asks could not be run.
    #[error("failed to ask the GPU's driver")]
    Run(#[source] io::Error),
    /// It ended without an answer.
    #[error("the process that asks the GPU's driver to {0} died")]
    Died(&'static str),
    /// The driver does not return.
    #[error("the GPU's driver did not {what} within {}, and is not waited for", humantime::format_duration(*.limit))]
    Hung {
        /// What was asked.
        what: &'static str,
        /// How long it was waited for.
        limit: Duration,
    },
    /// It said no.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// Somebody else has them.
    #[error("the GPU's driver has process {pid} {state}, and not for this agent")]
    Foreign {
        /// The process.
        pid: u32,
        /// How far it is.
        state: State,
    },
}

impl Gpus {
    /// Asks through `program`, which has to be kybernate-agent.
    pub fn new(config: GpuConfig, program: PathBuf) -> Self {
        let patience = PATIENCE_MIN.max(config.limit / 2);
        Self { config, program, patience, look: LOOK_LIMIT }
    }

    /// Has moves with files given up as soon as this: for tests, which have a driver that stands still.
    #[must_use]
    pub fn impatient(self, patience: Duration) -> Self {
        Self { patience, look: patience, ..self }
    }

    /// Asks through this very program, also when it was replaced on disk.
    pub fn ours(config: GpuConfig) -> Self {
        Self::new(config, "/proc/self/exe".into())
    }

    /// Whether the agent itself moves GPU memory, so that CRIU need not.
    pub fn is_asked(&self) -> bool {
        self.config.method == GpuMethod::Driver && self.is_there()
    }

    /// Whether CRIU's plugin moves GPU memory.
    pub(crate) fn is_plugin(&self) -> bool {
        self.config.method == GpuMethod::Plugin && self.is_there()
    }

    /// Returns the version of the driver that is loaded; `None` when there is none, or another one is
    /// named.
    pub(crate) fn loaded(&self) -> Option<String> {
        if self.config.driver.is_some() {
            return None;
        }
        version::of(&fs_err::read_to_string(LOADED).ok()?)
    }

    /// Whether the driver that is loaded is too old to be asked for anything: what has no GPU open
    /// needs none.
    pub(crate) fn is_too_old(&self) -> bool {
        let major = self.loaded().and_then(|loaded| version::major(&loaded));
        major.is_some_and(|major| major < version::FIRST)
    }

    /// A driver that is named is believed in, another one looked for.
    fn is_there(&self) -> bool {
        self.config.driver.is_some() || Path::new(LOADED).exists()
    }

    /// Describes the GPUs; `None` where there is nobody to ask.
    pub async fn facts(&self) -> Option<Result<GpuFacts, GpuError>> {
        if !self.is_there() {
            return None;
        }
        let answered = match self.ask("describe the GPUs", Work::Facts, LOOK_LIMIT).await {
            Ok(Reply::Facts(facts)) => Ok(facts),
            Ok(_) => Err(GpuError::Died("describe the GPUs")),
            Err(error) => Err(error),
        };
        Some(answered)
    }

    /// Finds those of `pids` that use CUDA. They must not be frozen: the driver would not answer. An
    /// error when somebody else has one of them locked.
    pub async fn find(&self, pids: &[u32]) -> Result<Held, GpuError> {
        let Looked { states, uses, missed, .. } = self.look(pids).await?;
        if let Some(reason) = missed.filter(|_| !states.is_empty()) {
            tracing::warn!(reason, "which GPUs a container uses is not known");
        }
        if let Some((pid, state)) = states.iter().find(|(_, state)| *state != State::Running) {
            return Err(GpuError::Foreign { pid: *pid, state: *state });
        }
        let pids = states.into_iter().map(|(pid, _)| pid);
        Ok(Held { processes: pids.filter_map(Process::of).collect(), uses, storage: None })
    }

    /// Finds those of `pids` whose GPU memory is away from the GPU, as CRIU restores them.
    pub async fn find_restored(&self, pids: &[u32]) -> Result<Held, GpuError> {
        let Looked { states, .. } = self.look(pids).await?;
        let pids = states.into_iter().map(|(pid, _)| pid);
        Ok(Held { processes: pids.filter_map(Process::of).collect(), ..Held::default() })
    }

    /// Returns how far each of `pids` is that uses CUDA.
    pub async fn states(&self, pids: &[u32]) -> Result<Vec<(u32, State)>, GpuError> {
        Ok(self.look(pids).await?.states)
    }

    /// Whether the driver copies GPU memory to and from files (custom storage).
    pub async fn has_storage(&self) -> Result<bool, GpuError> {
        Ok(self.look(&[]).await?.has_storage)
    }

    /// Moves the GPU memory of these processes into their own, or into files, and frees their GPUs.
    /// After a failure they have to be brought back.
    pub async fn take(&self, held: &Held) -> Result<(), GpuError> {
        if held.processes.is_empty() {
            return Ok(());
        }
        let lock_ms = u32::try_from(self.config.lock_limit.as_millis()).unwrap_or(u32::MAX);
        let storage = self.storage(held);
        let work = Work::Take { pids: held.alive(), lock_ms, uses: held.uses.clone(), storage };
        self.done("move GPU memory away", work, self.config.limit).await
    }

    /// Brings these processes back to where they use their GPUs, from wherever they are. Those that
    /// have ended are none of our business. They must not be frozen.
    pub async fn bring_back(&self, held: &Held) -> Result<(), GpuError> {
        self.bring(held, &[], self.storage(held)).await
    }

    /// Brings what was restored to where it uses its GPUs, onto other ones where `pairs` says so: then
    /// it has to name all of them. Nobody else brings these processes, and others that were restored
    /// from the same files do not wait for them.
    pub async fn bring_restored(&self, held: &Held, pairs: &[Pair]) -> Result<(), GpuError> {
        let storage = self.storage(held).map(|storage| Storage { shared: true, ..storage });
        self.bring(held, pairs, storage).await
    }

    async fn bring(
        &self,
        held: &Held,
        pairs: &[Pair],
        storage: Option<Storage>,
    ) -> Result<(), GpuError> {
        let pids = held.alive();
        if pids.is_empty() {
            return Ok(());
        }
        let work = Work::Bring { pids, uses: held.uses.clone(), pairs: pairs.to_vec(), storage };
        self.done("bring GPU memory back", work, self.config.limit).await
    }

    /// Who waits for the directory after a process that nobody waits for any more gets there before
    /// the limit, unless that is short.
    fn storage(&self, held: &Held) -> Option<Storage> {
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let patience_ms = milliseconds(self.patience);
        let look_ms = milliseconds(self.look);
        let directory = held.storage.clone()?;
        Some(Storage { directory, shared: false, patience_ms, look_ms })
    }

    async fn look(&self, pids: &[u32]) -> Result<Looked, GpuError> {
        const WHAT: &str = "say who uses it";
        match self.ask(WHAT, Work::Look { pids: pids.to_vec() }, LOOK_LIMIT).await? {
            Reply::Looked(looked) => Ok(looked),
            _ => Err(GpuError::Died(WHAT)),
        }
    }

    async fn done(&self, what: &'static str, work: Work, limit: Duration) -> Result<(), GpuError> {
        match self.ask(what, work, limit).await? {
            Reply::Done => Ok(()),
            Reply::Warned(warning) => {
                tracing::warn!(warning, "what was asked of the GPU's driver is done");
                Ok(())
            }
            _ => Err(GpuError::Died(what)),
        }
    }

    /// Has one request answered by a process of its own.
    async fn ask(
        &self,
        what: &'static str,
        work: Work,
        limit: Duration,
    ) -> Result<Reply, GpuError> {
        let GpuConfig { driver, management, .. } = &self.config;
        let driver = driver.clone().unwrap_or_else(|| "libcuda.so.1".into());
        // What is begun with files is brought to its end by itself, and then nobody is asked any more.
        let ends_itself = matches!(
            &work,
            Work::Take { storage: Some(_), .. } | Work::Bring { storage: Some(_), .. }
        );
        let request = Request { driver, management: management.clone(), work };
        let mut line = serde_json::to_vec(&request).map_err(|error| GpuError::Run(error.into()))?;
        line.push(b'\n');
        let mut command = tokio::process::Command::new(&self.program);
        // Which GPUs programs see, and where libraries are, is not for our environment to say.
        command.arg0("kybernate-agent").arg("gpu").env_clear().current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        if ends_itself {
            // Nor by a signal to our group, as of a terminal.
            command.process_group(0);
        }
        let mut child = command.kill_on_drop(!ends_itself).spawn().map_err(GpuError::Run)?;
        let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(GpuError::Run(io::ErrorKind::BrokenPipe.into()));
        };
        let mut answer = Vec::new();
        let answered = async {
            stdin.write_all(&line).await?;
            stdout.take(REPLY_BYTES_MAX).read_to_end(&mut answer).await
        };
        // Not waited for: a call in the driver's depths may not even end when it is killed.
        let answered = tokio::time::timeout(limit, answered).await;
        drop((stdin, child));
        match answered {
            Err(_elapsed) => return Err(GpuError::Hung { what, limit }),
            Ok(Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => {
                return Err(GpuError::Run(error));
            }
            Ok(_) => {}
        }
        match serde_json::from_slice(&answer) {
            Ok(Reply::Failed(failure)) => Err(failure.into()),
            Ok(reply) => Ok(reply),
            Err(_cut_short) => Err(GpuError::Died(what)),
        }
    }
}

impl GpuError {
    /// Whether nobody can bring back what this is about, so that nobody need try.
    pub(crate) const fn is_lost(&self) -> bool {
        matches!(self, Self::Failed(Failure::Lost(_)))
    }
}

impl Held {
    /// Whether there is nothing to bring back.
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty()
    }

    /// Returns the UUIDs of the GPUs that were used.
    pub(crate) fn gpus(&self) -> Vec<String> {
        self.uses.iter().map(|one| one.uuid.clone()).collect()
    }

    /// Returns the processes that are still the same.
    fn alive(&self) -> Vec<u32> {
        let same = |one: &&Process| process::is_there(one.pid, one.born);
        self.processes.iter().filter(same).map(|one| one.pid).collect()
    }
}

impl Process {
    /// Takes a look at a process; `None` when it has ended, or cannot be looked at.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, born: process::started(pid).ok()?? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::Made;

    #[test]
    fn what_an_earlier_agent_wrote_down_is_in_the_memory_of_processes() {
        let old = r#"{"gpu":{"processes":[{"pid":7,"born":9}],"uses":[]}}"#;
        let Made::Gpu(held) = serde_json::from_str(old).unwrap() else { panic!("{old}") };
        assert_eq!((held.processes.len(), &held.storage), (1, &None));
        assert_eq!(serde_json::to_string(&Made::Gpu(held)).unwrap(), old);
    }

    /// The directory is not removed before it is back.
    #[test]
    fn what_is_in_files_keeps_them() {
        let kept = Held { storage: Some("/x".into()), ..Held::default() };
        assert!(Made::Gpu(kept.clone()).has_processes());
        assert!(!Made::Gpu(Held::default()).has_processes());
        let again = serde_json::from_str(&serde_json::to_string(&kept).unwrap());
        assert_eq!(again.ok(), Some(kept));
    }
}
