use std::collections::BTreeSet;
use std::path::PathBuf;

use super::*;

fn room(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz").join(name)
}

/// Names of what is there for the packager, without what stands before and after them.
fn names(directory: &str) -> BTreeSet<String> {
    let entries = fs_err::read_dir(room(directory)).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let own = names.filter_map(|name| name.strip_prefix("packager_").map(str::to_owned));
    own.map(|name| name.trim_end_matches(".rs").to_owned()).collect()
}

#[test]
fn the_corpus_breaks_no_promise() {
    for (name, target) in TARGETS {
        let seeds = fs_err::read_dir(room("corpus").join(format!("packager_{name}"))).unwrap();
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
        let file = room("fuzz_targets").join(format!("packager_{name}.rs"));
        let target = fs_err::read_to_string(file).unwrap();
        assert!(target.contains(&format!("kybernate_packager::fuzz::{name}(bytes)")), "{target}");
        assert!(manifest.contains(&format!("\"packager_{name}\"")), "{name} is not built");
    }
}
