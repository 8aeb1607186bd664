//! The real program as a child process.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed step here is a failed test")]

use std::path::Path;
use std::process::{Output, Stdio};

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::harness::Remote;

/// A registry in a process of its own, killed when the value is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) remote: Remote,
    child: Child,
}

pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kybernate-registry"));
    command.args(arguments).kill_on_drop(true).stdin(Stdio::null());
    // Nobody sends requests here who would have to be told.
    command.env("KYBERNATE_REGISTRY_CONNECTIONS_ANNOUNCE", "0s");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

impl Process {
    /// Starts serving and waits for the line that says where.
    pub(crate) async fn start(root: &Path, more: &[&str]) -> Self {
        let root = root.to_str().unwrap();
        let serve = ["serve", "--root", root, "--listen", "127.0.0.1:0"];
        Self::of(command(&[&serve[..], more].concat())).await
    }

    /// Starts what serves, and waits for the line that says where.
    pub(crate) async fn of(mut serve: Command) -> Self {
        Self::listening(serve.spawn().unwrap()).await
    }

    /// Waits for the line that says where a child serves.
    pub(crate) async fn listening(mut child: Child) -> Self {
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).await.unwrap();
        let Some(address) = line.trim_end().strip_prefix("listening on ") else {
            panic!("the registry did not start: {line:?} {:?}", child.wait_with_output().await);
        };
        Self { remote: Remote::new(format!("http://{address}")), child }
    }

    /// Kills without warning, as power loss or the kernel would.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }

    /// Sends a signal, and leaves it at that.
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Asks to end and returns what was said.
    pub(crate) async fn terminate(self) -> Output {
        self.end(Signal::TERM).await
    }

    /// Sends a signal that ends it, and returns what was said.
    pub(crate) async fn end(self, signal: Signal) -> Output {
        self.signal(signal);
        drop(self.remote);
        self.child.wait_with_output().await.unwrap()
    }
}
