//! What no packer can beat here: reading a dump, leaving out zero pages, hashing the rest twice and
//! writing it, on all cores.

use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fs_err as fs;
use sha2::{Digest as _, Sha256};

/// Bytes read at once, and hashed alone with BLAKE3: a chunk of the format.
const CHUNK_BYTES: u64 = 4 << 20;
/// Bytes of the source whose pages are hashed and written together: a shard of the format.
const SHARD_BYTES: u64 = 64 << 20;
const PAGE_BYTES: usize = 4096;

/// Returns how long it takes to bring the pages of `dump` into a new directory `target`.
pub(super) fn pack(dump: &Path, target: &Path) -> io::Result<Duration> {
    fs::create_dir(target)?;
    let began = Instant::now();
    let source = fs::File::open(dump.join("pages-1.img"))?;
    let length = source.metadata()?.len();
    let next = AtomicU64::new(0);
    let cores = std::thread::available_parallelism()?.get();
    std::thread::scope(|scope| {
        let work = || -> io::Result<()> {
            loop {
                let shard = next.fetch_add(1, Ordering::Relaxed);
                if shard * SHARD_BYTES >= length {
                    return Ok(());
                }
                self::shard(&source, shard, length, target)?;
            }
        };
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().map_err(|_panic| io::Error::other("a thread panicked"))?
        })
    })?;
    Ok(began.elapsed())
}

fn shard(source: &fs::File, number: u64, length: u64, target: &Path) -> io::Result<()> {
    let mut out = fs::File::create(target.join(number.to_string()))?;
    let mut whole = Sha256::new();
    let mut buffer = Vec::new();
    let mut kept = Vec::new();
    let end = length.min((number + 1) * SHARD_BYTES);
    let mut offset = number * SHARD_BYTES;
    while offset < end {
        let bytes = (end - offset).min(CHUNK_BYTES);
        buffer.resize(usize::try_from(bytes).map_err(io::Error::other)?, 0);
        source.file().read_exact_at(&mut buffer, offset)?;
        kept.clear();
        for page in buffer.chunks(PAGE_BYTES).filter(|page| !is_zero(page)) {
            kept.extend_from_slice(page);
        }
        whole.update(&kept);
        std::hint::black_box(blake3::hash(&kept));
        out.write_all(&kept)?;
        offset += bytes;
    }
    std::hint::black_box(whole.finalize());
    // An image layout is on the disk when the command ends.
    out.sync_data()
}

fn is_zero(page: &[u8]) -> bool {
    page.chunks(256).all(|chunk| chunk.iter().fold(0, |sum, byte| sum | byte) == 0)
}
