//! What no way on this machine can beat: what one core needs to hash, copy or send a GiB.

use std::hint::black_box;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};

/// Larger than any cache, small enough to be there beside a workload.
const BUFFER_BYTES: usize = 64 << 20;
/// How many buffers are a GiB.
const BUFFERS: usize = 16;
/// Bytes per call where the kernel copies: what the registry and the packager use.
const CALL_BYTES: usize = 1 << 20;

const PAGE_BYTES: usize = 4096;

/// Time for one GiB of each.
#[derive(Clone, Debug)]
pub(super) struct Floors(pub(super) Vec<(&'static str, Duration)>);

impl Floors {
    /// Measures all of them, one after the other. `disk` is a directory where registries keep
    /// their blobs.
    pub(super) fn measure(disk: &Path) -> io::Result<Self> {
        let source: Vec<u8> = pattern().collect();
        let mut target = vec![1_u8; BUFFER_BYTES];
        let floors = vec![
            ("memcpy, one core", timed(|| copy(&source, &mut target))),
            ("first touch of new memory", timed(touch)),
            ("BLAKE3, one core", timed(|| blake3(&source))),
            ("SHA-256, one core", timed(|| sha256(&source))),
            ("loopback TCP, both ends", tried(|| loopback(&source))?),
            ("write to tmpfs", tried(|| write(Path::new("/dev/shm"), &source))?),
            ("write to disk and fdatasync", tried(|| write(disk, &source))?),
        ];
        Ok(Self(floors))
    }
}

/// Bytes in which no two pages are the same.
fn pattern() -> impl Iterator<Item = u8> {
    (0..BUFFER_BYTES / 8).flat_map(|word| word.wrapping_mul(0x9E37_79B9).to_le_bytes())
}

fn timed(work: impl FnOnce()) -> Duration {
    let began = Instant::now();
    work();
    began.elapsed()
}

fn tried(work: impl FnOnce() -> io::Result<()>) -> io::Result<Duration> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed())
}

fn copy(source: &[u8], target: &mut [u8]) {
    for _ in 0..BUFFERS {
        black_box(&mut *target).copy_from_slice(black_box(source));
    }
}

/// A restore pays it for every page of the process, a copy in a tmpfs once more. In a virtual
/// machine that hands free memory back to its host it is the host that pays, many times as much.
fn touch() {
    // Zeroed memory is mapped and not yet there.
    let mut memory = vec![0_u8; BUFFERS * BUFFER_BYTES];
    for page in memory.chunks_mut(PAGE_BYTES) {
        if let Some(byte) = black_box(page).first_mut() {
            *byte = 1;
        }
    }
    black_box(&memory);
}

fn blake3(source: &[u8]) {
    let mut hasher = blake3::Hasher::new();
    for _ in 0..BUFFERS {
        hasher.update(black_box(source));
    }
    black_box(hasher.finalize());
}

fn sha256(source: &[u8]) {
    let mut hasher = Sha256::new();
    for _ in 0..BUFFERS {
        hasher.update(black_box(source));
    }
    black_box(hasher.finalize());
}

fn loopback(source: &[u8]) -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let (mut receiver, _) = listener.accept()?;
    std::thread::scope(|scope| {
        let sent = scope.spawn(move || (0..BUFFERS).try_for_each(|_| sender.write_all(source)));
        let mut buffer = vec![0; CALL_BYTES];
        while receiver.read(&mut buffer)? > 0 {}
        sent.join().map_err(|_panic| io::Error::other("a thread panicked"))?
    })
}

fn write(directory: &Path, source: &[u8]) -> io::Result<()> {
    let mut file = tempfile::tempfile_in(directory)?;
    for _ in 0..BUFFERS {
        source.chunks(CALL_BYTES).try_for_each(|part| file.write_all(part))?;
    }
    file.sync_data()
}
