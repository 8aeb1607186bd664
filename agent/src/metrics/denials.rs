//! Calls that no rule allows, by who called what.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Callers that are told by name. More than a node has; users of the machine could be thousands.
const CALLERS_MAX: usize = 64;

/// Counts them.
#[derive(Clone, Debug, Default)]
pub(super) struct Denials {
    counted: Family<Call, Counter>,
    // Held for a look-up only.
    known: Arc<Mutex<BTreeSet<String>>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    caller: String,
    method: &'static str,
}

impl Denials {
    /// Counts one. Those who come after many others are counted together.
    pub(super) fn count(&self, caller: String, method: &'static str) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let named = known.contains(&caller) || {
            let room = known.len() < CALLERS_MAX;
            room && known.insert(caller.clone())
        };
        drop(known);
        let caller = if named { caller } else { "other".to_owned() };
        self.counted.get_or_create(&Call { caller, method }).inc();
    }

    pub(super) fn register(&self, all: &mut Registry) {
        let help = "Calls that no [[caller]] allows, by caller (a user id, or the first name of a \
                    certificate; \"other\" beyond the first 64) and method";
        all.register("denied_calls", help, self.counted.clone());
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::*;

    #[test]
    fn beyond_a_number_nobody_is_told_by_name() {
        let denials = Denials::default();
        for uid in (1..=70).chain([3, 70]) {
            denials.count(format!("uid:{uid}"), "Stage");
        }
        let (mut registry, mut page) = (Registry::default(), String::new());
        denials.register(&mut registry);
        text::encode(&mut page, &registry).unwrap();
        for line in [
            "denied_calls_total{caller=\"uid:3\",method=\"Stage\"} 2",
            "denied_calls_total{caller=\"uid:64\",method=\"Stage\"} 1",
            "denied_calls_total{caller=\"other\",method=\"Stage\"} 7",
        ] {
            assert!(page.contains(line), "{line} is missing in\n{page}");
        }
        assert!(!page.contains("uid:65"), "{page}");
    }
}
