//! Volumes below a link of the checkpoint's image, in which `/var/run` leads to `/run`.

use std::process::{Output, Stdio};

use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;

use crate::failures::victims::END_LIMIT;
use crate::harness::{
    at_once, checkpoint, next_agents, refused, refused_here, restore, said, start,
};
use crate::pods::{CONFIG, Spot, Staged, WORKLOAD, command_of, make_ready, root, stage_on_both_of};

/// Directories of each node.
const SECRET: &str = "/var/lib/kybernate/secret";
const DATA: &str = "/var/lib/kybernate/data";

/// A file system in memory, which a dump fills.
const MEMORY: &str = "type=tmpfs,src=tmpfs,dst=/own,options=nosuid:nodev";

fn volume(source: &str, place: &str, rights: &str) -> String {
    format!("type=bind,src={source},dst={place},options=rbind:rprivate:{rights}")
}

/// Stages a checkpoint of a container that had one volume.
fn staged(volume: &str) -> Staged {
    let scenario = start();
    let script = format!("mkdir -p {SECRET} {DATA} && echo node >{SECRET}/key");
    at_once(&scenario, |node| drop(node.run(&["sh", "-c", &script]).unwrap()));
    stage_on_both_of(scenario, &["--mount", volume])
}

fn create(spot: Spot<'_>, volumes: &[String]) -> Output {
    create_on(spot.node, spot.pinned, volumes)
}

fn create_on(node: &Node, pinned: &str, volumes: &[String]) -> Output {
    let options: Vec<_> = volumes.iter().flat_map(|volume| ["--mount", volume]).collect();
    let wish = format!("restore.kybernate.io/main={pinned}");
    let mut create = command_of(node, [pinned, "main"], &[&wish], &options, &WORKLOAD);
    create.stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_volume_below_a_link_is_known_among_others() {
    let token = volume(SECRET, "/var/run/token", "ro");
    let staged = staged(&token);
    staged.on_both(|spot| {
        let (node, name) = (spot.node, spot.node.name());
        let goes_on = |output: &Output, id: &str| {
            assert!(output.status.success(), "on {name}: {}", said(output));
            let after = spot.scenario.wait_for_ticks(node, id).unwrap();
            assert_eq!(after["boot_id_of_process"], spot.before["boot_id_of_process"], "on {name}");
            let seen = format!("{}/run/token", root(node, id));
            let key = node.run(&["cat", &format!("{seen}/key")]).unwrap();
            assert_eq!(key, "node\n", "on {name}");
            let write = node.output(&["touch", &format!("{seen}/new")]).unwrap();
            assert!(said(&write).contains("Read-only file system"), "on {name}: {}", said(&write));
            spot.scenario.remove(node, id).unwrap();
        };
        // One more than the source had, which it does not see.
        let output = create(spot, &[token.clone(), volume(DATA, "/extra", "rw")]);
        goes_on(&output, "main");
        let allow = ["--allow-mount", &format!("{SECRET}:/var/run/token:ro")];
        goes_on(&restore(spot.scenario, node, spot.pinned, "again", &allow), "again");
        let elsewhere = ["--allow-mount", &format!("{SECRET}:/token:ro")];
        let allow = [&allow[..], &elsewhere].concat();
        refused(spot.scenario, node, spot.pinned, &allow, "\"/token\" is read-only in new");
    });
    staged.scenario.end().unwrap();
}

/// CRIU would mount the one of two that runc tells it of last, with the rights of the other.
#[test]
fn no_link_leads_a_volume_to_the_name_of_another() {
    let data = volume(DATA, "/run/data", "rw");
    let staged = staged(&data);
    let reason =
        "leads \"/var/run/data\" to \"/run/data\", where the new container has \"/run/data\"";
    staged.on_both(|spot| {
        let (node, name) = (spot.node, spot.node.name());
        let output = create(spot, &[data.clone(), volume(SECRET, "/var/run/data", "ro")]);
        let text = said(&output);
        assert!(!output.status.success() && text.contains(reason), "on {name}: {text}");
        node.output(&["ctr", "container", "rm", "main"]).unwrap();
        let allow = [format!("{DATA}:/run/data"), format!("{SECRET}:/var/run/data")];
        let allow = allow.iter().flat_map(|mount| ["--allow-mount", mount]).collect::<Vec<_>>();
        refused(spot.scenario, node, spot.pinned, &allow, reason);
    });
    staged.scenario.end().unwrap();
}

/// runc would mount a volume where a link of another one's content leads, and may leave it there.
#[test]
fn no_captured_mount_leads_a_volume_elsewhere() {
    let mut scenario = start();
    next_agents(&mut scenario, CONFIG);
    at_once(&scenario, |node| {
        let script = format!("mkdir -p {SECRET} {DATA}/there && ln -s /elsewhere {DATA}/v");
        node.run(&["sh", "-c", &script]).unwrap();
        let data = ["--mount", &volume(DATA, "/a", "rw")];
        scenario.run_workload(node, "job", 16, &data).unwrap();
        let reference = scenario.reference(&format!("names/{}:v1", node.name()));
        let key = format!("node-{}", node.name());
        let take = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
        let taken = scenario.kyb_json(node, &[&take[..], &["--capture-mount", "/a"]].concat());
        let pinned = format!("{reference}@{}", taken.unwrap()["digest"].as_str().unwrap());
        for (place, reason) in [
            ("/a/v", "\"/a/v\" is behind a link in what is mounted on \"/a\""),
            ("/a/v/x", "\"/a/v/x\" is behind a link in what is mounted on \"/a\""),
        ] {
            let allow = ["--allow-mount", &format!("{SECRET}:{place}:ro")];
            refused(&scenario, node, &reference, &allow, reason);
        }
        scenario.remove(node, "job").unwrap();
        let output = restore(&scenario, node, &reference, "job", &[]);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "job").unwrap();
        scenario.remove(node, "job").unwrap();

        // A pod's emptyDir is filled with it: no link is in there before.
        make_ready(&scenario, node, &pinned);
        let filled = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/a";
        node.run(&["mkdir", "-p", filled]).unwrap();
        let own = volume(filled, "/a", "rw");
        let output = create_on(node, &pinned, &[own.clone(), volume(SECRET, "/a/v", "rw")]);
        let (text, reason) =
            (said(&output), "\"/a/v\" is behind a link in what is mounted on \"/a\"");
        assert!(!output.status.success() && text.contains(reason), "{text}");
        node.output(&["ctr", "container", "rm", "main"]).unwrap();
        assert_eq!(node.run(&["ls", "-A", filled]).unwrap(), "", "it is still filled");
        let output = create_on(node, &pinned, &[own]);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "main").unwrap();
        assert_eq!(node.run(&["readlink", &format!("{filled}/v")]).unwrap(), "/elsewhere\n");
        scenario.remove(node, "main").unwrap();
    });
    scenario.end().unwrap();
}

