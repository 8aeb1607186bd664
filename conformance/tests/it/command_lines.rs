//! runc's command line, as kybernate-runc has it: whatever runc says and does, it says and does too.

use std::process::{Output, Stdio};

use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;

use crate::harness::{at_once, said, start};

/// Commands in the lives of three containers of a bundle, and others. Those with a `!` must fail; in a
/// word, `:` is a space.
const CALLS: &[&str] = &[
    "--version",
    "--help",
    "help create",
    "features",
    "! nonsense",
    "! --nonsense state one",
    "! create",
    "! create --nonsense one",
    "! create --bundle /nowhere one",
    "! create --bundle BUNDLE ../one",
    "! state one",
    "! start one",
    "! delete one",
    "! kill one KILL",
    "delete --force one",
    "list --quiet",
    "create --bundle BUNDLE --no-pivot --pid-file /tmp/pid one",
    "! create --bundle BUNDLE one",
    "state one",
    "list",
    "list --format json",
    "ps --format json one",
    "start one",
    "! start one",
    "exec one busybox true",
    "! exec one busybox false",
    "exec --env WORD=said --cwd /bin one busybox sh -c pwd;busybox:echo:$WORD",
    "exec --detach --pid-file /tmp/exec-pid one busybox sleep 1000",
    "update --pids-limit 100 one",
    "events --stats one",
    "pause one",
    "state one",
    "resume one",
    "! resume one",
    "! delete one",
    "kill one TERM",
    "kill one KILL",
    "delete --force one",
    "create --bundle BUNDLE two",
    "delete -f two",
    "run --detach --bundle BUNDLE three",
    "! checkpoint four",
    "checkpoint --image-path /tmp/images --work-path /tmp/work --leave-running three",
    "delete --force three",
    "restore --detach --image-path /tmp/images --work-path /tmp/work --bundle BUNDLE three",
    "exec three busybox true",
    "kill --all three KILL",
    "delete --force three",
    "list --quiet",
];

/// Makes a bundle of the workload's image, whose container does nothing. (`sleep` would end when CRIU
/// lets go of it: its system call is interrupted.)
fn make_bundle(scenario: &Scenario, node: &Node) {
    let image = scenario.image();
    node.run(&["ctr", "image", "pull", "--plain-http", &image]).unwrap();
    let script = format!(
        "mkdir -p /tmp/bundle/rootfs && cd /tmp/bundle && runc spec &&
         ctr image mount --rw {image} /tmp/bundle/rootfs &&
         sed -i -e 's/\"terminal\": true/\"terminal\": false/' -e 's|\"sh\"|\"/workload\", \"pause\"|' \
             config.json"
    );
    node.run(&["sh", "-c", &script]).unwrap();
}

/// Takes a container through its life, and returns what was said to each call. Numbers and what else
/// differs each time are the same in it.
fn life(node: &Node, runtime: &str) -> Vec<String> {
    let script = "rm -rf /tmp/images /tmp/work /tmp/runc /tmp/pid /tmp/exec-pid; mkdir /tmp/images /tmp/runc";
    node.run(&["sh", "-c", script]).unwrap();
    let call = |line: &&str| {
        let fails = line.starts_with("! ");
        let line = line.trim_start_matches("! ").replace("BUNDLE", "/tmp/bundle");
        let words: Vec<String> = line.split(' ').map(|word| word.replace(':', " ")).collect();
        let words = words.iter().map(String::as_str);
        let words: Vec<&str> = [runtime, "--root", "/tmp/runc"].into_iter().chain(words).collect();
        // What runs on would hold our pipes.
        let mut command = node.command(&words);
        let output = if line.contains("--detach")
            || line.starts_with("create")
            || line.starts_with("restore")
        {
            let status =
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
            Output { status: status.unwrap(), stdout: Vec::new(), stderr: Vec::new() }
        } else {
            command.stdin(Stdio::null()).output().unwrap()
        };
        assert_eq!(!output.status.success(), fails, "{runtime} {line}: {}", said(&output));
        format!("{line}: {:?} {}", output.status.code(), alike(&said(&output)))
    };
    CALLS.iter().map(call).collect()
}

/// Returns a text with one `0` for each number in it, and one space between words: a table's columns
/// are as wide as its numbers. How much memory caches files is left out where there is none.
fn alike(text: &str) -> String {
    let mut alike = String::new();
    for letter in text.chars() {
        let letter = if letter.is_ascii_digit() { '0' } else { letter };
        if !(matches!(letter, '0' | ' ') && alike.ends_with(letter)) {
            alike.push(letter);
        }
    }
    alike.replace("\"cache\":0,", "")
}

#[test]
fn every_command_is_runcs() {
    let scenario = start();
    at_once(&scenario, |node| {
        make_bundle(&scenario, node);
        let (theirs, ours) = (life(node, "runc"), life(node, "/srv/bin/kybernate-runc"));
        for (theirs, ours) in theirs.iter().zip(&ours) {
            assert_eq!(ours, theirs, "on {}", node.name());
        }
        node.run(&["umount", "/tmp/bundle/rootfs"]).unwrap();
    });
    scenario.end().unwrap();
}
