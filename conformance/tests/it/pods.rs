//! Containers that kybernate-runc creates, as containerd's CRI plugin has them created.

use std::process::{Command, Output, Stdio};

use fs_err as fs;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::{Scenario, counter};

use crate::cgroups;
use crate::failures::claims::COLD;
use crate::failures::victims::running;
use crate::harness::{at_once, checkpoint, next_agents, said, start};
use crate::trust::replace_criu;
use crate::workloads::Place;
use crate::workloads::programs::NO_IO_URING;

/// What an agent is told beyond its keys.
pub(crate) const CONFIG: &str = "[staging.ram]\nbudget = \"1GiB\"\n[[registry]]\n\
                      host = \"10.77.0.1:5000\"\nplain_http = true\n";

/// The same, for those that wait until a restore has taken too long: "5s". A busy machine may need as long
/// for one that works.
pub(crate) fn with_limit(limit: &str) -> String {
    format!("{CONFIG}[pods]\nrestore_limit = \"{limit}\"\n")
}

/// Permissions of the root directory when the checkpoint is taken. No container has them by itself.
pub(crate) const ROOT_MODE: &str = "1555";

/// What runs in the containers.
pub(crate) const WORKLOAD: [&str; 6] = ["/workload", "run", "--state", "/state", "--mib", "24"];

/// A scenario in which a checkpoint of the workload is staged, and its image pulled.
pub(crate) struct Staged {
    pub(crate) scenario: Scenario,
    /// The node it is restored on.
    pub(crate) at: &'static str,
    /// `host/name@digest`.
    pub(crate) pinned: String,
    /// The counter when it was taken, and the identity of the process.
    pub(crate) before: serde_json::Value,
}

/// A node on which it is staged.
#[derive(Clone, Copy)]
pub(crate) struct Spot<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) node: &'a Node,
    pub(crate) pinned: &'a str,
    pub(crate) before: &'a serde_json::Value,
}

/// Stages one on both nodes, to be restored on node a first.
pub(crate) fn stage_on_both() -> Staged {
    stage_on_both_of(start(), &[])
}

/// Does the same with a scenario that was prepared for that, and a workload that was started with
/// more options of `ctr run`.
pub(crate) fn stage_on_both_of(scenario: Scenario, options: &[&str]) -> Staged {
    let mut staged = stage_on(scenario, options);
    staged.scenario.next_agent("a", CONFIG).unwrap();
    let a = staged.scenario.node("a");
    staged.scenario.remove(a, "job").unwrap();
    make_ready(&staged.scenario, a, &staged.pinned);
    Staged { at: "a", ..staged }
}

/// Stages one on node b alone.
fn stage_on(mut scenario: Scenario, options: &[&str]) -> Staged {
    scenario.next_agent("b", CONFIG).unwrap();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "job", 24, options).unwrap();
    let before = scenario.wait_for_ticks(a, "job").unwrap();
    a.run(&["chmod", ROOT_MODE, &root(a, "job")]).unwrap();
    let reference = scenario.reference("pods/job:v1");
    let digest = checkpoint(&scenario, a, "job", &reference);
    let pinned = format!("{reference}@{digest}");
    make_ready(&scenario, b, &pinned);
    Staged { scenario, at: "b", pinned, before }
}

/// Stages a checkpoint in a node's memory, and pulls its image there.
pub(crate) fn make_ready(scenario: &Scenario, node: &Node, pinned: &str) {
    let words = ["stage", pinned, "--tier", "ram", "--plain-http"];
    let output = scenario.kyb(node, &words).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    node.run(&["ctr", "image", "pull", "--plain-http", pinned]).unwrap();
}

