//! Room that operations were promised and have not used yet. Without it two that begin at once, as when
//! a node is drained, count on the same room, and both run out of it half-way.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fs_err as fs;

use super::{MARGIN_BYTES, MEMORY, StageError, fits_memory, make, space};
use crate::config::Config;

/// How a file system counts what a file has (stat(2), `st_blocks`).
const BLOCK_BYTES: u64 = 512;

/// What all operations were promised.
#[derive(Clone, Debug, Default)]
pub(crate) struct Promises(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Who chooses looks at what everybody has written: one after the other, on threads that may block.
    choosing: Mutex<()>,
    // Held for a look only.
    all: Mutex<BTreeMap<u64, Promise>>,
    next: AtomicU64,
}

/// What others than oneself have of a file system.
#[derive(Clone, Copy, Debug, Default)]
struct Others {
    /// What they will still write.
    coming: u64,
    /// What they have written, which goes when they end.
    there: u64,
}

/// Room for one operation; it is free for others when this is dropped.
#[derive(Debug)]
pub(crate) struct Promised {
    all: Promises,
    number: u64,
    place: PathBuf,
}

#[derive(Debug)]
struct Promise {
    /// The file system.
    device: u64,
    bytes: u64,
    /// Where the operation writes.
    directory: Option<PathBuf>,
    /// How much was seen there at most: what was there and is not any more was needed all the same.
    used: u64,
    /// How much was seen there at last.
    there: u64,
}

impl Promises {
    /// Picks the place where there is room for about `bytes`, and keeps them for whoever asked. Nothing
    /// is made but the staging directories themselves. Blocks.
    pub(crate) fn choose(&self, config: &Config, bytes: u64) -> Result<Promised, StageError> {
        let _alone = lock(&self.0.choosing);
        let place = self.place_for(config, bytes, |others| (others.coming, 0))?;
        Ok(self.promise(place, bytes.saturating_add(MARGIN_BYTES))?)
    }

    /// Picks the place that an operation would have without any other, and keeps nothing. Blocks.
    pub(crate) fn look(&self, config: &Config, bytes: u64) -> Result<Promised, StageError> {
        let _alone = lock(&self.0.choosing);
        let place = self.place_for(config, bytes, |others| (0, others.there))?;
        Ok(self.promise(place, 0)?)
    }

    /// Picks the place for a log or two, for which there is room beside everybody now. Blocks.
    pub(crate) fn little(&self, config: &Config) -> Result<Promised, StageError> {
        let place = self.place_for(config, 0, |_others| (0, 0))?;
        Ok(self.promise(place, 0)?)
    }

    fn promise(&self, place: PathBuf, bytes: u64) -> io::Result<Promised> {
        let device = device(&place)?;
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.0.all)
            .insert(number, Promise { device, bytes, directory: None, used: 0, there: 0 });
        Ok(Promised { all: self.clone(), number, place })
    }

    /// Picks the place for about `bytes`: with that much less, or more, for what others have there.
    fn place_for(
        &self,
        config: &Config,
        bytes: u64,
        less_and_more: impl Fn(Others) -> (u64, u64),
    ) -> Result<PathBuf, StageError> {
        let needed = bytes.saturating_add(MARGIN_BYTES);
        let tmpfs = &config.staging.tmpfs;
        // First what others have: what they write meanwhile counts twice, rather than not at all.
        let (less, more) = less_and_more(self.others(tmpfs, None));
        if fits_memory(&config.staging, needed, less, more) {
            return Ok(tmpfs.clone());
        }
        let directory = config.disk_stage();
        make(&directory)?;
        let (promised, more) = less_and_more(self.others(&directory, None));
        let available = space(&directory)?.saturating_add(more);
        if available.saturating_sub(promised) < needed {
            return Err(StageError::NoSpace { directory, available, promised, needed });
        }
        Ok(directory)
    }

    /// Returns what all but `own` have of the file system that a place is on.
    fn others(&self, place: &Path, own: Option<u64>) -> Others {
        let Ok(device) = device(place) else { return Others::default() };
        let is_there = |number: u64, one: &Promise| {
            Some(number) != own && one.device == device && one.bytes > 0
        };
        let others: Vec<(u64, PathBuf)> = lock(&self.0.all)
            .iter()
            .filter(|(number, one)| is_there(**number, one))
            .filter_map(|(number, one)| Some((*number, one.directory.clone()?)))
            .collect();
        for (number, directory) in others {
            self.note_used(number, &directory);
        }
        let all = lock(&self.0.all);
        let others = all.iter().filter(|(number, one)| is_there(**number, one));
        others.fold(Others::default(), |sum, (_, one)| Others {
            coming: sum.coming.saturating_add(one.bytes.saturating_sub(one.used)),
            there: sum.there.saturating_add(one.there),
        })
    }

    /// Looks how much an operation has written.
    fn note_used(&self, number: u64, directory: &Path) {
        let used = used_in(directory);
        if let Some(promise) = lock(&self.0.all).get_mut(&number) {
            promise.used = promise.used.max(used);
            promise.there = used;
        }
    }
}

impl Promised {
    /// Where the room is: one of the staging directories.
    pub(crate) fn place(&self) -> &Path {
        &self.place
    }

    /// Notes where in it the operation writes: what lies there is not missing any more.
    pub(crate) fn is_for(&self, directory: &Path) {
        if let Some(promise) = lock(&self.all.0.all).get_mut(&self.number) {
            promise.directory = Some(directory.to_owned());
        }
    }

