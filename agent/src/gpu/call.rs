//! What the agent and the process that asks the driver say to each other: one line of JSON each way.

use std::fmt;
use std::path::PathBuf;

use kybernate_spec::checkpoint::GpuFacts;
use kybernate_spec::gpu::STORAGE_DRIVER;
use serde::{Deserialize, Serialize};

use super::version::FIRST;
use super::{Pair, Use};

/// What is asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Request {
    /// The driver's library, and the management library.
    pub(super) driver: PathBuf,
    pub(super) management: PathBuf,
    pub(super) work: Work,
}

/// What is to be done.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Work {
    /// Say which of these processes use CUDA, how far each is, and which GPUs they use.
    Look { pids: Vec<u32> },
    /// Lock all of them, then move the GPU memory of each into its own memory, or into files.
    Take {
        pids: Vec<u32>,
        lock_ms: u32,
        /// With custom storage: the GPUs, and where their memory goes.
        #[serde(default)]
        uses: Vec<Use>,
        #[serde(default)]
        storage: Option<Storage>,
    },
    /// Bring each back from wherever it is to where it runs.
    Bring {
        pids: Vec<u32>,
        uses: Vec<Use>,
        pairs: Vec<Pair>,
        /// With custom storage: where their memory is.
        #[serde(default)]
        storage: Option<Storage>,
    },
    /// Say which GPUs there are.
    Facts,
}

/// Where GPU memory is copied to and from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Storage {
    pub(super) directory: PathBuf,
    /// Whether others may read there meanwhile, for processes of their own.
    #[serde(default)]
    pub(super) shared: bool,
    /// How long the driver may stand still, with a move begun, when nobody waits for it any more.
    pub(super) patience_ms: u64,
    /// How long a process that is found between two states is looked at before it is called lost.
    pub(super) look_ms: u64,
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Reply {
    Looked(Looked),
    Done,
    /// Done, and this is worth a warning.
    Warned(String),
    Facts(GpuFacts),
    Failed(Failure),
}

/// What a look found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Looked {
    /// The processes that use CUDA.
    pub(super) states: Vec<(u32, State)>,
    /// The GPUs they use; empty when nobody can say.
    pub(super) uses: Vec<Use>,
    /// Why the GPUs are not known.
    pub(super) missed: Option<String>,
    /// Whether the driver has custom storage.
    #[serde(default)]
    pub(super) has_storage: bool,
}

/// How far the driver is with a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It may use its GPUs.
    Running,
    /// It waits as soon as it wants to use one.
    Locked,
    /// Its GPU memory is in its own memory or in files, and it uses no GPU.
    Checkpointed,
    /// Something went wrong that the driver cannot put right.
    Failed,
    /// Its GPU memory is being copied to custom storage.
    Checkpointing,
    /// Its GPU memory is being copied from custom storage.
    Restoring,
    /// Somebody else moves its memory, or the driver has a state we do not know.
    Other,
}

/// An answer of the driver's that is no success: `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Code(pub(super) i32);

