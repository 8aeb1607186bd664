//! Commit: received bytes become a blob of a repository. No copy, no second read.

use std::io;
use std::sync::{Arc, PoisonError};

use fs_err as fs;
use kybernate_spec::{Digest, RepositoryName};

use super::checksum::{ChunkSums, DIGEST_CHECKED_MAX, write_header};
use super::house::refresh;
use super::{Buffer, Sink, Store, StoreError, SumRun, UploadFile};
use crate::gc::LinkKind;
use crate::trace;

/// An upload whose bytes are all received and whose digest is right.
#[derive(Debug)]
pub(crate) struct Commit {
    /// The repository that may show the blob from now on.
    pub(crate) repository: RepositoryName,
    /// The digest, already proven.
    pub(crate) digest: Digest,
    /// The file that becomes the blob.
    pub(crate) upload: UploadFile,
    /// The file, open.
    pub(crate) file: Arc<Sink>,
    /// Received bytes not yet written.
    pub(crate) rest: Buffer,
    /// All bytes of the blob, the rest included.
    pub(crate) length: u64,
    /// Checksums not yet written.
    pub(crate) sums: SumRun,
}

impl Store {
    /// Makes the upload a blob. When this returns the blob survives power loss. Blocks.
    ///
    /// A blob that is there already is replaced by the same bytes, freshly proven: this is what
    /// heals content that rotted on disk.
    pub(crate) fn commit(&self, commit: &Commit) -> Result<(), StoreError> {
        let stored = trace::part("store.commit", || {
            trace::note("kybernate.blob.size", commit.length);
            self.metrics.commit.time(|| self.put_upload(commit))
        });
        stored.map_err(StoreError::during("store a blob"))
    }

    fn put_upload(&self, commit: &Commit) -> io::Result<()> {
        let Commit { repository, digest, upload, file, rest, length, sums } = commit;
        let unwritten = u64::try_from(rest.filled().len()).unwrap_or(0);
        trace::part("store.write", || file.write(rest, length.saturating_sub(unwritten)))?;
        let file = file.file();
        // An interrupted PUT may have left bytes behind the end.
        file.set_len(*length)?;
        trace::part("store.sync", || file.sync_data())?;
        let has_checksums = *length > DIGEST_CHECKED_MAX;
        if has_checksums {
            let file = upload.checksums()?;
            sums.write(&file)?;
            write_header(&file, *length)?;
            file.sync_data()?;
        }
        let dir = self.layout.shelf(digest);
        self.directories.ensure(&dir)?;
        let _linking = self.hold(digest);
        {
            let _held = self.shelf_lock(digest).lock().unwrap_or_else(PoisonError::into_inner);
            if has_checksums {
                upload.rename_checksums(self.layout.checksums(digest))?;
            }
            upload.rename(self.layout.blob(digest))?;
        }
        // The link first: one journal commit then carries both directories.
        self.enter_link(repository, digest)?;
        self.directories.sync(&dir)?;
        self.directories.sync(&self.layout.blob_links(repository, digest.algorithm()))
    }

    /// Stores a manifest's bytes under its digest, durably.
    pub(super) fn put_content(&self, digest: &Digest, content: &[u8]) -> io::Result<()> {
        let length = u64::try_from(content.len()).unwrap_or(u64::MAX);
        let dir = self.layout.shelf(digest);
        self.directories.ensure(&dir)?;
        let _held = self.shelf_lock(digest).lock().unwrap_or_else(PoisonError::into_inner);
        if length > DIGEST_CHECKED_MAX {
            let mut sums = ChunkSums::default();
            sums.update(content);
            self.place_with(&self.layout.checksums(digest), |file| {
                sums.finish().write(file)?;
                write_header(file, length)
            })?;
        }
        self.place(content, &self.layout.blob(digest))
    }

    /// Enters a link, or makes one that is there young again; it is durable once its directory is
    /// synced. The caller holds the digest.
    pub(super) fn enter_link(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> io::Result<()> {
        let links = self.layout.blob_links(repository, digest.algorithm());
        self.directories.ensure(&links)?;
        let link = links.join(digest.hex());
        let lock = self.link_lock(repository, digest);
        let held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        match fs::File::create_new(&link) {
            // Whoever made it may not have synced yet, so the caller syncs also then.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                refresh(&link)?;
            }
            other => drop(other?),
        }
        self.link_there(repository, LinkKind::Blob, digest)?;
        drop(held);
        self.house.linked(repository, digest);
        Ok(())
    }
}
