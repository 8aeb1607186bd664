//! What the kernel of this machine cannot show, in an emulated one whose kernel can.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a failed step here is a failed test, and its words are wanted"
)]

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use kybernate_conformance::root::{self, Release};
use serde_json::Value;

const CLI: &str = env!("CARGO_BIN_EXE_kybernate-conformance");
/// One at a time: each of them keeps a processor busy.
static TURN: Mutex<()> = Mutex::new(());

/// Runs a program in the machine. What it says is ours to tell when it fails.
fn machine(words: &[&OsStr]) -> Output {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // Ends when we are killed, and the machine with it.
    let mut machine = Command::new("setpriv");
    machine.args(["--pdeathsig", "KILL", "--", CLI, "machine", "--"]).args(words);
    machine.output().unwrap()
}

fn shell(script: &str) -> Output {
    machine(&["sh", "-c", script].map(OsStr::new))
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&*output.stdout, &*output.stderr].concat()).into_owned()
}

/// Builds the end-to-end tests with all the programs they run, and returns where they are.
fn end_to_end_tests() -> PathBuf {
    // All targets: the same features as this test was built with, so nothing is built twice.
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--workspace", "--all-targets", "--locked", "--message-format=json"]);
    if CLI.contains("/release/") {
        cargo.arg("--release");
    }
    let built = cargo.output().unwrap();
    assert!(built.status.success(), "the programs do not build: {}", said(&built));
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let of = |message: &Value| {
        let found = message.get("manifest_path")? == manifest
            && message.pointer("/target/name")? == "it"
            && message.pointer("/target/kind/0")? == "test";
        found.then(|| message.get("executable")?.as_str().map(PathBuf::from))?
    };
    let text = String::from_utf8(built.stdout).unwrap();
    let mut messages = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    messages.find_map(|message| of(&message)).unwrap()
}

/// Runs end-to-end tests in the machine, in one boot, by their names as `it --list` has them. They
/// must exist and succeed.
fn in_the_machine(names: &[&str]) {
    let tests = end_to_end_tests();
    // It has no network to make them.
    for release in [Release::Trixie, Release::Forky] {
        root::ensure(release, &|text| println!("{text}")).unwrap();
    }
    let words = [&["--exact", "--nocapture", "--test-threads=1"], names].concat();
    let words = words.into_iter().map(OsStr::new);
    let output = machine(&[tests.as_os_str()].into_iter().chain(words).collect::<Vec<_>>());
    all_passed(&output, names);
}

/// Runs end-to-end tests where only cgroups of version 2 are seen, by this machine's own kernel. Its
/// controllers may be version 1's: limits are not shown there, but freezers and who is in a cgroup.
fn on_cgroups_of_version_2(names: &[&str]) {
    let tests = end_to_end_tests();
    let script = "mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec \"$@\"";
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", "unshare", "--mount", "--propagation", "private"]);
    command.args(["sh", "-c", script, "sh"]).arg(tests);
    command.args(["--exact", "--test-threads=2"]).args(names);
    all_passed(&command.output().unwrap(), names);
}

fn all_passed(output: &Output, names: &[&str]) {
    let text = said(output);
    assert!(output.status.success(), "{text}");
    let passed = format!("{} passed; 0 failed; 0 ignored", names.len());
    assert!(text.contains(&passed), "not all of {names:?} were run: {text}");
}

#[test]
fn the_machine_has_the_kernel_of_users_nodes() {
    root::ensure(Release::Trixie, &|text| println!("{text}")).unwrap();
    let root = root::cache().join("roots").join(Release::Trixie.name());
    let written = root::cache().join("written-in-the-machine");
    let output = shell(&format!(
        "pwd >&2
        uname -r
        stat -f -c %T /sys/fs/cgroup
        cat /sys/module/apparmor/parameters/enabled
        grep CapEff /proc/self/status
        cd '{root}' && mount -t proc proc proc && mount -t tmpfs tmpfs tmp &&
            mount -t tmpfs tmpfs run && mount --rbind /dev dev &&
            chroot . criu check --feature mem_dirty_track
        echo written >'{written}' && cat '{written}'
        exit 7",
        root = root.display(),
        written = written.display(),
    ));
    let text = said(&output);
    assert_eq!(output.status.code(), Some(7), "{text}");
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = out.lines();
    let release = lines.next().unwrap();
    assert!(release.starts_with("6.12.") && release.contains("+deb13"), "{text}");
    assert_eq!(
        lines.collect::<Vec<_>>(),
        ["cgroup2fs", "Y", "CapEff:\t000001ffffffffff", "mem_dirty_track is supported", "written"],
        "{text}"
    );
    let here = std::env::current_dir().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), format!("{}\n", here.display()));
    assert!(!written.exists(), "what is written there is here, too");
}

#[test]
fn a_machine_that_dies_says_what_its_kernel_said() {
    let output = shell("echo c >/proc/sysrq-trigger");
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("the machine ended before its command"), "{text}");
    assert!(text.contains("Kernel panic - not syncing: sysrq triggered crash"), "{text}");
}

#[test]
fn agents_that_die_leave_nothing_on_cgroups_of_version_2() {
    on_cgroups_of_version_2(&[
        "failures::claims::a_pods_container_is_restored_when_the_agent_dies_meanwhile",
        "failures::deaths::the_source_runs_on_whenever_the_agent_dies",
        "failures::pods::a_pods_restore_that_hangs_or_is_killed_leaves_nothing",
        "failures::restores::nothing_half_made_is_left_when_the_agent_dies_in_a_restore",
        "suspensions::a_dump_that_is_cut_short_leaves_it_suspended",
        "suspensions::a_suspended_container_stands_still_until_it_is_resumed",
    ]);
}

#[test]
fn memory_is_copied_before_the_pause() {
    in_the_machine(&["pre_copies::memory_is_copied_before_the_pause_where_the_kernel_tracks_it"]);
}

/// Its kernel has `AppArmor`, as those of most users' nodes.
#[test]
fn who_was_confined_is_confined_again() {
    in_the_machine(&["apparmor::who_was_confined_is_confined_again"]);
}

/// Its kernel lets CRIU 4.1 take internet sockets.
#[test]
fn servers_come_back_from_an_older_node() {
    in_the_machine(&["workloads::servers::servers_go_from_an_older_node_to_a_newer_one"]);
}
