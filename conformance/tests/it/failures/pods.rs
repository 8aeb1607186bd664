//! kybernate-runc when CRIU hangs or is killed, and when it is killed itself.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use rustix::process::Signal;
use serde_json::Value;

use super::cancels::{has_made_all, newest};
use super::claims::COLD;
use super::halt::halt;
use super::locks;
use super::victims::{END_LIMIT, catch, processes, running, signal};
use crate::harness::{at_once, next_agents, said, start};
use crate::pods::{
    CONFIG, ROOT_MODE, Spot, Staged, WORKLOAD, make_ready, nowhere, root, stage_on_both,
    stage_on_both_of, with_limit,
};
use crate::workloads::Place;
use crate::workloads::client::{Line, inside};

/// How often CRIU is killed until nobody but us can notice it.
const ROUNDS_MAX: u32 = 8;

/// What CRIU is told to talk to runc by: `criu swrk 3`.
const RUNC_SOCKET: &str = "fd/3";

/// Begins to restore a container and freezes CRIU in the middle, which never ends then.
pub(super) fn hang(spot: Spot<'_>) -> Child {
    hang_in(spot.node, &mut spot.command("main", spot.pinned, &[&spot.wish()]))
}

pub(crate) fn hang_in(node: &Node, create: &mut Command) -> Child {
    let create = begin(create);
    assert!(catch(|| !members(node).is_empty()), "CRIU does not begin");
    node.freezer("main").set(true).unwrap();
    create
}

/// Has CRIU hang when all is made, before it lets go of it.
fn hang_late(node: &Node, create: &mut Command) -> Child {
    let create = begin(create);
    let is_made = || has_made_all(node, "/var/lib/kybernate/stage", "restore.log");
    halt(node, || !members(node).is_empty(), is_made);
    create
}

fn begin(create: &mut Command) -> Child {
    let create = create.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    create.spawn().unwrap()
}

/// Nothing of a restore is left on the node, and the name can be used again.
pub(super) fn is_clean(spot: Spot<'_>, what: &str, network: &[&str]) {
    let node = spot.node;
    let what = format!("{what} on {}", node.name());
    for program in ["criu", "runc"] {
        assert_eq!(running(node, program), [], "{what}");
    }
    let script = "grep cgyard /proc/self/mountinfo; ls /run/containerd/runc/default; find /run/kybernate/runc -type f; \
                  iptables -w 5 -S | grep -i criu; ls -d /sys/fs/cgroup/freezer/default/*/ \
                  /sys/fs/cgroup/default/*/ 2>/dev/null";
    let left = node.output(&["sh", "-c", script]).unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout), "", "{what}");
    node.output(&["ctr", "container", "rm", "main"]).unwrap();
    let mut create = spot.command_of([spot.pinned, "main"], &[&spot.wish()], network, &WORKLOAD);
    let output = create.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{what}: {}", said(&output));
    let after = spot.scenario.wait_for_ticks(node, "main").unwrap();
    assert_eq!(after["boot_id_of_process"], spot.before["boot_id_of_process"], "{what}");
    spot.scenario.remove(node, "main").unwrap();
}

/// Who is killed of a restore.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Victims {
    /// CRIU, and whoever it has made processes of.
    All,
    /// CRIU alone: whoever it has made waits for it, and holds the socket that runc listens on.
    Criu,
}

/// Begins to restore a container, and kills somebody when CRIU has made the container's first
/// process. Returns how that ended, and whether that process held runc's socket.
fn kill(spot: Spot<'_>, victims: Victims) -> (Output, bool) {
    let node = spot.node;
    let create = begin(&mut spot.command("main", spot.pinned, &[&spot.wish()]));
    // Whom CRIU makes is in a PID namespace of its own at once.
    let own = link(node.init(), "ns/pid");
    let is_made = |one: &Process| link(*one, "ns/pid").is_some_and(|it| Some(it) != own);
    let made = || members(node).into_iter().filter(is_made).collect::<Vec<_>>();
    let criu = halt(node, || !members(node).is_empty(), || !made().is_empty());
    // It goes on until it has to wait for CRIU, which stands, or has done what it was made for.
    let stat = |one: &Process| fs::read_to_string(format!("/proc/{}/stat", one.pid));
    let works = |one: &Process| {
        stat(one).is_ok_and(|stat| [") R ", ") D "].iter().any(|state| stat.contains(state)))
    };
    let stand = catch(|| !made().iter().any(works));
    assert!(stand, "whom CRIU has made does not wait for it: {:?}", made().iter().map(stat));
    let socket = members(node).first().and_then(|criu| link(*criu, RUNC_SOCKET));
    let holds = made().iter().any(|one| socket.is_some() && link(*one, RUNC_SOCKET) == socket);
    signal(&if victims == Victims::All { members(node) } else { criu }, Signal::KILL);
    (create.wait_with_output().unwrap(), holds)
}

