//! Medians, ratios, a table.

use fs_err as fs;
use serde_json::{Value, json};

use super::spread::Spread;
use super::{Cost, Floors, Leg, Plan, Trip, Way};
use crate::node::Node;
use crate::scenario::Scenario;

/// Everything that was measured.
#[derive(Debug)]
pub(super) struct Report {
    plan: Plan,
    machine: Machine,
    /// One per round.
    pub(super) floors: Vec<Floors>,
    /// In the order in which they were measured.
    pub(super) trips: Vec<(Way, Trip)>,
}

/// What it was measured on.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    cores: usize,
    processor: String,
    kernel: String,
    /// Average number of running processes before the first round.
    load: String,
    nodes: Vec<String>,
    registry: String,
}

impl Machine {
    /// Looks at this machine and at the nodes.
    pub(super) fn look(scenario: &Scenario) -> anyhow::Result<Self> {
        let processors = fs::read_to_string("/proc/cpuinfo")?;
        let processor = processors.lines().find_map(|line| line.strip_prefix("model name"));
        let load = fs::read_to_string("/proc/loadavg")?;
        let registry = std::process::Command::new("docker-registry").arg("--version").output()?;
        let registry = String::from_utf8_lossy(&registry.stdout).trim().to_owned();
        let node = |node: &Node| -> anyhow::Result<String> {
            let script = "containerd --version | cut -d' ' -f3; runc --version | head -n 1; \
                criu --version | head -n 1";
            let versions = node.run(&["sh", "-c", script])?;
            let words: Vec<&str> = versions.split_whitespace().collect();
            Ok(format!("node {}: containerd {}", node.name(), words.join(" ")))
        };
        Ok(Self {
            cores: std::thread::available_parallelism()?.get(),
            processor: processor.unwrap_or_default().trim_matches([' ', '\t', ':']).to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            load: load.split_whitespace().next().unwrap_or_default().to_owned(),
            nodes: vec![node(&scenario.testbed.a)?, node(&scenario.testbed.b)?],
            registry,
        })
    }
}

impl Report {
    /// An empty report.
    pub(super) const fn new(plan: Plan, machine: Machine) -> Self {
        Self { plan, machine, floors: Vec::new(), trips: Vec::new() }
    }

    /// Returns everything as JSON, round by round.
    pub(super) fn json(&self) -> Value {
        let machine = &self.machine;
        let trips = self.trips.iter().map(|(way, trip)| {
            json!({
                "way": way.name(),
                "checkpointPush": leg_json(&trip.there),
                "pullRestore": leg_json(&trip.back),
                "sourcePausedMilliseconds": trip.paused_ms,
            })
        });
        let floors = self.floors.iter().map(|Floors(floors)| {
            let floor = |(name, time): &(&str, std::time::Duration)| {
                ((*name).to_owned(), json!(time.as_secs_f64()))
            };
            Value::Object(floors.iter().map(floor).collect())
        });
        json!({
            "mib": self.plan.mib,
            "rounds": self.plan.rounds,
            "machine": {
                "cores": machine.cores,
                "processor": machine.processor,
                "kernel": machine.kernel,
                "loadBefore": machine.load,
                "nodes": machine.nodes,
                "registry": machine.registry,
            },
            "trips": trips.collect::<Vec<_>>(),
            "floorSecondsPerGib": floors.collect::<Vec<_>>(),
            "ratios": {
                "checkpointPush": self.ratio(|trip| seconds(&trip.there)).json(),
                "pullRestore": self.ratio(|trip| seconds(&trip.back)).json(),
                "sourcePaused": self.ratio(paused).json(),
            },
        })
    }

