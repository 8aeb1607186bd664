//! Gives a captured mount the names that CRIU made in it while it dumped: a restore opens files by them.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err as fs;

use super::{Captured, Taking};
use crate::checkpoint::capture::{Link, capture_linked};
use crate::checkpoint::error::CheckpointError;
use crate::gate::{self, LinkFact};
use crate::links::{self, FileId, Held};
use crate::mounts::{self, Mount};

/// Who held what in the pause, and on which mounts.
struct Seen {
    held: Vec<Held>,
    mounts: Vec<Mount>,
}

impl Taking<'_> {
    /// Captures those mounts once more in which CRIU made names. It has taken them away by now; whether
    /// the first capture met them is chance.
    pub(super) async fn linked(&self, mut captured: Captured) -> Result<Captured, CheckpointError> {
        if !self.source.holds.links {
            return Ok(captured);
        }
        let facts = gate::inspect(&self.images()).await?.links;
        if facts.is_empty() {
            return Ok(captured);
        }
        let (freezer, pid) = (self.source.freezer.clone(), self.source.pid);
        let seen = tokio::task::spawn_blocking(move || Seen::of(pid, &freezer.processes()?));
        let seen = seen.await.map_err(io::Error::other).and_then(|seen| seen);
        let seen = seen.map_err(CheckpointError::Stage)?;
        let mut added: BTreeMap<usize, Vec<Link>> = BTreeMap::new();
        for fact in facts {
            match self.place(&seen, &fact) {
                Some(Place::Captured(number, link)) => added.entry(number).or_default().push(link),
                Some(Place::Dumped) => {}
                None => return Err(CheckpointError::Linked(fact.name)),
            }
        }
        for (number, links) in added {
            let (Some(volume), Some(mount)) =
                (captured.volumes.get_mut(number), self.source.captured.get(number))
            else {
                continue;
            };
            let tar = self.directory.join(format!("mount-{number}-linked.tar"));
            self.again(&mount.source, links, tar.clone()).await?;
            volume.tar = tar;
        }
        Ok(captured)
    }

    /// Returns where CRIU made a name; `None` where it does not go along.
    fn place(&self, seen: &Seen, fact: &LinkFact) -> Option<Place> {
        let id = u64::try_from(fact.mount?).ok()?;
        let mount = seen.mounts.iter().find(|mount| mount.id == id)?;
        let mut captured = self.source.captured.iter();
        let Some(number) = captured.position(|one| mount.point == *one.destination) else {
            let bound = mount.point.to_str().is_none_or(|at| self.source.spec.is_mounted_on(at));
            return (mount.kind == "tmpfs" && !bound).then_some(Place::Dumped);
        };
        let is_it =
            |held: &&Held| held.links > 0 && held.mount == Some(id) && held.name == fact.name;
        let mut files: Vec<FileId> = seen.held.iter().filter(is_it).map(|held| held.file).collect();
        files.sort_unstable();
        files.dedup();
        let [file] = *files else { return None };
        let place = Path::new(&fact.link).strip_prefix(&mount.point).ok()?.to_owned();
        Some(Place::Captured(number, Link { place, file }))
    }

    async fn again(
        &self,
        from: &Path,
        links: Vec<Link>,
        to: PathBuf,
    ) -> Result<(), CheckpointError> {
        let (from, stop) = (from.to_owned(), Arc::clone(&self.stop));
        let captured =
            tokio::task::spawn_blocking(move || capture_linked(&from, &links, &to, &stop));
        captured.await.map_err(|_ended| CheckpointError::CaptureInterrupted)??;
        Ok(())
    }
}

/// Where CRIU made a name.
enum Place {
    /// In a mount that is captured.
    Captured(usize, Link),
    /// In one that CRIU has dumped, with the name.
    Dumped,
}

impl Seen {
    fn of(pid: u32, pids: &[u32]) -> io::Result<Self> {
        let process = |pid: &u32| Path::new("/proc").join(pid.to_string());
        Ok(Self {
            held: pids.iter().flat_map(|pid| links::held(&process(pid))).collect(),
            mounts: mounts::read(&fs::read(process(&pid).join("mountinfo"))?).collect(),
        })
    }
}
