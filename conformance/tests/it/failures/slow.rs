//! A registry whose bytes come slowly, or not at all any more: operations wait and tell how far they
//! are, end when they are told to or have waited enough, and leave nothing.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use kybernate_conformance::testbed::HUB_ADDRESS;
use serde_json::Value;

use super::cancels::{at_step, begin, fails};
use super::has_tag;
use super::victims::END_LIMIT;
use crate::harness::{at_once, checkpoint, in_hub, next_agents, nodes, said, start};

/// How often bytes come.
const TICK: Duration = Duration::from_millis(20);
/// Bytes per tick and connection: memory of some MiB takes seconds.
const SLOW: usize = 64 << 10;
/// So that memory takes half a minute to come.
const SLOWER: usize = 2 << 10;
/// So few that nothing of size is ever there.
const CRAWL: usize = 512;
/// In the middle of the memory.
const HALF_BYTES: usize = 6 << 20;
/// Longer than a client waits for bytes that do not come (a minute), and to be sure.
const STALL_LIMIT: Duration = Duration::from_mins(4);

/// What has come through, and how it is to go on.
#[derive(Debug)]
struct Traffic {
    bytes_per_tick: AtomicUsize,
    passed: AtomicUsize,
    /// When so much has passed, nothing more does, and nobody comes in any more.
    stops_at: AtomicUsize,
    ends: AtomicBool,
}

/// A way to the registry on which bytes take their time. Ends with this value.
struct Way {
    address: SocketAddr,
    traffic: Arc<Traffic>,
    thread: Option<JoinHandle<()>>,
}

impl Traffic {
    fn has_stopped(&self) -> bool {
        self.passed.load(Ordering::Relaxed) >= self.stops_at.load(Ordering::Relaxed)
    }
}

impl Way {
    fn open(scenario: &Scenario) -> Self {
        let traffic = Arc::new(Traffic {
            bytes_per_tick: AtomicUsize::new(SLOW),
            passed: AtomicUsize::new(0),
            stops_at: AtomicUsize::new(usize::MAX),
            ends: AtomicBool::new(false),
        });
        let (tell, told) = std::sync::mpsc::channel();
        let passing = Arc::clone(&traffic);
        let thread = in_hub(scenario, move || {
            let listener = TcpListener::bind((HUB_ADDRESS, 0)).unwrap();
            listener.set_nonblocking(true).unwrap();
            tell.send(listener.local_addr().unwrap()).unwrap();
            let mut threads = Vec::new();
            let mut listener = Some(listener);
            while !passing.ends.load(Ordering::Relaxed) {
                if passing.has_stopped() {
                    listener = None;
                }
                match listener.as_ref().map(TcpListener::accept) {
                    Some(Ok((client, _))) => threads.extend(joined(client, &passing)),
                    _ => tick(),
                }
            }
            for thread in threads {
                thread.join().unwrap();
            }
        });
        let address = told.recv().unwrap();
        Self { address, traffic, thread: Some(thread) }
    }

    fn reference(&self, path: &str) -> String {
        format!("{}/{path}", self.address)
    }

    fn pace(&self, bytes_per_tick: usize) {
        self.traffic.bytes_per_tick.store(bytes_per_tick, Ordering::Relaxed);
    }