    /// Returns tables in Markdown.
    pub(super) fn table(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "{} cores of {}, Linux {}, load {} before; {}; {}\n\
             {} MiB process, a third each random, zero and repeating pages; {} rounds, interleaved; \
             median (least–most)\n\n",
            machine.cores,
            machine.processor,
            machine.kernel,
            machine.load,
            machine.nodes.join("; "),
            machine.registry,
            self.plan.mib,
            self.plan.rounds
        );
        text += "| | checkpoint → push, s | pull → restore, s | source paused, s | sent, MiB \
                 | received, MiB |\n|---|---|---|---|---|---|\n";
        for way in Way::ALL {
            let cells = [
                self.spread(way, |trip| seconds(&trip.there)).text(2),
                self.spread(way, |trip| seconds(&trip.back)).text(2),
                self.spread(way, paused).text(2),
                self.spread(way, |trip| mib(trip.there.cost.sent)).text(0),
                self.spread(way, |trip| mib(trip.back.cost.received)).text(0),
            ];
            line(&mut text, way.name(), &cells);
        }
        let ratios = [
            self.ratio(|trip| seconds(&trip.there)).text(1),
            self.ratio(|trip| seconds(&trip.back)).text(1),
            self.ratio(paused).text(1),
            self.ratio(|trip| mib(trip.there.cost.sent)).text(1),
            self.ratio(|trip| mib(trip.back.cost.received)).text(1),
        ];
        line(&mut text, "**b → b: containerd ÷ kybernate**", &ratios);
        text + &self.processors() + &self.steps() + &self.floors()
    }

    fn processors(&self) -> String {
        let gib = f64::from(self.plan.mib) / 1024.0;
        let mut text = "\n| processor time, CPU-s per GiB of process | checkpoint → push: node \
                        | registry | pull → restore: node | registry |\n|---|---|---|---|---|\n"
            .to_owned();
        for way in Way::ALL {
            let of = |time: fn(&Trip) -> std::time::Duration| {
                self.spread(way, move |trip| time(trip).as_secs_f64() / gib).text(2)
            };
            let cells = [
                of(|trip| trip.there.cost.node),
                of(|trip| trip.there.cost.registry),
                of(|trip| trip.back.cost.node),
                of(|trip| trip.back.cost.registry),
            ];
            line(&mut text, way.name(), &cells);
        }
        text
    }

    fn steps(&self) -> String {
        let mut text =
            "\n| steps, s (median) | checkpoint → push | pull → restore |\n|---|---|---|\n"
                .to_owned();
        for way in Way::ALL {
            let legs = [|trip: &Trip| trip.there.clone(), |trip: &Trip| trip.back.clone()];
            let cells = legs.map(|leg| {
                let trips: Vec<Leg> = self.of(way).map(leg).collect();
                let names = trips.first().map(|leg| leg.steps.clone()).unwrap_or_default();
                let steps = names.iter().map(|(name, _)| {
                    let times = trips.iter().filter_map(|leg| step(leg, name));
                    format!("{name} {:.3}", Spread::of(times).median)
                });
                steps.collect::<Vec<_>>().join(", ")
            });
            line(&mut text, way.name(), &cells);
        }
        text
    }

    fn floors(&self) -> String {
        let mut text = "\n| floors of this machine | s per GiB |\n|---|---|\n".to_owned();
        let names = self.floors.first().map(|Floors(floors)| floors.clone()).unwrap_or_default();
        for (name, _) in names {
            let all = self.floors.iter().flat_map(|Floors(floors)| floors);
            let times = all.filter(|(known, _)| *known == name).map(|(_, time)| time.as_secs_f64());
            line(&mut text, name, &[Spread::of(times).text(2)]);
        }
        text
    }

    fn of(&self, way: Way) -> impl Iterator<Item = &Trip> {
        self.trips.iter().filter(move |(found, _)| *found == way).map(|(_, trip)| trip)
    }

    fn spread(&self, way: Way, figure: impl Fn(&Trip) -> f64) -> Spread {
        Spread::of(self.of(way).map(figure))
    }

    /// How many times as much containerd's own way needs, round by round, in the same geometry.
    fn ratio(&self, figure: impl Fn(&Trip) -> f64 + Copy) -> Spread {
        let peer = self.of(Way::Containerd).map(figure);
        Spread::of(peer.zip(self.of(Way::Ours).map(figure)).map(|(peer, ours)| peer / ours))
    }
}

fn line(text: &mut String, name: &str, cells: &[String]) {
    *text += &["| ", name, " | ", &cells.join(" | "), " |\n"].concat();
}

fn leg_json(leg: &Leg) -> Value {
    let Cost { time, sent, received, node, registry } = leg.cost;
    let steps = leg.steps.iter().map(|(name, time)| (name.clone(), json!(time)));
    json!({
        "seconds": time.as_secs_f64(),
        "bytesSent": sent,
        "bytesReceived": received,
        "nodeCpuSeconds": node.as_secs_f64(),
        "registryCpuSeconds": registry.as_secs_f64(),
        "stepMicroseconds": Value::Object(steps.collect()),
    })
}

fn seconds(leg: &Leg) -> f64 {
    leg.cost.time.as_secs_f64()
}

fn paused(trip: &Trip) -> f64 {
    std::time::Duration::from_millis(trip.paused_ms).as_secs_f64()
}

fn step(leg: &Leg, name: &str) -> Option<f64> {
    let (_, time) = leg.steps.iter().find(|(known, _)| known == name)?;
    Some(std::time::Duration::from_micros(*time).as_secs_f64())
}

/// KiB are exact up to 4 TiB.
fn mib(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes >> 10).unwrap_or(u32::MAX)) / 1024.0
}
