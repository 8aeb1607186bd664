//! The table of workloads in the agent's README.

use std::path::Path;

use fs_err as fs;

use super::{own, programs, servers};
use crate::cluster;
use crate::cluster::guests::through_a_pod;
use crate::journeys::{COUNTER, FACTS, WAYS};

const BEGIN: &str = "<!-- workloads -->\n";
const END: &str = "<!-- end of workloads -->\n";

/// The table is made of what is run: `UPDATE=1 cargo test` writes it.
#[test]
fn the_readme_lists_every_workload() {
    let mut table =
        "| workload | taken, restored | through a Pod | the same afterwards | refused |\n"
            .to_owned();
    table += "|---|---|---|---|---|\n";
    let mut line = |name: &str, places: [&str; 2], proven: &str, refused: &str| {
        let [places, pods] = places;
        table.extend([
            "| ", name, " | ", places, " | ", pods, " | ", proven, " | ", refused, " |\n",
        ]);
    };
    let ways = WAYS.map(|way| way.join(", ")).join("; ");
    let proven = FACTS.map(|(_, proven)| proven).join(", ");
    let proven = format!("its count, {proven}");
    line(COUNTER, [&ways, &cluster::WAY.join(", ")], &proven, "");
    for workload in own::WORKLOADS.iter().chain(programs::WORKLOADS) {
        let unless = workload.unless.map(|(finding, when)| format!("{when} (`{finding}`)"));
        let places = ["a, b", through_a_pod(workload.id)];
        line(workload.name, places, workload.proven, &unless.unwrap_or_default());
    }
    line(own::HUGE.name, ["a, b", ""], own::HUGE.proven, "");
    line(own::HEAP.0, ["a, b", through_a_pod("heap")], own::HEAP.1, "");
    let refused = format!("on a, with Linux 6.16 and later (`{}`)", servers::REFUSED);
    for server in servers::ALL {
        line(server.name, ["a, b; b, b", through_a_pod(server.id)], server.proven, &refused);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/README.md");
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let expected = format!("{before}{BEGIN}{table}{END}{after}");
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &expected).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap();
    assert_eq!(written, expected, "run `UPDATE=1 cargo test` and commit {}", path.display());
}
