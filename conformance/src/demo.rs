//! The story of `make demo`: a running container moves, and what must not work does not.

use std::path::Path;
use std::process::Output;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use crate::command::tail;
use crate::scenario::Scenario;

mod refusals;

/// Runs the whole story and prints it; fails where it does not go as told.
pub(crate) fn run(bin: &Path, mib: u32) -> anyhow::Result<()> {
    let story = Story::begin();
    story.chapter("two nodes, a registry, an agent on each node, a key for each agent");
    let scenario = Scenario::start(bin, &|text| story.line(text))?;
    let outcome = tell(&story, &scenario, mib);
    if outcome.is_err() {
        for log in ["agent-a.log", "agent-b.log", "registry.log"] {
            let text = fs_err::read_to_string(scenario.testbed.private().join(log));
            let text = text.unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let last = lines.get(lines.len().saturating_sub(20)..).unwrap_or_default();
            story.line(&format!("{log}:\n{}", last.join("\n")));
        }
    }
    scenario.end()?;
    outcome?;
    story.chapter("done: nothing is left of the nodes");
    Ok(())
}

fn tell(story: &Story, scenario: &Scenario, mib: u32) -> anyhow::Result<()> {
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    for node in [a, b] {
        let script = "containerd --version | cut -d' ' -f3; runc --version | head -n 1; \
            criu --version | head -n 1";
        let versions = node.run(&["sh", "-c", script])?;
        story.line(&format!("node {}: containerd {}", node.name(), one_line(&versions)));
    }

    story.chapter("a container is running on node a");
    scenario.run_workload(a, "counter", mib, &[])?;
    let before = scenario.wait_for(a, "counter", |status| {
        number(status, "checksums_done") > Some(0) && number(status, "counter") > Some(5)
    })?;
    story.line(&format!("{mib} MiB of memory: {}", summary(&before)));

    story.chapter("kyb checkpoint: paused, dumped, resumed, packed, pushed, signed, tagged");
    let reference = scenario.reference("demo/counter:moved");
    let words = ["checkpoint", "counter", &reference, "--plain-http", "--sign-key", "node-a"];
    let taken = story.timed(|| scenario.kyb_json(a, &words))?;
    let digest = text(&taken, "digest")?;
    story.facts(&taken);
    story.line(&format!("digest {digest}"));
    let after = scenario.wait_for_ticks(a, "counter")?;
    story.line(&format!("the source runs on: {}", summary(&after)));

    story.chapter("what others see in it");
    look_inside(story, scenario, &reference)?;

    story.chapter("kyb restore: on node b, verified, compared, gated, materialised, restored");
    let words = ["restore", &reference, "--plain-http", "--name", "counter"];
    let restored = story.timed(|| scenario.kyb_json(b, &words))?;
    story.facts(&restored);
    let here = scenario.wait_for_ticks(b, "counter")?;
    story.line(&format!("it goes on: {}", summary(&here)));
    goes_on(&before, &here)?;
    refusals::tell(story, scenario, &reference, &digest)
}

/// The restored process is the one that was dumped, and everything about it is right.
fn goes_on(before: &Value, here: &Value) -> anyhow::Result<()> {
    let identity = "boot_id_of_process";
    ensure!(here.get(identity) == before.get(identity), "it is another process: {here}");
    ensure!(number(here, "counter") > number(before, "counter"), "the counter fell: {here}");
    for fact in ["checksum_ok", "pipe_ok", "log_ok"] {
        ensure!(here.get(fact) == Some(&Value::Bool(true)), "{fact} is not true: {here}");
    }
    Ok(())
}

fn look_inside(story: &Story, scenario: &Scenario, reference: &str) -> anyhow::Result<()> {
    let b = &scenario.testbed.b;
    let manifest = b.run(&["crane", "manifest", "--insecure", reference])?;
    let manifest: Value = serde_json::from_str(&manifest).context("crane printed no manifest")?;
    story.line(&format!("$ crane manifest {reference}"));
    story.line(&format!("  {}", text(&manifest, "artifactType")?));
    for child in list(&manifest, "manifests") {
        story.line(&format!("  {} {}", role(child).unwrap_or("?"), text(child, "digest")?));
    }
    let image = scenario.image();
    story.line(&format!("$ oras discover {image}"));
    let found = b.run(&["oras", "discover", "--plain-http", &image])?;
    for line in
        found.lines().filter(|line| line.contains("application/") || line.contains("sha256"))
    {
        story.line(&format!("  {line}"));
    }
    for expected in ["vnd.kybernate.checkpoint.v1+json", "vnd.dev.sigstore.bundle"] {
        ensure!(found.contains(expected), "oras does not find {expected}");
    }
    story.line(&format!("$ cosign verify --key node-a.pub {reference}"));
    cosign(scenario, "node-a", reference)?;
    story.line("  verified");
    story.line(&format!("$ ctr image pull {reference}; ctr run …"));
    b.run(&["ctr", "image", "pull", "--plain-http", reference])?;
    let words = ["ctr", "run", "--rm", reference, "cold", "sh", "-c", "tail -n 1 /state/ticks.log"];
    let last = b.told(&words)?;
    story.line(&format!(
        "  an ordinary image: it starts afresh, with the files the process had written, up to line {}",
        last.trim()
    ));
    ensure!(last.trim().parse::<u64>().is_ok(), "the rootfs diff is not in the image: {last:?}");
    Ok(())
}

