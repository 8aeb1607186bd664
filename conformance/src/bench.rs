//! Figures beside containerd's own path, in one run: checkpoint → push and pull → restore.
//!
//! Reading order: here is what is measured, in which order; [`ours`] and [`containerd`] are the two
//! ways, [`meter`] counts what they cost, [`floors`] what no way on this machine can beat,
//! [`report`] makes a table of it. Nothing is asserted on time; that the process which comes back
//! is the one that went is.

mod containerd;
mod floors;
mod meter;
pub(crate) mod node;
pub(crate) mod oci;
mod ours;
pub(crate) mod pack;
pub(crate) mod registry;
mod report;
pub(crate) mod runc;
mod spread;

use std::io;
use std::path::Path;

use anyhow::{Context as _, ensure};
use rustix::fs::Advice;
use serde_json::Value;

use self::floors::Floors;
use self::meter::{Cost, Meter};
use self::report::{Machine, Report};
use crate::node::Node;
use crate::process::Service;
use crate::scenario::Scenario;

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Memory of the process, in MiB.
    pub(crate) mib: u32,
    /// How often every way is measured.
    pub(crate) rounds: u32,
}

/// One way from a running process to a running process, measured once.
#[derive(Clone, Debug)]
struct Trip {
    /// From the command to the artifact in the registry.
    there: Leg,
    /// From the command to the running process.
    back: Leg,
    /// The longest pause between two ticks that the source has seen.
    paused_ms: u64,
}

/// One half of a trip.
#[derive(Clone, Debug)]
struct Leg {
    cost: Cost,
    /// The steps it consists of, in order, with their microseconds.
    steps: Vec<(String, u64)>,
}

/// The ways that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// containerd's own, through Debian's docker-registry, from node b to node b.
    Containerd,
    /// Ours, in the same geometry.
    Ours,
    /// Ours, from node a to node b, which containerd's own way cannot.
    OursAcross,
}

impl Way {
    /// In this order in every round.
    const ALL: [Self; 3] = [Self::Containerd, Self::Ours, Self::OursAcross];

    const fn name(self) -> &'static str {
        match self {
            Self::Containerd => "containerd b → b",
            Self::Ours => "kybernate b → b",
            Self::OursAcross => "kybernate a → b",
        }
    }
}

/// Everything that a trip needs.
struct Bench<'a> {
    scenario: &'a Scenario,
    peer: Service,
    plan: Plan,
}

/// Measures, and prints a table or JSON.
#[expect(clippy::print_stdout, reason = "the command's result")]
pub(crate) fn run(bin: &Path, plan: Plan, json: bool) -> anyhow::Result<()> {
    let say = crate::cli::say;
    say("starting two nodes, two registries and two agents");
    let scenario = Scenario::start(bin, &say)?;
    let report = measure(&scenario, plan);
    if report.is_err() {
        for log in ["agent-a.log", "agent-b.log", "registry.log"] {
            let text = fs_err::read_to_string(scenario.testbed.private().join(log));
            let text = text.unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let last = lines.get(lines.len().saturating_sub(20)..).unwrap_or_default();
            say(&format!("{log}:\n{}", last.join("\n")));
        }
    }
    scenario.end()?;
    let report = report?;
    if json {
        println!("{}", serde_json::to_string_pretty(&report.json())?);
    } else {
        println!("{}", report.table());
    }
    Ok(())
}

