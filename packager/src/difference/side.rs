//! One of two checkpoints that are compared.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use kybernate_spec::Digest;
use kybernate_spec::page_index::Place;

use super::{DifferenceError, scratch};
use crate::artifact::Checkpoint;
use crate::inside::{Inside, MappedRegion};
use crate::pack::base::PAGE_HASH_BYTES;
use crate::pack::upload::blocking;
use crate::progress::Progress;
use crate::store::Store;
use crate::stored::{StoredAt, StoredPages};
use crate::unpack::unpack_for_a_look;

/// Pages whose hashes are read at once: those of a segment.
const BATCH: u64 = 1024;

/// A checkpoint with its images and its page index.
pub(super) struct Side {
    pub(super) store: Store,
    pub(super) checkpoint: Checkpoint,
    pub(super) stored: StoredPages,
    pub(super) inside: Inside,
    pub(super) hashes: Hashes,
    // Removed when dropped.
    _scratch: tempfile::TempDir,
}

/// The hashes of pages.
pub(super) enum Hashes {
    /// None are at hand.
    None,
    /// As the page hash layer has them: in the order in which the page index names pages.
    Listed(File),
    /// By place: for each shard one after the other, for each of its pages. Not all are there.
    Placed(File, Vec<u64>),
}

/// Memory that several processes may share.
#[derive(Clone, Debug)]
pub(super) struct Shared<'a> {
    pub(super) pagemap: String,
    pub(super) region: &'a MappedRegion,
}

impl Side {
    /// Fetches the images and the page index.
    pub(super) async fn open(
        store: &Store,
        checkpoint: Checkpoint,
    ) -> Result<Self, DifferenceError> {
        let failed = |what| move |error| DifferenceError::Io(what, error);
        let (scratch, images) = blocking(scratch).await.map_err(failed("make a directory"))?;
        let index = unpack_for_a_look(store, &checkpoint, &images, &Progress::default()).await?;
        let read = move || {
            let stored = StoredPages::scan(&images, index).map_err(io::Error::other)?;
            let inside = Inside::read(&images, &stored)?;
            Ok((stored, inside))
        };
        let (stored, inside) = blocking(read).await.map_err(failed("read the images"))?;
        let (store, hashes) = (store.clone(), Hashes::None);
        Ok(Self { store, checkpoint, stored, inside, hashes, _scratch: scratch })
    }

    /// Returns the digest of the checkpoint.
    pub(super) const fn digest(&self) -> &Digest {
        &self.checkpoint.stored.descriptor.digest
    }

    /// Returns the shared memory by its lowest mapper: names of images change between dumps.
    pub(super) fn shared(&self) -> BTreeMap<(u32, u64), Shared<'_>> {
        let mut mappers: BTreeMap<u64, (u32, &MappedRegion)> = BTreeMap::new();
        let mut processes: Vec<_> = self.inside.processes.iter().collect();
        processes.sort_by_key(|process| process.pid);
        for process in processes {
            for region in &process.regions {
                if let Some(id) = region.shared {
                    mappers.entry(id).or_insert((process.pid, region));
                }
            }
        }
        let keyed = mappers.into_iter().map(|(id, (pid, region))| {
            let pagemap = format!("pagemap-shmem-{id}.img");
            ((pid, region.start), Shared { pagemap, region })
        });
        keyed.collect()
    }

    /// Returns which shard has a page, by its digest.
    pub(super) fn shard(&self, place: Place) -> Option<&Digest> {
        self.checkpoint.shards.get(usize::from(place.shard)).map(|shard| &shard.digest)
    }

    /// Reads the hashes of consecutive pages, a segment's at most.
    pub(super) fn hashes(&self, at: StoredAt, pages: u64) -> io::Result<Vec<u8>> {
        let width = u64::try_from(PAGE_HASH_BYTES).map_err(io::Error::other)?;
        let (file, first) = match &self.hashes {
            Hashes::None => return Err(io::ErrorKind::NotFound.into()),
            Hashes::Listed(file) => (file, at.ordinal),
            Hashes::Placed(file, before) => {
                let before = before.get(usize::from(at.place.shard)).copied();
                let before = before.ok_or(io::ErrorKind::NotFound)?;
                (file, before + u64::from(at.place.page))
            }
        };
        let bytes = usize::try_from(pages.min(BATCH) * width).map_err(io::Error::other)?;
        let mut hashes = vec![0; bytes];
        file.read_exact_at(&mut hashes, first * width)?;
        Ok(hashes)
    }
}

/// Reads all of a stream into a file without a name.
pub(super) fn keep(mut from: impl io::Read) -> io::Result<File> {
    let mut file = tempfile::tempfile()?;
    io::copy(&mut from, &mut file)?;
    Ok(file)
}

impl fmt::Debug for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Side").field("digest", self.digest()).finish_non_exhaustive()
    }
}