/// CRIU opens each file by its path, as root, while it has directories of the node open: a link that has come
/// into the way since would lead it there.
#[test]
fn no_link_leads_an_open_file_elsewhere() {
    let mut scenario = start();
    next_agents(&mut scenario, CONFIG);
    let image = scenario.image();
    at_once(&scenario, |node| {
        node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
        let sh = |script: &str| node.run(&["sh", "-c", script]).unwrap();
        sh(&format!("mkdir -p {SECRET} {DATA}/d && echo node >{SECRET}/open"));
        let data = volume(DATA, "/data", "rw");
        let holds = "mkdir /own/d; exec 8<>/own/d/open 7<>/data/d/open; echo own >&7; \
                     while true; do sleep 0.1; done";
        let more = ["ctr", "run", "-d", "--mount", &data, "--mount", MEMORY];
        node.run(&[&more[..], &[&image, "job", "sh", "-c", holds]].concat()).unwrap();
        assert!(wait_until(END_LIMIT, || sh(&format!("cat {DATA}/d/open || true")) == "own\n"));
        let reference = scenario.reference(&format!("names/open-{}:v1", node.name()));
        let pinned = format!("{reference}@{}", checkpoint(&scenario, node, "job", &reference));
        scenario.remove(node, "job").unwrap();
        make_ready(&scenario, node, &pinned);

        let allow = ["--allow-mount", &format!("{DATA}:/data")];
        let reason = "a link leads its open file \"/data/d/open\" elsewhere";
        sh(&format!("mv {DATA}/d {DATA}/real"));
        for target in [SECRET, "real", "/proc/self/fd/126/../..", "/proc/1/root/var"] {
            sh(&format!("ln -sfn {target} {DATA}/d"));
            refused(&scenario, node, &reference, &allow, reason);
            let output = create_on(node, &pinned, std::slice::from_ref(&data));
            let text = said(&output);
            assert!(!output.status.success() && text.contains(reason), "{target}: {text}");
            node.output(&["ctr", "container", "rm", "main"]).unwrap();
        }
        sh(&format!("rm {DATA}/d && mv {DATA}/real {DATA}/d"));

        // Nor in what the dump itself has in memory.
        let forged = forge(&scenario, node, [&reference, &image]);
        let reason = "its own files have a link, \"/own/d\", on the way";
        let known = ["--allow-unknown-facts", "--allow-new-privileges"];
        refused(&scenario, node, &forged, &[&allow[..], &known].concat(), reason);
        let output = restore(&scenario, node, &reference, "job", &allow);
        assert!(output.status.success(), "{}", said(&output));
        let held = sh(&format!("cat {}/fd/7", root(node, "job").trim_end_matches("/root")));
        assert_eq!((&*held, &*sh(&format!("cat {SECRET}/open"))), ("own\n", "node\n"));
        let linked = sh(&format!("readlink {}/fd/8", root(node, "job").trim_end_matches("/root")));
        assert_eq!(linked, "/own/d/open\n");
        scenario.remove(node, "job").unwrap();
    });
    scenario.end().unwrap();
}