/// Prepares to create and start a container as the CRI plugin does for a pod with these annotations,
/// with more options of `ctr run`.
pub(crate) fn command_of(
    node: &Node,
    [image, id]: [&str; 2],
    annotations: &[&str],
    options: &[&str],
    program: &[&str],
) -> Command {
    let mut words = vec!["ctr", "run", "-d", "--cpu-shares", "0"];
    words.extend(["--runc-binary", "/srv/bin/kybernate-runc"]);
    let own =
        ["io.kubernetes.cri.container-type=container", "io.kubernetes.cri.container-name=main"];
    for annotation in own.iter().chain(annotations) {
        words.extend(["--annotation", annotation]);
    }
    words.extend(options);
    words.extend([image, id]);
    node.command(&[&words, program].concat())
}

/// Returns the root directory of a container, as the node sees it.
pub(crate) fn root(node: &Node, id: &str) -> String {
    let place = Place { node, namespace: "default", id, state: "/state" };
    format!("/proc/{}/root", place.pid().unwrap())
}

impl Staged {
    pub(crate) fn node(&self) -> &Node {
        self.scenario.node(self.at)
    }

    /// Returns where it is restored.
    pub(crate) fn here(&self) -> Spot<'_> {
        self.spot(self.node())
    }

    /// Works on both nodes at a time.
    pub(crate) fn on_both(&self, work: impl Fn(Spot<'_>) + Sync) {
        at_once(&self.scenario, |node| work(self.spot(node)));
    }

    fn spot<'a>(&'a self, node: &'a Node) -> Spot<'a> {
        Spot { scenario: &self.scenario, node, pinned: &self.pinned, before: &self.before }
    }

    /// Has both agents give up a restore early.
    pub(crate) fn in_haste(mut self) -> Self {
        next_agents(&mut self.scenario, &with_limit("5s"));
        self
    }

    /// Kills the agent of the node, and leaves it without one.
    pub(crate) fn kill_agent(&mut self) {
        self.scenario.agent(self.at).take().unwrap().kill();
    }

    pub(crate) fn start_agent(&mut self) {
        self.scenario.next_agent(self.at, &with_limit("5s")).unwrap();
    }
}

impl Spot<'_> {
    /// Prepares to create and start the workload.
    pub(crate) fn command(&self, id: &str, image: &str, annotations: &[&str]) -> Command {
        self.command_of([image, id], annotations, &[], &WORKLOAD)
    }

    /// Prepares another program, with more options of `ctr run`.
    pub(crate) fn command_of(
        &self,
        named: [&str; 2],
        annotations: &[&str],
        options: &[&str],
        program: &[&str],
    ) -> Command {
        command_of(self.node, named, annotations, options, program)
    }

    pub(crate) fn create(&self, id: &str, image: &str, annotations: &[&str]) -> Output {
        self.command(id, image, annotations).stdin(Stdio::null()).output().unwrap()
    }

    /// Has the checkpoint restored in a container `main` with other options of `ctr run`.
    fn restore_with(&self, options: &[&str]) -> Output {
        let mut command =
            self.command_of([self.pinned, "main"], &[&self.wish()], options, &WORKLOAD);
        command.stdin(Stdio::null()).output().unwrap()
    }

    pub(crate) fn wish(&self) -> String {
        format!("restore.kybernate.io/main={}", self.pinned)
    }
}

