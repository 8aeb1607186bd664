//! The guardian's own side.

use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use kybernate_spec::chain;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::unix::pipe;
use tokio::time::Instant;

use crate::cgroup::{self, Freezer};
use crate::config::GpuConfig;
use crate::gpu::{Gpus, Held};
use crate::process::own_program;
use crate::revive::{Paused, Revived};
use crate::runtime::Containerd;

/// How the agent starts a guardian.
#[derive(Clone, Debug, clap::Args)]
pub struct GuardianArgs {
    /// containerd's socket.
    #[arg(long)]
    containerd: PathBuf,
    /// containerd's namespace of the container.
    #[arg(long)]
    namespace: String,
    /// The container.
    #[arg(long)]
    container: String,
    /// Its first process.
    #[arg(long)]
    pid: u32,
    /// The cgroup that the runtime has made for it, if that is known.
    #[arg(long)]
    cgroup: Option<String>,
    /// Where its dump and CRIU's log go.
    #[arg(long)]
    directory: PathBuf,
    /// How long the pause may last.
    #[arg(long)]
    deadline_ms: u64,
    /// Whose GPU memory it brings back, and how (JSON).
    #[arg(long)]
    gpu: String,
    /// Already re-parented: stand guard.
    #[arg(long)]
    detached: bool,
}

/// Runs the guardian: first leaves the agent's session and becomes nobody's child, then guards.
pub fn run(args: GuardianArgs) -> ExitCode {
    let done = if args.detached { guard(&args) } else { detach() };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, container = args.container, "the guardian failed");
            ExitCode::FAILURE
        }
    }
}

/// Starts ourselves once more in a session of our own, with the same pipes, and ends: the second
/// process then belongs to init.
fn detach() -> io::Result<()> {
    rustix::process::setsid()?;
    let mut command = std::process::Command::new(own_program());
    command.args(std::env::args_os().skip(1)).arg("--detached");
    // Not waited for: we end, and init is the one who waits.
    let _child = command.stdin(Stdio::inherit()).stdout(Stdio::inherit()).spawn()?;
    Ok(())
}

fn guard(args: &GuardianArgs) -> io::Result<()> {
    match cgroup::leave(std::process::id()) {
        Ok(0) | Err(_) => tracing::warn!("the guardian stays in the agent's cgroup"),
        Ok(_) => {}
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stood = runtime.block_on(stand(args));
    // It waits for nobody who still looks at something.
    runtime.shutdown_background();
    stood
}

async fn stand(args: &GuardianArgs) -> io::Result<()> {
    let paused = Paused {
        namespace: Containerd::at(&args.containerd).namespace(&args.namespace),
        container: args.container.clone(),
        pid: args.pid,
        freezer: Freezer::of(args.pid, args.cgroup.as_deref())?,
        directory: args.directory.clone(),
        is_looked_for: true,
        cut_short: true,
    };
    let (held, config): (Held, GpuConfig) = serde_json::from_str(&args.gpu)?;
    let orders = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
    let mut answers = pipe::Sender::from_owned_fd(io::stdout().as_fd().try_clone_to_owned()?)?;
    let mut orders = BufReader::new(orders).lines();
    let mut deadline = Instant::now() + Duration::from_millis(args.deadline_ms);
    answers.write_all(b"ready\n").await?;
    let patience = loop {
        tokio::select! {
            order = orders.next_line() => match order.ok().flatten().as_deref() {
                Some("done") => return answers.write_all(b"bye\n").await,
                Some(order) => {
                    let time = order.strip_prefix("extend ").and_then(|text| text.parse().ok());
                    if let Some(time) = time {
                        deadline = Instant::now() + Duration::from_millis(time);
                    }
                    // An agent that has died since has nobody to hear it, and closes the orders.
                    answers.write_all(b"extended\n").await.unwrap_or_default();
                }
                None => {
                    tracing::warn!(container = args.container, "the agent is dead");
                    // It may have been given more while the container ran.
                    break deadline.min(Instant::now() + Duration::from_millis(args.deadline_ms));
                }
            },
            () = tokio::time::sleep_until(deadline) => {
                tracing::warn!(container = args.container, "the deadline has passed");
                // The agent may be stuck: what it can read decides nothing here.
                answers.write_all(b"expired\n").await.unwrap_or_default();
                break Instant::now();
            }
        }
    };
    match paused.revive(patience).await {
        Ok(how @ (Revived::Running | Revived::Thawed | Revived::Gone)) => {
            tracing::warn!(container = args.container, ?how, "brought back");
            // It runs: only now does the driver answer. The agent, or the next one, does it as well.
            let back = Gpus::ours(config).bring_back(&held).await;
            answers.write_all(b"revived\n").await.unwrap_or_default();
            back.map_err(|error| io::Error::other(chain(&error).to_string()))
        }
        Err(error) => Err(io::Error::other(chain(&error).to_string())),
    }
}
