//! The workload whose memory is large, in a pod.

use kybernate_conformance::command::wait_until;
use serde_json::Value;

use super::LIMIT;
use crate::workloads::Place;

pub(super) const COMMAND: &[&str] = &["/workload", "run", "--state", "/state", "--mib", "2048"];

/// How far it is with summing all of its memory.
#[derive(Clone, Debug)]
pub(super) struct Sums {
    boot: Value,
    rounds: u64,
}

impl Sums {
    /// Waits until it has summed everything once more than `before`, from the beginning, and all is right.
    /// The round that was under way then may have begun earlier.
    pub(super) fn after(place: Place<'_>, before: Option<&Self>) -> Self {
        let mut last = Value::Null;
        let wanted = before.map_or(0, |before| before.rounds + 2);
        let reached = wait_until(LIMIT, || {
            last = status(place);
            last["rounds_done"].as_u64() >= Some(wanted)
        });
        assert!(reached, "no {wanted} rounds: {last}");
        for fact in ["checksum_ok", "pipe_ok", "log_ok"] {
            assert_eq!(last[fact], true, "{last}");
        }
        let boot = last["boot_id_of_process"].clone();
        assert!(before.is_none_or(|before| before.boot == boot), "it was started anew");
        Self { boot, rounds: last["rounds_done"].as_u64().unwrap() }
    }
}

fn status(place: Place<'_>) -> Value {
    let words = ["ctr", "-n", place.namespace, "task", "exec", "--exec-id", "sums", place.id];
    let status = ["/workload", "status", "--state", "/state"];
    let text = place.node.told(&[&words[..], &status].concat()).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}
