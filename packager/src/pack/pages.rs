//! Pushing the pages of a dump: shards that are new, shards that a base has, and the page index over
//! both.

use std::io::{self, Read as _, Write};
use std::path::Path;
use std::sync::Arc;

use fs_err as fs;
use futures::{StreamExt as _, TryStreamExt as _};
use kybernate_spec::page_index::{self, Chunk, Header, PAGE_BYTES, SHARD_BYTES_MAX};
use kybernate_spec::{Descriptor, annotation, media_type};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::PackError;
use super::base::OpenBase;
use super::dump::Dump;
use super::shards::{OpenFile, Planned, Planner, ShardPlan, open_files};
use super::upload::{FileSource, HashingWriter, ShardSource, Target, blocking, hash_file};
use crate::copy;
use crate::store::{StoreError, StoreErrorKind};
use crate::wanted;

/// The pages of one dump.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pages<'a> {
    pub(super) dump: &'a Arc<Dump>,
    pub(super) shard_bytes: u64,
    /// Whether a hash of each is stored too.
    pub(super) hashes: bool,
    pub(super) scratch: &'a Path,
}

/// What is in the store now.
#[derive(Debug)]
pub(super) struct Pushed {
    pub(super) index: Descriptor,
    /// The shards that the index names: the base's, then new ones.
    pub(super) shards: Vec<Descriptor>,
    pub(super) hashes: Option<Descriptor>,
    /// Bytes of all pages that the index names.
    pub(super) live_bytes: u64,
    /// Bytes of those that the base does not have.
    pub(super) added_bytes: u64,
}

/// A shard of the page index.
#[derive(Debug)]
struct Listed {
    descriptor: Descriptor,
    chunks: Vec<Chunk>,
}

/// A new shard, by its number.
type NewShard = (u16, Listed);

impl Pages<'_> {
    /// Pushes what `base` does not have, and the page index; `None` when shards of the base that are
    /// needed turned out to be gone or damaged. They are known now, so that it can be tried again.
    pub(super) async fn push(
        &self,
        base: Option<Arc<OpenBase>>,
        target: Target<'_>,
    ) -> Result<Option<Pushed>, PackError> {
        let records = self.scratch.join("page-index.records");
        let (planned, new) = self.push_new(base.as_ref(), &records, target).await?;
        let added_bytes = new.iter().map(|(_, shard)| shard.descriptor.size).sum::<u64>();
        let (numbers, shards) = list(base.as_deref(), &planned, new);
        if let Some(base) = &base
            && !base.provide(&planned.used, target).await?
        {
            return Ok(None);
        }
        let header = Header {
            hash: super::CHUNK_HASH,
            shards: u32::try_from(shards.len()).unwrap_or(u32::MAX),
            files: u32::try_from(self.dump.bulk.len()).unwrap_or(u32::MAX),
        };
        let path = self.scratch.join("page-index");
        let written = {
            let path = path.clone();
            blocking(move || {
                let index = write_index(&path, &records, &header, &shards, &numbers)?;
                Ok((index, shards))
            })
        };
        let (index, shards) =
            written.await.map_err(|kind| PackError::Io("write the page index", kind))?;
        super::check::check_index(&index, self.dump.bulk_bytes())?;
        target.store(&index, &FileSource { path, offset: 0 }).await?;
        let used = planned.used.iter().map(|pages| u64::from(*pages)).sum::<u64>();
        Ok(Some(Pushed {
            index: index.with_annotation(annotation::TITLE, "page-index"),
            shards: shards.into_iter().map(|shard| shard.descriptor).collect(),
            hashes: self.push_hashes(target).await?,
            live_bytes: added_bytes + used * u64::from(PAGE_BYTES),
            added_bytes,
        }))
    }

    /// Places all pages and pushes the shards that are new, while the files are read.
    async fn push_new(
        &self,
        base: Option<&Arc<OpenBase>>,
        records: &Path,
        target: Target<'_>,
    ) -> Result<(Planned, Vec<NewShard>), PackError> {
        let parallel = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
        let files: Arc<[_]> = {
            let dump = Arc::clone(self.dump);
            let opened = blocking(move || open_files(&dump)).await;
            opened.map_err(|kind| PackError::Io("open the dump", kind))?.into()
        };
        // Full shards wait here while others are sent: a few stretches each, not their bytes.
        let (sender, receiver) = mpsc::channel::<ShardPlan>(parallel);
        let planning = {
            let (dump, files, records) =
                (Arc::clone(self.dump), Arc::clone(&files), records.to_owned());
            let (base, shard_bytes) = (base.cloned(), self.shard_bytes);
            let hashes = self.hashes.then(|| self.hashes_file());
            wanted::spawn(move |wanted| {
                let hashes = hashes.map(fs::File::create).transpose()?;
                let planner = Planner::new(&dump, &files, shard_bytes, base.as_deref(), hashes)?;
                let mut out = io::BufWriter::new(fs::File::create(records)?);
                let placed = planner.run(&mut out, wanted, |plan| {
                    let sent = sender.blocking_send(plan);
                    sent.map_err(|_closed| io::ErrorKind::BrokenPipe.into())
                })?;
                out.flush()?;
                Ok::<_, io::Error>(placed)
            })
        };
        let pushed: Result<Vec<_>, PackError> = ReceiverStream::new(receiver)
            .map(|plan| push_shard(plan, Arc::clone(&files), base, target))
            .buffer_unordered(parallel)
            .try_collect()
            .await;
        // The push's error is the cause.
        if pushed.is_err() {
            planning.stop();
        }
        let outcome = planning.end().await;
        let mut pushed = pushed?;
        let placed = outcome
            .map_err(|_cancelled| PackError::Interrupted)?
            .map_err(|kind| PackError::Io("read the dump's pages", kind))?;
        pushed.sort_by_key(|(number, _)| *number);
        Ok((placed, pushed))
    }

    fn hashes_file(&self) -> std::path::PathBuf {
        self.scratch.join("page-hashes")
    }

    async fn push_hashes(&self, target: Target<'_>) -> Result<Option<Descriptor>, PackError> {
        if !self.hashes {
            return Ok(None);
        }
        let path = self.hashes_file();
        let described = {
            let path = path.clone();
            wanted::blocking(move |wanted| hash_file(media_type::PAGE_HASHES, &path, wanted)).await
        };
        let layer = described.map_err(|kind| PackError::Io("read the page hashes", kind))?;
        if layer.size > SHARD_BYTES_MAX {
            tracing::warn!("more than 64 GiB of pages: their hashes are left out");
            return Ok(None);
        }
        target.store(&layer, &FileSource { path, offset: 0 }).await?;
        Ok(Some(layer.with_annotation(annotation::TITLE, "page-hashes")))
    }
}