#[test]
fn a_container_goes_on_where_its_checkpoint_was_taken() {
    let scenario = start();
    let shown = cgroups::shown(&scenario.testbed.a);
    let staged = stage_on(scenario, shown);
    let (b, scenario, here) = (staged.node(), &staged.scenario, staged.here());
    let mut create = here.command_of([here.pinned, "main"], &[&here.wish()], shown, &WORKLOAD);
    let output = create.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let after = scenario.wait_for_ticks(b, "main").unwrap();
    cgroups::are_its_own(b, "main");
    assert_eq!(after["boot_id_of_process"], staged.before["boot_id_of_process"]);
    assert!(counter(&after) > counter(&staged.before));
    for fact in ["checksum_ok", "pipe_ok", "log_ok"] {
        assert_eq!(after[fact], true, "{after}");
    }
    let mode = b.run(&["stat", "-L", "-c", "%a", &root(b, "main")]).unwrap();
    assert_eq!(mode.trim(), ROOT_MODE);
    // It is a container like any other.
    b.run(&["ctr", "task", "pause", "main"]).unwrap();
    b.run(&["ctr", "task", "resume", "main"]).unwrap();
    let again = scenario.reference("pods/again:v1");
    checkpoint(scenario, b, "main", &again);
    scenario.wait_for_ticks(b, "main").unwrap();
    let operations = scenario.kyb_json(b, &["ps"]).unwrap().to_string();
    assert!(operations.contains("main"), "{operations}");
    scenario.remove(b, "main").unwrap();

    // Other containers of the class are runc's.
    let output = here.create("plain", here.pinned, &[]);
    assert!(output.status.success(), "{}", said(&output));
    let fresh = scenario.wait_for_ticks(b, "plain").unwrap();
    assert_ne!(fresh["boot_id_of_process"], staged.before["boot_id_of_process"]);
    scenario.remove(b, "plain").unwrap();
    assert_eq!(running(b, "criu"), []);
    staged.scenario.end().unwrap();
}

/// Allows a container's processes everything. Without the node's devices, which another node need
/// not have.
const MIGHTY: [&str; 3] =
    ["--privileged", "--privileged-without-host-devices", "--allow-new-privs"];

/// Stands in for CRIU, and leaves a word when a runtime asks it for something.
const CRIU: &str = "#!/bin/sh\n[ \"$1\" = swrk ] && : >/run/criu-ran\n\
                    exec /usr/sbin/criu.real \"$@\"\n";

/// The containers that do not get the dump have less than it in one thing each: were that let pass,
/// nothing else would be in the way. `/sys` and its cgroups are for writing in it, which its
/// specification must say.
#[test]
fn a_privileged_container_goes_on_as_a_privileged_one_and_no_other() {
    let staged = stage_on_both_of(start(), &MIGHTY);
    let filtered = [&MIGHTY[..], &["--seccomp"]].concat();
    let lesser: [(&[&str], &[&str]); 3] = [
        (
            &MIGHTY[2..],
            &["\"/sys\" is writable", "CAP_SYS_ADMIN", "which the new container has not"],
        ),
        (&MIGHTY[..2], &["its processes may gain privileges"]),
        (&filtered, &["its processes have no seccomp filter"]),
    ];
    staged.on_both(|spot| {
        let (node, name) = (spot.node, spot.node.name());
        replace_criu(node, CRIU);
        let ran = || node.path("/run/criu-ran").exists();
        for (options, reasons) in lesser {
            let output = spot.restore_with(options);
            let text = said(&output);
            assert!(!output.status.success(), "on {name}, {options:?}: {text}");
            for reason in ["refused (identity)"].iter().chain(reasons) {
                assert!(text.contains(reason), "on {name}, {options:?}: {reason}: {text}");
            }
            assert!(!ran(), "on {name}, {options:?}: CRIU ran");
            node.output(&["ctr", "container", "rm", "main"]).unwrap();
        }

        let output = spot.restore_with(&MIGHTY);
        assert!(output.status.success(), "on {name}: {}", said(&output));
        let after = spot.scenario.wait_for_ticks(node, "main").unwrap();
        assert_eq!(after["boot_id_of_process"], spot.before["boot_id_of_process"], "on {name}");
        assert!(ran(), "on {name}: who restored it?");
        // As an exec probe is run, by kybernate-runc.
        let exec = ["ctr", "task", "exec", "--exec-id", "look", "main"];
        let look = ["/workload", "status", "--state", "/state"];
        let told = node.told(&[&exec[..], &look].concat()).unwrap();
        assert!(told.contains("\"log_ok\":true"), "on {name}: {told}");
        spot.scenario.remove(node, "main").unwrap();
    });
    staged.scenario.end().unwrap();
}

