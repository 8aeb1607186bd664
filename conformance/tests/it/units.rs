//! The services as systemd runs them, by the units that are installed, with all that these take away.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fs_err as fs;
use kybernate_conformance::command::{self, wait_until};
use kybernate_conformance::node::{Node, command_in, told};
use kybernate_conformance::preflight::preflight;
use kybernate_conformance::process::{Process, Service};
use kybernate_conformance::scenario::{PASSWORD, Scenario, counter};
use serde_json::Value;

use crate::failures::halt::HOLD;
use crate::harness::{at_once, bin, said, target};
use crate::pods::WORKLOAD;

mod scopes;

const SYSTEMD: &str = include_str!("units/systemd.sh");
const LIMIT: Duration = Duration::from_mins(2);

const REGISTRY: &str = "listen = \"0.0.0.0:5000\"\n[connections]\nannounce = \"0s\"\n";

/// Cgroups of version 2 alone.
const UNIFIED: &str = "unified";

/// Beside it there is a hook that holds a pause.
const AGENT: &str = r#"
[[sign_keys]]
name = "own"
file = "/etc/kybernate/own.key"
password_file = "/etc/kybernate/password"
[[trust]]
key = "/etc/kybernate/own.pub"
repository = "*"
source_namespace = "*"
[staging.ram]
budget = "256MiB"
"#;

/// A machine inside of a node, whose first process is systemd.
struct Machine {
    systemd: Process,
    _outer: Service,
}

impl Machine {
    /// Starts it with our services installed, and with containerd; with all the cgroups that the node
    /// has, or those of version 2 alone (`unified`).
    fn start(node: &Node, cgroups: &str) -> Self {
        install(node);
        let mut outer = node.command(&["sh", "-c", SYSTEMD, "sh", cgroups]);
        let outer = Service::start(outer.stdin(Stdio::null())).unwrap();
        let mut systemd = None;
        let begun = wait_until(LIMIT, || {
            let unshare = outer.process().unwrap().child();
            systemd = unshare.and_then(Process::child);
            systemd.is_some_and(|process| name(process) == "systemd")
        });
        assert!(begun, "systemd does not start");
        let machine = Self { systemd: systemd.unwrap(), _outer: outer };
        let booted = || {
            let state = said(&machine.output(&["systemctl", "is-system-running"]));
            ["running", "degraded"].contains(&state.trim())
        };
        assert!(wait_until(LIMIT, booted), "{}", machine.state());
        machine.run(&["systemctl", "start", "containerd"]);
        machine
    }

    fn command(&self, words: &[&str]) -> Command {
        command_in(
            self.systemd,
            &[&["env", &format!("COSIGN_PASSWORD={PASSWORD}")], words].concat(),
        )
    }

    fn output(&self, words: &[&str]) -> Output {
        command::output(&mut self.command(words)).unwrap()
    }

    /// Runs what must succeed.
    fn run(&self, words: &[&str]) -> String {
        let output = self.output(words);
        assert!(output.status.success(), "{words:?}: {}\n{}", said(&output), self.state());
        String::from_utf8(output.stdout).unwrap()
    }

    fn state(&self) -> String {
        let script = "systemctl --no-pager --failed; journalctl --no-pager -b | tail -n 100";
        said(&self.output(&["sh", "-c", script]))
    }

    /// Returns a property of a unit.
    fn shows(&self, unit: &str, property: &str) -> String {
        self.run(&["systemctl", "show", "--value", "-p", property, unit]).trim().to_owned()
    }

    fn count(&self, id: &str) -> Option<u64> {
        let status = ["/workload", "status", "--state", "/state"];
        let exec = ["ctr", "task", "exec", "--exec-id", "status", id];
        let run = |words: &[&str]| command::run(&mut self.command(words));
        let text = told(&[&exec[..], &status].concat(), run).ok()?;
        counter(&serde_json::from_str::<Value>(&text).ok()?)
    }

    /// Runs the workload, with more options of `ctr run`.
    fn start_workload(&self, image: &str, id: &str, options: &[&str]) {
        // Without a share, which not every kernel has to give.
        let run = ["ctr", "run", "-d", "--cpu-shares", "0"];
        self.run(&[&run[..], options, &[image, id], &WORKLOAD].concat());
        self.ticks_on(id);
    }

    fn ticks_on(&self, id: &str) {
        let mut first = None;
        let ticked = wait_until(LIMIT, || {
            let now = self.count(id);
            first = first.or(now);
            now > first
        });
        assert!(ticked, "{id} does not run\n{}", self.state());
    }

    /// Starts a checkpoint of `job` and returns when it is paused; it stays so.
    fn hold(&self, reference: &str) -> Service {
        let words = ["kyb", "checkpoint", "job", reference, "--hook", "hold", "--plain-http"];
        let kyb = Service::start(self.command(&words).stderr(Stdio::null())).unwrap();
        let paused = || {
            let tasks = self.run(&["ctr", "task", "ls"]);
            tasks.lines().any(|line| line.starts_with("job ") && line.contains("PAUSED"))
        };
        assert!(wait_until(LIMIT, paused), "it is not paused\n{}", self.state());
        kyb
    }
}