async fn push_shard(
    plan: ShardPlan,
    files: Arc<[Arc<OpenFile>]>,
    base: Option<&Arc<OpenBase>>,
    target: Target<'_>,
) -> Result<NewShard, PackError> {
    let number = plan.number;
    let source = ShardSource { plan: Arc::new(plan), files };
    let hashed = source.clone();
    let (descriptor, chunks) = wanted::blocking(move |wanted| hashed.hash(wanted))
        .await
        .map_err(|kind| PackError::Io("read the dump's pages", kind))?;
    // One that was given up may be in this very store, damaged.
    let resend = target.resend || base.is_some_and(|base| base.has_given_up(&descriptor.digest));
    Target { resend, ..target }.store(&descriptor, &source).await?;
    Ok((number, Listed { descriptor, chunks }))
}

impl OpenBase {
    /// Makes sure that `store` has the shards that are used. Returns false when one of them is not
    /// to be had: it is given up.
    async fn provide(&self, used: &[u32], target: Target<'_>) -> Result<bool, StoreError> {
        let mut whole = true;
        for (number, (shard, used)) in (0..).zip(self.shards.iter().zip(used)) {
            if *used == 0 {
                continue;
            }
            if self.is_given_up(number) {
                whole = false;
                continue;
            }
            match copy::send(&self.store, target.store, shard, target.progress).await {
                Ok(_) => {}
                Err(error) if is_lost(&error.kind) => {
                    self.give_up(number);
                    whole = false;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(whole)
    }
}

/// Whether a shard is not there, or something else is.
const fn is_lost(kind: &StoreErrorKind) -> bool {
    matches!(kind, StoreErrorKind::NotFound | StoreErrorKind::Mismatch(_))
}

/// Numbers the shards anew, without those of the base that are not used; returns the new number by
/// the old one, and the shards by their new numbers.
fn list(base: Option<&OpenBase>, planned: &Planned, new: Vec<NewShard>) -> (Vec<u16>, Vec<Listed>) {
    let mut numbers = vec![0; usize::try_from(planned.shards).unwrap_or_default()];
    let mut shards = Vec::new();
    let next = |shards: &Vec<Listed>| u16::try_from(shards.len()).unwrap_or(u16::MAX);
    let known = base.map_or((&[][..], &[][..]), |base| (&*base.shards, &*base.tables));
    let known = planned.used.iter().zip(known.0.iter().zip(known.1));
    for (number, (used, (descriptor, chunks))) in numbers.iter_mut().zip(known) {
        if *used > 0 {
            *number = next(&shards);
            let descriptor = descriptor.bare();
            shards.push(Listed { descriptor, chunks: chunks.clone() });
        }
    }
    for (old, shard) in new {
        if let Some(number) = numbers.get_mut(usize::from(old)) {
            *number = next(&shards);
        }
        shards.push(shard);
    }
    (numbers, shards)
}

/// Puts the page index together from its parts.
fn write_index(
    path: &Path,
    records: &Path,
    header: &Header,
    shards: &[Listed],
    numbers: &[u16],
) -> io::Result<Descriptor> {
    let file = io::BufWriter::new(fs::File::create(path)?);
    let mut out = HashingWriter::new(file);
    page_index::write_header(&mut out, header)?;
    for shard in shards {
        page_index::write_shard(&mut out, &shard.chunks)?;
    }
    let mut records = io::BufReader::new(fs::File::open(records)?);
    let is_same = (0..).zip(numbers).all(|(old, new): (u16, _)| old == *new);
    if is_same {
        io::copy(&mut records, &mut out)?;
    } else {
        page_index::renumber(&mut records.by_ref(), &mut out, numbers)?;
    }
    page_index::write_end(&mut out)?;
    out.flush()?;
    Ok(out.describe(media_type::PAGE_INDEX))
}