fn link(process: Process, name: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{}/{name}", process.pid)).ok()
}

/// Returns what is in the container's cgroup. The first that is in there is CRIU.
fn members(node: &Node) -> Vec<Process> {
    let members = fs::read_to_string(node.freezer("main").directory().join("cgroup.procs"));
    let members = members.unwrap_or_default();
    members.lines().filter_map(|pid| Process::find(pid.parse().ok()?)).collect()
}

/// What starts cold has nothing of a dump, nor has the node.
fn is_cold(spot: Spot<'_>) {
    assert_eq!(running(spot.node, "criu"), []);
    let mode = spot.node.run(&["stat", "-L", "-c", "%a", &root(spot.node, "main")]).unwrap();
    assert_ne!(mode.trim(), ROOT_MODE, "it is the dump's");
}

#[test]
fn a_pods_restore_that_hangs_or_is_killed_leaves_nothing() {
    let mut staged = stage_on_both().in_haste();
    staged.on_both(|spot| {
        let create = hang(spot);
        let output = create.wait_with_output().unwrap();
        let text = said(&output);
        assert!(!output.status.success() && text.contains("took longer than 5 s"), "{text}");
        is_clean(spot, "CRIU hangs", &[]);

        // containerd kills a runtime that takes too long for it, and nobody else.
        let create = hang(spot);
        let wrapper = running(spot.node, "kybernate-runc");
        assert!(!wrapper.is_empty(), "it is gone already");
        signal(&wrapper, Signal::KILL);
        let output = create.wait_with_output().unwrap();
        let text = said(&output);
        assert!(!output.status.success() && !text.contains("took longer"), "{text}");
        is_clean(spot, "the wrapper is killed", &[]);
    });
    // Nobody waits as long as that for a CRIU that is gone.
    next_agents(&mut staged.scenario, &with_limit("10m"));
    staged.on_both(|spot| {
        // runc notices it by itself where nobody holds its socket any more.
        let told = |holds| {
            if holds {
                "CRIU was killed in the middle of the restore"
            } else {
                "the restore failed"
            }
        };
        let unnoticed = (0..ROUNDS_MAX).any(|_| {
            let (output, holds) = kill(spot, Victims::Criu);
            let text = said(&output);
            assert!(!output.status.success() && text.contains(told(holds)), "{text}");
            is_clean(spot, "CRIU is killed", &[]);
            holds
        });
        assert!(unnoticed, "runc noticed it each time");

        let (output, _) = kill(spot, Victims::All);
        let text = said(&output);
        assert!(!output.status.success() && text.contains("the restore failed"), "{text}");
        is_clean(spot, "all are killed", &[]);
    });
    staged.scenario.end().unwrap();
}

/// runc has yet to start CRIU, of which nothing is in the container's cgroup.
#[test]
fn a_pods_restore_whose_wrapper_is_killed_early_leaves_nothing() {
    let staged = stage_on_both();
    staged.on_both(|spot| {
        let node = spot.node;
        // A machine that is busy may come too late.
        let is_early = (0..ROUNDS_MAX).any(|_| {
            let create = begin(&mut spot.command("main", spot.pinned, &[&spot.wish()]));
            let mut runc = Vec::new();
            let begins = catch(|| {
                runc = processes(node, restores);
                !runc.is_empty()
            });
            assert!(begins, "runc does not begin");
            signal(&runc, Signal::STOP);
            let is_early = members(node).is_empty();
            signal(&running(node, "kybernate-runc"), Signal::KILL);
            let output = create.wait_with_output().unwrap();
            signal(&runc, Signal::CONT);
            assert!(!is_early || !output.status.success(), "{}", said(&output));
            if output.status.success() {
                spot.scenario.remove(node, "main").unwrap();
            }
            is_clean(spot, "the wrapper is killed early", &[]);
            is_early
        });
        assert!(is_early, "CRIU had begun each time");
    });
    staged.scenario.end().unwrap();
}

