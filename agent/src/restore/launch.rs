//! Makes the container and has containerd restore it.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use containerd_client::services::v1::Container;
use containerd_client::services::v1::container::Runtime;
use kybernate_spec::Digest;
use serde_json::Value;

mod abandoned;

use super::image::{RuntimeImage, SNAPSHOTTER};
use super::user::UserError;
use super::{CHECKPOINT_LABEL, OPERATION_LABEL};
use crate::network;
use crate::operations::{Driver, Made, OperationsError};
use crate::patience::Patience;
use crate::runtime::{Mount, Namespace, RuntimeError, RuntimeErrorKind, SPEC_TYPE};
use crate::{criu_log, orphan, process, rootfs};

/// The runtime restored containers get: containerd's own.
const RUNTIME: &str = "io.containerd.runc.v2";

/// How long a restored process is watched: one that cannot live dies as soon as it is scheduled.
const WATCH: Duration = Duration::from_millis(50);

/// How often it is looked at meanwhile: one that sleeps was scheduled, and lives.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Why a container was not restored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Operations(#[from] OperationsError),
    #[error(transparent)]
    User(#[from] UserError),
    #[error("failed to look at the allowed devices")]
    Devices(#[source] io::Error),
    #[error("failed to find the root file system that containerd has mounted")]
    Root(#[source] io::Error),
    #[error("the restore failed{log}")]
    Restore {
        /// What CRIU's log has to say about it, if anything.
        log: String,
        #[source]
        source: RuntimeError,
    },
    #[error("CRIU was killed in the middle of the restore{log}")]
    Abandoned {
        /// What CRIU's log has to say about it, if anything.
        log: String,
    },
    #[error(
        "CRIU has stood still for {}: the most that restore_stall in the agent's configuration \
         allows{log}", humantime::format_duration(*stall)
    )]
    Hung {
        /// How long that was.
        stall: Duration,
        /// What CRIU's log has to say about it, if anything.
        log: String,
    },
    #[error("failed to bring up the loopback device of the restored container")]
    Loopback(#[source] io::Error),
    #[error("the restored process ended at once with status {0}")]
    Ended(u32),
}

/// What is to be made.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) namespace: &'a Namespace,
    pub(super) container: &'a str,
    pub(super) image: &'a RuntimeImage,
    pub(super) checkpoint: &'a Digest,
    /// CRIU's images.
    pub(super) images: &'a Path,
    /// Where CRIU writes its log.
    pub(super) work: PathBuf,
    /// Where CRIU works, and what it makes lives.
    pub(super) cgroup: &'a str,
    /// How long CRIU may stand still.
    pub(super) stall: Duration,
}

/// Prepares the root file system of a container on top of the snapshot `chain`.
pub(super) async fn rootfs(
    leased: &Namespace,
    container: &str,
    chain: Option<&Digest>,
    driver: &Driver,
) -> Result<Vec<Mount>, LaunchError> {
    Ok(leased.prepare(SNAPSHOTTER, &snapshot(container, driver), chain).await?)
}

