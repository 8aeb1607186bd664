//! Brings sources back that an agent left paused, before anything else is done: when the agent and
//! its guardian have died in one moment, nobody else does. Run by the next agent first of all, and
//! by the service manager when the agent has ended, whatever is wrong with its configuration.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use fs_err as fs;
use tokio::task::JoinSet;

use crate::config::{DEFAULT_CONTAINERD, DEFAULT_FILE, DEFAULT_ROOT, OPERATIONS};
use crate::operations::{self, Record};
use crate::runtime::Containerd;
use crate::undo;

/// How long a new agent gives them before it goes on: what CRIU gets to end, and containerd to
/// answer. What is left is undone with the rest.
pub(crate) const FIRST_LIMIT: Duration = Duration::from_secs(10);

/// The same when nobody follows: as long as bringing back one of them may take.
const ALONE_LIMIT: Duration = Duration::from_mins(1);

/// How it is started.
#[derive(Clone, Debug, clap::Args)]
pub struct RescueArgs {
    /// Configuration file (TOML); only `root` and `containerd` are read, also when others are wrong.
    #[arg(long, value_name = "FILE", env = "KYBERNATE_AGENT_CONFIG")]
    config: Option<PathBuf>,
    /// containerd's socket.
    #[arg(long, value_name = "ADDR", env = "KYBERNATE_AGENT_CONTAINERD")]
    containerd: Option<PathBuf>,
    /// Directory for everything the agent keeps.
    #[arg(long, value_name = "DIR", env = "KYBERNATE_AGENT_ROOT")]
    root: Option<PathBuf>,
}

/// Brings them back and ends. An agent that runs sees to that itself: then nothing is done.
pub fn run(args: RescueArgs) -> ExitCode {
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(alone(args)),
        Err(error) => {
            tracing::error!(%error, "failed to start");
            ExitCode::FAILURE
        }
    }
}

async fn alone(args: RescueArgs) -> ExitCode {
    let (root, containerd) = args.places();
    match hold(&root) {
        Ok(Some(_lock)) => match first(&root.join(OPERATIONS), &containerd, ALONE_LIMIT).await {
            0 => ExitCode::SUCCESS,
            left => {
                tracing::error!(left, "sources are still paused, or may be");
                ExitCode::FAILURE
            }
        },
        Ok(None) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, ?root, "failed to look for paused sources");
            ExitCode::FAILURE
        }
    }
}

/// Brings back whatever operations that have not ended left paused. Nothing else of them is touched.
/// Whoever calls this holds the agent's lock. Returns how many are still paused, or not known to run: so
/// is whatever an operation was about that cannot be read.
pub(crate) async fn first(operations: &Path, containerd: &Path, limit: Duration) -> usize {
    let kept = operations.to_owned();
    let read = tokio::task::spawn_blocking(move || operations::unfinished(&kept)).await;
    let (records, unread) = match read.map_err(io::Error::other).and_then(|read| read) {
        Ok(found) => found,
        Err(error) => {
            tracing::error!(%error, ?operations, "failed to read what was under way");
            return 1;
        }
    };
    if unread > 0 {
        tracing::error!(
            unread,
            ?operations,
            "operations cannot be read, and what they have paused stays so: `ctr --namespace NAMESPACE task \
             ls` tells what is PAUSED, and `task resume` lets it run"
        );
    }
    let mut back = JoinSet::new();
    for record in records.into_iter().filter(Record::pauses) {
        let namespace = Containerd::at(containerd).namespace(&record.namespace);
        back.spawn(async move {
            let runs = undo::bring_back_source(&namespace, &record).await;
            tracing::warn!(
                operation.id = record.id,
                container = record.container,
                runs,
                "an earlier agent ended while this container was paused"
            );
            runs
        });
    }
    let mut left = back.len();
    let all = async {
        while let Some(runs) = back.join_next().await {
            left -= usize::from(runs.unwrap_or(false));
        }
    };
    // Those that take longer are left where they are.
    tokio::time::timeout(limit, all).await.unwrap_or_default();
    left.saturating_add(unread)
}

impl RescueArgs {
    /// Returns the agent's directory and containerd's socket.
    fn places(self) -> (PathBuf, PathBuf) {
        let file = self.config.as_deref().unwrap_or(Path::new(DEFAULT_FILE));
        let text = fs::read_to_string(file).unwrap_or_default();
        // Line by line when the whole is no TOML: a slip elsewhere must leave nobody paused.
        let table: toml::Table = text.parse().unwrap_or_else(|_wrong| {
            let head = text.lines().take_while(|line| !line.trim_start().starts_with('['));
            head.filter_map(|line| line.parse::<toml::Table>().ok()).flatten().collect()
        });
        let written =
            |key: &str| table.get(key).and_then(|value| value.as_str()).map(PathBuf::from);
        let root = self.root.or_else(|| written("root"));
        let containerd = self.containerd.or_else(|| written("containerd"));
        (
            root.unwrap_or_else(|| DEFAULT_ROOT.into()),
            containerd.unwrap_or_else(|| DEFAULT_CONTAINERD.into()),
        )
    }
}

/// Takes the agent's lock; nothing when an agent has it, or none has ever run here.
fn hold(root: &Path) -> io::Result<Option<OwnedFd>> {
    let lock = match fs::File::open(root.join("agent.lock")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        lock => OwnedFd::from(lock?.into_parts().0),
    };
    match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(lock)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(text: &str) -> (PathBuf, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("agent.toml");
        fs::write(&file, text).unwrap();
        RescueArgs { config: Some(file), containerd: None, root: None }.places()
    }

    #[test]
    fn a_wrong_configuration_hides_nobody() {
        let told = (PathBuf::from("/x"), PathBuf::from("/c.sock"));
        let good = "root = \"/x\"\ncontainerd = \"/c.sock\"\n";
        assert_eq!(places(good), told);
        assert_eq!(places(&format!("{good}no = 1\n[[caller]]\nwho = 3\n")), told);
        assert_eq!(places(&format!("{good}[staging\nroot = \"/y\"\n")), told);
        assert_eq!(places(&format!("oops\n{good}")), told);
        assert_eq!(places("").0, PathBuf::from(DEFAULT_ROOT));
    }

    #[tokio::test]
    async fn what_cannot_be_read_may_be_paused() {
        let kept = tempfile::tempdir().unwrap();
        let first = || first(kept.path(), Path::new("/nowhere"), FIRST_LIMIT);
        assert_eq!(first().await, 0);
        fs::write(kept.path().join("01a221de2425908efd17.log"), "cut sho").unwrap();
        assert_eq!(first().await, 1);
    }

    #[test]
    fn an_agent_that_runs_is_not_interfered_with() {
        let root = tempfile::tempdir().unwrap();
        assert!(hold(root.path()).unwrap().is_none());
        fs::write(root.path().join("agent.lock"), "").unwrap();
        let held = hold(root.path()).unwrap();
        assert!(held.is_some() && hold(root.path()).unwrap().is_none());
        drop(held);
        assert!(hold(root.path()).unwrap().is_some());
    }
}
