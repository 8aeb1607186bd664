//! The testbed itself.

use std::collections::BTreeSet;
use std::path::Path;

use fs_err as fs;
use kybernate_conformance::testbed::{HUB_ADDRESS, Testbed, preflight};

use crate::harness::bin;

/// Mounts, cgroups and network namespaces of this machine that belong to the testbed at `directory`.
fn traces(directory: &Path, pids: &[u32]) -> BTreeSet<String> {
    let place = directory.display().to_string();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mounts = mounts.lines().filter(|line| line.contains(&place)).map(str::to_owned);
    let tag = format!("kybernate-{}-", directory.file_name().unwrap().to_str().unwrap());
    let cgroups = fs::read_dir("/sys/fs/cgroup")
        .unwrap()
        .flatten()
        .flat_map(|hierarchy| fs::read_dir(hierarchy.path()).into_iter().flatten().flatten());
    let cgroups =
        cgroups.map(|entry| entry.path().display().to_string()).filter(|path| path.contains(&tag));
    let processes = pids
        .iter()
        .filter(|pid| Path::new(&format!("/proc/{pid}")).exists())
        .map(|pid| format!("process {pid}"));
    let left = directory.exists().then(|| place.clone());
    mounts.chain(cgroups).chain(processes).chain(left).collect()
}

#[test]
fn two_nodes_see_each_other_and_leave_nothing_behind() {
    preflight().unwrap();
    let testbed = Testbed::start(&bin(), &|text| println!("{text}")).unwrap();
    for (node, version) in [(&testbed.a, "1.7."), (&testbed.b, "2.1.")] {
        let found = node.run(&["ctr", "version"]).unwrap();
        assert!(found.contains(version), "{found}");
        // It says "Looks good" on standard error.
        let checked = node.output(&["criu", "check"]).unwrap();
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
        let routes = node.run(&["ip", "-4", "route"]).unwrap();
        assert!(routes.contains("10.77.0.0/24"), "{routes}");
        // Nothing listens, so the hub refuses; an unreachable hub would time out (28).
        let url = format!("http://{HUB_ADDRESS}:9/");
        let output = node.output(&["curl", "-s", "-m", "5", &url]).unwrap();
        assert_eq!(output.status.code(), Some(7));
    }
    let mut pids = vec![testbed.hub.pid()];
    for node in [&testbed.a, &testbed.b] {
        pids.extend([node.pid(), node.init()]);
    }
    let directory = testbed.private();
    assert!(traces(&directory, &pids).len() > pids.len(), "the probe sees nothing");
    testbed.end().unwrap();
    assert_eq!(traces(&directory, &pids), BTreeSet::new());
}