/// Whether a process is a runc that restores.
fn restores(pid: u32) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.starts_with(b"/") && String::from_utf8_lossy(&line).contains("\0restore\0")
}

/// A CRIU without our word about cgroups mounts the node's in its work directory.
#[test]
fn cgroups_that_a_killed_criu_has_mounted_stay() {
    let mut scenario = start();
    let script = "set -e; yard=/var/lib/kybernate/stage/01a200000000deadbeef/.criu.cgyard.x; mkdir -p $yard; \
                  mount -t tmpfs none $yard; mount --make-private $yard; mkdir $yard/cgroups; \
                  if test -e /sys/fs/cgroup/cgroup.controllers; then \
                  mount -t cgroup2 none $yard/cgroups; else \
                  mount -t cgroup -o freezer none $yard/cgroups; fi; mkdir $yard/cgroups/kept";
    at_once(&scenario, |node| drop(node.run(&["sh", "-c", script]).unwrap()));
    next_agents(&mut scenario, CONFIG);
    at_once(&scenario, |node| {
        node.run(&["sh", "-c", "! ls -d /var/lib/kybernate/stage/01a200000000deadbeef"]).unwrap();
        node.run(&["sh", "-c", "rmdir /sys/fs/cgroup/kept || rmdir /sys/fs/cgroup/freezer/kept"])
            .unwrap();
    });
    scenario.end().unwrap();
}

/// It is ended while CRIU is at it, or held by what it was told to make; the pod's policy comes next.
#[test]
fn a_pods_restore_can_be_cancelled() {
    let staged = stage_on_both();
    staged.on_both(|spot| {
        let node = spot.node;
        let cancel = |annotations: &[&str]| {
            let create = hang_in(node, &mut spot.command("main", spot.pinned, annotations));
            let operation = newest(spot.scenario, node);
            assert_eq!(operation["state"], "running", "{operation}");
            node.run(&["kyb", "cancel", operation["id"].as_str().unwrap()]).unwrap();
            let output = create.wait_with_output().unwrap();
            let text = said(&output);
            let mut last = Value::Null;
            let ended = wait_until(END_LIMIT, || {
                last = newest(spot.scenario, node);
                last["state"] != "running"
            });
            assert!(ended && last["state"] == "cancelled", "{last}");
            assert_eq!(last["error"], "it was cancelled");
            (output.status.success(), text)
        };
        let (done, text) = cancel(&[&spot.wish()]);
        assert!(!done && text.contains("it was cancelled"), "{text}");
        is_clean(spot, "it was cancelled", &[]);
        let (done, text) = cancel(&[&spot.wish(), COLD]);
        assert!(done, "{text}");
        is_cold(spot);
        spot.scenario.remove(node, "main").unwrap();
    });
    staged.scenario.end().unwrap();
}

#[test]
fn what_starts_cold_after_a_failed_restore_answers() {
    const PORT: u16 = 7000;
    // The network of a pod, which outlives its containers.
    let scenario = start();
    at_once(&scenario, |node| {
        node.run(&["sh", "-c", "ip netns add pod && ip -n pod link set lo up"]).unwrap();
    });
    let network = ["--with-ns", "network:/run/netns/pod"];
    let staged = stage_on_both_of(scenario, &network).in_haste();
    staged.on_both(|spot| {
        let node = spot.node;
        let server = ["busybox", "httpd", "-f", "-p", "7000", "-h", "/bin"];
        let annotations = [&*spot.wish(), COLD];
        for hang in [hang_in, hang_late] {
            let mut create =
                spot.command_of([spot.pinned, "main"], &annotations, &network, &server);
            let output = hang(node, &mut create).wait_with_output().unwrap();
            assert!(output.status.success(), "{}", said(&output));
            is_cold(spot);
            let place = Place { node, namespace: "default", id: "main", state: "" };
            let pid = place.pid().unwrap().to_string();
            assert_eq!(locks(node, &pid), "", "the pod's network is locked");
            let ask = || Line::connect(PORT).ask("GET /busybox HTTP/1.0\r\n\r\n").unwrap();
            assert_eq!(inside(place, ask).join().unwrap(), "HTTP/1.1 200 OK");
            spot.scenario.remove(node, "main").unwrap();
        }
        is_clean(spot, "it started cold", &network);
        node.run(&["ip", "netns", "del", "pod"]).unwrap();
    });
    staged.scenario.end().unwrap();
}

/// An emptyDir of the pod, as a kubelet lays it out.
const SCRATCH: &str = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/scratch";

