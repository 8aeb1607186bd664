//! What holds the house together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Who may depend on whom. A missing line is a missing edge: nothing links the registry, everyone
/// meets it on the wire.
const ALLOWED: &[(&str, &[&str])] = &[
    ("kybernate-spec", &[]),
    ("kybernate-registry", &["kybernate-spec"]),
    ("kybernate-packager", &["kybernate-spec"]),
    ("kybernate-agent", &["kybernate-packager", "kybernate-spec"]),
    ("kybernate-conformance", &["kybernate-spec"]),
];

/// A file that is longer has more than one subject.
const LINES_MAX: usize = 600;

#[test]
fn dependencies_point_towards_the_specification() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
        .output()
        .unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let packages = metadata["packages"].as_array().unwrap();
    assert_eq!(packages.len(), allowed.len(), "a crate is missing from the table");
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let actual: BTreeSet<&str> = package["dependencies"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|dependency| dependency["kind"].is_null())
            .filter_map(|dependency| dependency["name"].as_str())
            .filter(|dependency| dependency.starts_with("kybernate-"))
            .collect();
        let permitted: BTreeSet<&str> = allowed[name].iter().copied().collect();
        assert!(actual.is_subset(&permitted), "{name} may not depend on {actual:?}");
    }
}

#[test]
fn no_source_file_is_too_long_and_none_is_a_mod_rs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut sources = Vec::new();
    for room in ["spec", "registry", "packager", "agent", "conformance"] {
        collect(&root.join(room), &mut sources);
    }
    assert!(sources.len() > 50, "only {} sources were found", sources.len());
    for source in sources {
        assert_ne!(source.file_name().unwrap(), "mod.rs", "{}", source.display());
        let lines = fs_err::read_to_string(&source).unwrap().lines().count();
        assert!(lines <= LINES_MAX, "{} has {lines} lines", source.display());
    }
}

fn collect(directory: &Path, sources: &mut Vec<PathBuf>) {
    for entry in fs_err::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push(path);
        }
    }
}
