//! What kybernate-runc adds to a call of runc's: both in one run, in turns, on the nodes or where
//! this program runs.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use fs_err as fs;
use serde_json::{Value, json};

use super::spread::Spread;
use crate::command::wait_until;
use crate::image::WORKLOAD;
use crate::testbed::Testbed;

/// What to measure.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Plan {
    /// How often each command is called, of each of the two runtimes.
    #[arg(long, default_value_t = 100)]
    calls: u32,
    /// Measure on this machine, which has runc, and not on two nodes of the testbed.
    #[arg(long)]
    here: bool,
    /// Print every call's milliseconds as JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// The commands of a container's life, in this order.
const COMMANDS: [&str; 6] = ["create", "state", "start", "exec", "kill", "delete"];

/// How long a killed container may take to be gone.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Milliseconds of calls, runc's and kybernate-runc's in each round, by command.
type Samples = BTreeMap<String, Vec<[f64; 2]>>;

/// Measures, and prints a table or JSON.
#[expect(clippy::print_stdout, reason = "the command's result")]
pub(crate) fn run(bin: &Path, plan: Plan) -> anyhow::Result<()> {
    ensure!(plan.calls > 0, "--calls must be 1 at least");
    let places = if plan.here {
        BTreeMap::from([("here".to_owned(), measure(bin, plan.calls)?)])
    } else {
        on_nodes(bin, plan.calls)?
    };
    if plan.json {
        println!("{}", serde_json::to_string(&places)?);
    } else {
        println!("{}", table(&places));
    }
    Ok(())
}

/// Has both nodes measure for themselves, one after the other.
fn on_nodes(bin: &Path, calls: u32) -> anyhow::Result<BTreeMap<String, Samples>> {
    let testbed = Testbed::start(bin, &crate::cli::say)?;
    let calls = calls.to_string();
    let mut places = BTreeMap::new();
    for node in [&testbed.a, &testbed.b] {
        let version = node.run(&["runc", "--version"])?;
        let version = version.lines().next().and_then(|line| line.split(' ').nth(2));
        let place = format!("{}: runc {}", node.name(), version.unwrap_or_default());
        crate::cli::say(&format!("measuring on node {place}"));
        let words =
            ["kybernate-conformance", "bench", "runc", "--here", "--json", "--calls", &calls];
        let text = node.run(&words)?;
        let mut found: BTreeMap<String, Samples> =
            serde_json::from_str(&text).with_context(|| format!("{place} said {text:?}"))?;
        places.insert(place, found.remove("here").context("there are no figures")?);
    }
    testbed.end()?;
    Ok(places)
}

/// Measures on this machine.
fn measure(bin: &Path, calls: u32) -> anyhow::Result<Samples> {
    let home = tempfile::Builder::new().prefix("kybernate-bench-runc-").tempdir_in("/run")?;
    let runtimes = [PathBuf::from("runc"), bin.join("kybernate-runc")];
    let runtimes = runtimes.map(|program| Runtime { program, home: home.path().to_owned() });
    let mut samples = Samples::new();
    // A first round fills caches and does not count.
    for round in 0..=calls {
        let mut taken = [[0.0; COMMANDS.len()]; 2];
        // Neither is always the first.
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for which in order {
            if let (Some(runtime), Some(place)) = (runtimes.get(which), taken.get_mut(which)) {
                *place = runtime.life(&format!("bench-{which}-{round}"))?;
            }
        }
        if round > 0 {
            let [plain, ours] = taken;
            for ((command, plain), ours) in COMMANDS.into_iter().zip(plain).zip(ours) {
                samples.entry(command.to_owned()).or_default().push([plain, ours]);
            }
        }
    }
    Ok(samples)
}

/// A runtime, and where its containers are.
struct Runtime {
    program: PathBuf,
    home: PathBuf,
}

impl Runtime {
    /// Takes a container through its life, and returns the milliseconds of each command.
    fn life(&self, id: &str) -> anyhow::Result<[f64; COMMANDS.len()]> {
        let bundle = self.home.join(id);
        write_bundle(&bundle, id)?;
        let pid_file = bundle.join("pid");
        let create = ["create", "--bundle", text(&bundle)?, "--pid-file", text(&pid_file)?, id];
        let create = self.call(&create)?;
        let pid = fs::read_to_string(pid_file)?;
        let (state, start) = (self.call(&["state", id])?, self.call(&["start", id])?);
        // As a probe is run. What it runs ends with the container.
        let (program, pid_of_it) = (bundle.join("process.json"), bundle.join("exec.pid"));
        let [program, pid_of_it] = [text(&program)?, text(&pid_of_it)?];
        let exec = ["exec", "--process", program, "--detach", "--pid-file", pid_of_it, id];
        let exec = self.call(&exec)?;
        let kill = self.call(&["kill", id, "KILL"])?;
        let process = PathBuf::from(format!("/proc/{}", pid.trim()));
        let gone = || !process.exists();
        ensure!(wait_until(END_LIMIT, gone), "container {id} does not end");
        let delete = self.call(&["delete", id])?;
        fs::remove_dir_all(bundle)?;
        Ok([create, state, start, exec, kill, delete])
    }

