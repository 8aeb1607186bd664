//! Figures of a node: how long a container is frozen, and how long it takes to come back, beside what
//! `runc checkpoint` and `runc restore` need for the same container.
//!
//! Reading order: here is what is measured, in which order; [`floor`] is what nothing beats. Nothing
//! is asserted on time; that the process which comes back is the one that went is.

mod floor;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use fs_err as fs;
use serde_json::Value;

use self::floor::Floor;
use super::meter::{processor_of_process, resident};
use super::number;
use super::ours::steps;
use super::registry::table::Table;
use crate::node::Node;
use crate::scenario::Scenario;

/// The columns.
const OURS: &str = "kybernate";
const FLOOR: &str = "runc + cp";

/// What a restore from the registry is, where what was written has to be copied for runc too.
const WITH_COPY: &str = "restore from the registry, beside runc and a copy";

/// Where checkpoints lie ready: in memory, and on the disk.
const TIERS: &str = "[staging.ram]\nbudget = \"6GiB\"\n[staging.nvme]\nbudget = \"6GiB\"\n";

/// What to measure.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Plan {
    /// The node: `a` has containerd 1.7 and CRIU 4.1, `b` 2.1 and 4.2.
    #[arg(long, default_value = "b", value_parser = ["a", "b"])]
    on: String,
    /// Memory of the process, in MiB.
    #[arg(long, default_value_t = 512)]
    mib: u32,
    /// What the container has written into its root file system, in MiB.
    #[arg(long, value_delimiter = ',', default_value = "0,200,2048")]
    upper: Vec<u32>,
    /// How often everything is measured.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// What is taken by the agent has CRIU's options of its own, as what kybernate-runc creates and
    /// what the agent has restored: the network is not locked then.
    #[arg(long)]
    own_options: bool,
    /// Also say how long each step of ours took.
    #[arg(long)]
    steps: bool,
    /// Print every round's figures as JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Everything that a round needs.
struct Bench<'a> {
    scenario: &'a Scenario,
    node: &'a Node,
    /// The process of its agent.
    agent: u32,
    plan: &'a Plan,
    /// What the agent used while it was asked nothing: processor time, and of which time.
    idle: (Duration, Duration),
}

/// What a process says of itself before it is taken.
struct Source {
    id: String,
    status: Value,
}

/// Measures, and prints a table or JSON.
pub(crate) fn run(bin: &Path, plan: &Plan) -> anyhow::Result<()> {
    let say = crate::cli::say;
    say("starting two nodes, a registry and two agents");
    let mut scenario = Scenario::start(bin, &say)?;
    scenario.next_agent(&plan.on, TIERS)?;
    let agent = scenario.agent(&plan.on).as_ref().context("no agent runs")?.process().pid;
    let load = fs::read_to_string("/proc/loadavg")?;
    let table = measure(&scenario, agent, plan);
    scenario.end()?;
    print(plan, load.split(' ').next().unwrap_or_default(), &table?)
}

#[expect(clippy::print_stdout, reason = "the command's result")]
fn print(plan: &Plan, load: &str, table: &Table) -> anyhow::Result<()> {
    if plan.json {
        println!("{}", serde_json::to_string_pretty(&table.json())?);
    } else {
        println!(
            "{} MiB process on node {}; {} rounds, median (least–most); load {load} before\n\n{}",
            plan.mib,
            plan.on,
            plan.rounds,
            table.text()
        );
    }
    Ok(())
}

fn measure(scenario: &Scenario, agent: u32, plan: &Plan) -> anyhow::Result<Table> {
    let mut table = Table::default();
    let idle = (Duration::ZERO, Duration::ZERO);
    let mut bench = Bench { scenario, node: scenario.node(&plan.on), agent, plan, idle };
    // A first round warms up.
    for round in 0..=plan.rounds {
        for upper in &plan.upper {
            let ours = bench.ours(round, *upper)?;
            let floor = bench.floor(round, *upper)?;
            if round > 0 {
                table.add(OURS, ours);
                table.add(FLOOR, floor);
            }
        }
        crate::cli::say(&format!("round {round}/{} is done", plan.rounds));
    }
    let (used, time) = bench.idle;
    let idle = 100.0 * used.as_secs_f64() / time.as_secs_f64();
    let most = resident(agent).context("the agent has ended")?;
    table.add(OURS, vec![("agent, most resident, MiB".to_owned(), most)]);
    table.add(OURS, vec![("agent, % of a processor while idle".to_owned(), idle)]);
    Ok(table)
}

