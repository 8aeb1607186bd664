//! Processes that a testbed starts and ends, by their ids.

use std::io::{self, BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use fs_err as fs;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::command::wait_until;

/// How long a process may take to end after it was asked to.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// A running child. It is killed when this is dropped.
#[derive(Debug)]
pub struct Service {
    child: Child,
    // Kept open: a program that still prints must not die of it.
    output: Option<BufReader<ChildStdout>>,
    stays: bool,
}

impl Service {
    /// Starts a program; its standard output is read by [`Service::wait_for_line`].
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().map(BufReader::new);
        Ok(Self { child, output, stays: false })
    }

    /// Returns the process, while it runs.
    pub fn process(&self) -> io::Result<Process> {
        let ended = || io::Error::other(format!("process {} has ended", self.child.id()));
        Process::find(self.child.id()).ok_or_else(ended)
    }

    /// Lets the program outlive this value and this process.
    pub const fn stay(&mut self) {
        self.stays = true;
    }

    /// Reads lines until one begins with `prefix`, and returns the rest of it. Fails with what
    /// was printed when the output ends before.
    pub fn wait_for_line(&mut self, prefix: &str) -> io::Result<String> {
        let mut seen = String::new();
        let Some(output) = &mut self.output else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        loop {
            let mut line = String::new();
            if output.read_line(&mut line)? == 0 {
                let text = format!("it ended before it was ready: {}", seen.trim());
                return Err(io::Error::other(text));
            }
            if let Some(rest) = line.trim_end().strip_prefix(prefix) {
                return Ok(rest.trim().to_owned());
            }
            seen.push_str(&line);
        }
    }

    /// Asks the program to end and waits until it has.
    pub fn stop(mut self) -> io::Result<()> {
        if let Some(process) = Process::find(self.child.id()) {
            process.signal(Signal::TERM);
        }
        if self.ends() { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    /// Waits until the program has ended by itself. Returns whether it has.
    pub fn ends(&mut self) -> bool {
        wait_until(END_TIMEOUT, || self.child.try_wait().is_ok_and(|status| status.is_some()))
    }

    /// Kills the program, as a power failure would, and waits until it is gone.
    pub fn kill(mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if !self.stays {
            // Ended already is as good.
            drop(self.child.kill());
            drop(self.child.wait());
        }
    }
}

/// A process of this machine, whoever started it. Its id with its time of birth is never that of
/// another process, until the machine starts anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// The process id.
    pub pid: u32,
    /// When it began, in clock ticks since boot.
    pub birth: u64,
}

impl Process {
    /// Returns the process that has this id now.
    pub fn find(pid: u32) -> Option<Self> {
        born(pid).map(|birth| Self { pid, birth })
    }

    /// Returns this process.
    pub fn own() -> Option<Self> {
        Self::find(std::process::id())
    }

    /// Whether it still runs.
    pub fn runs(self) -> bool {
        born(self.pid) == Some(self.birth)
    }

    /// Returns its first child.
    pub fn child(self) -> Option<Self> {
        let list = format!("/proc/{0}/task/{0}/children", self.pid);
        let text = fs::read_to_string(list).ok().filter(|_| self.runs())?;
        text.split_whitespace().find_map(|word| Self::find(word.parse().ok()?))
    }

    /// Sends a signal; a process that is gone already does not matter.
    pub fn signal(self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw)
            && self.runs()
        {
            let _gone: Result<(), _> = kill_process(pid, signal);
        }
    }

    /// Kills it and waits until it is gone. Returns whether it is.
    pub fn kill(self) -> bool {
        self.signal(Signal::KILL);
        wait_until(END_TIMEOUT, || !self.runs())
    }
}

/// When a process began. `None` when there is none, or when all that is left of it is its entry
/// in the table: not every machine's first process takes those away soon.
fn born(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command in parentheses may hold anything; fields are counted from its end (proc(5)).
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ');
    let dead = matches!(fields.next()?, "Z" | "X");
    fields.nth(18)?.parse().ok().filter(|_| !dead)
}

/// Adds what a program wrote to its log to why it did not start.
pub(crate) fn with_log(error: io::Error, log: &Path) -> io::Error {
    let text = fs::read_to_string(log).unwrap_or_default();
    io::Error::new(error.kind(), format!("{error}; {}", text.trim()))
}