/// Why the driver did not do something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// The library cannot be used.
    #[error("the library {path:?} cannot be used for checkpoints (driver {} can): {reason}", FIRST)]
    Library {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A call for one process failed.
    #[error("{call} of process {pid} failed: {code}")]
    Call {
        /// The driver's name of it.
        call: String,
        /// The process.
        pid: u32,
        /// What the driver answered.
        code: Code,
    },
    /// Somebody else works on it.
    #[error("the GPU's driver has process {pid} {state}, and not for this agent")]
    Foreign {
        /// The process.
        pid: u32,
        /// How far it is.
        state: State,
    },
    /// It can only be ended.
    #[error("the GPU's driver has lost the GPU memory of process {0}, which can only be ended")]
    Lost(u32),
    /// It is stopped, and the driver would wait for it for ever.
    #[error("process {0} is stopped (SIGSTOP), and the GPU's driver needs it to run")]
    Stopped(u32),
    /// A restore that finds too little memory spoils what it was to bring back.
    #[error("GPU {uuid} has {free} bytes free, and {needed} are to come back to it")]
    Room {
        /// Which.
        uuid: String,
        /// What comes back.
        needed: u64,
        /// What there is.
        free: u64,
    },
    /// The driver is too old, or says so.
    #[error("the GPU's driver has no custom storage, which driver {} brings", STORAGE_DRIVER)]
    NoStorage,
    /// Its files cannot be used, and nothing is begun.
    #[error("GPU memory cannot be kept in {path:?}: {reason}")]
    Storage {
        /// The directory, or the file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A move was begun, and did not come to its end.
    #[error(
        "the move of the GPU memory of process {pid} was cut short, which the driver cannot take back: \
         it can only be ended: {reason}"
    )]
    Cut {
        /// The process.
        pid: u32,
        /// Why.
        reason: String,
    },
    /// Nobody wants it any more.
    #[error("nobody waits for the GPU memory of process {0} to be moved")]
    Unwanted(u32),
    /// It does not look like one.
    #[error("{0:?} is no UUID of a GPU")]
    Uuid(String),
    /// The question was not understood: another version of this program asks.
    #[error("the request cannot be read: {0}")]
    Request(String),
}

impl State {
    /// Understands `CUprocessState`.
    pub(super) const fn of(number: i32) -> Self {
        match number {
            0 => Self::Running,
            1 => Self::Locked,
            2 => Self::Checkpointed,
            3 => Self::Failed,
            4 => Self::Checkpointing,
            5 => Self::Restoring,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Locked => "locked",
            Self::Checkpointed => "checkpointed",
            Self::Failed => "failed",
            Self::Checkpointing => "checkpointing",
            Self::Restoring => "restoring",
            Self::Other => "between two states",
        })
    }
}

impl Code {
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub(super) const INVALID: Self = Self(1);

    /// `CUDA_ERROR_INVALID_DEVICE`.
    pub(super) const INVALID_DEVICE: Self = Self(101);

    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub(super) const NOT_SUPPORTED: Self = Self(801);

    /// Whether this is said of processes that do not use CUDA (seen: 3), or that have ended (seen:
    /// 304), or of every process where the driver has no checkpoints (documented: 801).
    pub(super) const fn is_of_no_user(self) -> bool {
        matches!(self.0, 1 | 3 | 304 | 801)
    }

    /// Whether this is said of a process that is not the one whose memory is away: it has ended, or
    /// runs another program, which has no GPU (3). Of a process that is there any other code says that
    /// the question failed, and it still waits for its memory.
    pub(super) const fn is_of_another(self, has_ended: bool) -> bool {
        self.0 == 3 || (has_ended && self.is_of_no_user())
    }

    /// Returns the name of the header, and what it means for a checkpoint.
    const fn words(self) -> (&'static str, &'static str) {
        match self.0 {
            1 => ("CUDA_ERROR_INVALID_VALUE", "the driver does not take it"),
            2 => ("CUDA_ERROR_OUT_OF_MEMORY", "there is too little memory"),
            3 => ("CUDA_ERROR_NOT_INITIALIZED", "the process does not use CUDA"),
            100 => ("CUDA_ERROR_NO_DEVICE", "there is no GPU to bring it back to"),
            101 => ("CUDA_ERROR_INVALID_DEVICE", "the GPU it is to come back to is not there"),
            201 => ("CUDA_ERROR_INVALID_CONTEXT", "its GPUs cannot be used"),
            304 => {
                ("CUDA_ERROR_OPERATING_SYSTEM", "the kernel refused; the process may have ended")
            }
            401 => ("CUDA_ERROR_ILLEGAL_STATE", "the process is not at that step"),
            600 => ("CUDA_ERROR_NOT_READY", "its work on the GPU did not end in time"),
            801 => (
                "CUDA_ERROR_NOT_SUPPORTED",
                "it has what this driver cannot checkpoint: managed memory, MIG, MPS or IPC",
            ),
            _ => ("CUresult", "see the driver's list of errors"),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, meaning) = self.words();
        write!(f, "{name} ({}): {meaning}", self.0)
    }
}
