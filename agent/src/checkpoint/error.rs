//! Why a checkpoint was not taken.

use std::io;
use std::time::Duration;

use kybernate_packager::pack::PackError;
use kybernate_packager::sign::SignError;
use kybernate_packager::store::StoreError;
use kybernate_packager::verify::VerifyError;
use kybernate_spec::{Digest, Tag};

use super::base::BaseError;
use super::capture::CaptureError;
use crate::gate::GateError;
use crate::gpu::GpuError;
use crate::guardian::GuardianError;
use crate::hooks::HookError;
use crate::operations::{Cancelled, Driver, OperationsError, RefusedBy, Stopped};
use crate::revive::ReviveError;
use crate::runtime::RuntimeError;

/// Why a checkpoint has no container image, though nobody wanted that.
pub(super) const NO_IMAGE: &str = "containerd lacks the source's image, or layers of it";

/// Why a checkpoint was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Operations(#[from] OperationsError),
    #[error(transparent)]
    Guardian(#[from] GuardianError),
    #[error("failed to make a place for the dump")]
    Stage(#[source] io::Error),
    #[error("failed to write the container's CRIU configuration")]
    CriuConfig(#[source] io::Error),
    /// Memory was to be copied before the pause.
    #[error("copying memory before the pause failed: CRIU's pre-dump ended with {status}{log}")]
    PreCopy {
        status: std::process::ExitStatus,
        /// What CRIU's log has to say about it, if anything.
        log: String,
    },
    #[error("failed to have CRIU copy memory before the pause")]
    PreDump(#[source] io::Error),
    #[error(
        "CRIU held the container for longer than its deadline while it copied memory before the pause: \
         leave out --pre-copy, or take a longer --pause-deadline"
    )]
    HeldTooLong,
    #[error("failed to look at the container's TCP connections")]
    Connections(#[source] io::Error),
    #[error(
        "the container's TCP connections cannot be held for a restore (nft, of nftables, does that): \
         install it, or leave out --stop"
    )]
    Hold(#[source] io::Error),
    #[error("the dump failed{log}")]
    Dump {
        /// What CRIU's log has to say about it, if anything.
        log: String,
        #[source]
        source: RuntimeError,
    },
    /// A hook before the pause did not want it.
    #[error(transparent)]
    Before(HookError),
    #[error(transparent)]
    Hook(#[from] HookError),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error("the dump of the suspended container took longer than its deadline")]
    Late,
    /// What the look before the pause did not see.
    #[error(
        "the container holds {0:?} by a name that was deleted, and nothing that goes along has another: \
         try again, and `kyb preflight` says why if it stays so"
    )]
    Linked(String),
    /// Of a source that was to be stopped. Its dump came to its end, so nothing is left in it.
    #[error(
        "the checkpoint was not stored within the {} that the pause may take, so the source is not \
         stopped: take a longer --pause-deadline", humantime::format_duration(*.0)
    )]
    NotStored(Duration),
    /// Behind the point of no return.
    #[error(
        "the source was not stopped in time, and runs on: the registry was slow to take the tag, or \
         containerd to end the source"
    )]
    NotStopped,
    #[error(
        "process {0} waits in vfork(2) for a child that executes no program, and CRIU cannot stop one that \
         does: end that child, or try again when it has executed its program"
    )]
    Waits(u32),
    #[error("failed to look at the container's freezer")]
    Freezer(#[source] io::Error),
    #[error(
        "somebody else let the container run while its checkpoint was taken: try again, and leave it \
         paused meanwhile"
    )]
    LetRun,
    #[error("the capture stopped before its end")]
    CaptureInterrupted,
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    Gate(#[from] GateError),
    /// The gate of every restore would refuse it.
    #[error("nobody could restore the dump, so it is not stored: {}", .0.join("; "))]
    Unrestorable(Vec<String>),
    #[error(transparent)]
    Revive(#[from] ReviveError),
    #[error(transparent)]
    Base(#[from] BaseError),
    #[error("the registry took the signature, and does not give it back")]
    Unsigned(#[from] VerifyError),
    #[error("the registry took the tag, and does not give it back")]
    Unnamed(#[source] StoreError),
    #[error("the registry took the tag {0}, and gives {1} by it")]
    Misnamed(Tag, Digest),
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error(
        "the checkpoint has no container image and could not be restored, so the source is not stopped: \
         {NO_IMAGE} (--runnable never stops it all the same)"
    )]
    NoImage,
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Sign(#[from] SignError),
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    #[error(transparent)]
    Stopped(#[from] Stopped),
    #[error("the container has just ended, or was started anew and is another one: try again")]
    StartedAnew,
    #[error(
        "somebody else has paused the container meanwhile: have it resumed (ctr task resume), and try again"
    )]
    PausedElsewhere,
}

impl CheckpointError {
    /// Says it as it is when the pause went on behind the dump, and had this `deadline`.
    pub(super) fn behind_the_dump(self, driver: &Driver, deadline: Duration) -> Self {
        match self {
            Self::Guardian(GuardianError::Expired) if !driver.is_committed() => {
                Self::NotStored(deadline)
            }
            Self::Guardian(GuardianError::Expired) => Self::NotStopped,
            other => other,
        }
    }

    /// Returns the rule that refused, when it was one.
    pub(super) fn refused_by(&self) -> Option<RefusedBy> {
        match self {
            Self::Base(error) => error.refused_by(),
            Self::Before(HookError::Operations(_)) => None,
            Self::Before(_) => Some(RefusedBy::Policy),
            Self::Unrestorable(_) => Some(RefusedBy::Identity),
            _ => None,
        }
    }
}
