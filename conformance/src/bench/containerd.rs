//! containerd's own way: `ctr container checkpoint`, `image push`, `image pull`, `container restore`.
//!
//! It has to end where it began: an index that containerd 1.7 wrote is "media type not found" to
//! containerd 2.1. So that the pull is one, image and content are removed before it; the base
//! image's layers stay, as they do on a node that has run the image.

use std::time::Instant;

use super::{Bench, Leg, Meter};

/// Takes a checkpoint and pushes it.
pub(super) fn push(bench: &Bench<'_>, meter: &Meter<'_>, id: &str) -> anyhow::Result<Leg> {
    let reference = reference(bench, id);
    let checkpoint =
        ["ctr", "container", "checkpoint", "--task", "--rw", "--image", id, &reference];
    let push = ["ctr", "image", "push", "--plain-http", &reference];
    steps(meter, &[("checkpoint", &checkpoint), ("push", &push)])
}

/// Pulls a checkpoint and restores it.
pub(super) fn restore(bench: &Bench<'_>, meter: &Meter<'_>, id: &str) -> anyhow::Result<Leg> {
    let reference = reference(bench, id);
    let pull = ["ctr", "image", "pull", "--plain-http", &reference];
    let restore = ["ctr", "container", "restore", "--rw", "--live", id, &reference];
    steps(meter, &[("pull", &pull), ("restore", &restore)])
}

/// Removes the checkpoint's image and its content from the node.
pub(super) fn forget(bench: &Bench<'_>, id: &str) -> anyhow::Result<()> {
    let node = &bench.scenario.testbed.b;
    node.run(&["ctr", "image", "rm", "--sync", &reference(bench, id)])?;
    Ok(())
}

fn reference(bench: &Bench<'_>, id: &str) -> String {
    bench.scenario.peer_reference(&format!("demo/counter:{id}"))
}

fn steps(meter: &Meter<'_>, commands: &[(&str, &[&str])]) -> anyhow::Result<Leg> {
    let (steps, cost) = meter.measure(|| {
        let mut steps = Vec::new();
        for (name, words) in commands {
            let began = Instant::now();
            meter.node.run(words)?;
            steps.push(((*name).to_owned(), u64::try_from(began.elapsed().as_micros())?));
        }
        Ok(steps)
    })?;
    Ok(Leg { cost, steps })
}
