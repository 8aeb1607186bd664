//! Workloads of our own program: what Linux gives to processes, and what a container may be.

use fs_err as fs;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use serde_json::Value;

use super::proof::{all_count, goes_on};
use super::{Place, Workload};
use crate::harness::{checkpoint, refused, restore, said, start};

const KEEP: &[&str] = &["/workload", "keep", "--state", "/state"];

/// What is kept where the root cannot be written to.
const TMPFS: &str = "type=tmpfs,src=tmpfs,dst=/state,options=rw:nosuid:size=16m:mode=1777";

pub(crate) const WORKLOADS: &[Workload] = &[
    Workload {
        id: "linux",
        name: "what Linux gives to processes",
        proven: "two processes with semaphores and shared memory of System V and POSIX, memfd, \
                 pipes, unix sockets, a deleted file that is open, locks (flock, POSIX, of open \
                 files), timers (timerfd, itimer, POSIX), epoll, eventfd, signalfd, a child \
                 that has ended (zombie), a name that is not UTF-8",
        options: &[],
        command: KEEP,
        state: "/state/keep",
        allow: &[],
        unless: None,
    },
    Workload {
        id: "links",
        name: "files held by names that were deleted",
        proven: "a semaphore of `sem_open` and a file with another name in `/dev/shm`, each still the \
                 file that has the other name, and a deleted file of the image",
        options: &["--annotation", "org.criu.config=/var/lib/kybernate/criu/links.conf"],
        command: &["/workload", "keep", "--state", "/state", "--links", "yes"],
        state: "/state/keep",
        allow: &[],
        unless: None,
    },
    Workload {
        id: "threads",
        name: "500 threads",
        proven: "each of them counts on",
        options: &[],
        command: &["/workload", "keep", "--state", "/state", "--threads", "500"],
        state: "/state/keep",
        allow: &[],
        unless: None,
    },
    Workload {
        id: "tmpfs",
        name: "a tmpfs of the container",
        proven: "its files, open and deleted ones too",
        options: &["--mount", TMPFS],
        command: KEEP,
        state: "/state/keep",
        allow: &[],
        unless: None,
    },
    Workload {
        id: "bind",
        name: "a directory of the node (bind mount)",
        proven: "the same files are open; the restoring node must allow the mount",
        options: &["--mount", "type=bind,src=/srv/share/bound,dst=/bound,options=rbind:rw"],
        command: &["/workload", "keep", "--state", "/bound"],
        state: "/bound/keep",
        allow: &["--allow-mount", "/srv/share/bound:/bound"],
        unless: None,
    },
    Workload {
        id: "read-only",
        name: "a read-only root",
        proven: "it is read-only",
        options: &["--read-only", "--mount", TMPFS],
        command: KEEP,
        state: "/state/keep",
        allow: &[],
        unless: None,
    },
    Workload {
        id: "user",
        name: "a user that is not root",
        proven: "user, groups, capabilities",
        options: &["--user", "1000:1000"],
        command: &["/workload", "keep", "--state", "/tmp/state"],
        state: "/tmp/state/keep",
        allow: &[],
        unless: Some(("other-user", "where containerd lacks CAP_SYS_RESOURCE")),
    },
    Workload {
        id: "capabilities",
        name: "dropped capabilities",
        proven: "all five sets of them",
        options: &[
            "--cap-drop",
            "CAP_NET_RAW",
            "--cap-drop",
            "CAP_MKNOD",
            "--cap-drop",
            "CAP_CHOWN",
        ],
        command: KEEP,
        state: "/state/keep",
        allow: &[],
        unless: None,
    },
    Workload {
        id: "seccomp",
        name: "seccomp, containerd's profile",
        proven: "mode and number of filters",
        options: &["--seccomp"],
        command: KEEP,
        state: "/state/keep",
        allow: &[],
        unless: None,
    },
];

