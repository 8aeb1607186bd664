//! Processes that a testbed starts and ends, by their ids.

use std::io::{self, BufRead as _, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use fs_err as fs;
use rustix::process::{Pid, Signal, kill_process};

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

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
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
        signal(self.child.id(), Signal::TERM);
        let mut ended = false;
        wait_until(END_TIMEOUT, || {
            ended = self.child.try_wait().is_ok_and(|status| status.is_some());
            ended
        });
        if ended { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
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

/// When a process began, in clock ticks since boot; `None` when there is none. A process id with
/// its time of birth is never that of another process.
pub fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command in parentheses may hold anything; fields are counted from its end (proc(5)).
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(19)?.parse().ok()
}

/// Returns the children of a process.
pub fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// Sends a signal; a process that is gone already does not matter.
pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _gone: Result<(), _> = kill_process(pid, signal);
    }
}