/// As `seccompProfile` says: what was dumped under a filter of its own, that lets more through, is no match
/// for what containerd's refuses.
#[test]
fn a_filter_that_lets_more_through_is_refused() {
    let scenario = start();
    fs::write(scenario.testbed.share().join("lenient.json"), NO_IO_URING).unwrap();
    let lenient = ["--seccomp", "--seccomp-profile", "/srv/share/lenient.json"];
    let staged = stage_on_both_of(scenario, &lenient);
    staged.on_both(|spot| {
        let (node, name) = (spot.node, spot.node.name());
        let output = spot.restore_with(&["--seccomp"]);
        let text = said(&output);
        assert!(!output.status.success(), "on {name}: {text}");
        for told in ["refused (identity)", "unshare, userfaultfd", "clone(CLONE_NEWUSER)"] {
            assert!(text.contains(told), "on {name}: {told}: {text}");
        }
        node.output(&["ctr", "container", "rm", "main"]).unwrap();
        let output = spot.restore_with(&lenient);
        assert!(output.status.success(), "on {name}: {}", said(&output));
        let after = spot.scenario.wait_for_ticks(node, "main").unwrap();
        assert_eq!(after["boot_id_of_process"], spot.before["boot_id_of_process"], "on {name}");
        spot.scenario.remove(node, "main").unwrap();
    });
    staged.scenario.end().unwrap();
}

/// A directory of the node that others see mounts below, too, as all are where systemd is.
const MEDIA: &str = "/var/lib/kybernate/media";

/// As `mountPropagation: HostToContainer` says, and `None`.
#[test]
fn a_volume_follows_its_node_only_where_the_pod_wants_that() {
    let scenario = start();
    for node in [&scenario.testbed.a, &scenario.testbed.b] {
        node.run(&["mkdir", "-p", MEDIA]).unwrap();
        node.run(&["mount", "-t", "tmpfs", "media", MEDIA]).unwrap();
        node.run(&["mount", "--make-shared", MEDIA]).unwrap();
        node.run(&["mkdir", &format!("{MEDIA}/new")]).unwrap();
    }
    let volume =
        |propagation| format!("type=bind,src={MEDIA},dst=/media,options=rbind:{propagation}:rw");
    let (slave, private) = (volume("rslave"), volume("rprivate"));
    let staged = stage_on_both_of(scenario, &["--mount", &slave]);
    staged.on_both(|spot| {
        let (node, name) = (spot.node, spot.node.name());
        let create = |volume: &str| spot.restore_with(&["--mount", volume]);
        let output = create(&private);
        let text = said(&output);
        let reason = "\"/media\" would follow this node's mounts";
        assert!(!output.status.success() && text.contains(reason), "on {name}: {text}");
        node.output(&["ctr", "container", "rm", "main"]).unwrap();

        let output = create(&slave);
        assert!(output.status.success(), "on {name}: {}", said(&output));
        let after = spot.scenario.wait_for_ticks(node, "main").unwrap();
        assert_eq!(after["boot_id_of_process"], spot.before["boot_id_of_process"], "on {name}");
        let new = format!("{MEDIA}/new");
        node.run(&["mount", "-t", "tmpfs", "later", &new]).unwrap();
        fs::write(node.path(&new).join("file"), "later").unwrap();
        let seen = fs::read_to_string(node.path(&root(node, "main")).join("media/new/file"));
        assert_eq!(seen.unwrap(), "later", "on {name}");
        spot.scenario.remove(node, "main").unwrap();
    });
    staged.scenario.end().unwrap();
}