/// One that a sidecar has, too.
const SHARED: &str = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/shared";

/// Has a container have an emptyDir.
fn mount_of(volume: &str) -> String {
    let (_, name) = volume.rsplit_once('/').unwrap();
    format!("type=bind,src={volume},dst=/{name},options=rbind:rw")
}

/// Takes a container with a file of this size in each of these emptyDirs, and stages that on both nodes.
fn stage_with(volumes: &[&str], options: &[&str], bytes: u64) -> Staged {
    let mut scenario = start();
    next_agents(&mut scenario, CONFIG);
    let all = volumes.join(" ");
    at_once(&scenario, |node| {
        node.run(&["sh", "-c", &format!("mkdir -p {all}")]).unwrap();
    });
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 24, options).unwrap();
    let before = scenario.wait_for_ticks(a, "job").unwrap();
    a.run(&["chmod", ROOT_MODE, &root(a, "job")]).unwrap();
    let each = |what: &str| {
        a.run(&["sh", "-c", &format!("for place in {all}; do {what} $place/captured; done")])
            .unwrap();
    };
    each(&format!("head -c {bytes} /dev/zero >"));
    let reference = scenario.reference("pods/scratch:v1");
    let mut words = vec!["checkpoint", "job", &*reference, "--plain-http", "--sign-key", "node-a"];
    for volume in volumes {
        words.extend(["--capture-mount", volume.rsplit_once("~empty-dir").unwrap().1]);
    }
    let taken = scenario.kyb_json(a, &words).unwrap();
    let pinned = format!("{reference}@{}", taken["digest"].as_str().unwrap());
    scenario.remove(a, "job").unwrap();
    each("rm");
    at_once(&scenario, |node| make_ready(&scenario, node, &pinned));
    Staged { scenario, at: "a", pinned, before }
}

/// The pod's other containers have what it is given, and so has it when it starts afresh: the agent takes
/// away what it has put there, and not later.
#[test]
fn what_starts_cold_has_its_pods_directories_as_they_were() {
    let mount = mount_of(SCRATCH);
    let options = ["--mount", &*mount];
    let staged = stage_with(&[SCRATCH], &options, 0).in_haste();
    staged.on_both(|spot| {
        let node = spot.node;
        let program = ["sh", "-c", "echo cold >/scratch/cold; exec busybox sleep 1000"];
        let annotations = [&*spot.wish(), COLD];
        let list = || node.run(&["ls", SCRATCH]).unwrap();
        node.run(&["chmod", "0750", SCRATCH]).unwrap();
        for hang in [hang_in, hang_late] {
            let mut create =
                spot.command_of([spot.pinned, "main"], &annotations, &options, &program);
            let create = hang(node, &mut create);
            assert_eq!(list(), "captured\n");
            node.run(&["touch", &format!("{SCRATCH}/sidecar")]).unwrap();
            let output = create.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", said(&output));
            is_cold(spot);
            assert!(wait_until(END_LIMIT, || list() == "cold\nsidecar\n"), "{}", list());
            assert_eq!(node.run(&["stat", "-c", "%a", SCRATCH]).unwrap(), "750\n");
            // Nor does the operation's end.
            let ended = || newest(spot.scenario, node)["state"] == "failed";
            assert!(wait_until(END_LIMIT, ended));
            assert_eq!(list(), "cold\nsidecar\n");
            spot.scenario.remove(node, "main").unwrap();
            node.run(&["sh", "-c", &format!("rm {SCRATCH}/*")]).unwrap();
        }
        is_clean(spot, "it started cold", &options);
        assert_eq!(list(), "captured\n");
    });
    staged.scenario.end().unwrap();
}

/// Enough that it is not put there in an instant.
const LARGE_BYTES: u64 = 256 << 20;

/// The pod that has the emptyDir.
const UID: &str = "0-9";

/// Returns what lies in the emptyDir.
fn list(node: &Node) -> String {
    node.run(&["ls", SCRATCH]).unwrap()
}

