//! Builds the programs under test and starts scenarios.

use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::thread::JoinHandle;

use fs_err as fs;
use kybernate_conformance::machine::INSIDE;
use kybernate_conformance::node::Node;
use kybernate_conformance::preflight::preflight;
use kybernate_conformance::scenario::{Agent, Scenario};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Returns the directory that this test's programs are built to.
pub(crate) fn target() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    own.parent().unwrap().parent().unwrap().to_owned()
}

/// Returns the directory of the programs, built as this test is.
pub(crate) fn bin() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        let target = target();
        if std::env::var_os(INSIDE).is_some() {
            // Whoever started the machine has built them.
            return target;
        }
        // All targets: the same features as this test was built with, so nothing is built twice.
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--workspace", "--all-targets", "--locked", "--quiet"]);
        if target.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success(), "the programs do not build");
        target
    };
    BUILT.get_or_init(build).clone()
}

/// Starts everything; fails with the reason where the machine cannot.
pub(crate) fn start() -> Scenario {
    preflight().unwrap();
    Scenario::start(&bin(), &|text| println!("{text}")).unwrap()
}

/// Makes a library of a source file that stands alone.
pub(crate) fn library(source: &str, place: &Path) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let status = Command::new(Path::new(env!("CARGO")).with_file_name("rustc"))
        .args(["--crate-type", "cdylib", "--edition", "2024", "-C", "strip=symbols", "-o"])
        .arg(place)
        .arg(path)
        .status();
    assert!(status.unwrap().success(), "{source} does not compile");
}

/// Looks at what tests said that were run by their names: all of them were, and passed.
pub(crate) fn all_passed(output: &Output, names: &[&str]) {
    let text = said(output);
    assert!(output.status.success(), "{text}");
    let passed = format!("{} passed; 0 failed; 0 ignored", names.len());
    assert!(text.contains(&passed), "not all of {names:?} were run: {text}");
}

/// Returns what a program said, both ways.
pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&*output.stdout, &*output.stderr].concat()).into_owned()
}

/// Takes a checkpoint of `id` on a node, which must succeed, and returns its digest.
pub(crate) fn checkpoint(scenario: &Scenario, node: &Node, id: &str, reference: &str) -> String {
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", id, reference, "--plain-http", "--sign-key", &key];
    let taken = scenario.kyb_json(node, &words).unwrap();
    taken["digest"].as_str().unwrap().to_owned()
}

/// Restores a reference on a node, however that ends.
pub(crate) fn restore(
    scenario: &Scenario,
    node: &Node,
    reference: &str,
    name: &str,
    more: &[&str],
) -> Output {
    let words = ["restore", reference, "--plain-http", "--name", name];
    scenario.kyb(node, &[&words[..], more].concat()).unwrap()
}

/// Files of a cgroup that limit it: of version 1, and of version 2.
pub(crate) const MEMORY: [&str; 2] = ["memory.limit_in_bytes", "memory.max"];
pub(crate) const CPU: [&str; 2] = ["cpu.cfs_quota_us", "cpu.max"];

/// Returns what limits a container.
pub(crate) fn limit(node: &Node, id: &str, [older, newer]: [&str; 2]) -> String {
    let script = r#"cat $(find /sys/fs/cgroup -path "*$1*/$2" -o -path "*$1*/$3")"#;
    node.run(&["sh", "-c", script, "sh", id, older, newer]).unwrap().trim().to_owned()
}

/// Expects that a command was refused for `reason`.
pub(crate) fn refused_here(output: &Output, reason: &str) {
    let text = said(output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains(reason), "{text:?} does not mention {reason:?}");
}

/// Restores a reference and expects a refusal for `reason` that leaves nothing behind.
pub(crate) fn refused(
    scenario: &Scenario,
    node: &Node,
    reference: &str,
    more: &[&str],
    reason: &str,
) {
    let before = scenario.traces(node).unwrap();
    let output = restore(scenario, node, reference, "refused", more);
    refused_here(&output, reason);
    assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
}

/// Returns both nodes.
pub(crate) const fn nodes(scenario: &Scenario) -> [&Node; 2] {
    [&scenario.testbed.a, &scenario.testbed.b]
}

/// Ends the agents of both nodes, and starts the next ones, with `more` in their configurations.
pub(crate) fn next_agents(scenario: &mut Scenario, more: &str) {
    for name in ["a", "b"] {
        scenario.next_agent(name, more).unwrap();
    }
}

/// Works on both nodes at a time, with the agents of a scenario. What somebody fails with is said
/// again at the end, where it is looked for.
pub(crate) fn on_both(scenario: &mut Scenario, work: impl Fn(&Scenario, &Node, Agent) + Sync) {
    let agents = [scenario.agent_a.take().unwrap(), scenario.agent_b.take().unwrap()];
    let (scenario, work) = (&*scenario, &work);
    let both = nodes(scenario).into_iter().zip(agents);
    together(both.map(|(node, agent)| move || work(scenario, node, agent)));
}

/// Does the same with whatever agents there are, and returns what came of it.
pub(crate) fn at_once<T: Send>(scenario: &Scenario, work: impl Fn(&Node) -> T + Sync) -> Vec<T> {
    let work = &work;
    together(nodes(scenario).into_iter().map(|node| move || work(node)))
}

fn together<T: Send>(works: impl Iterator<Item = impl FnOnce() -> T + Send>) -> Vec<T> {
    let done: Vec<_> = std::thread::scope(|scope| {
        // All begin before one is waited for.
        let all: Vec<_> = works.map(|work| scope.spawn(work)).collect();
        all.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    let (done, failed): (Vec<_>, Vec<_>) = done.into_iter().partition(Result::is_ok);
    let said = failed.iter().filter_map(|one| one.as_ref().err()).map(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it says nothing")
    });
    assert!(failed.is_empty(), "{}", said.collect::<Vec<_>>().join("\n\n"));
    done.into_iter().flatten().collect()
}

/// Changes a bit in the middle of a file, as a disk does: nothing else tells of it.
pub(crate) fn change_a_bit(path: &Path) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let found = file.metadata().unwrap();
    let (mut byte, place) = ([0], found.len() / 2);
    file.file().read_exact_at(&mut byte, place).unwrap();
    file.file().write_all_at(&[byte[0] ^ 1], place).unwrap();
    file.file().set_modified(found.modified().unwrap()).unwrap();
}

/// Runs `work` on a thread that is in a network (`/proc/PID/ns/net`): so are the sockets that it makes.
pub(crate) fn in_network<T: Send + 'static>(
    network: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let network = fs::File::open(network).unwrap();
    std::thread::spawn(move || {
        let kind = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(network.as_fd(), kind).unwrap();
        work()
    })
}

/// Runs `work` on a thread in the network that the testbed's registries are in.
pub(crate) fn in_hub<T: Send + 'static>(
    scenario: &Scenario,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let hub = scenario.testbed.hub.process().pid;
    in_network(Path::new(&format!("/proc/{hub}/ns/net")), work)
}
