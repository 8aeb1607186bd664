//! Running other programs, with their words in the error.

use std::process::{Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// How much of a program's output goes into an error: its last lines.
const TAIL_LINES: usize = 12;

/// Why a program did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// It could not be started.
    #[error("failed to start {command}")]
    Start {
        /// The program and its arguments.
        command: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It failed.
    #[error("{command} ended with {status}: {output}")]
    Failed {
        /// The program and its arguments.
        command: String,
        /// How it ended.
        status: ExitStatus,
        /// The end of what it said.
        output: String,
    },
}

/// Runs a program to its end and returns its standard output.
pub fn run(command: &mut Command) -> Result<String, CommandError> {
    let output = output(command)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(CommandError::Failed {
        command: describe(command),
        status: output.status,
        output: tail(&output),
    })
}

/// Runs a program to its end, however it ends.
pub fn output(command: &mut Command) -> Result<Output, CommandError> {
    command
        .stdin(Stdio::null())
        .output()
        .map_err(|source| CommandError::Start { command: describe(command), source })
}

/// Returns the last lines of what a program said.
pub fn tail(output: &Output) -> String {
    let text = [&*output.stdout, &*output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.trim().lines().collect();
    lines.get(lines.len().saturating_sub(TAIL_LINES)..).unwrap_or_default().join("\n")
}

/// How often it is looked at what is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Waits until `condition` holds, looking again every few milliseconds. Returns whether it did
/// within `limit`. A look that costs more, as one that starts programs, is paused after for twice as
/// long as it took: what is waited for needs the processors, too.
pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    loop {
        let looked = Instant::now();
        if condition() {
            return true;
        }
        if began.elapsed() > limit {
            return false;
        }
        #[expect(clippy::disallowed_methods, reason = "the one place that polls, with a bound")]
        std::thread::sleep((looked.elapsed() * 2).max(LOOK_EVERY));
    }
}

fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}