/// Lets cosign verify a reference with one of the scenario's keys.
fn cosign(scenario: &Scenario, key: &str, reference: &str) -> anyhow::Result<()> {
    let key = format!("/srv/share/{key}.pub");
    let words = ["cosign", "verify", "--key", &key, "--insecure-ignore-tlog"];
    let words = [&words[..], &["--allow-http-registry", reference]].concat();
    scenario.testbed.b.run(&words).map(drop).context("cosign does not verify our signature")
}

/// Tells the story on standard output.
struct Story {
    began: Instant,
    /// What lines begin with, so that they stand under their chapter.
    margin: &'static str,
}

impl Story {
    fn begin() -> Self {
        Self { began: Instant::now(), margin: "          " }
    }

    #[expect(clippy::print_stdout, reason = "the demo's product")]
    fn chapter(&self, text: &str) {
        println!("\n[{:5.1} s] {text}", self.began.elapsed().as_secs_f64());
    }

    #[expect(clippy::print_stdout, reason = "the demo's product")]
    fn line(&self, text: &str) {
        println!("{}{}", self.margin, text.replace('\n', &["\n", self.margin].concat()));
    }

    fn timed<T, E>(&self, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let began = Instant::now();
        let done = work()?;
        self.line(&format!("took {:.2} s", began.elapsed().as_secs_f64()));
        Ok(done)
    }

    /// Prints the times and sizes of an operation.
    fn facts(&self, operation: &Value) {
        let parts = |key: &str| operation.get(key).and_then(Value::as_object).into_iter().flatten();
        let times = parts("timesMicroseconds").filter_map(|(step, time)| {
            let milliseconds = time.as_u64()? / 1000;
            (milliseconds > 0).then(|| format!("{step} {milliseconds} ms"))
        });
        self.line(&times.collect::<Vec<_>>().join(", "));
        let sizes = parts("sizes").filter_map(|(name, bytes)| {
            let name = match &**name {
                "dumpBytes" => "in the dump",
                "pageBytes" => "of pages that are not zero",
                "transferredBytes" => "over the network",
                _ => return None,
            };
            Some(format!("{} MiB {name}", bytes.as_u64()? >> 20))
        });
        self.line(&sizes.collect::<Vec<_>>().join(", "));
    }

    /// Prints a refusal and makes sure that it was one: exit code 2, and a reason that names what
    /// is wrong.
    fn refused(&self, what: &str, output: &Output, reason: &str) -> anyhow::Result<()> {
        let said = last_line(output);
        self.line(&format!("{what}: {said}"));
        if output.status.code() != Some(2) {
            bail!("{what} ended with {} instead of a refusal", output.status);
        }
        ensure!(said.contains(reason), "the reason does not mention {reason:?}");
        Ok(())
    }
}

fn text(value: &Value, key: &str) -> anyhow::Result<String> {
    let found = value.get(key).and_then(Value::as_str);
    found.map(str::to_owned).with_context(|| format!("there is no {key} in {value}"))
}

fn number(value: &Value, key: &str) -> Option<u64> {
    value.get(key).and_then(Value::as_u64)
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value.get(key).and_then(Value::as_array).into_iter().flatten()
}

/// What a child of a checkpoint index is.
fn role(child: &Value) -> Option<&str> {
    child.get("annotations")?.get("io.kybernate.role")?.as_str()
}

fn summary(status: &Value) -> String {
    let fact = |key: &str| status.get(key).map_or_else(|| "?".to_owned(), ToString::to_string);
    format!(
        "counter {}, checksum ok {}, file ok {}, pipe ok {}",
        fact("counter"),
        fact("checksum_ok"),
        fact("log_ok"),
        fact("pipe_ok")
    )
}

/// What a program said last: the reason, after the steps it had reported.
fn last_line(output: &Output) -> String {
    tail(output).lines().last().unwrap_or_default().to_owned()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