impl Plan<'_> {
    /// Creates the container's record.
    pub(super) async fn create(&self, spec: &Value, driver: &Driver) -> Result<(), LaunchError> {
        let spec = prost_types::Any {
            type_url: SPEC_TYPE.to_owned(),
            value: spec.to_string().into_bytes(),
        };
        let container = Container {
            id: self.container.to_owned(),
            labels: HashMap::from([
                (CHECKPOINT_LABEL.to_owned(), self.checkpoint.to_string()),
                (OPERATION_LABEL.to_owned(), driver.id().to_owned()),
            ]),
            image: self.image.name.clone(),
            runtime: Some(Runtime { name: RUNTIME.to_owned(), options: None }),
            spec: Some(spec),
            snapshotter: SNAPSHOTTER.to_owned(),
            snapshot_key: snapshot(self.container, driver),
            ..Container::default()
        };
        Ok(self.namespace.create_container(container).await?)
    }

    /// Has containerd mount the root file system, and returns where. Nothing is in it yet: the runtime
    /// is not called before the start.
    pub(super) async fn mount(&self, rootfs: Vec<Mount>) -> Result<PathBuf, LaunchError> {
        let (namespace, id) = (self.namespace, self.container);
        namespace.create_restored_task(id, rootfs.clone(), self.images, &self.work).await?;
        let usual = orphan::root(namespace, id);
        let found = tokio::task::spawn_blocking(move || rootfs::mounted(&rootfs, &usual)).await;
        found.map_err(io::Error::other).and_then(|found| found).map_err(LaunchError::Root)
    }

    /// Restores the processes and makes sure that they live. Returns the first one's id.
    pub(super) async fn start(&self, driver: &Driver) -> Result<u32, LaunchError> {
        let (namespace, id) = (self.namespace, self.container);
        let started = tokio::select! {
            started = self.while_it_moves(driver, namespace.start(id)) => started,
            () = abandoned::abandoned(self.cgroup, &self.work) => {
                return Err(LaunchError::Abandoned { log: self.log().await });
            }
        };
        let pid = match started {
            Some(Ok(pid)) => pid,
            Some(Err(source)) => {
                return Err(LaunchError::Restore { log: self.log().await, source });
            }
            None => {
                return Err(LaunchError::Hung { stall: self.stall, log: self.log().await });
            }
        };
        let watch = async {
            tokio::select! {
                biased;
                ended = namespace.wait(id, WATCH) => Some(ended),
                () = sleeping(pid) => None,
            }
        };
        let (network, watched) = tokio::join!(network::loopback(pid), watch);
        match watched {
            // It had nothing left to do.
            Some(Ok(0)) => Ok(pid),
            // It runs on.
            None | Some(Err(RuntimeError { kind: RuntimeErrorKind::Timeout, .. })) => {
                network.map(|()| pid).map_err(LaunchError::Loopback)
            }
            Some(Ok(status)) => Err(LaunchError::Ended(status)),
            Some(Err(error)) => Err(error.into()),
        }
    }

    /// Waits for CRIU, as long as the memory that it reads comes; `None` when nothing has come for
    /// long.
    async fn while_it_moves<T>(
        &self,
        driver: &Driver,
        restored: impl Future<Output = T>,
    ) -> Option<T> {
        let mut restored = std::pin::pin!(restored);
        loop {
            let before = driver.progress.snapshot().transferred;
            if let Ok(done) = tokio::time::timeout(self.stall, &mut restored).await {
                return Some(done);
            }
            if driver.progress.snapshot().transferred == before {
                return None;
            }
        }
    }

    /// Returns what CRIU says of its failure.
    async fn log(&self) -> String {
        let log = self.work.join("restore.log");
        let log = tokio::task::spawn_blocking(move || criu_log::telling(&log)).await;
        log.unwrap_or_default()
    }
}

/// Returns what a container is made of, in the order in which that is made. Each has a name that nobody
/// else has, or says whose it is, since what is undone goes by that.
pub(super) fn made(container: &str, cgroup: &str, driver: &Driver) -> [Made; 3] {
    let (container, cgroup) = (container.to_owned(), cgroup.to_owned());
    let (snapshotter, key) = (SNAPSHOTTER.to_owned(), snapshot(&container, driver));
    [
        Made::Snapshot { snapshotter, key },
        Made::Container(container.clone()),
        Made::Task { container, cgroup },
    ]
}

/// Returns the name of the root file system's snapshot.
fn snapshot(container: &str, driver: &Driver) -> String {
    format!("{container}-{}", driver.id())
}

/// Waits until a process sleeps by itself; longer than it is watched when it does not.
async fn sleeping(pid: u32) {
    let mut looks = Patience::new(WATCH * 2, LOOK_EVERY);
    while looks.once_more().await {
        if process::sleeps(pid) {
            return;
        }
    }
    std::future::pending::<()>().await;
}
