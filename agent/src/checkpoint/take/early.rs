//! What is copied before the pause, so that it is short: files ([`ahead`]), and memory where that was
//! asked for, in rounds of CRIU's `pre-dump` (`spec/decisions/0062`). The first round has all memory,
//! and each one after it what was written to meanwhile; the dump has the rest. A round stops the
//! container for as long as CRIU takes to find its pages; they are written when it runs again.

use std::io;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::time::{Instant, MissedTickBehavior};

use super::super::meter::{self, measure};
use super::Taking;
use crate::checkpoint::Memory;
use crate::checkpoint::ahead;
use crate::checkpoint::capture::Draft;
use crate::checkpoint::error::CheckpointError;
use crate::{cgroup, criu_config, criu_log, dumper, process, stage};

/// How long copying may take before the pause. The container runs meanwhile.
pub(super) const COPY_LIMIT: Duration = Duration::from_hours(24);

/// More rounds than this do not help: what is written to in one takes as long to copy.
const ROUNDS_MAX: u32 = 5;

/// What is so little is copied in the pause, in a few milliseconds.
const LITTLE: u64 = 8 << 20;

/// How often a CRIU that copies memory is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How it went with a CRIU that was not to hold the container for long.
enum Watched {
    Ended(std::process::ExitStatus),
    HeldTooLong,
}

