//! What ties the store to its index: the seal, and the notes of changes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use fs_err as fs;
use kybernate_spec::{Digest, RepositoryName, chain};
use serde::{Deserialize, Serialize};

use super::layout::{Layout, file_name};
use super::manifest::ManifestRecord;
use super::record::Record;
use super::referrer::ReferrerRecord;
use super::{Store, absent, read_record};
use crate::gc::LinkKind;
use crate::index::{Change, Index, LAYOUT};

/// Says that the index agrees with the objects: it was closed last, with these files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Seal {
    layout: u32,
    /// The directory of the database.
    pub(crate) database: String,
    /// The checksum of its files.
    pub(crate) files: String,
}

impl Record for Seal {
    const KIND: &'static str = "index";
}

impl Seal {
    /// Takes the seal off a store that is being opened. One of another layout is none.
    pub(super) fn take(layout: &Layout) -> io::Result<Option<Self>> {
        let path = layout.seal();
        let seal = read_record::<Self>(&path)?;
        absent(fs::remove_file(path))?;
        // The name is part of a path.
        let good = |seal: &Self| {
            seal.layout == LAYOUT && seal.database.bytes().all(|b| b.is_ascii_hexdigit())
        };
        Ok(seal.filter(good))
    }
}

impl Store {
    /// The lists over the objects.
    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    /// Returns the seal the store was opened with.
    pub(crate) fn sealed(&self) -> Option<&Seal> {
        self.seal.as_ref()
    }

    pub(crate) fn index_dir(&self) -> PathBuf {
        self.layout.index()
    }

    /// Whether lists are answered from the index.
    pub fn is_indexed(&self) -> bool {
        self.index.is_ready()
    }

    /// Notes a change that the caller has made visible in the objects, under the lock that orders
    /// changes of that object.
    pub(super) fn changed(&self, change: Change) -> io::Result<()> {
        self.break_seal()?;
        self.index.note(change);
        Ok(())
    }

    /// Notes that a repository links content.
    pub(super) fn link_there(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
    ) -> io::Result<()> {
        let content = absent(fs::metadata(self.layout.blob(digest)))?;
        let bytes = content.map_or(0, |content| content.len());
        self.changed(Change::link(repository, kind, digest, bytes))
    }

    /// Notes that a repository does not link content any more.
    pub(super) fn link_gone(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
    ) -> io::Result<()> {
        self.changed(Change::no_link(repository, kind, digest))
    }

    /// Notes that a link went to quarantine, to `aside`: a manifest refers to nothing any more.
    pub(super) fn link_condemned(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
        aside: &Path,
    ) -> io::Result<()> {
        if let Some(subject) = subject(kind, aside)? {
            self.changed(Change::no_referrer(repository, &subject, digest))?;
        }
        self.link_gone(repository, kind, digest)
    }

    /// Notes that a link came back, to `live`.
    pub(super) fn link_revived(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
        live: &Path,
    ) -> io::Result<()> {
        self.link_there(repository, kind, digest)?;
        let Some(subject) = subject(kind, live)? else { return Ok(()) };
        let record = self.layout.referrers(repository, &subject).join(file_name(digest));
        match read_record::<ReferrerRecord>(&record)? {
            Some(record) => self.changed(Change::referrer(repository, &subject, &record.referrer)?),
            None => Ok(()),
        }
    }

    /// Makes sure that the seal, which was removed when the store was opened, does not come back
    /// after power loss. Costs a sync the first time, and is done in the background at once.
    pub(crate) fn break_seal(&self) -> io::Result<()> {
        if self.seal_broken.load(Ordering::Acquire) {
            return Ok(());
        }
        self.directories.sync(self.layout.root())?;
        self.seal_broken.store(true, Ordering::Release);
        Ok(())
    }

    fn close_index(&self) -> io::Result<()> {
        let Some((database, files)) = self.index.close() else { return Ok(()) };
        let record = Seal { layout: LAYOUT, database, files };
        self.place_record(&record, &self.layout.seal())?;
        self.directories.sync(self.layout.root())
    }
}

/// Returns what the manifest whose link is at `path` refers to.
fn subject(kind: LinkKind, path: &Path) -> io::Result<Option<Digest>> {
    if kind == LinkKind::Blob {
        return Ok(None);
    }
    Ok(read_record::<ManifestRecord>(path)?.and_then(|record| record.subject))
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Err(error) = self.close_index() {
            tracing::warn!(error = %chain(&error), "the index is not sealed and will be made again");
        }
    }
}
