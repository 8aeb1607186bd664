//! The programs that are compared: ours, and others' from the node root of Debian 14.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::fs::sync;

use super::super::meter::resident;
use crate::command::tail;

/// How often a program's memory is looked at.
const SAMPLE: Duration = Duration::from_millis(5);

/// What one or several runs cost.
#[derive(Clone, Debug, Default)]
pub(super) struct Ran {
    pub(super) time: Duration,
    /// The most memory that one of them had resident, as far as was seen, in MiB.
    pub(super) mib: f64,
    /// What the last one printed.
    pub(super) out: String,
}

/// Where programs are, and where they run.
#[derive(Debug)]
pub(super) struct Tools {
    kyb: PathBuf,
    root: PathBuf,
    home: PathBuf,
}

impl Tools {
    /// `bin` has ours, `cache` the node roots; `home` is where they run.
    pub(super) fn new(bin: &Path, cache: &Path, home: &Path) -> Self {
        let (kyb, root) = (bin.join("kyb"), cache.join("roots/forky"));
        Self { kyb, root, home: home.to_owned() }
    }

    /// Runs ours.
    pub(super) fn kyb(&self, words: &[&str]) -> anyhow::Result<Ran> {
        let mut command = Command::new(&self.kyb);
        command.args(words).arg("--json").env("TMPDIR", &self.home);
        self.run(&mut command).with_context(|| format!("kyb {}", words.join(" ")))
    }

    /// Runs a program of this machine.
    pub(super) fn system(&self, program: &str, words: &[&str]) -> anyhow::Result<Ran> {
        let ran = self.run(Command::new(program).args(words));
        ran.with_context(|| format!("{program} {}", words.join(" ")))
    }

    /// Whether the node root has a program.
    pub(super) fn has(&self, program: &str) -> bool {
        self.root.join("usr/bin").join(program).exists()
    }

    /// Runs a program of the node root with the root's own loader: nothing in the root changes.
    pub(super) fn foreign(&self, program: &str, words: &[&str]) -> anyhow::Result<Ran> {
        let root = self.root.display();
        let libraries = format!("{root}/lib/x86_64-linux-gnu:{root}/usr/lib/x86_64-linux-gnu");
        let mut command = Command::new(self.root.join("lib64/ld-linux-x86-64.so.2"));
        command.args(["--library-path", &libraries]);
        command.arg(self.root.join("usr/bin").join(program)).args(words);
        self.run(&mut command).with_context(|| format!("{program} {}", words.join(" ")))
    }

    fn run(&self, command: &mut Command) -> anyhow::Result<Ran> {
        command.current_dir(&self.home).env("HOME", &self.home).stdin(Stdio::null());
        // What others have written is on the disk before.
        sync();
        let began = Instant::now();
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (pid, done) = (child.id(), AtomicBool::new(false));
        let (output, time, mib) = std::thread::scope(|scope| {
            let sampler = scope.spawn(|| {
                let mut peak = 0_f64;
                while !done.load(Ordering::Relaxed) {
                    peak = peak.max(resident(pid).unwrap_or_default());
                    std::thread::park_timeout(SAMPLE);
                }
                peak
            });
            let output = child.wait_with_output();
            let time = began.elapsed();
            done.store(true, Ordering::Relaxed);
            sampler.thread().unpark();
            (output, time, sampler.join().unwrap_or_default())
        });
        let output = output?;
        ensure!(output.status.success(), "it ended with {}: {}", output.status, tail(&output));
        Ok(Ran { time, mib, out: String::from_utf8_lossy(&output.stdout).into_owned() })
    }
}

impl Ran {
    /// Adds what came after.
    pub(super) fn then(self, next: Self) -> Self {
        Self { time: self.time + next.time, mib: self.mib.max(next.mib), out: next.out }
    }

    pub(super) const fn seconds(&self) -> f64 {
        self.time.as_secs_f64()
    }
}
