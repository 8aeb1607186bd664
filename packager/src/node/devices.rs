//! The character devices of a node that containers can be given.

use std::collections::BTreeSet;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use fs_err as fs;

/// Devices noted at most: a bound against a /dev that somebody fills.
const DEVICES_MAX: usize = 4096;

/// How deep /dev is looked into: `/dev/infiniband/uverbs0`, `/dev/bus/usb/001/002`.
const DEPTH_MAX: u32 = 4;

/// What every container gets from its runtime.
const DEFAULT: [&str; 8] = ["null", "zero", "full", "random", "urandom", "tty", "console", "ptmx"];

/// Directories that are other file systems, or full of terminals.
const OTHERS: [&str; 4] = ["pts", "shm", "mqueue", "hugepages"];

/// Looks at /dev.
pub(super) fn here() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    gather(Path::new("/dev"), 0, &mut found);
    found
}

/// What cannot be read is left out.
fn gather(directory: &Path, depth: u32, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if found.len() >= DEVICES_MAX {
            return;
        }
        let (name, path) = (entry.file_name(), entry.path());
        let (Some(name), Some(path_text)) = (name.to_str(), path.to_str()) else { continue };
        // Not following links: what they lead to is found by itself.
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_char_device() && !(depth == 0 && is_ordinary(name)) {
            found.insert(path_text.to_owned());
        } else if kind.is_dir() && depth < DEPTH_MAX && !(depth == 0 && OTHERS.contains(&name)) {
            gather(&path, depth + 1, found);
        }
    }
}

/// Whether every machine has this one: a default device, or a terminal.
fn is_ordinary(name: &str) -> bool {
    DEFAULT.contains(&name) || name.starts_with("tty") || name.starts_with("vcs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_every_container_has_is_left_out() {
        let found = here();
        for path in ["/dev/null", "/dev/tty", "/dev/tty1", "/dev/ptmx", "/dev/shm"] {
            assert!(!found.contains(path), "{path}");
        }
        // Whatever else there is can be looked at again.
        for path in &found {
            assert!(fs::symlink_metadata(path).unwrap().file_type().is_char_device(), "{path}");
        }
        assert!(is_ordinary("vcsa1") && !is_ordinary("kvm") && !is_ordinary("nvidia0"));
    }
}