/// Has a pod's container created that may start afresh, and kills the agent while it puts into an emptyDir what was
/// captured. Returns whether it was in time.
fn dies_giving(staged: &mut Staged, options: &[&str]) -> bool {
    let here = staged.here();
    let wishes = [&*here.wish(), COLD];
    let create = begin(&mut here.command_in_pod(UID, [here.pinned, "main"], &wishes, options));
    let file = here.node.path(&format!("{SCRATCH}/captured"));
    let there = || fs::metadata(&file).map_or(0, |file| file.len());
    assert!(catch(|| there() > 0), "nothing is put there");
    let agents = running(here.node, "kybernate-agent");
    signal(&agents, Signal::STOP);
    if there() == LARGE_BYTES {
        signal(&agents, Signal::CONT);
        let output = create.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        here.scenario.remove(here.node, "main").unwrap();
        let tidy = format!("rm {SCRATCH}/* /var/lib/kybernate/restored/default/{UID}.main");
        here.node.run(&["sh", "-c", &tidy]).unwrap();
        return false;
    }
    staged.kill_agent();
    is_not_afresh(&create.wait_with_output().unwrap());
    true
}

/// It was not created, since something of a restore may be in its pod's directories.
fn is_not_afresh(output: &Output) {
    let text = said(output);
    let told = "what it was given for that may still be there, so it does not start afresh";
    assert!(!output.status.success() && text.contains(told), "{text}");
}

/// Whatever its pod says of failures: what is there by then is nobody's. The next agent takes it away.
#[test]
fn nothing_starts_beside_what_a_dead_agent_was_giving() {
    let mount = mount_of(SCRATCH);
    let options = ["--mount", &*mount];
    let mut staged = stage_with(&[SCRATCH], &options, LARGE_BYTES).in_haste();
    for at in ["a", "b"] {
        staged.at = at;
        let base = staged.scenario.image();
        staged.here().begin_pod(UID, staged.here().pinned);
        // A machine that is busy may come too late.
        let died = (0..ROUNDS_MAX).any(|_| dies_giving(&mut staged, &options));
        assert!(died, "all was there each time");
        // Nor when it is tried again, with nobody to ask.
        let here = staged.here();
        here.node.run(&["ctr", "container", "rm", "main"]).unwrap();
        here.node.run(&["ctr", "image", "pull", "--plain-http", &base]).unwrap();
        let wishes = [&*here.wish(), COLD];
        let create = |id, image: &str, wishes: &[&str]| {
            here.create_in_pod(UID, [image, id], wishes, &options)
        };
        is_not_afresh(&create("main-1", here.pinned, &wishes));
        assert_eq!(here.noted(), format!("{UID}.main.given~\n"));
        here.node.run(&["ctr", "container", "rm", "main-1"]).unwrap();
        staged.start_agent();
        let here = staged.here();
        let is_clear = || list(here.node).is_empty() && here.noted().is_empty();
        assert!(wait_until(END_LIMIT, is_clear), "{} {}", list(here.node), here.noted());
        let afresh = [&*nowhere(), COLD];
        let output = here.create_in_pod(UID, [&base, "main-2"], &afresh, &options);
        assert!(output.status.success() && here.is_afresh("main-2"), "{}", said(&output));
        here.scenario.remove(here.node, "main-2").unwrap();
        here.node.run(&["ctr", "container", "rm", "other"]).unwrap();
        is_clean(here, "the agent died as it gave", &options);
        assert_eq!(list(here.node), "captured\n");
    }
    staged.scenario.end().unwrap();
}

/// The next agent learns that the container has begun with what its pod was given, whatever came after it.
#[test]
fn what_a_container_began_with_outlives_it_and_the_agent() {
    let mount = mount_of(SCRATCH);
    let options = ["--mount", &*mount];
    let mut staged = stage_with(&[SCRATCH], &options, 0).in_haste();
    for at in ["a", "b"] {
        staged.at = at;
        let here = staged.here();
        here.begin_pod(UID, here.pinned);
        let wishes = [&*here.wish(), COLD];
        let mut create = here.command_in_pod(UID, [here.pinned, "main"], &wishes, &options);
        let create = hang_in(here.node, &mut create);
        staged.kill_agent();
        let here = staged.here();
        here.node.freezer("main").set(false).unwrap();
        let output = create.wait_with_output().unwrap();
        assert!(output.status.success() && !here.is_afresh("main"), "{}", said(&output));
        assert_eq!(here.noted(), format!("{UID}.main\n"));
        here.scenario.remove(here.node, "main").unwrap();
        // Nobody is there to say that it was restored before.
        let output = here.create_in_pod(UID, [here.pinned, "main-1"], &wishes, &options);
        assert!(output.status.success() && here.is_afresh("main-1"), "{}", said(&output));
        here.node.run(&["touch", &format!("{SCRATCH}/own")]).unwrap();
        here.scenario.remove(here.node, "main-1").unwrap();
        staged.start_agent();
        let here = staged.here();
        let mut last = Value::Null;
        let ended = wait_until(END_LIMIT, || {
            last = newest(here.scenario, here.node);
            last["state"] != "running"
        });
        assert!(ended, "{last}");
        assert_eq!(list(here.node), "captured\nown\n");
        here.node.run(&["ctr", "container", "rm", "other"]).unwrap();
    }
    staged.scenario.end().unwrap();
}

