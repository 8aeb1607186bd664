//! Operations that are held where a test wants them, however slow or fast this machine is.

use std::time::{Duration, Instant};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::{Process, Service};
use kybernate_conformance::scenario::Scenario;
use rustix::process::{Signal, getpriority_process, setpriority_process};

use super::is;
use super::victims::{END_LIMIT, catch, processes, running, signal};
use crate::harness::{nodes, start};

/// How long CRIU goes on between two looks. Less, and a machine that is busy does not get there in time.
const STEP: Duration = Duration::from_millis(1);
/// How long it is waited for those that were told to stop.
const STAND_LIMIT: Duration = Duration::from_millis(100);
/// The highest priority there is without real time (setpriority(2)), of one thread.
const FIRST: i32 = -20;
/// Where the hook waits that holds a pause.
const PIPE: &str = "/run/hold";

/// A hook that goes on when somebody writes into the pipe.
pub(crate) const HOLD: &str = r#"
[[hooks]]
name = "hold"
when = "while_paused"
command = ["/bin/sh", "-c", "read -r _ </run/hold"]
limit = "50s"
on_request = true
"#;

/// Starts everything, with agents that can be asked to hold.
pub(super) fn start_holding() -> Scenario {
    let mut scenario = start();
    drop((scenario.agent_a.take(), scenario.agent_b.take()));
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, HOLD).unwrap());
    scenario.agent_b = Some(scenario.start_agent(&scenario.testbed.b, HOLD).unwrap());
    for node in nodes(&scenario) {
        make_pipe(node);
    }
    scenario
}

/// Makes what the hook waits at.
pub(crate) fn make_pipe(node: &Node) {
    node.run(&["mkfifo", PIPE]).unwrap();
}

/// Starts a checkpoint of a node's `job`, and returns when it is paused and the hook waits, which comes
/// behind the dump; it stays so.
pub(crate) fn hold(node: &Node, reference: &str, more: &[&str]) -> Service {
    let key = format!("node-{}", node.name());
    let words = ["kyb", "checkpoint", "job", reference, "--plain-http", "--sign-key", &key];
    let words = [&words[..], &["--hook", "hold"], more].concat();
    let kyb = Service::start(&mut node.command(&words)).unwrap();
    let waits = |pid: u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&format!("<{PIPE}"))
    };
    let is_held = || is(node, "job", "PAUSED") && !processes(node, waits).is_empty();
    assert!(wait_until(END_LIMIT, is_held), "it is not held");
    kyb
}

/// Lets a held checkpoint go on.
pub(crate) fn let_go(node: &Node) {
    // Not before the hook is there to read.
    let script = format!("echo >{PIPE}");
    node.run(&["timeout", "50", "sh", "-c", &script]).unwrap();
}

/// Stops the CRIU of a node when something is `reached`, which takes a while to pass. Once it has `begun`
/// it goes on from look to look only, so that it does not get past that while nobody looks.
pub(crate) fn halt(
    node: &Node,
    begun: impl Fn() -> bool,
    reached: impl Fn() -> bool,
) -> Vec<Process> {
    let mut criu = Vec::new();
    let mut looks = Vec::new();
    let mut stands = false;
    // Whoever gets the processor instead of this thread lets CRIU run past it.
    let nice = getpriority_process(None).unwrap();
    setpriority_process(None, FIRST).unwrap();
    let halted = catch(|| {
        if !begun() {
            return false;
        }
        // Looking for them takes as long as many a step does.
        if !stands {
            criu = running(node, "criu");
        }
        signal(&criu, Signal::STOP);
        stands = stand(&criu);
        if stands && reached() {
            return true;
        }
        looks.push((stands, criu.len()));
        signal(&criu, Signal::CONT);
        let end = Instant::now() + STEP;
        while Instant::now() < end {
            std::thread::yield_now();
        }
        false
    });
    setpriority_process(None, nice).unwrap();
    if !halted {
        looks.dedup();
        let operations = node.run(&["kyb", "ps", "--operations", "--json"]);
        panic!("CRIU does not come to that; (stands, processes) {looks:?}; {operations:?}");
    }
    criu
}

/// Waits until processes that were told to stop have. Whoever waits in vfork(2) for a child that was
/// stopped too never does: they have to go on first.
fn stand(processes: &[Process]) -> bool {
    let end = Instant::now() + STAND_LIMIT;
    loop {
        let left: Vec<_> = processes.iter().filter(|process| process.runs()).collect();
        if left.iter().all(|process| is_stopped(**process)) {
            return !left.is_empty();
        }
        if Instant::now() > end {
            return false;
        }
        std::thread::yield_now();
    }
}

fn is_stopped(process: Process) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid));
    stat.is_ok_and(|stat| stat.contains(") T "))
}
