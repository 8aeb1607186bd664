//! What the kernel of this machine cannot show, in an emulated one whose kernel can.

use std::ffi::OsStr;
use std::process::{Command, Output};
use std::time::Instant;

use kybernate_conformance::machine::INSIDE;
use kybernate_conformance::programs::{self, Programs};
use kybernate_conformance::root::{self, Release};

use crate::connections::moves;
use crate::failures::deaths::rounds;
use crate::harness::{all_passed, bin, next_agents, said};
use crate::pods::CONFIG;
use crate::workloads::servers;
use crate::{apparmor, pre_copies, workloads};

/// The test that shows it, which shows nothing elsewhere.
const SHOWS: &str = "emulated::is_shown_in_the_machine";

/// Runs a program in the machine. What it says is ours to tell when it fails.
fn machine(words: &[&OsStr]) -> Output {
    // Ends when we are killed, and the machine with it.
    let mut machine = Command::new("setpriv");
    machine.args(["--pdeathsig", "KILL", "--"]).arg(bin().join("kybernate-conformance"));
    machine.args(["machine", "--"]).args(words).output().unwrap()
}

fn shell(script: &str) -> Output {
    machine(&["sh", "-c", script].map(OsStr::new))
}

#[test]
fn what_only_another_kernel_shows() {
    // It has no network to make them.
    let say = |text: &str| println!("{text}");
    for release in [Release::Trixie, Release::Forky] {
        root::ensure(release, &say).unwrap();
    }
    programs::ensure(Programs::Servers, &say).unwrap();
    let tests = std::env::current_exe().unwrap();
    let words = ["--exact", "--nocapture", SHOWS].map(OsStr::new);
    all_passed(&machine(&[&[tests.as_os_str()], &words[..]].concat()), &[SHOWS]);
}

/// By one pair of nodes: to start them takes as long there as to show something.
#[test]
fn is_shown_in_the_machine() {
    if std::env::var_os(INSIDE).is_none() {
        println!("SKIPPED: this is not the emulated machine");
        return;
    }
    let began = Instant::now();
    let shown = |what| println!("{what} after {:.0} s", began.elapsed().as_secs_f64());
    let (mut scenario, image) = workloads::programs::start(Programs::Servers);
    next_agents(&mut scenario, &[CONFIG, pre_copies::HOOKS].concat());
    shown("both nodes");
    // There is AppArmor, as on most users' nodes.
    apparmor::who_was_confined_is_confined_again(&scenario);
    shown("profiles of AppArmor");
    // The kernel tracks which pages are written to, and withholds no capability.
    pre_copies::memory_is_copied_before_the_pause(&scenario);
    shown("memory before the pause");
    // CRIU 4.1 may take internet sockets.
    servers::servers_go_from_an_older_node_to_a_newer_one(&scenario, &image);
    shown("servers");
    moves::a_connection_goes_on_on_an_older_node(&scenario);
    shown("a connection");
    rounds::the_source_runs_on_whoever_dies_in_a_round(&mut scenario);
    shown("deaths in rounds");
    scenario.end().unwrap();
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