#[test]
fn what_cannot_be_restored_fails_or_starts_afresh_as_the_pod_wants() {
    let mut staged = stage_on_both();
    let base = staged.scenario.image();
    let other = format!("sha256:{}", "0".repeat(64));
    let unstaged = staged.pinned.split('@').next().unwrap();
    let unstaged = format!("restore.kybernate.io/main={unstaged}@{other}");
    let tagged = format!("restore.kybernate.io/main={}", staged.scenario.reference("pods/job:v1"));
    let wish = staged.here().wish();
    let create = |node: &Node, image: &str, annotations: &[&str]| {
        let workload = ["/workload", "run", "--state", "/state", "--mib", "24"];
        let mut command = command_of(node, [image, "main"], annotations, &[], &workload);
        command.stdin(Stdio::null()).output().unwrap()
    };
    at_once(&staged.scenario, |node| {
        node.run(&["ctr", "image", "pull", "--plain-http", &base]).unwrap();
        for (what, image, wish, reason) in [
            ("not staged", &staged.pinned, &unstaged, "is not staged on this node"),
            ("no digest", &staged.pinned, &tagged, "names no digest"),
            ("another image", &base, &wish, "is not the checkpoint"),
        ] {
            let output = create(node, image, &[wish]);
            let text = said(&output);
            assert!(!output.status.success() && text.contains(reason), "{what}: {text}");
            node.output(&["ctr", "container", "rm", "main"]).unwrap();
        }
        // A cold start is a start like any other.
        let output = create(node, &base, &[&unstaged, COLD]);
        assert!(output.status.success(), "{}", said(&output));
        let fresh = staged.scenario.wait_for_ticks(node, "main").unwrap();
        assert_ne!(fresh["boot_id_of_process"], staged.before["boot_id_of_process"]);
        staged.scenario.remove(node, "main").unwrap();
    });

    staged.on_both(is_not_begun_before_its_start);
    staged.on_both(begins_afresh_once);

    // Without an agent there is no checkpoint.
    drop((staged.scenario.agent_a.take(), staged.scenario.agent_b.take()));
    at_once(&staged.scenario, |node| {
        let output = create(node, &staged.pinned, &[&wish]);
        let text = said(&output);
        assert!(!output.status.success() && text.contains("failed to reach the agent"), "{text}");
    });
    staged.scenario.end().unwrap();
}

/// Returns the labels of a Pod's container `main`, as options of `ctr`.
fn of_pod(uid: &str) -> Vec<String> {
    let uid = format!("io.kubernetes.pod.uid={uid}");
    let labels = ["io.kubernetes.pod.namespace=default", &uid, "io.kubernetes.container.name=main"];
    labels.iter().flat_map(|label| ["--label", label]).map(str::to_owned).collect()
}

/// Names a checkpoint that is nowhere.
pub(crate) fn nowhere() -> String {
    format!("restore.kybernate.io/main=10.77.0.1:5000/none@sha256:{}", "0".repeat(64))
}

impl Spot<'_> {
    /// Prepares to create and start a container `main` of a Pod.
    pub(crate) fn command_in_pod(
        &self,
        uid: &str,
        named: [&str; 2],
        annotations: &[&str],
        options: &[&str],
    ) -> Command {
        let annotation = format!("io.kubernetes.cri.sandbox-uid={uid}");
        let annotations = [&[&*annotation], annotations].concat();
        let labels = of_pod(uid);
        let options = labels.iter().map(String::as_str).chain(options.iter().copied());
        let options: Vec<&str> = options.collect();
        let mut command = command_of(self.node, named, &annotations, &options, &WORKLOAD);
        command.stdin(Stdio::null());
        command
    }

    pub(crate) fn create_in_pod(
        &self,
        uid: &str,
        named: [&str; 2],
        annotations: &[&str],
        options: &[&str],
    ) -> Output {
        self.command_in_pod(uid, named, annotations, options).output().unwrap()
    }

    /// Has one created that is never started, and deleted.
    pub(crate) fn create_unstarted(
        &self,
        uid: &str,
        [image, id]: [&str; 2],
        annotations: &[&str],
        options: &[&str],
    ) {
        const PROGRAM: &str = "/usr/local/bin/no-start";
        let node = self.node;
        fs::write(node.path(PROGRAM), NO_START).unwrap();
        node.run(&["chmod", "755", PROGRAM]).unwrap();
        let options = [&["--runc-binary", PROGRAM], options].concat();
        let output = self.create_in_pod(uid, [image, id], annotations, &options);
        let text = said(&output);
        assert!(!output.status.success() && text.contains("start failed"), "{text}");
        node.output(&["ctr", "task", "rm", "-f", id]).unwrap();
        node.run(&["ctr", "container", "rm", id]).unwrap();
    }

    /// Returns what is noted about Pods' containers.
    pub(crate) fn noted(&self) -> String {
        self.node.run(&["ls", "/var/lib/kybernate/restored/default"]).unwrap()
    }

    /// Whether a container has begun afresh.
    pub(crate) fn is_afresh(&self, id: &str) -> bool {
        let status = self.scenario.wait_for_ticks(self.node, id).unwrap();
        status["boot_id_of_process"] != self.before["boot_id_of_process"]
    }

    /// Makes the Pod one that is there whatever becomes of its container: nothing of it is forgotten.
    pub(crate) fn begin_pod(&self, uid: &str, image: &str) {
        let labels = of_pod(uid);
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        self.node
            .run(&[&["ctr", "container", "create"], &labels[..], &[image, "other"]].concat())
            .unwrap();
    }
}

