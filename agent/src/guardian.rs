//! The guardian: a tiny process of its own that brings a paused source back when we cannot.
//!
//! It is started before the pause, outside our session and our cgroup, and holds one end of a
//! pipe. When the pipe breaks we are dead; when the deadline passes we are too slow. Either way it
//! resumes the container: through containerd, else with the kernel's freezer.
//!
//! ```text
//! agent → guardian   extend MILLISECONDS | done     (end of file: the agent is dead)
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
use crate::config::GpuConfig;
use crate::gpu::Held;
use crate::process::own_program;
use crate::tasks::Tasks;

/// How long a guardian may take to start or to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How long one may be at work after the deadline: it needs twenty seconds at most.
const END_LIMIT: Duration = Duration::from_secs(30);

/// The log of all guardians is begun anew above this size.
const LOG_BYTES_MAX: u64 = 1 << 20;

/// Whom to guard.
#[derive(Clone, Debug)]
pub(crate) struct Charge {
    pub(crate) containerd: PathBuf,
    pub(crate) namespace: String,
    pub(crate) container: String,
    pub(crate) pid: u32,
    /// The cgroup that the runtime has made for it, where that is known.
    pub(crate) cgroup: Option<String>,
    /// Where its dump and CRIU's log go.
    pub(crate) directory: PathBuf,
    pub(crate) deadline: Duration,
    /// Whose GPU memory it brings back when the container runs again, and how.
    pub(crate) gpu: Held,
    pub(crate) gpus: GpuConfig,
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
    /// It is gone: somebody ended it.
    #[error("the guardian has ended, so that nobody would bring the container back in time")]
    Gone,
    /// The deadline has passed: it ends the pause, and the dump with it.
    #[error(
        "the pause took longer than its deadline and was cut short; CRIU may have left code in the \
         processes, after which they cannot be checkpointed until they are started anew: take a longer \
         --pause-deadline"
    )]
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
        let (wanted, place) = (charge.clone(), log.clone());
        let command = tokio::task::spawn_blocking(move || command(&wanted, &place)).await;
        let command = command.map_err(io::Error::other).and_then(|command| command);
        let mut child = command.and_then(|mut command| command.spawn());
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

    /// Returns when the guardian has begun to resume the container by itself, or has ended.
    pub(crate) fn expired(&self) -> impl Future<Output = GuardianError> + use<> {
        let mut said = self.said.clone();
        async move {
            // The listener ends with the guardian, and says so unless it was sent away.
            match said.wait_for(|said| *said >= Said::Expired).await.map(|said| *said) {
                Ok(Said::Gone) => GuardianError::Gone,
                Ok(_) => GuardianError::Expired,
                Err(_dismissed) => std::future::pending().await,
            }
        }
    }

    /// Gives the pause a new deadline from now on; an error when the old one has passed.
    pub(crate) async fn extend(&mut self, time: Duration) -> Result<(), GuardianError> {
        let before = *self.said.borrow();
        let order = format!("extend {}\n", time.as_millis());
        self.order(&order, |said| said != before).await
    }

    /// Sends the guardian away; an error when it has resumed the container. It has ended then, too:
    /// one that is still at it might resume the container in its next pause.
    pub(crate) async fn dismiss(mut self) -> Result<(), GuardianError> {
        let dismissed = self.order("done\n", |said| said >= Said::Bye).await;
        if dismissed.is_err() {
            let ended = async { while self.said.changed().await.is_ok() {} };
            if tokio::time::timeout(END_LIMIT, ended).await.is_err() {
                tracing::error!("a guardian that resumed its container does not end");
            }
        }
        dismissed
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
            Ok(Ok(said)) if *said == Said::Gone => Err(GuardianError::Gone),
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
    let mut command = std::process::Command::new(own_program());
    command.arg("guardian");
    if let Some(cgroup) = &charge.cgroup {
        command.arg("--cgroup").arg(cgroup);
    }
    command
        .arg("--containerd")
        .arg(&charge.containerd)
        .args(["--namespace", &charge.namespace, "--container", &charge.container])
        .args(["--pid", &charge.pid.to_string()])
        .arg("--directory")
        .arg(&charge.directory)
        .args(["--deadline-ms", &charge.deadline.as_millis().to_string()])
        .args(["--gpu", &serde_json::to_string(&(&charge.gpu, &charge.gpus))?])
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(options.open(log)?);
    Ok(command.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stands in for a guardian: says what a script says.
    fn guardian(script: &str, tasks: &Tasks) -> Guardian {
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (says, said) = watch::channel(Said::Ready(0));
        let answers = BufReader::new(answers).lines();
        tasks.spawn(|_| listen(answers, says));
        Guardian { orders, said }
    }

    #[tokio::test]
    async fn one_that_resumes_the_container_has_ended_when_it_is_dismissed() {
        let (tasks, directory) = (Tasks::default(), tempfile::tempdir().unwrap());
        let gate = directory.path().join("gate");
        let script = format!("mkfifo {gate:?}; echo expired; cat {gate:?}; echo revived");
        let guardian = guardian(&script, &tasks);
        assert!(matches!(guardian.expired().await, GuardianError::Expired));
        let mut dismissed = std::pin::pin!(guardian.dismiss());
        assert!(tokio::time::timeout(Duration::from_millis(200), &mut dismissed).await.is_err());
        // It comes to its end.
        tokio::task::spawn_blocking(move || fs::write(gate, "")).await.unwrap().unwrap();
        assert!(matches!(dismissed.await, Err(GuardianError::Expired)));
    }

    #[tokio::test]
    async fn a_deadline_is_given_anew_as_it_was() {
        let (tasks, directory) = (Tasks::default(), tempfile::tempdir().unwrap());
        let told = directory.path().join("told");
        let script = format!("read line; echo $line > {told:?}; echo extended; read line");
        let mut guardian = guardian(&script, &tasks);
        guardian.extend(Duration::from_millis(2_900)).await.unwrap();
        assert_eq!(fs::read_to_string(told).unwrap(), "extend 2900\n");
    }

    #[tokio::test]
    async fn one_that_was_killed_is_no_expired_one() {
        let tasks = Tasks::default();
        let guardian = guardian("read order", &tasks);
        let expired = guardian.expired();
        let Guardian { orders, .. } = guardian;
        drop(orders);
        assert!(matches!(expired.await, GuardianError::Gone));
    }
}
