//! What a piece of work on a node costs: time, bytes on the wire, processor time.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use fs_err as fs;

use crate::node::Node;
use crate::process::Process;

/// Counts what happens on a node and in a registry while something is done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meter<'a> {
    /// The node that works.
    pub(super) node: &'a Node,
    /// The registry it works with.
    pub(super) registry: Process,
}

/// What something cost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    /// From the first command to the end of the last.
    pub(super) time: Duration,
    /// Bytes that left the node's network interface.
    pub(super) sent: u64,
    /// Bytes that came in through it.
    pub(super) received: u64,
    /// Processor time of everything in the node: its containerd, runc, CRIU, agent and commands,
    /// and the workload for as long as it is running.
    pub(super) node: Duration,
    /// Processor time of the registry.
    pub(super) registry: Duration,
}

impl Meter<'_> {
    /// Does something and returns what it cost. What others have written is on the disk before.
    pub(super) fn measure<T>(
        &self,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<(T, Cost)> {
        rustix::fs::sync();
        let before = self.read()?;
        let began = Instant::now();
        let done = work()?;
        let time = began.elapsed();
        let after = self.read()?;
        let cost = Cost {
            time,
            sent: after.sent - before.sent,
            received: after.received - before.received,
            node: after.node.saturating_sub(before.node),
            registry: after.registry.saturating_sub(before.registry),
        };
        Ok((done, cost))
    }

    /// Reads all counters; the time is left out.
    fn read(&self) -> anyhow::Result<Cost> {
        let init = self.node.init().pid;
        let (received, sent) = traffic(init).context("the node has no network interface")?;
        Ok(Cost {
            time: Duration::ZERO,
            sent,
            received,
            node: processor_of_cgroup(init)?,
            registry: processor_of_process(self.registry.pid)?,
        })
    }
}

/// Bytes that a process's network namespace received and sent through `eth0` (proc(5)).
fn traffic(pid: u32) -> Option<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/net/dev")).ok()?;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("eth0:"))?;
    let field = |number| line.split_whitespace().nth(number)?.parse().ok();
    Some((field(0)?, field(8)?))
}

/// Processor time of the cgroup that a process is in, and of all below it.
fn processor_of_cgroup(pid: u32) -> anyhow::Result<Duration> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let mut usage = None;
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        if controllers.split(',').any(|controller| controller == "cpuacct") {
            let file = format!("/sys/fs/cgroup/{controllers}{path}/cpuacct.usage");
            let nanoseconds = fs::read_to_string(file)?.trim().parse()?;
            return Ok(Duration::from_nanos(nanoseconds));
        }
        if controllers.is_empty() {
            // The node's own processes are in a leaf beside its containers.
            let path = path.strip_suffix("/init").unwrap_or(path);
            usage = fs::read_to_string(format!("/sys/fs/cgroup{path}/cpu.stat")).ok();
        }
    }
    let usage = usage.context("no cgroup counts the node's processor time")?;
    let line = usage.lines().find_map(|line| line.strip_prefix("usage_usec "));
    Ok(Duration::from_micros(line.context("cpu.stat has no usage_usec")?.trim().parse()?))
}

/// Processor time of a process and of its children that ended (proc(5), fields 14 to 17).
pub(super) fn processor_of_process(pid: u32) -> anyhow::Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(") ").context("the process has ended")?;
    let ticks: u64 = fields.split(' ').skip(11).take(4).filter_map(|t| t.parse::<u64>().ok()).sum();
    Ok(Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second()))
}

/// The most memory that a process had resident so far, in MiB.
pub(super) fn resident(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<f64>().ok()? / 1024.0)
}
