//! Reads every repository's objects, to make the index of them.
//!
//! It runs beside everything else. An object that is seen and gone before it is entered would come
//! back as a ghost, so each is looked at again while the lock is held that its removal needs.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use fs_err as fs;
use kybernate_spec::{Algorithm, Digest, RepositoryName, Tag};

use super::layout::parse_file_name;
use super::listing::is_repository;
use super::referrer::ReferrerRecord;
use super::{Store, absent, is_there, read_record};
use crate::gc::LinkKind;
use crate::index::{Change, IndexDatabase, IndexError, Reindexed};

/// Objects entered while a repository's lock is held: ~1 ms.
const LOCKED_MAX: usize = 128;
/// Objects entered before what has been entered is synced, so that memory stays small.
const SYNC_EVERY: u64 = 4_096;

/// A repository of so many objects is read once more when all are entered, see `sweep`.
const SWEPT_FROM: u64 = 1_024;

/// Why the objects could not be read into an index.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// The objects could not be read.
    #[error("failed to read the objects")]
    Objects(#[source] io::Error),
    /// The database failed.
    #[error("failed to write the index")]
    Index(#[source] IndexError),
    /// The mark that the index agrees with the objects could not be changed.
    #[error("failed to change the index's seal")]
    Seal(#[source] io::Error),
    /// It was asked to end.
    #[error("stopped half-way")]
    Stopped,
}

/// What is done with one entry of a directory.
type Each<'a, 's> = &'a mut dyn FnMut(&mut Scan<'s>, &str) -> Result<(), ScanError>;

struct Scan<'a> {
    store: &'a Store,
    database: &'a IndexDatabase,
    stop: &'a dyn Fn() -> bool,
    counts: Reindexed,
    unsynced: u64,
}

impl Store {
    /// Enters every object into `database`. Blocks.
    pub(crate) fn scan(
        &self,
        database: &IndexDatabase,
        stop: &dyn Fn() -> bool,
    ) -> Result<Reindexed, ScanError> {
        let counts = Reindexed::default();
        let mut scan = Scan { store: self, database, stop, counts, unsynced: 0 };
        self.each_repository(&mut |name| scan.repository(name))?;
        Ok(scan.counts)
    }

    /// Shows `each` every repository, in no order. Fails when it cannot be told which there are: what
    /// is not shown here would be missing from lists, and its content be nobody's.
    pub(crate) fn each_repository<E: From<io::Error>>(
        &self,
        each: &mut dyn FnMut(&RepositoryName) -> Result<(), E>,
    ) -> Result<(), E> {
        let root = self.layout.repositories();
        let mut unread = vec![root.clone()];
        while let Some(dir) = unread.pop() {
            let name = dir.strip_prefix(&root).ok().and_then(Path::to_str).unwrap_or_default();
            match name.parse::<RepositoryName>() {
                Ok(name) if is_repository(&dir)? => each(&name)?,
                Ok(_) => {}
                // What begins with no name has none in it.
                Err(_) if dir == root => {}
                Err(_) => continue,
            }
            let listed = fs::read_dir(&dir);
            // One that was there a moment ago may have gone, and the one above all others may not.
            let entries = if dir == root { Some(listed?) } else { absent(listed)? };
            for entry in entries.into_iter().flatten() {
                let entry = entry?;
                let ours = entry.file_name().to_string_lossy().starts_with('_');
                if !ours && is_directory(&entry, &root)? {
                    unread.push(entry.path());
                }
            }
        }
        Ok(())
    }
}

/// A symbolic link among the repositories leads nowhere.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} leads to nothing: bring back the disk it leads to, or remove it")]
struct Dangling(PathBuf);

/// Whether an entry is a directory, or leads to one: what was moved to another disk is served, so
/// it is counted too.
fn is_directory(entry: &fs::DirEntry, root: &Path) -> io::Result<bool> {
    let kind = entry.file_type()?;
    if !kind.is_symlink() {
        return Ok(kind.is_dir());
    }
    let path = entry.path();
    match absent(fs::metadata(&path))? {
        Some(found) => Ok(found.is_dir() && !leads_back(&path, &found, root)?),
        None => Err(io::Error::other(Dangling(path))),
    }
}

/// Whether what is at `path` is one of the directories above it, where everything would be met again.
fn leads_back(path: &Path, found: &Metadata, root: &Path) -> io::Result<bool> {
    for above in path.ancestors().skip(1).take_while(|above| above.starts_with(root)) {
        let above = fs::metadata(above)?;
        if (above.dev(), above.ino()) == (found.dev(), found.ino()) {
            return Ok(true);
        }
    }
    Ok(false)
}

impl From<io::Error> for ScanError {
    fn from(error: io::Error) -> Self {
        Self::Objects(error)
    }
}

impl From<IndexError> for ScanError {
    fn from(error: IndexError) -> Self {
        Self::Index(error)
    }
}