/// Makes a checkpoint of another one that has a link in memory, where a file is open.
fn forge(scenario: &Scenario, node: &Node, [reference, image]: [&str; 2]) -> String {
    let key = format!("/srv/share/node-{}.key", node.name());
    let public = format!("/srv/share/node-{}.pub", node.name());
    let mount = format!("/data={DATA}");
    let words = ["export", reference, "/tmp/own.tar", "--format", "cri", "--key", &public];
    scenario.kyb_json(node, &[&words[..], &["--plain-http", "--mount", &mount]].concat()).unwrap();
    let script = format!(
        "set -e; mkdir -p /tmp/own /tmp/led; cd /tmp/own; tar -xf ../own.tar; ln -s {SECRET} ../led/d
        for one in checkpoint/tmpfs-dev-*; do
            if tar -tzf $one ./d/open >/dev/null 2>&1; then tar -C ../led -czf $one .; fi
        done
        tar -cf ../forged.tar *; rm -r ../led"
    );
    node.run(&["sh", "-c", &script]).unwrap();
    let forged = scenario.reference(&format!("names/forged-{}:v1", node.name()));
    let words = ["import", "/tmp/forged.tar", &forged, "--format", "cri", "--image", image];
    let signed = ["--namespace", "default", "--sign-key", &key, "--plain-http"];
    scenario.kyb_json(node, &[&words[..], &signed].concat()).unwrap();
    forged
}

/// CRIU would take what is behind the colon for what is mounted from the node. Who restores what is provided
/// asks no agent, and runc would make a place where a link leads it, in what is for reading only.
#[test]
fn no_link_ends_a_name_or_leads_what_is_provided() {
    let scenario = start();
    at_once(&scenario, |node| {
        node.run(&["mkdir", "-p", SECRET, DATA]).unwrap();
        let secret = ["--mount", &volume(SECRET, "/ro", "ro")];
        scenario.run_workload(node, "job", 16, &secret).unwrap();
        let root = root(node, "job");
        node.run(&["ln", "-s", "/ro/made", &format!("{root}/new")]).unwrap();
        let before = scenario.traces(node).unwrap();
        let reference = scenario.reference(&format!("names/led-{}:v1", node.name()));
        checkpoint(&scenario, node, "job", &reference);
        let read_only = ["--allow-mount", &format!("{SECRET}:/ro:ro")];
        let provide = |reference: &str, more: &[&str]| {
            let words = ["provide", reference, "--plain-http"];
            scenario.kyb(node, &[&words[..], &read_only, more].concat()).unwrap()
        };
        let led = provide(&reference, &["--allow-mount", &format!("{DATA}:/new")]);
        refused_here(&led, "its link \"new\" is on the way to \"/new\"");
        assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
        let output = provide(&reference, &["--allow-mount", &format!("{DATA}:/newer")]);
        assert!(output.status.success(), "{}", said(&output));
        node.run(&["ctr", "image", "rm", "--sync", &format!("{reference}-containerd")]).unwrap();

        node.run(&["ln", "-s", "/x]:/run", &format!("{root}/odd")]).unwrap();
        let reference = scenario.reference(&format!("names/odd-{}:v1", node.name()));
        checkpoint(&scenario, node, "job", &reference);
        let allow = [read_only[0], read_only[1], "--allow-mount", &format!("{SECRET}:/odd:ro")];
        refused(&scenario, node, &reference, &allow, "CRIU takes a part for the name");
        let before = scenario.traces(node).unwrap();
        let output = provide(&reference, &[]);
        refused_here(&output, "its link \"odd\" leads to a name with ']'");
        assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
        scenario.remove(node, "job").unwrap();
        let output = restore(&scenario, node, &reference, "job", &read_only);
        assert!(output.status.success(), "{}", said(&output));
        scenario.wait_for_ticks(node, "job").unwrap();
    });
    scenario.end().unwrap();
}