/// Puts programs, units, configurations and keys where `make install` and the units say.
fn install(node: &Node) {
    let root = node.path("");
    let directory = root.join("etc/kybernate");
    fs::create_dir_all(&directory).unwrap();
    let here = format!("[[registry]]\nhost = \"{}:5000\"\nplain_http = true\n", node.address());
    let own = format!("{AGENT}{HOLD}{here}");
    fs::write(directory.join("agent.toml"), &own).unwrap();
    let mut make = Command::new("make");
    make.args(["-s", "-C", concat!(env!("CARGO_MANIFEST_DIR"), "/.."), "install-files"]);
    make.arg(format!("DESTDIR={}", root.display())).arg(format!("FROM={}", target().display()));
    make.args([
        "PREFIX=/usr/local",
        "PROGRAMS=kyb kybernate-agent kybernate-runc kybernate-registry",
    ]);
    command::run(&mut make).unwrap();
    let installed = |name: &str| fs::read_to_string(directory.join(name)).unwrap();
    assert_eq!(installed("agent.toml"), own, "a configuration was replaced");
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/registry/example.toml");
    assert_eq!(installed("registry.toml"), fs::read_to_string(example).unwrap());
    fs::write(directory.join("password"), PASSWORD).unwrap();
    fs::write(directory.join("registry.toml"), REGISTRY).unwrap();
    let key = ["/usr/local/bin/kyb", "keygen", "/etc/kybernate/own"];
    node.run(&[&["env", &format!("COSIGN_PASSWORD={PASSWORD}")], &key[..]].concat()).unwrap();
}

fn name(process: Process) -> String {
    fs::read_to_string(format!("/proc/{}/comm", process.pid)).unwrap_or_default().trim().to_owned()
}

#[test]
fn systemd_runs_the_services_by_their_units() {
    preflight().unwrap();
    let scenario = Scenario::bare(&bin(), &|text| println!("{text}")).unwrap();
    // Debian 14's systemd runs on nothing else than version 2.
    at_once(&scenario, |node| {
        let cgroups = if node.name() == "a" { "all" } else { UNIFIED };
        runs_the_services(&scenario, &Machine::start(node, cgroups), node, cgroups);
    });
    scenario.end().unwrap();
}

fn runs_the_services(scenario: &Scenario, machine: &Machine, node: &Node, cgroups: &str) {
    let (agent, registry) = ("kybernate-agent.service", "kybernate-registry.service");
    machine.run(&["systemd-analyze", "verify", agent, registry]);

    // Who waits for a service finds it serving.
    machine.run(&["systemctl", "start", registry]);
    machine.run(&["curl", "-sf", "http://127.0.0.1:5000/v2/"]);
    machine.run(&["systemctl", "start", agent]);
    machine.run(&["kyb", "ps"]);

    let repository = format!("{}:5000/units", node.address());
    let image = format!("{repository}/counter:base");
    scenario.push_image(&image).unwrap();
    machine.run(&["ctr", "image", "pull", "--plain-http", &image]);
    let runs_job = || match cgroups {
        UNIFIED => scopes::run(machine, &image, "job", &[]),
        _ => machine.start_workload(&image, "job", &[]),
    };
    runs_job();
    let reference = format!("{repository}/job");
    moves(machine, &reference);
    machine.run(&["mkfifo", "/run/hold"]);
    outlives_a_kill(machine, agent, &reference);
    if cgroups == UNIFIED {
        scopes::goes_on(machine, node, &reference);
        runs_job();
    }
    stops(machine, agent, &reference);
    refuses_a_wrong_configuration(machine, agent);
    machine.run(&["systemctl", "stop", registry]);
    assert_eq!(machine.shows(registry, "Result"), "success");
    refuses_a_wrong_configuration(machine, registry);
}

/// A checkpoint and a restore with what the unit leaves the agent.
fn moves(machine: &Machine, repository: &str) {
    let reference = format!("{repository}:v1");
    machine.run(&["kyb", "checkpoint", "job", &reference, "--plain-http"]);
    let taken = machine.count("job");
    machine.run(&["kyb", "restore", &reference, "--name", "restored", "--plain-http"]);
    machine.ticks_on("restored");
    machine.ticks_on("job");
    assert!(taken.is_some() && machine.count("restored") >= Some(1), "{taken:?}");
}

/// The agent with all that it has started in its cgroup is killed: the source runs on, and so does
/// the next agent.
fn outlives_a_kill(machine: &Machine, agent: &str, repository: &str) {
    let _kyb = machine.hold(&format!("{repository}:killed"));
    machine.run(&["systemctl", "kill", "-s", "KILL", agent]);
    machine.ticks_on("job");
    let again = || {
        machine.shows(agent, "NRestarts") == "1" && machine.shows(agent, "SubState") == "running"
    };
    assert!(wait_until(LIMIT, again), "{}", machine.state());
    machine.run(&["kyb", "ps"]);
    let before = machine.shows(agent, "MainPID");
    machine.run(&["systemctl", "reload", agent]);
    assert_eq!(machine.shows(agent, "MainPID"), before);
}

/// A stop in the middle of an operation is the agent's to handle; its hook is not cut off by systemd.
fn stops(machine: &Machine, agent: &str, repository: &str) {
    let _kyb = machine.hold(&format!("{repository}:stopped"));
    machine.run(&["systemctl", "stop", agent]);
    machine.ticks_on("job");
    assert_eq!(machine.shows(agent, "Result"), "success");
    let log = machine.run(&["journalctl", "--no-pager", "-u", agent]);
    assert!(!log.contains("SIGTERM"), "{log}");
}

fn refuses_a_wrong_configuration(machine: &Machine, unit: &str) {
    let file = unit.trim_start_matches("kybernate-").replace(".service", ".toml");
    machine.run(&["sh", "-c", &format!("echo nonsense >>/etc/kybernate/{file}")]);
    let output = machine.output(&["systemctl", "start", unit]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert_eq!(machine.shows(unit, "SubState"), "failed");
    assert_eq!(machine.shows(unit, "ExecMainStatus"), "64");
    assert_eq!(machine.shows(unit, "NRestarts"), "0");
}
