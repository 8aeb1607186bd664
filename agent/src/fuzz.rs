//! What `fuzz/` and the replay of its corpus give the bytes of others to.
//!
//! Each function is one parser, and panics where it breaks a promise. They are compiled for tests
//! and for fuzzing only. [`TARGETS`] has them all: each has a file in `fuzz/fuzz_targets` and seeds
//! in `fuzz/corpus`, under the name `agent_` and its own.

#![expect(clippy::missing_panics_doc, reason = "to panic is what these functions are for")]

use crate::gate::{Expected, Summary, decode, judge};

/// Takes what others wrote.
pub type Parser = fn(&[u8]);

/// Every parser and its name.
pub const TARGETS: [(&str, Parser); 1] = [("gate", gate)];

/// CRIU's images, as the process without privileges gets them.
pub fn gate(bytes: &[u8]) {
    let Ok(summary) = decode(bytes) else { return };
    assert!(summary.processes > 0 && summary.threads >= summary.processes, "{summary:?}");
    let told = serde_json::to_vec(&summary).unwrap_or_default();
    let heard: Option<Summary> = serde_json::from_slice(&told).ok();
    assert_eq!(heard.as_ref(), Some(&summary), "it arrives as something else");
    let _reasons = judge(&summary, &Expected::default());
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    use super::*;

    fn room(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz").join(name)
    }

    /// Names of what is there for the agent, without what stands before and after them.
    fn names(directory: &str) -> BTreeSet<String> {
        let entries = fs_err::read_dir(room(directory)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let own = names.filter_map(|name| name.strip_prefix("agent_").map(str::to_owned));
        own.map(|name| name.trim_end_matches(".rs").to_owned()).collect()
    }

    #[test]
    fn the_corpus_breaks_no_promise() {
        for (name, target) in TARGETS {
            let seeds = fs_err::read_dir(room("corpus").join(format!("agent_{name}"))).unwrap();
            let mut count = 0;
            for seed in seeds {
                let path = seed.unwrap().path();
                // Known only when it fails.
                println!("{}", path.display());
                target(&fs_err::read(&path).unwrap());
                count += 1;
            }
            assert!(count >= 3, "{name} has {count} seeds");
        }
    }

    #[test]
    fn each_parser_is_fuzzed() {
        let all: BTreeSet<_> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(names("corpus"), all);
        assert_eq!(names("fuzz_targets"), all);
        let manifest = fs_err::read_to_string(room("Cargo.toml")).unwrap();
        for name in all {
            let file = room("fuzz_targets").join(format!("agent_{name}.rs"));
            let target = fs_err::read_to_string(file).unwrap();
            assert!(target.contains(&format!("kybernate_agent::fuzz::{name}(bytes)")), "{target}");
            assert!(manifest.contains(&format!("\"agent_{name}\"")), "{name} is not built");
        }
    }
}
