//! Pods that kubelets restore: a real cluster on the two nodes, one for all that is looked at here.

mod beside;
mod command;
mod doors;
mod generations;
pub(crate) mod guests;
mod kubelet;
mod left;
mod pod;
mod policies;
mod shared;
mod story;

use std::time::Instant;

use kybernate_conformance::cluster::Cluster;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::counter;
use serde_json::Value;

use self::generations::Second;
use self::pod::{Wanted, secret};
use self::policies::References;
use self::story::{PODS, Story};
use crate::harness::{CPU, MEMORY, limit};

/// From which node to which the counting process moves.
pub(crate) const WAY: [&str; 2] = ["a", "b"];

/// The process of the source, in a pod of another node: everything around it is the new pod's.
fn it_goes_on(story: &Story, began: Instant) {
    story.wait_ready("restored");
    println!("pod restored and ready: {:.1} s", began.elapsed().as_secs_f64());
    story.goes_on("restored", &story.before);
    what_is_around_it_is_the_pods(story, "restored", &story.scenario.testbed.b);
    story.exec("restored", &["sh", "-c", "echo here >/scratch/file"]);
}

/// A restored pod of the node has an address, a secret, a limit and a log of its own.
fn what_is_around_it_is_the_pods(story: &Story, name: &str, node: &Node) {
    let pod = story.cluster.get("pod", name).unwrap();
    assert_eq!(pod["spec"]["nodeName"], node.name());
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{pod}");
    let address = pod["status"]["podIP"].as_str().unwrap();
    let network = if node.name() == "a" { "10.78.1." } else { "10.78.2." };
    assert!(address.starts_with(network), "{address}");
    let seen = story.exec(name, &["busybox", "ip", "-o", "-4", "address"]);
    assert!(seen.contains(address), "{address}: {seen}");
    assert_eq!(story.exec(name, &["cat", "/secret/word"]), "new");
    // Whoever was in the source from outside is not in here.
    let programs = story.programs_of(name);
    let strangers = ["tail", "sleep"].map(str::to_owned);
    assert!(!strangers.iter().any(|one| programs.contains(one)), "{programs:?}");
    let own = |what| limit(node, &story.container(name), what);
    assert_eq!(own(MEMORY), (256 << 20).to_string());
    // Microseconds of each tenth of a second.
    assert_eq!(own(CPU).split(' ').next(), Some("50000"));
    // The kubelet asks for another one where a pod may have more memory.
    let seen = story.exec(name, &["sh", "-c", "cat /proc/[0-9]*/oom_score_adj 2>/dev/null; true"]);
    let words = ["ctr", "-n", PODS, "container", "info", "--spec", &story.container(name)];
    let spec: Value = serde_json::from_str(&node.run(&words).unwrap()).unwrap();
    let wanted = spec["process"]["oomScoreAdj"].to_string();
    assert!(seen.lines().count() > 2 && seen.lines().all(|one| one == wanted), "{wanted}: {seen}");

    // Its standard output is the new container's: it begins where the old one ended.
    let log = story.cluster.kubectl(&["logs", name]).unwrap();
    let lines: Vec<u64> = log.lines().map(|line| line.parse().unwrap()).collect();
    assert!(lines.windows(2).all(|two| two[1] == two[0] + 1), "{log}");
    assert!(lines.first() > counter(&story.before).as_ref(), "{log}");
}

/// A container that ends is started afresh by its kubelet, not from the checkpoint again.
fn it_starts_afresh_after_its_end(story: &Story) {
    story.kill("restored");
    story.wait_restarted("restored");
    story.is_fresh("restored");
    story.delete("default", &["restored"]);
}

/// Whether Kubernetes was left out on purpose, which is said then.
fn is_left_out() -> bool {
    let Err(missing) = Cluster::look() else { return false };
    let left_out = std::env::var_os("KYBERNATE_WITHOUT_GO").is_some_and(|set| !set.is_empty());
    assert!(left_out, "{missing}");
    println!("SKIPPED: {missing}");
    true
}

/// What one process goes through.
fn one_process(story: &Story) {
    let references = References::make(story);
    let began = Instant::now();
    story.cluster.apply(&[secret("default", "new")]).unwrap();
    story.apply(&[Wanted::restored("restored", &story.pinned)]);
    generations::begin(story);
    doors::lead_outside(story);
    it_goes_on(story, began);
    shared::is_refused(story);
    beside::goes_on(story);
    policies::begin(story, &references);
    let second = Second::take(story);
    policies::the_sick_are_restarted(story);
    policies::refusals_are_told(story);
    policies::it_starts_cold(story);
    policies::it_is_restored_once(story);
    second.go_on(story);
    it_starts_afresh_after_its_end(story);
}

#[test]
fn pods_go_on_under_kubelets() {
    if is_left_out() {
        return;
    }
    let story = Story::begin();
    std::thread::scope(|scope| {
        let guests = scope.spawn(|| guests::go_on(&story));
        one_process(&story);
        if let Err(panic) = guests.join() {
            std::panic::resume_unwind(panic);
        }
    });
    story.end();
}