impl Taking<'_> {
    /// Copies what the container has written while it still runs, where that is much and can be done.
    /// It is held for a moment first (`ahead`). Whatever goes wrong, nothing is missing later.
    pub(super) async fn copy_ahead(&mut self) -> Result<Option<Draft>, CheckpointError> {
        if !ahead::is_worthwhile(self.app, self.source).await {
            return Ok(None);
        }
        self.driver.step("copy");
        self.is_the_same().await?;
        self.driver.will_make(self.pause()).await?;
        let since = ahead::moment(&self.source.freezer).await;
        self.running().await?;
        let Some(since) = since else { return Ok(None) };
        let draft = self.directory.join("draft");
        if let Some(guardian) = &mut self.guardian {
            // The container runs: only what comes after has a deadline.
            guardian.extend(COPY_LIMIT).await?;
        }
        let copied = ahead::copy(self.source, since, &draft, &self.stop);
        let progress = &self.driver.progress;
        let copied = measure(&self.directory, self.source.estimate.written, progress, copied).await;
        if let Some(guardian) = &mut self.guardian {
            guardian.extend(self.order.deadline).await?;
        }
        Ok(copied)
    }

    /// Copies memory while the container runs, where that was asked for. Returns the name of the last
    /// round's directory.
    pub(super) async fn copy_memory(&mut self) -> Result<Option<String>, CheckpointError> {
        // One that is suspended stands still anyway.
        if self.order.memory == Memory::Paused || self.source.suspended {
            return Ok(None);
        }
        self.driver.step("pre-copy");
        self.is_the_same().await?;
        // A CRIU that is ended may leave it standing.
        self.driver.will_make(self.pause()).await?;
        if let Some(guardian) = &mut self.guardian {
            // How long each round holds it is watched here.
            guardian.extend(COPY_LIMIT).await?;
        }
        let (mut last, mut before) = (None, u64::MAX);
        for number in 1..=ROUNDS_MAX {
            // Rounds take their time, and a process id may be another's by now.
            self.is_the_same().await?;
            let name = format!("round-{number}");
            let bytes = self.round(&name, last.as_deref(), before).await?;
            tracing::debug!(number, bytes, "memory was copied before the pause");
            last = Some(name);
            // One that finds more than half of what the one before it found would be the last of many.
            if bytes <= LITTLE || bytes > before / 2 {
                break;
            }
            before = bytes;
        }
        if let Some(guardian) = &mut self.guardian {
            guardian.extend(self.order.deadline).await?;
        }
        self.running().await?;
        Ok(last)
    }

    /// Takes away what CRIU was told of rounds, as soon as the dump is there.
    pub(super) async fn forget_round(&self) {
        let Some(file) = self.source.criu_config.clone() else { return };
        let forgotten = self.driver.spawn_blocking(move || criu_config::forget(&file)).await;
        if let Err(error) = forgotten.map_err(io::Error::other).and_then(|done| done) {
            tracing::warn!(%error, "a container's CRIU configuration still names a round");
        }
    }

    /// Has CRIU copy what was written to since the round in `last`, which had `before` bytes. Returns
    /// how many bytes these are.
    async fn round(
        &self,
        name: &str,
        last: Option<&str>,
        before: u64,
    ) -> Result<u64, CheckpointError> {
        let (images, work) = (self.directory.join(name), self.directory.join("work"));
        let made = images.clone();
        let made = self.driver.spawn_blocking(move || stage::make(&made)).await;
        let made = made.map_err(io::Error::other).and_then(|made| made);
        made.map_err(CheckpointError::Stage)?;
        let log = format!("{name}.log");
        let mut command = Command::new("criu");
        command.args(["pre-dump", "--no-default-config", "--track-mem", "--manage-cgroups=ignore"]);
        command.args(["-v4", "--log-file", &log, "--tree", &self.source.pid.to_string()]);
        command.arg("--images-dir").arg(&images).arg("--work-dir").arg(&work);
        if let Some(last) = last {
            command.args(["--prev-images-dir", &beside(last)]);
        }
        // Signals from a terminal are for the agent, which ends it where that does no harm.
        command.process_group(0).current_dir("/").stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut criu = command.spawn().map_err(CheckpointError::PreDump)?;
        // Whoever ends the agent's cgroup would end it at a moment that its container may not survive.
        if let Some(pid) = criu.id()
            && !matches!(cgroup::leave(pid), Ok(1..))
        {
            tracing::warn!(pid, "CRIU stays in the agent's cgroup");
        }
        let expected = self.source.estimate.memory.min(before);
        let watched =
            measure(&images, expected, &self.driver.progress, self.watch(&mut criu)).await;
        match watched.map_err(CheckpointError::PreDump)? {
            Watched::Ended(status) if status.success() => {
                let written = tokio::task::spawn_blocking(move || meter::bytes(images)).await;
                written.map_err(|error| CheckpointError::PreDump(io::Error::other(error)))
            }
            Watched::Ended(status) => {
                let log = work.join(log);
                let log = tokio::task::spawn_blocking(move || criu_log::telling(&log)).await;
                Err(CheckpointError::PreCopy { status, log: log.unwrap_or_default() })
            }
            Watched::HeldTooLong => Err(CheckpointError::HeldTooLong),
        }
    }

    /// Waits for CRIU, unless it holds the container for longer than a pause may last.
    async fn watch(&self, criu: &mut Child) -> io::Result<Watched> {
        let (pid, tracer) = (self.source.pid, criu.id());
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut held: Option<Instant> = None;
        loop {
            tokio::select! {
                ended = criu.wait() => return Ok(Watched::Ended(ended?)),
                _ = ticks.tick() => {
                    let holds = tokio::task::spawn_blocking(move || process::tracer(pid)).await;
                    let holds = holds.map_err(io::Error::other)?;
                    if holds.is_none() || holds != tracer {
                        held = None;
                        continue;
                    }
                    let since = *held.get_or_insert_with(Instant::now);
                    if since.elapsed() > self.order.deadline {
                        if let Some(criu) = tracer {
                            dumper::cut(criu, &self.source.freezer, false).await?;
                        }
                        criu.wait().await?;
                        return Ok(Watched::HeldTooLong);
                    }
                }
            }
        }
    }
}

/// Returns where a round is, seen from the directory of another one or of the dump.
pub(super) fn beside(round: &str) -> String {
    format!("../{round}")
}
