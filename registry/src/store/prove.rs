//! Proving stored content against its digest, and what scrubbing keeps on disk.

use std::io;
use std::ops::ControlFlow;
use std::sync::PoisonError;

use fs_err as fs;
use kybernate_spec::{Digest, Hasher};
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, pread};

use super::checksum::{CHUNK_BYTES, ChunkSums, DIGEST_CHECKED_MAX, SumRun};
use super::record::Record;
use super::{Store, StoreError, absent, is_there, open_if_there, read_record};
use crate::scrub::Pass;

/// Digests listed at once.
const LISTED_MAX: usize = 1024;

/// What reading content from beginning to end has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proof {
    /// It is right, and so many bytes long.
    Good(u64),
    /// It is right; its checksums were not and were made anew.
    Repaired(u64),
    /// It was wrong and is moved away.
    Corrupt,
    /// It is not there any more.
    Gone,
}

impl Record for Pass {
    const KIND: &'static str = "scrub";
}

impl Store {
    /// Reads content whole and compares it with its digest and its checksums. `rest` is called with
    /// how many bytes were read and says whether to go on; without that there is no answer. Blocks.
    pub(crate) fn prove(
        &self,
        digest: &Digest,
        rest: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Option<Proof>, StoreError> {
        self.read_whole(digest, rest).map_err(StoreError::during("read content again"))
    }

    fn read_whole(
        &self,
        digest: &Digest,
        rest: &mut dyn FnMut(u64) -> bool,
    ) -> io::Result<Option<Proof>> {
        let Some(file) = open_if_there(&self.layout.blob(digest))? else {
            return Ok(Some(Proof::Gone));
        };
        // What clients read often stays in the page cache, and this does not push it out.
        fadvise(&file, 0, None, Advice::NoReuse).map_err(io::Error::from)?;
        let mut hasher = Hasher::new(digest.algorithm());
        let mut sums = ChunkSums::default();
        let mut length = 0;
        let mut buffer = self.buffer(CHUNK_BYTES);
        loop {
            buffer.clear();
            let read = match pread(&file, buffer.spare(), length) {
                Ok(read) => read,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if read == 0 {
                break;
            }
            buffer.advance(read);
            hasher.update(buffer.filled());
            sums.update(buffer.filled());
            let read = u64::try_from(read).unwrap_or(0);
            length += read;
            if !rest(read) {
                return Ok(None);
            }
        }
        if hasher.finish() != *digest {
            return Ok(Some(self.set_aside(digest, &file)));
        }
        let repaired =
            length > DIGEST_CHECKED_MAX && self.repair(digest, &sums.finish(), length)?;
        Ok(Some(if repaired { Proof::Repaired(length) } else { Proof::Good(length) }))
    }

    fn set_aside(&self, digest: &Digest, file: &fs::File) -> Proof {
        self.quarantine(digest, file, "scrubbing found that it does not match its digest");
        Proof::Corrupt
    }

    /// Makes checksums anew when they are not those of good content. Returns whether they were not.
    fn repair(&self, digest: &Digest, sums: &SumRun, length: u64) -> io::Result<bool> {
        let path = self.layout.checksums(digest);
        let right = sums.file(length);
        if absent(fs::read(&path))?.is_some_and(|found| found == right) {
            return Ok(false);
        }
        let _kept = self.hold(digest);
        let _held = self.shelf_lock(digest).lock().unwrap_or_else(PoisonError::into_inner);
        if !is_there(&self.layout.blob(digest))? {
            return Ok(false);
        }
        tracing::error!(blob.digest = %digest, "stored content is right, its checksums were not and are made anew");
        self.place(&right, &path)?;
        self.directories.sync(&self.layout.shelf(digest))?;
        Ok(true)
    }

    /// Lists some contents that come after one, in order; none when there are none.
    pub(crate) fn contents_after(&self, after: Option<&Digest>) -> Result<Vec<Digest>, StoreError> {
        let mut contents = Vec::new();
        let listed = self.each_content(after, |digest| {
            contents.push(digest);
            let full = contents.len() >= LISTED_MAX;
            Ok(if full { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        });
        listed.map_err(StoreError::during("list content"))?;
        Ok(contents)
    }

    /// Runs `work` on the pass under way, which nobody else moves on meanwhile.
    pub(crate) fn scrubbing<T>(
        &self,
        work: impl FnOnce(&mut Pass) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut pass = self.house.scrubbing.lock().unwrap_or_else(PoisonError::into_inner);
        let pass = match &mut *pass {
            Some(pass) => pass,
            none => {
                let read = read_record(&self.layout.scrub_progress());
                let read = read.map_err(StoreError::during("read how far scrubbing was"))?;
                let read: Pass = read.unwrap_or_default();
                if read.done {
                    self.metrics.note_incomplete(read.incomplete);
                }
                none.insert(read)
            }
        };
        work(pass)
    }

    /// Writes down how far scrubbing is. It is not synced for its own sake: what is lost is read
    /// again.
    pub(crate) fn keep_scrub_progress(&self, pass: &Pass) -> Result<(), StoreError> {
        let kept = self.place_record(pass, &self.layout.scrub_progress());
        kept.map_err(StoreError::during("write how far scrubbing is"))
    }
}
