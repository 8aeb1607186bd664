//! Mounts that CRIU leaves alone, since they come from the node: which of them go along.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_packager::runtime_spec::SourceSpec;

use super::Wanted;
use crate::app::Rejection;
use crate::config::Config;
use crate::container::is_empty_dir;
use crate::stage;

/// Where POSIX shared memory is.
const SHARED_MEMORY: &str = "/dev/shm";

/// A mount whose content is captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CapturedMount {
    /// Where it is in the container, as its specification says.
    pub(super) destination: String,
    /// The directory of the node.
    pub(super) source: PathBuf,
}

/// Returns about how many bytes lie in a container's own file systems in memory, which CRIU dumps, as it does
/// not with what is `bound` from outside.
pub(super) fn memory_bytes(pid: u32, bound: &[String]) -> u64 {
    let process = Path::new("/proc").join(pid.to_string());
    let all = fs::read(process.join("mountinfo")).unwrap_or_default();
    let mut counted = BTreeSet::new();
    let own = crate::mounts::read(&all).filter(|mount| {
        let is_bound = bound.iter().any(|place| mount.point == Path::new(place));
        mount.kind == "tmpfs" && !is_bound && counted.insert(mount.device)
    });
    let used = own.filter_map(|mount| {
        let place = mount.point.strip_prefix("/").ok()?;
        stage::used(&process.join("root").join(place)).ok()
    });
    used.fold(0, u64::saturating_add)
}

/// Chooses the mounts: shared memory always, what is asked for, and a pod's emptyDirs where the
/// node's configuration says so.
pub(super) fn captured(
    spec: &SourceSpec,
    is_of_pod: bool,
    wanted: &Wanted,
    config: &Config,
) -> Result<Vec<CapturedMount>, Rejection> {
    let mut chosen: Vec<CapturedMount> = Vec::new();
    let mut choose = |destination: &str, source: &Path| {
        if !chosen.iter().any(|one| one.destination == destination) {
            let (destination, source) = (destination.to_owned(), source.to_owned());
            chosen.push(CapturedMount { destination, source });
        }
    };
    if let Some(source) = spec.shared_memory() {
        choose(SHARED_MEMORY, source);
    }
    for destination in &wanted.capture_mounts {
        let invalid = |text: &str| {
            Err(Rejection::Invalid(format!("{destination:?} cannot be captured: {text}")))
        };
        // As shells complete the name of a directory.
        let bound = [destination, destination.trim_end_matches('/')];
        let bound = bound.into_iter().find_map(|place| Some((place, spec.bound(place)?)));
        let Some((destination, source)) = bound else {
            return invalid("nothing of the node is mounted there in the container");
        };
        if !fs::symlink_metadata(source).is_ok_and(|found| found.is_dir()) {
            return invalid("what is mounted there is no directory");
        }
        choose(destination, source);
    }
    if is_of_pod && config.pods.capture_empty_dirs {
        for (destination, source) in spec.binds().filter(|(_, source)| is_empty_dir(source)) {
            choose(destination, source);
        }
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn what_lies_in_memory_is_counted_but_what_is_bound() {
        const BYTES: u64 = 1 << 20;
        let all = crate::mounts::own().unwrap();
        let memory: Vec<String> = all
            .iter()
            .filter(|mount| mount.kind == "tmpfs")
            .map(|mount| mount.point.display().to_string())
            .collect();
        assert!(memory.iter().any(|place| place == SHARED_MEMORY), "{memory:?}");
        let mut file = tempfile::tempfile_in(SHARED_MEMORY).unwrap();
        file.write_all(&vec![1; usize::try_from(BYTES).unwrap()]).unwrap();
        let pid = std::process::id();
        assert!(memory_bytes(pid, &[]) >= BYTES);
        assert_eq!(memory_bytes(pid, &memory), 0);
    }
}
