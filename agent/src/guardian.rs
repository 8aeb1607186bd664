//! The guardian: a tiny process of its own that brings a paused source back when we cannot.
//!
//! It is started before the pause, outside our session and our cgroup, and holds one end of a
//! pipe. When the pipe breaks we are dead; when the deadline passes we are too slow. Either way it
//! resumes the container: through containerd, else with the kernel's freezer.
//!
//! ```text
//! agent → guardian   extend SECONDS | done          (end of file: the agent is dead)
//! guardian → agent   ready | extended | bye | expired | revived
//! ```

use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use fs_err as fs;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::sync::watch;

mod process;

pub use self::process::{GuardianArgs, run};
use crate::tasks::Tasks;

/// How long a guardian may take to start or to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The log of all guardians is begun anew above this size.
const LOG_BYTES_MAX: u64 = 1 << 20;

/// Whom to guard.
#[derive(Clone, Debug)]
pub(crate) struct Charge {
    pub(crate) containerd: PathBuf,
    pub(crate) namespace: String,
    pub(crate) container: String,
    pub(crate) pid: u32,
    /// Where its dump and CRIU's log go.
    pub(crate) directory: PathBuf,
    pub(crate) deadline: Duration,
}

/// The agent's side of a guardian. Dropping it without [`Guardian::dismiss`] makes the guardian
/// resume the container, as if we had died.
#[derive(Debug)]
pub(crate) struct Guardian {
    orders: ChildStdin,
    said: watch::Receiver<Said>,
}

/// What the guardian said last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Said {
    Ready(u32),
    Bye,
    Expired,
    Gone,
}

/// Why a guardian does not stand.
#[derive(Debug, thiserror::Error)]
pub enum GuardianError {
    /// It could not be started.
    #[error("failed to start the guardian")]
    Start(#[source] io::Error),
    /// It does not answer.
    #[error("the guardian does not answer; its log is {0:?}")]
    Silent(PathBuf),
    /// The deadline has passed: it resumed the container.
    #[error("the pause took longer than its deadline, and the container was resumed")]
    Expired,
}

impl Guardian {
    /// Starts a guardian and waits until it stands.
    pub(crate) async fn start(
        charge: &Charge,
        root: &Path,
        tasks: &Tasks,
    ) -> Result<Self, GuardianError> {
        let log = root.join("guardian.log");
        let mut child = command(charge, &log).and_then(|mut command| command.spawn());
        let (orders, answers) = match &mut child {
            Ok(child) => (child.stdin.take(), child.stdout.take()),
            Err(_) => (None, None),
        };
        let mut child = child.map_err(GuardianError::Start)?;
        let (Some(orders), Some(answers)) = (orders, answers) else {
            return Err(GuardianError::Start(io::ErrorKind::BrokenPipe.into()));
        };
        let mut answers = BufReader::new(answers).lines();
        let ready = tokio::time::timeout(ANSWER_LIMIT, answers.next_line()).await;
        // What we started only starts the guardian and ends.
        child.wait().await.map_err(GuardianError::Start)?;
        match ready {
            Ok(Ok(Some(line))) if line == "ready" => {}
            _ => return Err(GuardianError::Silent(log)),
        }
        let (says, said) = watch::channel(Said::Ready(0));
        tasks.spawn(|_| listen(answers, says));
        Ok(Self { orders, said })
    }

    /// Returns when the guardian has begun to resume the container by itself.
    pub(crate) fn expired(&self) -> impl Future<Output = ()> + use<> {
        let mut said = self.said.clone();
        async move {
            // The listener ends with the guardian, and says so unless it was sent away.
            if said.wait_for(|said| *said >= Said::Expired).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Gives the pause a new deadline from now on; an error when the old one has passed.
    pub(crate) async fn extend(&mut self, time: Duration) -> Result<(), GuardianError> {
        let before = *self.said.borrow();
        let order = format!("extend {}\n", time.as_secs().max(1));
        self.order(&order, |said| said != before).await
    }

    /// Sends the guardian away; an error when it has resumed the container.
    pub(crate) async fn dismiss(mut self) -> Result<(), GuardianError> {
        self.order("done\n", |said| said >= Said::Bye).await
    }

    async fn order(
        &mut self,
        order: &str,
        answered: impl Fn(Said) -> bool,
    ) -> Result<(), GuardianError> {
        // A broken pipe is told by what the guardian said, or did not.
        self.orders.write_all(order.as_bytes()).await.unwrap_or_default();
        let answer = self.said.wait_for(|said| answered(*said));
        match tokio::time::timeout(ANSWER_LIMIT, answer).await {
            Ok(Ok(said)) if *said < Said::Expired => Ok(()),
            _ => Err(GuardianError::Expired),
        }
    }
}

/// Passes on what the guardian says until it ends.
async fn listen(mut answers: Lines<BufReader<ChildStdout>>, says: watch::Sender<Said>) {
    let mut extended = 0;
    while let Ok(Some(line)) = answers.next_line().await {
        let said = match &*line {
            "extended" => {
                extended += 1;
                Said::Ready(extended)
            }
            "bye" => Said::Bye,
            "expired" => Said::Expired,
            _ => continue,
        };
        says.send_replace(said);
    }
    says.send_if_modified(|said| {
        let ended = *said < Said::Bye;
        if ended {
            *said = Said::Gone;
        }
        ended
    });
}

fn command(charge: &Charge, log: &Path) -> io::Result<Command> {
    let fresh = fs::metadata(log).is_ok_and(|log| log.len() > LOG_BYTES_MAX);
    let mut options = std::fs::OpenOptions::new();
    options.create(true).append(!fresh).write(true).truncate(fresh).mode(0o600);
    let mut command = std::process::Command::new(std::env::current_exe()?);
    command
        .arg("guardian")
        .arg("--containerd")
        .arg(&charge.containerd)
        .args(["--namespace", &charge.namespace, "--container", &charge.container])
        .args(["--pid", &charge.pid.to_string()])
        .arg("--directory")
        .arg(&charge.directory)
        .args(["--deadline-ms", &charge.deadline.as_millis().to_string()])
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(options.open(log)?);
    Ok(command.into())
}