    /// Stops for good when so many bytes more have passed.
    fn stop_after(&self, bytes: usize) {
        let passed = self.traffic.passed.load(Ordering::Relaxed);
        self.traffic.stops_at.store(passed + bytes, Ordering::Relaxed);
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        self.traffic.ends.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Lets the time of one tick pass.
fn tick() {
    let end = std::time::Instant::now() + TICK;
    wait_until(TICK, || std::time::Instant::now() >= end);
}

/// Joins a client with the registry, both ways.
fn joined(client: TcpStream, traffic: &Arc<Traffic>) -> [JoinHandle<()>; 2] {
    let registry = TcpStream::connect((HUB_ADDRESS, 5000)).unwrap();
    let ways = [(client.try_clone().unwrap(), registry.try_clone().unwrap()), (registry, client)];
    ways.map(|(from, to)| {
        let traffic = Arc::clone(traffic);
        std::thread::spawn(move || {
            // Whoever hangs up first ends it.
            pass(&from, &to, &traffic).unwrap_or_default();
            for end in [from, to] {
                end.shutdown(Shutdown::Both).unwrap_or_default();
            }
        })
    })
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, traffic: &Traffic) -> io::Result<()> {
    from.set_nonblocking(false)?;
    from.set_read_timeout(Some(TICK))?;
    to.set_write_timeout(Some(END_LIMIT))?;
    let mut buffer = vec![0; SLOW];
    while !traffic.ends.load(Ordering::Relaxed) {
        if traffic.has_stopped() {
            tick();
            continue;
        }
        let most = traffic.bytes_per_tick.load(Ordering::Relaxed);
        match from.read(&mut buffer[..most]) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                to.write_all(&buffer[..count])?;
                traffic.passed.fetch_add(count, Ordering::Relaxed);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
        tick();
    }
    Ok(())
}

/// Returns the newest operation, if there is one.
fn newest(scenario: &Scenario, node: &Node) -> Value {
    let told = scenario.kyb_json(node, &["ps", "--operations"]).unwrap();
    told["operations"].as_array().and_then(|all| all.last().cloned()).unwrap_or_default()
}

/// Waits until the newest operation has told of more bytes twice.
fn comes_on(scenario: &Scenario, node: &Node) {
    let mut seen = Vec::new();
    let grows = wait_until(STALL_LIMIT, || {
        let now = newest(scenario, node);
        let bytes = now["progress"]["bytesDone"].as_u64().unwrap_or_default();
        if now["state"] == "running" && bytes > seen.last().copied().unwrap_or_default() {
            seen.push(bytes);
        }
        seen.len() >= 2
    });
    assert!(grows, "it tells of {seen:?} bytes: {}", newest(scenario, node));
}

/// Ends an operation by its time and by `kyb cancel`; nothing is left of it.
fn ends_as_told(scenario: &Scenario, node: &Node, words: &[&str], steps: &[&str]) {
    let before = scenario.traces(node).unwrap();
    let kyb = begin(node, &[words, &["--timeout", "5s"]].concat());
    let told = fails(kyb);
    assert!(told.contains("its time was over"), "{told}");
    assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
    let kyb = begin(node, words);
    let id = at_step(scenario, node, steps);
    let told = scenario.kyb_json(node, &["cancel", &id]).unwrap();
    assert_eq!(told["state"], "cancelled", "{told}");
    fails(kyb);
    assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
}

#[test]
fn a_restore_waits_for_a_slow_registry_as_long_as_it_may() {
    let mut scenario = start();
    next_agents(&mut scenario, "[staging.ram]\nbudget = \"1GiB\"\n");
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 24, &[]).unwrap();
    checkpoint(&scenario, a, "job", &scenario.reference("slow/job:v1"));
    scenario.remove(a, "job").unwrap();
    let way = Way::open(&scenario);
    let reference = way.reference("slow/job:v1");
    let words = ["restore", &reference, "--name", "job"];
    way.pace(SLOWER);
    let begun = at_once(&scenario, |node| {
        let kyb = begin(node, &words);
        comes_on(&scenario, node);
        kyb
    });
    way.pace(SLOW);
    for (node, kyb) in nodes(&scenario).into_iter().zip(begun) {
        let output = kyb.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "job").unwrap();
        scenario.remove(node, "job").unwrap();
    }

    way.pace(CRAWL);
    at_once(&scenario, |node| {
        let steps = ["resolve", "verify", "pull", "materialise", "restore"];
        let stage = ["stage", &reference, "--tier", "ram"];
        for words in [&words[..], &stage, &["provide", &reference]] {
            ends_as_told(&scenario, node, words, &steps);
        }
    });

    // Nothing comes any more, and nobody answers who asks again.
    way.pace(SLOW);
    way.stop_after(HALF_BYTES);
    at_once(&scenario, |node| {
        let before = scenario.traces(node).unwrap();
        let mut kyb = begin(node, &words);
        assert!(wait_until(STALL_LIMIT, || kyb.try_wait().unwrap().is_some()), "it waits for ever");
        let told = fails(kyb);
        let error = told.lines().find(|line| line.starts_with("error:")).unwrap_or_default();
        assert!(error.contains(&way.address.to_string()), "{told} does not name the registry");
        assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
    });
    drop(way);
    scenario.end().unwrap();
}

#[test]
fn a_source_runs_on_while_its_checkpoint_goes_to_a_slow_registry() {
    let scenario = start();
    for node in nodes(&scenario) {
        scenario.run_workload(node, "job", 24, &[]).unwrap();
    }
    let way = Way::open(&scenario);
    let path = |what: &str, node: &Node| format!("slow/{what}-{}:v1", node.name());
    let keys = |node: &Node| format!("node-{}", node.name());
    way.pace(SLOWER);
    let begun = at_once(&scenario, |node| {
        let (reference, key) = (way.reference(&path("pushed", node)), keys(node));
        let kyb = begin(node, &["checkpoint", "job", &reference, "--sign-key", &key]);
        // As little memory as this is told of at once, when all of it has arrived.
        let step = || newest(&scenario, node)["step"].as_str().unwrap_or_default().to_owned();
        let goes = || ["pack", "push"].contains(&&*step());
        assert!(wait_until(END_LIMIT, goes), "it does not go: {}", newest(&scenario, node));
        scenario.wait_for_ticks(node, "job").unwrap();
        kyb
    });
    way.pace(SLOW);
    for (node, kyb) in nodes(&scenario).into_iter().zip(begun) {
        let output = kyb.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        assert!(has_tag(&scenario, &scenario.reference(&path("pushed", node))));
    }

    way.pace(CRAWL);
    at_once(&scenario, |node| {
        let (reference, key) = (way.reference(&path("other", node)), keys(node));
        let words = ["checkpoint", "job", &reference, "--sign-key", &key];
        ends_as_told(&scenario, node, &words, &["preflight", "dump", "capture", "pack", "push"]);
        scenario.wait_for_ticks(node, "job").unwrap();
    });
    way.pace(SLOW);
    for node in nodes(&scenario) {
        assert!(!has_tag(&scenario, &scenario.reference(&path("other", node))));
    }
    drop(way);
    scenario.end().unwrap();
}
