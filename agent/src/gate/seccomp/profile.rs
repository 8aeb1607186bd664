//! What a container's seccomp profile refuses (OCI runtime specification, `linux.seccomp`).

use std::collections::BTreeSet;

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

/// Whether a rule is for this call: of most of its arguments it is not known. All its conditions must hold,
/// but where two are about one argument: then one is enough, since runc makes a rule of each
/// (`libcontainer/seccomp`).
fn applies(rule: &Value, call: Guarded) -> Option<bool> {
    let conditions = rule.get("args").and_then(Value::as_array);
    let conditions = conditions.map(Vec::as_slice).unwrap_or_default();
    let all: Vec<Option<bool>> = conditions.iter().map(|one| holds(one, call)).collect();
    let arguments: BTreeSet<_> = conditions.iter().map(argument).collect();
    let is_enough = arguments.len() < conditions.len();
    let (wanted, is_known) = (Some(is_enough), !all.contains(&None));
    if all.contains(&wanted) { wanted } else { is_known.then_some(!is_enough) }
}

/// Returns which argument a condition is about.
fn argument(condition: &Value) -> Option<u64> {
    condition.get("index").map_or(Some(0), Value::as_u64)
}

fn holds(condition: &Value, call: Guarded) -> Option<bool> {
    let number = |key: &str| condition.get(key).map_or(Some(0), Value::as_u64);
    let (value, second) = (number("value")?, number("valueTwo")?);
    // These bits are set. What is less and more is told by two words, of which one alone says nothing.
    let bits = u64::from(call.first);
    argument(condition).filter(|index| *index == 0)?;
    match condition.get("op")?.as_str()? {
        "SCMP_CMP_EQ" => (bits & !value != 0).then_some(false),
        "SCMP_CMP_NE" => (bits & !value != 0).then_some(true),
        "SCMP_CMP_MASKED_EQ" if bits & value & !second != 0 => Some(false),
        "SCMP_CMP_MASKED_EQ" => (value & !bits == 0).then_some(value & bits == second),
        _ => None,
    }
}
