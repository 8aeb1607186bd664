//! What a container's seccomp profile refuses (OCI runtime specification, `linux.seccomp`).

use serde_json::Value;

use super::{Guarded, Refused};

/// Actions that let a call through, or let somebody else do so.
const LENIENT: [&str; 4] = ["SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_TRACE", "SCMP_ACT_NOTIFY"];

impl Refused {
    /// Returns what a profile refuses, whatever the arguments that are not known.
    pub(crate) fn by_profile(profile: &Value) -> Self {
        let refuses = |of: Option<&Value>| {
            let action = of.and_then(Value::as_str);
            action.is_none_or(|action| !LENIENT.contains(&action))
        };
        let by_default = refuses(profile.get("defaultAction"));
        let rules = profile.get("syscalls").and_then(Value::as_array);
        let rules = rules.map(Vec::as_slice).unwrap_or_default();
        Self::of(|call| {
            let named = rules.iter().filter(|rule| has(rule, call.name));
            let mut is_refused = by_default;
            for rule in named {
                match (applies(rule, call), refuses(rule.get("action"))) {
                    (Some(false), _) | (None, true) => {}
                    (_, false) => return false,
                    (Some(true), true) => is_refused = true,
                }
            }
            is_refused
        })
    }
}

fn has(rule: &Value, name: &str) -> bool {
    let names = rule.get("names").and_then(Value::as_array);
    names.is_some_and(|names| names.iter().any(|one| one == name))
}

/// Whether a rule is for this call: of most of its arguments it is not known.
fn applies(rule: &Value, call: Guarded) -> Option<bool> {
    let conditions = rule.get("args").and_then(Value::as_array);
    let conditions = conditions.map(Vec::as_slice).unwrap_or_default().iter();
    let all: Vec<Option<bool>> = conditions.map(|condition| holds(condition, call)).collect();
    let is_known = all.contains(&Some(false)) || !all.contains(&None);
    is_known.then(|| !all.contains(&Some(false)))
}

fn holds(condition: &Value, call: Guarded) -> Option<bool> {
    let number = |key: &str| condition.get(key).map_or(Some(0), Value::as_u64);
    let first = call.first.filter(|_| number("index") == Some(0))?;
    let (value, second) = (number("value")?, number("valueTwo")?);
    match condition.get("op")?.as_str()? {
        "SCMP_CMP_EQ" => Some(first == value),
        "SCMP_CMP_NE" => Some(first != value),
        "SCMP_CMP_LT" => Some(first < value),
        "SCMP_CMP_LE" => Some(first <= value),
        "SCMP_CMP_GT" => Some(first > value),
        "SCMP_CMP_GE" => Some(first >= value),
        "SCMP_CMP_MASKED_EQ" => Some(first & value == second),
        _ => None,
    }
}