impl<'s> Scan<'s> {
    fn repository(&mut self, name: &RepositoryName) -> Result<(), ScanError> {
        let before = self.counts;
        self.counts.repositories += 1;
        self.enter(&Change::repository(name))?;
        for algorithm in [Algorithm::Sha256, Algorithm::Sha512] {
            self.blobs(name, algorithm)?;
            self.manifests(name, algorithm)?;
            self.referrers(name, algorithm)?;
        }
        self.tags(name)?;
        if self.counts.links - before.links + self.counts.tags - before.tags > SWEPT_FROM {
            self.database.sync()?;
            self.database.sweep(name)?;
        }
        Ok(())
    }

    fn blobs(&mut self, name: &RepositoryName, algorithm: Algorithm) -> Result<(), ScanError> {
        let dir = self.store.layout.blob_links(name, algorithm);
        self.each_in(&dir, &mut |scan, file| {
            let Ok(digest) = format!("{algorithm}:{file}").parse::<Digest>() else { return Ok(()) };
            let lock = scan.store.link_lock(name, &digest);
            let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
            scan.link(name, LinkKind::Blob, &digest, &dir.join(file))
        })
    }

    fn manifests(&mut self, name: &RepositoryName, algorithm: Algorithm) -> Result<(), ScanError> {
        let dir = self.store.layout.manifest_links(name, algorithm);
        self.each_locked(name, &dir, &mut |scan, file| {
            let Ok(digest) = format!("{algorithm}:{file}").parse::<Digest>() else { return Ok(()) };
            scan.link(name, LinkKind::Manifest, &digest, &dir.join(file))
        })
    }

    fn link(
        &mut self,
        name: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
        link: &Path,
    ) -> Result<(), ScanError> {
        let content = absent(fs::metadata(self.store.layout.blob(digest)))?;
        let linked = is_there(link)?;
        let Some(content) = content.filter(|_| linked) else { return Ok(()) };
        self.counts.links += 1;
        self.enter(&Change::link(name, kind, digest, content.len()))
    }

    fn tags(&mut self, name: &RepositoryName) -> Result<(), ScanError> {
        let dir = self.store.layout.tags(name);
        self.each_locked(name, &dir, &mut |scan, file| {
            let Ok(tag) = file.parse::<Tag>() else { return Ok(()) };
            if !is_there(&dir.join(file))? {
                return Ok(());
            }
            scan.counts.tags += 1;
            scan.enter(&Change::tag(name, &tag))
        })
    }

    fn referrers(&mut self, name: &RepositoryName, algorithm: Algorithm) -> Result<(), ScanError> {
        let dir = self.store.layout.subjects(name, algorithm);
        self.each_in(&dir, &mut |scan, hex| {
            let Ok(subject) = format!("{algorithm}:{hex}").parse::<Digest>() else { return Ok(()) };
            let dir = dir.join(hex);
            scan.each_locked(name, &dir, &mut |scan, file| {
                let Some(digest) = parse_file_name(file) else { return Ok(()) };
                let link = scan.store.layout.manifest_link(name, &digest);
                let record = read_record::<ReferrerRecord>(&dir.join(file))?;
                let linked = is_there(&link)?;
                let Some(record) = record.filter(|_| linked) else { return Ok(()) };
                let change = Change::referrer(name, &subject, &record.referrer);
                scan.counts.referrers += 1;
                scan.enter(&change.map_err(io::Error::from)?)
            })
        })
    }

    /// Shows `each` the entries of a directory a few at a time, while nothing of the repository can
    /// be removed.
    fn each_locked(
        &mut self,
        name: &RepositoryName,
        dir: &Path,
        each: Each<'_, 's>,
    ) -> Result<(), ScanError> {
        let mut some = Vec::new();
        self.each_in(dir, &mut |scan, file| {
            some.push(file.to_owned());
            if some.len() >= LOCKED_MAX { scan.drain(name, &mut some, each) } else { Ok(()) }
        })?;
        self.drain(name, &mut some, each)
    }

    fn drain(
        &mut self,
        name: &RepositoryName,
        some: &mut Vec<String>,
        each: Each<'_, 's>,
    ) -> Result<(), ScanError> {
        let store = self.store;
        let _held = store.repository_lock(name).read().unwrap_or_else(PoisonError::into_inner);
        some.drain(..).try_for_each(|file| each(self, &file))
    }

    fn each_in(&mut self, dir: &Path, each: Each<'_, 's>) -> Result<(), ScanError> {
        for entry in absent(fs::read_dir(dir))?.into_iter().flatten() {
            if let Some(file) = entry?.file_name().to_str() {
                each(self, file)?;
            }
            self.breathe()?;
        }
        Ok(())
    }

    fn enter(&mut self, change: &Change) -> Result<(), ScanError> {
        self.unsynced += 1;
        Ok(self.database.apply(change)?)
    }

    /// Called with no lock held.
    fn breathe(&mut self) -> Result<(), ScanError> {
        if (self.stop)() {
            return Err(ScanError::Stopped);
        }
        if self.unsynced >= SYNC_EVERY {
            self.unsynced = 0;
            self.database.sync()?;
        }
        Ok(())
    }
}