/// One that ended before it was started has not begun: what it was given is taken away by the next try, and
/// nothing starts afresh before.
#[test]
fn what_was_given_and_never_started_is_given_again() {
    let mounts = [mount_of(SCRATCH), mount_of(SHARED)];
    let options = ["--mount", &*mounts[0], "--mount", &*mounts[1]];
    let staged = stage_with(&[SCRATCH, SHARED], &options, 0);
    let base = staged.scenario.image();
    staged.on_both(|spot| {
        let node = spot.node;
        node.run(&["ctr", "image", "pull", "--plain-http", &base]).unwrap();
        spot.begin_pod(UID, &base);
        let (wish, afresh) = ([&*spot.wish(), COLD], [&*nowhere(), COLD]);
        let create = |id, image: &str, wishes: &[&str]| {
            spot.create_in_pod(UID, [image, id], wishes, &options)
        };
        let has = |scratch: &str, shared: &str, noted: &str| {
            let shared_has = node.run(&["ls", SHARED]).unwrap();
            assert_eq!([&*list(node), &shared_has, &spot.noted()], [scratch, shared, noted]);
        };
        let (begun, given) = (format!("{UID}.main\n"), format!("{UID}.main.given~\n"));
        spot.create_unstarted(UID, [spot.pinned, "main-0"], &wish, &options);
        has("captured\n", "captured\n", &given);
        // Whoever has it meanwhile keeps it, and that alone.
        let sidecar = ["--mount", &*mounts[1], &base, "sidecar", "/workload", "pause"];
        node.run(&[&["ctr", "run", "-d"], &sidecar[..]].concat()).unwrap();
        node.run(&["touch", &format!("{SHARED}/more")]).unwrap();
        for (id, image, wishes) in [("main-1", &*base, &afresh), ("main-2", spot.pinned, &wish)] {
            let output = create(id, image, wishes);
            let text = said(&output);
            let told = format!("no container has begun, is still in [{SHARED:?}]");
            assert!(!output.status.success() && text.contains(&told), "{text}");
            node.run(&["ctr", "container", "rm", id]).unwrap();
            has(if id == "main-1" { "" } else { "theirs\n" }, "captured\nmore\n", &given);
            node.run(&["touch", &format!("{SCRATCH}/theirs")]).unwrap();
        }
        node.run(&["rm", &format!("{SCRATCH}/theirs")]).unwrap();
        spot.scenario.remove(node, "sidecar").unwrap();
        let again = create("main-3", spot.pinned, &wish);
        assert!(again.status.success() && !spot.is_afresh("main-3"), "{}", said(&again));
        has("captured\n", "captured\n", &begun);
        spot.scenario.remove(node, "main-3").unwrap();
        // What has begun is restored no more, and begins afresh beside what it has.
        let next = create("main-4", spot.pinned, &wish);
        assert!(next.status.success() && spot.is_afresh("main-4"), "{}", said(&next));
        has("captured\n", "captured\n", &begun);
        spot.scenario.remove(node, "main-4").unwrap();

        // With nothing to restore, another one starts afresh where nothing is, as it was.
        let noted = "/var/lib/kybernate/restored/default";
        let tidy = format!("rm {SCRATCH}/* {SHARED}/* {noted}/{UID}.main; chmod 0710 {SCRATCH}");
        node.run(&["sh", "-c", &tidy]).unwrap();
        spot.create_unstarted(UID, [spot.pinned, "main-5"], &wish, &options);
        assert_eq!(node.run(&["stat", "-c", "%a", SCRATCH]).unwrap(), "755\n");
        let cold = create("main-6", &base, &afresh);
        assert!(cold.status.success() && spot.is_afresh("main-6"), "{}", said(&cold));
        has("", "", &begun);
        assert_eq!(node.run(&["stat", "-c", "%a", SCRATCH]).unwrap(), "710\n");
        spot.scenario.remove(node, "main-6").unwrap();
        node.run(&["ctr", "container", "rm", "other"]).unwrap();
    });
    staged.scenario.end().unwrap();
}