    /// Calls it as containerd's shim does, and returns the milliseconds that took.
    fn call(&self, words: &[&str]) -> anyhow::Result<f64> {
        // A namespace of containerd's is the last part of it.
        let root = self.home.join("root/default");
        let log = self.home.join("log.json");
        let mut command = Command::new(&self.program);
        command.args(["--root", text(&root)?, "--log", text(&log)?, "--log-format", "json"]);
        command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let began = Instant::now();
        let status = command.status().with_context(|| format!("{}", self.program.display()))?;
        let taken = began.elapsed();
        if !status.success() {
            let log = fs::read_to_string(log).unwrap_or_default();
            anyhow::bail!("{} {} failed: {log}", self.program.display(), words.join(" "));
        }
        Ok(taken.as_secs_f64() * 1000.0)
    }
}

/// Writes a bundle as containerd's CRI plugin writes them, shortened, and beside it a process to be run
/// in the container, as its shim does.
fn write_bundle(bundle: &Path, id: &str) -> anyhow::Result<()> {
    let rootfs = bundle.join("rootfs");
    for directory in ["proc", "dev", "sys"] {
        fs::create_dir_all(rootfs.join(directory))?;
    }
    let program = rootfs.join("workload");
    fs::write(&program, WORKLOAD)?;
    fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let mount = |place: &str, kind: &str, options: &[&str]| json!({ "destination": place, "type": kind, "source": kind, "options": options });
    let kinds = ["pid", "mount", "ipc", "uts", "network"];
    let namespaces: Vec<Value> = kinds.iter().map(|kind| json!({ "type": kind })).collect();
    let process = json!({
        "user": { "uid": 0, "gid": 0 },
        "args": ["/workload", "pause"],
        "env": ["PATH=/bin"],
        "cwd": "/",
        "capabilities": { "bounding": ["CAP_KILL"], "effective": ["CAP_KILL"],
                          "permitted": ["CAP_KILL"] },
        "noNewPrivileges": true,
    });
    fs::write(bundle.join("process.json"), process.to_string())?;
    let spec = json!({
        "ociVersion": "1.0.2",
        "process": process,
        "root": { "path": "rootfs" },
        "mounts": [
            mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
            mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        ],
        "annotations": {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.container-name": "main",
            "io.kubernetes.cri.sandbox-namespace": "default",
        },
        "linux": {
            "cgroupsPath": format!("/kybernate-bench-{id}"),
            "namespaces": namespaces,
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list"],
            "readonlyPaths": ["/proc/bus", "/proc/sys"],
        },
    });
    Ok(fs::write(bundle.join("config.json"), spec.to_string())?)
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is no text", path.display()))
}

/// A table in Markdown. What is more is the middle of the differences in each round.
fn table(places: &BTreeMap<String, Samples>) -> String {
    let mut lines = Vec::new();
    for (place, samples) in places {
        let calls = samples.values().map(Vec::len).max().unwrap_or_default();
        lines.push(format!(
            "| {place}, {calls} calls each | runc, ms | kybernate-runc, ms | more, ms | ratio |\n\
             |---|---|---|---|---|\n"
        ));
        for command in COMMANDS {
            let Some(rounds) = samples.get(command) else { continue };
            let of = |figure: fn(&[f64; 2]) -> f64| Spread::of(rounds.iter().map(figure));
            let (plain, ours) = (of(|[plain, _]| *plain), of(|[_, ours]| *ours));
            let more = of(|[plain, ours]| ours - plain);
            lines.push(format!(
                "| `{command}` | {} | {} | {:.2} | {:.2} |\n",
                plain.text(1),
                ours.text(1),
                more.median,
                ours.median / plain.median
            ));
        }
        lines.push("\n".to_owned());
    }
    lines.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_more_is_told_by_round() {
        let samples = Samples::from([("state".to_owned(), vec![[10.0, 12.0], [20.0, 21.0]])]);
        let table = table(&BTreeMap::from([("here".to_owned(), samples)]));
        assert!(table.contains("| here, 2 calls each |"), "{table}");
        let line = "| `state` | 15.0 (10.0–20.0) | 16.5 (12.0–21.0) | 1.50 | 1.10 |";
        assert!(table.contains(line), "{table}");
    }

    #[test]
    fn a_bundle_is_one_of_a_pods_container() {
        let directory = tempfile::tempdir().unwrap();
        write_bundle(directory.path(), "c").unwrap();
        let spec = fs::read(directory.path().join("config.json")).unwrap();
        let spec: Value = serde_json::from_slice(&spec).unwrap();
        assert_eq!(spec["annotations"]["io.kubernetes.cri.container-type"], "container");
        assert_eq!(spec["linux"]["cgroupsPath"], "/kybernate-bench-c");
    }
}
