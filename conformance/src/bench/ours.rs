//! Our way: `kyb checkpoint` and `kyb restore`, through the node's agent and our registry.

use serde_json::Value;

use super::{Bench, Leg, Meter};

/// The steps of an operation in their order, as the agent's proto file lists them.
const STEPS: [&str; 17] = [
    "preflight",
    "copy",
    "dump",
    "capture",
    "resume",
    "pack",
    "push",
    "sign",
    "tag",
    "resolve",
    "verify",
    "compare",
    "gate",
    "pull",
    "materialise",
    "create",
    "restore",
];

/// Takes a checkpoint: it is durable, signed and tagged when this returns.
pub(super) fn push(bench: &Bench<'_>, meter: &Meter<'_>, id: &str) -> anyhow::Result<Leg> {
    let (reference, key) = (reference(bench, id), format!("node-{}", meter.node.name()));
    leg(bench, meter, &["checkpoint", id, &reference, "--plain-http", "--sign-key", &key])
}

/// Restores a checkpoint: the process runs when this returns.
pub(super) fn restore(bench: &Bench<'_>, meter: &Meter<'_>, id: &str) -> anyhow::Result<Leg> {
    leg(bench, meter, &["restore", &reference(bench, id), "--plain-http", "--name", id])
}

fn reference(bench: &Bench<'_>, id: &str) -> String {
    bench.scenario.reference(&format!("demo/counter:{id}"))
}

fn leg(bench: &Bench<'_>, meter: &Meter<'_>, words: &[&str]) -> anyhow::Result<Leg> {
    let (operation, cost) = meter.measure(|| Ok(bench.scenario.kyb_json(meter.node, words)?))?;
    Ok(Leg { cost, steps: steps(&operation) })
}

/// Returns the steps of an operation in their order, in microseconds.
pub(super) fn steps(operation: &Value) -> Vec<(String, u64)> {
    let times = operation.get("timesMicroseconds").and_then(Value::as_object);
    let mut steps: Vec<(String, u64)> = times
        .into_iter()
        .flatten()
        .filter_map(|(step, time)| Some((step.clone(), time.as_u64()?)))
        .collect();
    steps.sort_by_key(|(step, _)| STEPS.iter().position(|known| known == step));
    steps
}