impl Bench<'_> {
    /// Takes a process, and brings it back from the registry, from memory and from the disk.
    fn ours(&self, round: u32, upper: u32) -> anyhow::Result<Vec<(String, f64)>> {
        let (scenario, node) = (self.scenario, self.node);
        let id = format!("ours-{upper}-{round}");
        let options = format!("org.criu.config=/var/lib/kybernate/criu/{id}.conf");
        let options = ["--annotation", &options];
        let source = self.start(&id, upper, if self.plan.own_options { &options } else { &[] })?;
        let reference = scenario.reference(&format!("node/{}:v1", source.id));
        let key = format!("node-{}", node.name());
        self.touch_memory(upper);
        let words = ["checkpoint", &source.id, &reference, "--plain-http", "--sign-key", &key];
        let taken = scenario.kyb_json(node, &words)?;
        let frozen = self.gap(&source.id)?;
        scenario.remove(node, &source.id)?;

        let back = |tier: Option<&str>| -> anyhow::Result<(Duration, Value)> {
            if let Some(tier) = tier {
                let words = ["stage", &reference, "--tier", tier, "--plain-http"];
                scenario.kyb_json(node, &words)?;
            }
            self.make_ready(upper)?;
            let began = Instant::now();
            let words = ["restore", &reference, "--plain-http", "--name", &source.id];
            let told = scenario.kyb_json(node, &words)?;
            let time = began.elapsed();
            let staged = told.get("staged").and_then(Value::as_str);
            ensure!(staged == tier, "restored from another place than thought: {told}");
            source.is_back(&scenario.wait_for_ticks(node, &source.id)?)?;
            scenario.remove(node, &source.id)?;
            if tier.is_some() {
                scenario.kyb_json(node, &["evict", &reference])?;
            }
            Ok((time, told))
        };
        let (cold, fetched) = back(None)?;
        let (warm, staged) = back(Some("ram"))?;
        let (read, proven) = back(Some("nvme"))?;
        let parts = [
            ("frozen", frozen, taken),
            ("restore from memory", warm, staged),
            ("restore from the disk", read, proven),
            ("restore from the registry", cold, fetched),
        ];
        let mut figures = Vec::new();
        for (what, time, told) in parts {
            figures.push(figure(what, upper, time));
            if self.plan.steps {
                let step = |(step, microseconds): (String, u64)| {
                    figure(&format!("{what}: {step}"), upper, Duration::from_micros(microseconds))
                };
                figures.extend(steps(&told).into_iter().map(step));
            }
        }
        if upper > 0 {
            figures.push(figure(WITH_COPY, upper, cold));
        }
        Ok(figures)
    }

    /// Does the same with nothing but runc and cp. The agent is asked nothing meanwhile.
    fn floor(&mut self, round: u32, upper: u32) -> anyhow::Result<Vec<(String, f64)>> {
        let source = self.start(&format!("floor-{upper}-{round}"), upper, &[])?;
        let floor = Floor::new(self.node, &source.id)?;
        let (before, began) = (processor_of_process(self.agent)?, Instant::now());
        self.touch_memory(upper);
        floor.take()?;
        let frozen = self.gap(&source.id)?;
        self.scenario.remove(self.node, &source.id)?;
        floor.mount()?;
        self.make_ready(upper)?;
        let restored = floor.restore()?;
        let status = serde_json::from_str(&floor.status()?)?;
        source.is_back(&status)?;
        let copied = floor.copy()?;
        floor.end()?;
        self.idle.0 += processor_of_process(self.agent)?.saturating_sub(before);
        self.idle.1 += began.elapsed();
        let mut figures = vec![
            figure("frozen", upper, frozen),
            figure("restore from memory", upper, restored),
            figure("restore from the disk", upper, restored),
            figure("restore from the registry", upper, restored),
        ];
        if upper > 0 {
            figures.push(figure(WITH_COPY, upper, restored + copied));
        }
        Ok(figures)
    }

    /// Starts a process that has written so much into its root file system.
    fn start(&self, id: &str, upper: u32, options: &[&str]) -> anyhow::Result<Source> {
        let (scenario, node) = (self.scenario, self.node);
        scenario.run_workload(node, id, self.plan.mib, options)?;
        let script = "pid=$(ctr task ls | awk -v id=\"$1\" '$1 == id { print $2 }') && \
            dd if=/dev/urandom of=/proc/$pid/root/payload bs=1M count=\"$2\" status=none";
        node.run(&["sh", "-c", script, "sh", id, &upper.to_string()])?;
        rustix::fs::sync();
        Ok(Source { id: id.to_owned(), status: scenario.wait_for_ticks(node, id)? })
    }

    /// Takes twice as much memory as is measured next, and gives it back. The host of a virtual machine
    /// may take free memory away, and then gives it page by page: that costs several times what is
    /// measured, now on one side and now on the other.
    fn touch_memory(&self, upper: u32) {
        // Pieces so large that each is the kernel's again at once.
        let pieces = 2 * (self.plan.mib + upper).div_ceil(64);
        let touched: Vec<Vec<u8>> = (0..pieces).map(|_| vec![1; 64 << 20]).collect();
        std::hint::black_box(&touched);
    }

    /// Makes a restore begin as any other does.
    fn make_ready(&self, upper: u32) -> anyhow::Result<()> {
        rustix::fs::sync();
        self.touch_memory(upper);
        // Whoever enters the node goes into its cgroups, and waits there for all processors, 10 to
        // 30 ms, unless somebody did so just before.
        self.node.run(&["true"])?;
        Ok(())
    }

    /// Returns the longest time in which the process has not run.
    fn gap(&self, id: &str) -> anyhow::Result<Duration> {
        let status = self.scenario.wait_for_ticks(self.node, id)?;
        let gap = number(&status, "longest_gap_ms").context("the source tells no gap")?;
        Ok(Duration::from_millis(gap))
    }
}

impl Source {
    /// The process is the one that was taken, and its memory is right.
    fn is_back(&self, status: &Value) -> anyhow::Result<()> {
        let identity = "boot_id_of_process";
        let same = status.get(identity) == self.status.get(identity);
        ensure!(same, "{} is another process: {status}", self.id);
        // It may not have ticked since.
        let goes_on = number(status, "counter") >= number(&self.status, "counter");
        ensure!(goes_on, "{} began anew: {status}", self.id);
        let whole = status.get("checksum_ok") == Some(&Value::Bool(true));
        ensure!(whole, "{} has lost memory: {status}", self.id);
        Ok(())
    }
}

fn figure(what: &str, upper: u32, time: Duration) -> (String, f64) {
    (format!("{what}, {upper} MiB written, ms"), 1000.0 * time.as_secs_f64())
}