/// Runs where the machine can spare huge pages.
pub(super) const HUGE: Workload = Workload {
    id: "huge",
    name: "huge pages (hugetlb)",
    proven: "8 MiB, half of them shared memory",
    options: &[],
    command: &["/workload", "keep", "--state", "/state", "--huge", "4"],
    state: "/state/keep",
    allow: &[],
    unless: None,
};

/// Huge pages that the machine has for as long as this lives.
struct HugePages {
    before: u64,
}

impl HugePages {
    const NUMBER: &str = "/proc/sys/vm/nr_hugepages";

    /// Returns nothing when its memory is too scattered for so many more.
    fn reserve(pages: u64) -> Option<Self> {
        let number = || fs::read_to_string(Self::NUMBER).unwrap().trim().parse::<u64>().unwrap();
        let reserved = Self { before: number() };
        fs::write(Self::NUMBER, (reserved.before + pages).to_string()).unwrap();
        (number() >= reserved.before + pages).then_some(reserved)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        fs::write(Self::NUMBER, self.before.to_string()).unwrap_or_default();
    }
}

/// What the table says of the workload whose memory is large.
pub(super) const HEAP: (&str, &str) = ("a heap of 2 GiB", "sums over all of it");
const HEAP_MIB: u32 = 2048;

/// Whether CRIU may ask for what belongs to other users: `CAP_SYS_RESOURCE`, bit 24.
pub(crate) fn may_ask_others(node: &Node) -> bool {
    let status = node.run(&["cat", "/proc/self/status"]).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:\t")).unwrap();
    u64::from_str_radix(mask, 16).unwrap() & (1 << 24) != 0
}

/// Moves what is not root's, with the image pulled, where CRIU may ask for what belongs to others; in
/// the end as a pod's container, on both nodes. Returns whether it may.
pub(crate) fn another_user_moves(scenario: &Scenario, [a, b]: [&Node; 2]) -> bool {
    let user = WORKLOADS.iter().find(|workload| workload.id == "user").unwrap();
    let may = may_ask_others(a);
    if may {
        user.moves(scenario, &scenario.image(), [a, b], &|_| {});
        user.goes_on_in_pods(scenario, [a, b]);
    }
    may
}

/// Looks for what its own ticks do not show.
fn is_whole(place: Place<'_>) {
    if place.id == "threads" {
        all_count(place);
    }
    has_no_names_of_criu(place);
}

/// What CRIU names in a dump is gone when the processes are back.
fn has_no_names_of_criu(place: Place<'_>) {
    let shared = place.node.path(&format!("/proc/{}/root/dev/shm", place.pid().unwrap()));
    let names = fs::read_dir(shared).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> =
        names.filter(|name| name.to_string_lossy().starts_with("link_remap.")).collect();
    assert!(left.is_empty(), "{}: {left:?}", place.id);
}

#[test]
fn what_linux_gives_to_processes_is_given_back() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    let image = scenario.image();
    for node in [a, b] {
        node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    }
    fs::create_dir_all(scenario.testbed.share().join("bound")).unwrap();
    for workload in WORKLOADS {
        match workload.unless {
            Some((finding, _)) if !may_ask_others(a) => {
                workload.is_refused(&scenario, &image, a, finding);
            }
            _ => workload.moves(&scenario, &image, [a, b], &is_whole),
        }
    }
    // An older CRIU, runc and containerd give it back alike.
    for id in ["linux", "links"] {
        let workload = WORKLOADS.iter().find(|workload| workload.id == id).unwrap();
        workload.moves(&scenario, &image, [a, a], &is_whole);
    }
    // It would be for writing too, there where it was taken: node a has CRIU 4.1.
    let locked = WORKLOADS.iter().find(|workload| workload.id == "read-only").unwrap();
    let reason = "which CRIU before 4.2 does not give back";
    refused(&scenario, a, &locked.reference(&scenario, "1"), &[], reason);
    scenario.end().unwrap();
}

