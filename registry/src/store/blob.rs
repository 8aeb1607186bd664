//! Blobs: content by digest, shown through the repositories it is linked to.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::PoisonError;

use fs_err as fs;
use kybernate_spec::{Digest, Hasher, RepositoryName, chain};

use super::checksum::{ChunkTable, DIGEST_CHECKED_MAX};
use super::layout::file_name;
use super::{Store, StoreError, absent, glance, is_there, open_if_there};
use crate::gc::LinkKind;

/// A blob that is there, not yet read.
#[derive(Debug)]
pub(crate) struct OpenBlob {
    pub(crate) digest: Digest,
    pub(crate) file: fs::File,
    pub(crate) length: u64,
    pub(crate) table: Option<ChunkTable>,
}

impl Store {
    /// Opens a blob of a repository. A blob known to be corrupt is absent.
    pub(crate) fn blob(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> Result<Option<OpenBlob>, StoreError> {
        let failed = StoreError::during("open a blob");
        if self.is_linked(repository, digest)? {
            // Whoever is shown it may leave out to push it.
            self.house.seen.note(repository, digest);
            self.content(digest).map_err(failed)
        } else {
            Ok(None)
        }
    }

    /// Whether a repository may show a blob; the content may be missing all the same.
    fn is_linked(&self, repository: &RepositoryName, digest: &Digest) -> Result<bool, StoreError> {
        let link = self.layout.blob_link(repository, digest);
        let found =
            absent(glance::metadata(&link)).map_err(StoreError::during("read a blob's link"))?;
        Ok(found.is_some())
    }

    /// Links a blob of `from` to `repository` without its bytes. Returns whether it was there.
    pub(crate) fn mount(
        &self,
        from: &RepositoryName,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> Result<bool, StoreError> {
        let failed = StoreError::during("mount a blob");
        let _held = self.hold(digest);
        let there = self.blob(from, digest)?.is_some() || self.is_condemned(from, digest)?;
        if there {
            // It may have been put there just now, by who has not synced yet.
            self.directories
                .sync(&self.layout.shelf(digest))
                .and_then(|()| self.link(repository, digest))
                .map_err(failed)?;
        }
        Ok(there)
    }

    /// Whether a blob is in the quarantine of a repository and whole: a mount revives it.
    pub(crate) fn is_condemned(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> Result<bool, StoreError> {
        let aside = self.condemned_link(repository, LinkKind::Blob, digest);
        let whole = || Ok(is_there(&aside)? && self.content(digest)?.is_some());
        whole().map_err(StoreError::during("look at a condemned blob"))
    }

    /// Links a blob to a repository, durably.
    fn link(&self, repository: &RepositoryName, digest: &Digest) -> io::Result<()> {
        self.enter_link(repository, digest)?;
        self.directories.sync(&self.layout.blob_links(repository, digest.algorithm()))
    }

    /// Whether a repository has a blob, which then survives power loss: whoever put it there may have
    /// been killed before it was synced.
    pub(crate) fn has_durably(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> Result<bool, StoreError> {
        if self.blob(repository, digest)?.is_none() {
            return Ok(false);
        }
        let links = self.layout.blob_links(repository, digest.algorithm());
        let synced = self.directories.sync(&self.layout.shelf(digest));
        let synced = synced.and_then(|()| self.directories.sync(&links));
        synced.map(|()| true).map_err(StoreError::during("sync a blob"))
    }

    /// Takes a blob out of a repository. Returns whether it was there.
    pub(crate) fn unlink(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> Result<bool, StoreError> {
        let looked = self.refuse_to_remove(repository, digest)?;
        // Nobody pushes a manifest that needs it meanwhile.
        let lock = self.repository_lock(repository);
        let _held = lock.write().unwrap_or_else(PoisonError::into_inner);
        self.refuse_what_changed(looked, repository, digest)?;
        let remove = || {
            let links = self.layout.blob_links(repository, digest.algorithm());
            let removed = {
                let lock = self.link_lock(repository, digest);
                let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
                let removed = absent(fs::remove_file(links.join(digest.hex())))?.is_some();
                if removed {
                    self.remove_aside(repository, LinkKind::Blob, digest)?;
                    self.link_gone(repository, LinkKind::Blob, digest)?;
                }
                removed
            };
            if removed {
                self.house.notes.content(digest);
                self.directories.sync(&links)?;
            }
            Ok(removed)
        };
        remove().map_err(StoreError::during("delete a blob's link"))
    }

    /// Opens content whatever repository it is in. What cannot be whole is moved away and absent.
    pub(super) fn content(&self, digest: &Digest) -> io::Result<Option<OpenBlob>> {
        let Some(file) = open_if_there(&self.layout.blob(digest))? else { return Ok(None) };
        let length = file.metadata()?.len();
        if length == 0 && Hasher::new(digest.algorithm()).finish() != *digest {
            // Nothing will be read, so nothing would be checked later.
            return self.discard(digest, &file, "it is empty");
        }
        let sums = open_if_there(&self.layout.checksums(digest))?;
        let table = match sums {
            // A small blob that has checksums was larger once.
            Some(sums) => match ChunkTable::open(sums.into_file(), length)? {
                Some(table) => Some(table),
                None => return self.discard(digest, &file, "its length is wrong"),
            },
            None if length <= DIGEST_CHECKED_MAX => None,
            None => return self.discard(digest, &file, "its checksums are missing"),
        };
        Ok(Some(OpenBlob { digest: digest.clone(), file, length, table }))
    }

    fn discard<T>(
        &self,
        digest: &Digest,
        file: &fs::File,
        why: &'static str,
    ) -> io::Result<Option<T>> {
        glance::blocks()?;
        self.quarantine(digest, file, why);
        Ok(None)
    }

    /// Moves content that does not match its digest out of the way, so that it is absent from now
    /// on and the next push of it heals.
    ///
    /// `file` is what was read: content put in its place since then stays.
    pub(crate) fn quarantine(&self, digest: &Digest, file: &fs::File, why: &'static str) {
        let moving = || -> io::Result<()> {
            let path = self.layout.blob(digest);
            let _held = self.shelf_lock(digest).lock().unwrap_or_else(PoisonError::into_inner);
            let Some(there) = absent(fs::metadata(&path))? else { return Ok(()) };
            let read = file.metadata()?;
            // Nor is it worth a word: garbage collection may have taken it while it was looked at.
            if (there.dev(), there.ino()) != (read.dev(), read.ino()) {
                return Ok(());
            }
            tracing::error!(blob.digest = %digest, why, "stored content is corrupt and is moved away; push it again to heal it");
            let aside = format!("{}-{}", file_name(digest), read.ino());
            fs::rename(&path, self.layout.corrupt().join(aside))?;
            self.metrics.corrupt.inc();
            self.directories.sync(&self.layout.shelf(digest))
        };
        if let Err(error) = moving() {
            tracing::error!(blob.digest = %digest, error = %chain(&error), "failed to move corrupt content away");
        }
    }
}

#[cfg(test)]
mod tests;