/// A Pod's container that could not be restored, and began afresh, is not restored when it is created again,
/// unless its Pod wants that: its data has gone on.
fn begins_afresh_once(spot: Spot<'_>) {
    let Spot { scenario, node, pinned, .. } = spot;
    let (base, wish) = (scenario.image(), spot.wish());
    spot.begin_pod("0-7", &base);
    let first = spot.create_in_pod("0-7", [&base, "main-0"], &[&nowhere(), COLD], &[]);
    assert!(first.status.success() && spot.is_afresh("main-0"), "{}", said(&first));
    scenario.remove(node, "main-0").unwrap();
    let fail = "on-restart.kybernate.io/main=fail";
    let fails = spot.create_in_pod("0-7", [pinned, "main-1"], &[&wish, COLD, fail], &[]);
    let text = said(&fails);
    assert!(!fails.status.success() && text.contains("it began afresh before"), "{text}");
    node.output(&["ctr", "container", "rm", "main-1"]).unwrap();
    let again = spot.create_in_pod("0-7", [pinned, "main-2"], &[&wish, COLD], &[]);
    assert!(again.status.success() && spot.is_afresh("main-2"), "{}", said(&again));
    scenario.remove(node, "main-2").unwrap();
    let restore = "on-restart.kybernate.io/main=restore";
    let wanted = spot.create_in_pod("0-7", [pinned, "main-3"], &[&wish, restore], &[]);
    assert!(wanted.status.success() && !spot.is_afresh("main-3"), "{}", said(&wanted));
    scenario.remove(node, "main-3").unwrap();
    node.run(&["ctr", "container", "rm", "other"]).unwrap();
}

/// kybernate-runc, but that nothing is started.
const NO_START: &str = "#!/bin/sh\n\
    for word; do [ \"$word\" != start ] || { echo not today >&2; exit 1; }; done\n\
    exec /srv/bin/kybernate-runc \"$@\"\n";

/// What was created in a Pod, and ended before it was started, has not begun: it is restored later.
fn is_not_begun_before_its_start(spot: Spot<'_>) {
    let Spot { scenario, node, pinned, .. } = spot;
    let (base, wish) = (scenario.image(), spot.wish());
    spot.begin_pod("0-8", &base);
    for (image, annotations) in [(&*base, &[&*nowhere(), COLD][..]), (pinned, &[&*wish])] {
        spot.create_unstarted("0-8", [image, "main-0"], annotations, &[]);
        assert_eq!(spot.noted(), "", "{annotations:?}");
    }
    let restored = spot.create_in_pod("0-8", [pinned, "main-1"], &[&wish], &[]);
    assert!(restored.status.success() && !spot.is_afresh("main-1"), "{}", said(&restored));
    scenario.remove(node, "main-1").unwrap();
    node.run(&["ctr", "container", "rm", "other"]).unwrap();
}