    /// Promises about `bytes` in all, if there is room for them in the same place. Blocks.
    pub(crate) fn grows(&self, config: &Config, bytes: u64) -> bool {
        let _alone = lock(&self.all.0.choosing);
        let needed = bytes.saturating_add(MARGIN_BYTES);
        let others = self.all.others(&self.place, Some(self.number)).coming;
        let fits = if self.place == config.staging.tmpfs {
            fits_memory(&config.staging, needed, others, 0)
        } else {
            space(&self.place).is_ok_and(|space| space.saturating_sub(others) >= needed)
        };
        if fits && let Some(promise) = lock(&self.all.0.all).get_mut(&self.number) {
            promise.bytes = promise.bytes.max(needed);
        }
        fits
    }

    /// Notes that no more than about `bytes` are still to come. Blocks.
    pub(crate) fn needs_only(&self, bytes: u64) {
        let directory =
            lock(&self.all.0.all).get(&self.number).and_then(|one| one.directory.clone());
        if let Some(directory) = directory {
            self.all.note_used(self.number, &directory);
        }
        if let Some(promise) = lock(&self.all.0.all).get_mut(&self.number) {
            let bytes = bytes.saturating_add(MARGIN_BYTES);
            promise.bytes = promise.bytes.min(promise.used.saturating_add(bytes));
        }
    }
}

impl Drop for Promised {
    fn drop(&mut self) {
        lock(&self.all.0.all).remove(&self.number);
    }
}

/// Returns the file system that a place is on.
fn device(place: &Path) -> io::Result<u64> {
    Ok(fs::metadata(place)?.dev())
}

/// Returns how many bytes a directory has on its own file system, as far as they can be looked at.
fn used_in(directory: &Path) -> u64 {
    let Ok(top) = fs::symlink_metadata(directory) else { return 0 };
    let (mut bytes, mut left) = (0_u64, vec![directory.to_owned()]);
    while let Some(within) = left.pop() {
        let Ok(entries) = fs::read_dir(&within) else { continue };
        for entry in entries.flatten() {
            // What is mounted there is read from the agent itself.
            if within == directory && entry.file_name() == MEMORY {
                continue;
            }
            match fs::symlink_metadata(entry.path()) {
                // What CRIU mounts takes no room.
                Ok(found) if found.is_dir() && found.dev() != top.dev() => {}
                Ok(found) if found.is_dir() => left.push(entry.path()),
                Ok(found) => {
                    bytes = bytes.saturating_add(found.blocks().saturating_mul(BLOCK_BYTES));
                }
                Err(_) => {}
            }
        }
    }
    bytes
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::tests::config;

    #[test]
    fn what_was_promised_is_nobody_elses() {
        let root = tempfile::tempdir().unwrap();
        // Nothing goes into memory.
        let (config, promises) = (config(root.path(), 0.0), Promises::default());
        let stage = config.disk_stage();
        make(&stage).unwrap();
        let half = space(&stage).unwrap() / 5 * 3;
        let first = promises.choose(&config, half).unwrap();
        assert_eq!(first.place(), stage);
        let error = promises.choose(&config, half).unwrap_err();
        let StageError::NoSpace { available, promised, needed, .. } = &error else {
            panic!("{error}")
        };
        assert!(*promised == half + MARGIN_BYTES && available > needed, "{error}");
        let told = format!("of which operations that are under way will write {promised}");
        assert!(error.to_string().contains(&told), "{error}");
        // It does not stand in its own way, and others get what is left.
        assert!(first.grows(&config, half + 1) && !first.grows(&config, half * 2));
        drop(promises.choose(&config, half / 3).unwrap());
        // Whoever only looks keeps nothing, and is told what would be.
        let looked = promises.look(&config, half).unwrap();
        drop(first);
        drop(promises.choose(&config, half).unwrap());
        drop(looked);
        assert!(lock(&promises.0.all).is_empty());
    }

    #[test]
    fn what_is_there_is_not_promised_any_more() {
        let home = tempfile::tempdir().unwrap();
        let (config, promises) = (config(home.path(), 0.0), Promises::default());
        let room = promises.choose(&config, 1 << 20).unwrap();
        let directory = room.place().join("operation");
        let outstanding = || promises.others(home.path(), None).coming;
        room.is_for(&directory);
        assert_eq!(outstanding(), (1 << 20) + MARGIN_BYTES);
        assert_eq!(promises.others(home.path(), Some(room.number)).coming, 0);
        make(&directory.join("images")).unwrap();
        let (file, content) = (directory.join("images/pages-1.img"), vec![1; 1 << 20]);
        fs::write(&file, content).unwrap();
        // A file system may need some for itself, and give it later.
        fs::File::open(&file).unwrap().sync_all().unwrap();
        assert!(outstanding() <= MARGIN_BYTES, "{}", outstanding());
        // It is free again when the operation has ended.
        assert!(promises.others(home.path(), None).there >= 1 << 20);
        fs::remove_file(file).unwrap();
        assert!(outstanding() <= MARGIN_BYTES, "what was used is needed again");
        assert_eq!(promises.others(home.path(), None).there, 0, "what is gone is free already");
        assert!(room.grows(&config, 64 << 20) && outstanding() > 32 << 20);
        room.needs_only(4096);
        assert_eq!(outstanding(), 4096 + MARGIN_BYTES);
        room.needs_only(1 << 30);
        assert_eq!(outstanding(), 4096 + MARGIN_BYTES, "it grew");
        assert_eq!(used_in(Path::new("/nowhere")), 0);
    }
}
