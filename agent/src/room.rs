//! Room that was missing: which file system is full, and what helps there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kybernate_spec::chain;

use crate::app::App;
use crate::config::Config;
use crate::stage;

/// What is said without room, in small letters: CRIU and the kernel's own words begin with a large
/// one, those of Go's programs do not. A CRIU whose log lies where no room is does not say so: when it
/// has failed, it is looked whether that is why.
const WORDS: [&str; 3] = ["no space left on device", "disk quota exceeded", "criu"];

/// How much a file system has left at most that is called full: what is written comes in pieces.
const LEFT_BYTES_MAX: u64 = 4 << 20;

/// A place where something is written, and what helps when it is full.
#[derive(Clone, Debug)]
struct Place {
    directory: PathBuf,
    helps: String,
}

/// Says why an operation failed; where that was for want of room, also where none is, and what helps.
pub(crate) async fn explained(
    app: &App,
    namespace: &str,
    error: &(dyn std::error::Error + Send + Sync + 'static),
) -> String {
    let told = chain(error).to_string();
    if !may_be_room(&told) {
        return told;
    }
    let mut places = ours(&app.config);
    match app.containerd.namespace(namespace).content_directory().await {
        Ok(found) => places.extend(found.map(containerds)),
        Err(error) => tracing::debug!(error = %chain(&error), "containerd's root is not known"),
    }
    let full = tokio::task::spawn_blocking(move || full(&places)).await.unwrap_or_default();
    [vec![told], full].concat().join("; ")
}

/// Whether it may have failed for want of room.
fn may_be_room(text: &str) -> bool {
    let text = text.to_lowercase();
    WORDS.iter().any(|words| text.contains(words))
}

/// Returns where the agent writes.
fn ours(config: &Config) -> Vec<Place> {
    let staging = &config.staging;
    let place = |directory: &Path, helps: &str| Place {
        directory: directory.to_owned(),
        helps: helps.to_owned(),
    };
    let dumps = if stage::is_ours(&staging.tmpfs) {
        "it is the agent's own: other operations that are under way take the rest, and a larger \
         [staging] memory_share counts after a restart"
    } else {
        "make what is mounted there larger, or take away what is not the agent's"
    };
    let mut places = vec![
        place(&staging.tmpfs, dumps),
        place(&config.disk_stage(), "free room on its file system"),
        place(&config.volumes(), "free room on its file system"),
        place(&config.disk_volumes(), "free room on its file system"),
    ];
    if let Some(tier) = &staging.ram {
        let helps = if stage::is_ours(&tier.directory) {
            "it is the agent's own: `kyb evict` takes away what is staged there, and a larger \
             [staging.ram] budget counts after a restart"
                .to_owned()
        } else {
            let budget = tier.budget;
            format!(
                "make what is mounted there as large as the budget of {budget} bytes, or that smaller"
            )
        };
        places.push(Place { directory: tier.directory.clone(), helps });
    }
    if let Some(tier) = &staging.nvme {
        let helps = "free room on its file system, or `kyb evict` what is staged there";
        places.push(place(&tier.directory, helps));
    }
    places
}

/// Returns where containerd writes, whose content store is in `content`.
fn containerds(content: PathBuf) -> Place {
    let directory = content.parent().map_or(content.clone(), Path::to_owned);
    Place {
        directory,
        helps: "free room there: containerd keeps images and containers in it".into(),
    }
}

/// Says which of the file systems are full, each once.
fn full(places: &[Place]) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let mut told = Vec::new();
    for Place { directory, helps } in places {
        let Ok(found) = rustix::fs::statvfs(directory) else { continue };
        let left = found.f_bavail.saturating_mul(found.f_frsize);
        let total = found.f_blocks.saturating_mul(found.f_frsize);
        // Some have no number of files.
        let is_full = left < LEFT_BYTES_MAX || (found.f_files > 0 && found.f_ffree == 0);
        let device = rustix::fs::stat(directory).map(|found| found.st_dev).unwrap_or_default();
        if is_full && seen.insert(device) {
            let place = directory.display();
            told.push(format!("{place} is full ({left} of {total} bytes left): {helps}"));
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_who_has_no_room_is_understood() {
        for text in [
            "Error (criu/image.c:1): write: No space left on device",
            "OCI runtime create failed: write /x: no space left on device: unknown",
            "failed to write: Disk quota exceeded (os error 122)",
            "runc did not terminate successfully: exit status 1: criu failed: type NOTIFY errno 0",
        ] {
            assert!(may_be_room(text), "{text}");
        }
        assert!(!may_be_room("the registry has not answered"));
    }

    #[test]
    fn what_is_full_is_told_once_and_nothing_else() {
        let place =
            |directory: &str| Place { directory: directory.into(), helps: "tidy up".into() };
        // Neither has blocks: as full as can be.
        let told = full(&[place("/proc/self"), place("/proc"), place("/nowhere")]);
        assert_eq!(told, ["/proc/self is full (0 of 0 bytes left): tidy up"]);
        let roomy = tempfile::tempdir().unwrap();
        assert!(stage::space(roomy.path()).unwrap() > LEFT_BYTES_MAX, "this machine has no room");
        assert_eq!(full(&[place(&roomy.path().display().to_string())]), [""; 0]);
    }
}