fn measure(scenario: &Scenario, plan: Plan) -> anyhow::Result<Report> {
    let machine = Machine::look(scenario)?;
    let bench = Bench { scenario, peer: scenario.start_peer()?, plan };
    // The base image's layers are in both registries, in the repository that is pushed to.
    scenario.push_image(&scenario.peer_reference("demo/counter:base"))?;
    let mut report = Report::new(plan, machine);
    // On a virtual machine the first touch of memory costs several times what later ones do.
    crate::cli::say("warming up: one round that does not count");
    for way in Way::ALL {
        bench.trip(way, 0).with_context(|| way.name())?;
    }
    for round in 1..=plan.rounds {
        let say = |text: &str| crate::cli::say(&format!("round {round}/{}: {text}", plan.rounds));
        report.floors.push(Floors::measure(&scenario.testbed.private())?);
        for way in Way::ALL {
            let trip = bench.trip(way, round).with_context(|| way.name())?;
            say(&format!(
                "{}: checkpoint → push {:.2} s, pull → restore {:.2} s, source paused {} ms",
                way.name(),
                trip.there.cost.time.as_secs_f64(),
                trip.back.cost.time.as_secs_f64(),
                trip.paused_ms
            ));
            report.trips.push((way, trip));
        }
    }
    Ok(report)
}

impl Bench<'_> {
    /// Starts a process, takes it to a registry and back, and checks that it is the same one.
    ///
    /// Every trip has a process of its own, whose random pages no registry has seen.
    fn trip(&self, way: Way, round: u32) -> anyhow::Result<Trip> {
        let scenario = self.scenario;
        let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
        let (from, to) = if way == Way::OursAcross { (a, b) } else { (b, b) };
        let id = format!("{way:?}-{round}").to_lowercase();
        // What earlier trips have left in the page cache would take the memory of this one.
        rustix::fs::sync();
        for root in [scenario.registry_root(), scenario.peer_root()] {
            uncache(&root)?;
        }
        scenario.run_workload(from, &id, self.plan.mib, &[])?;
        let before = scenario.wait_for_ticks(from, &id)?;

        let there = self.meter(way, from)?;
        let there = match way {
            Way::Containerd => containerd::push(self, &there, &id)?,
            Way::Ours | Way::OursAcross => ours::push(self, &there, &id)?,
        };
        let left = scenario.wait_for_ticks(from, &id)?;
        scenario.remove(from, &id)?;
        if way == Way::Containerd {
            containerd::forget(self, &id)?;
        }
        let back = self.meter(way, to)?;
        let back = match way {
            Way::Containerd => containerd::restore(self, &back, &id)?,
            Way::Ours | Way::OursAcross => ours::restore(self, &back, &id)?,
        };
        self.goes_on(to, &id, &before)?;
        scenario.remove(to, &id)?;
        if way == Way::Containerd {
            containerd::forget(self, &id)?;
        }
        let paused_ms = number(&left, "longest_gap_ms").context("the source tells no gap")?;
        Ok(Trip { there, back, paused_ms })
    }

    fn meter<'a>(&self, way: Way, node: &'a Node) -> anyhow::Result<Meter<'a>> {
        let registry = match way {
            Way::Containerd => &self.peer,
            Way::Ours | Way::OursAcross => {
                self.scenario.registry.as_ref().context("our registry is not running")?
            }
        };
        Ok(Meter { node, registry: registry.process()? })
    }

    /// The process is the one that was dumped, and has summed all its memory since.
    fn goes_on(&self, node: &Node, id: &str, before: &Value) -> anyhow::Result<()> {
        let rounds = number(&self.scenario.status(node, id)?, "rounds_done").unwrap_or_default();
        let after = self.scenario.wait_for(node, id, |status| {
            number(status, "rounds_done").is_some_and(|done| done > rounds + 1)
        })?;
        let identity = "boot_id_of_process";
        ensure!(after.get(identity) == before.get(identity), "it is another process: {after}");
        ensure!(number(&after, "counter") > number(before, "counter"), "it began anew: {after}");
        Ok(())
    }
}

/// Lets the kernel forget what it holds of the files below a directory.
fn uncache(directory: &Path) -> io::Result<()> {
    for entry in fs_err::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            uncache(&entry.path())?;
        } else if kind.is_file() {
            let file = fs_err::File::open(entry.path())?;
            rustix::fs::fadvise(file.file(), 0, None, Advice::DontNeed)?;
        }
    }
    Ok(())
}

fn number(value: &Value, key: &str) -> Option<u64> {
    value.get(key).and_then(Value::as_u64)
}