#[test]
fn a_mount_that_was_captured_is_the_containers_own() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    let image = scenario.image();
    a.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    let bound = scenario.testbed.share().join("bound");
    fs::create_dir_all(&bound).unwrap();
    let bind = WORKLOADS.iter().find(|workload| workload.id == "bind").unwrap();
    a.run(&[&["ctr", "run", "-d"], bind.options, &[&image, bind.id], bind.command].concat())
        .unwrap();
    let mut last = goes_on(bind.on(a), None);
    let references = ["1", "2"].map(|tag| scenario.reference(&format!("workloads/own:{tag}")));
    let take = |node: &Node, reference: &str, place: &str| {
        let key = format!("node-{}", node.name());
        let words = ["checkpoint", bind.id, reference, "--plain-http", "--sign-key", &key];
        scenario.kyb(node, &[&words[..], &["--capture-mount", place]].concat()).unwrap()
    };
    for (place, reason) in [("/nowhere", "nothing of the node"), ("/proc", "nothing of the node")] {
        let refused = take(a, &references[0], place);
        assert_eq!(refused.status.code(), Some(64), "{}", said(&refused));
        assert!(said(&refused).contains(reason), "{}", said(&refused));
    }
    let taken = take(a, &references[0], "/bound");
    assert!(taken.status.success(), "{}", said(&taken));
    scenario.remove(a, bind.id).unwrap();
    // Nobody needs what it came from.
    fs::remove_dir_all(&bound).unwrap();
    for reference in &references {
        let output = restore(&scenario, b, reference, bind.id, &[]);
        assert!(output.status.success(), "{}", said(&output));
        let now = goes_on(bind.on(b), Some(&last));
        assert_eq!(now.boot, last.boot, "it was started anew");
        last = now;
        if reference == &references[0] {
            let again = take(b, &references[1], "/bound");
            assert!(again.status.success(), "{}", said(&again));
        }
        scenario.remove(b, bind.id).unwrap();
    }
    assert!(!bound.exists());
    scenario.end().unwrap();
}

#[test]
fn huge_pages_move() {
    let Some(_reserved) = HugePages::reserve(16) else {
        println!("SKIPPED: this machine has no 32 MiB in one piece each 2 MiB");
        return;
    };
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    let image = scenario.image();
    for node in [a, b] {
        node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    }
    HUGE.moves(&scenario, &image, [a, b], &|_| {});
    scenario.end().unwrap();
}

#[test]
fn a_large_heap_moves() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    // The sums go on over all of it, from where they were.
    let sums = |node: &Node, rounds: u64| {
        let far = |status: &Value| status["rounds_done"].as_u64() >= Some(rounds);
        let status = scenario.wait_for(node, "heap", far).unwrap();
        for fact in ["checksum_ok", "pipe_ok", "log_ok"] {
            assert_eq!(status[fact], true, "{status}");
        }
        (status["rounds_done"].as_u64().unwrap(), status["boot_id_of_process"].clone())
    };
    scenario.run_workload(a, "heap", HEAP_MIB, &[]).unwrap();
    let (first, second) = (scenario.reference("heap/all:1"), scenario.reference("heap/all:2"));
    let (_, boot) = sums(a, 0);
    checkpoint(&scenario, a, "heap", &first);
    scenario.remove(a, "heap").unwrap();
    for reference in [&first, &second] {
        let output = restore(&scenario, b, reference, "heap", &[]);
        assert!(output.status.success(), "{}", said(&output));
        let (rounds, _) = sums(b, 0);
        // The one that is under way began before, the next one did not.
        assert_eq!(sums(b, rounds + 1).1, boot);
        if reference == &first {
            checkpoint(&scenario, b, "heap", &second);
            sums(b, rounds + 2);
            scenario.remove(b, "heap").unwrap();
        }
    }
    scenario.end().unwrap();
}
