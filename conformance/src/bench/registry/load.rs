//! Work for a registry: one blob there or back, or as many small requests as it takes.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use kybernate_spec::{Descriptor, Digest, Hasher, media_type};

use super::wire::{Reply, Wire};

/// Where everything goes.
pub(super) const REPOSITORY: &str = "bench/small";
/// What large blobs are made of.
const PIECE_BYTES: usize = 1 << 20;

/// What many clients saw.
#[derive(Debug, Default)]
pub(super) struct Load {
    /// How long each request took, sorted.
    times: Vec<Duration>,
    /// How long all of them took together.
    span: Duration,
}

/// Bytes to push: pieces that are the same in every blob, and a first one that is not.
#[derive(Debug)]
pub(super) struct Bulk {
    first: Vec<u8>,
    piece: Vec<u8>,
    pieces: usize,
    digest: Digest,
}

impl Load {
    /// Requests per second.
    pub(super) fn rate(&self) -> f64 {
        self.count() / self.span.as_secs_f64()
    }

    /// How many there were.
    pub(super) fn count(&self) -> f64 {
        f64::from(u32::try_from(self.times.len()).unwrap_or(u32::MAX))
    }

    /// The time, in milliseconds, below which 99 of 100 were.
    pub(super) fn p99(&self) -> f64 {
        let at = self.times.len() * 99 / 100;
        self.times.get(at).copied().unwrap_or_default().as_secs_f64() * 1000.0
    }
}

impl Bulk {
    /// Makes a blob of `mib` MiB that nobody has. Hashing it is not part of what is measured.
    pub(super) fn new(mib: usize, seed: u64) -> Self {
        let (first, piece) = (noise(PIECE_BYTES, seed), noise(PIECE_BYTES, 1));
        let mut hasher = Hasher::new(kybernate_spec::Algorithm::Sha256);
        hasher.update(&first);
        (1..mib).for_each(|_| hasher.update(&piece));
        Self { first, piece, pieces: mib, digest: hasher.finish() }
    }

    /// Pushes it with POST and PUT.
    pub(super) fn push(&self, wire: &mut Wire) -> anyhow::Result<()> {
        let rest = std::iter::repeat_n(self.piece.as_slice(), self.pieces.saturating_sub(1));
        let pieces: Vec<&[u8]> = std::iter::once(self.first.as_slice()).chain(rest).collect();
        push(wire, "bench/bulk", &self.digest, &pieces)
    }

    /// Its path.
    pub(super) fn path(&self) -> String {
        format!("/v2/bench/bulk/blobs/{}", self.digest)
    }
}

/// Lets `clients` repeat `work` for a while; it is told the client's number and how often it did.
pub(super) fn hammer(
    address: SocketAddr,
    clients: u64,
    span: Duration,
    work: impl Fn(&mut Wire, u64, u64) -> anyhow::Result<()> + Sync,
) -> anyhow::Result<Load> {
    let began = Instant::now();
    let times = together(clients, |client| {
        let mut wire = Wire::connect(address)?;
        let mut times = Vec::new();
        for number in 0.. {
            let before = Instant::now();
            work(&mut wire, client, number)?;
            times.push(before.elapsed());
            if began.elapsed() >= span {
                break;
            }
        }
        Ok(times)
    })?;
    let mut load = Load { times: times.concat(), span: began.elapsed() };
    load.times.sort_unstable();
    Ok(load)
}

/// Does `work` as many times side by side.
pub(super) fn together<T: Send>(
    many: u64,
    work: impl Fn(u64) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Vec<T>> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..many).map(|number| scope.spawn(move || work(number))).collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_panic| anyhow::anyhow!("a thread panicked"))?);
        joined.collect()
    })
}

/// Repeats `work` until `other` is done, and returns what both gave.
pub(super) fn beside<A, B: Send>(
    other: impl FnOnce() -> anyhow::Result<A>,
    work: impl Fn() -> anyhow::Result<B> + Sync + Send,
) -> anyhow::Result<A> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let repeating = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                work()?;
            }
            anyhow::Ok(())
        });
        let outcome = other();
        done.store(true, Ordering::Relaxed);
        repeating.join().map_err(|_panic| anyhow::anyhow!("a thread panicked"))??;
        outcome
    })
}

/// Pushes a blob with POST and PUT, as containerd does.
pub(super) fn push(
    wire: &mut Wire,
    repository: &str,
    digest: &Digest,
    body: &[&[u8]],
) -> anyhow::Result<()> {
    let begun = wire.ask("POST", &format!("/v2/{repository}/blobs/uploads/"))?;
    expect(&begun, 202)?;
    let location = begun.location.context("no Location")?;
    let mark = if location.contains('?') { '&' } else { '?' };
    let target = format!("{location}{mark}digest={digest}");
    let fields = "Content-Type: application/octet-stream\r\n";
    expect(&wire.send("PUT", &target, fields, body)?, 201)
}

/// Pushes a small blob that nobody has.
pub(super) fn push_small(wire: &mut Wire, seed: u64) -> anyhow::Result<()> {
    let content = noise(4096, seed);
    push(wire, REPOSITORY, &Digest::of(&content), &[&content])
}

/// Pushes an image of nothing under a tag.
pub(super) fn push_image(wire: &mut Wire, repository: &str, tag: &str) -> anyhow::Result<()> {
    push(wire, repository, &Digest::of(b"{}"), &[b"{}"])?;
    tag_image(wire, repository, tag)
}

/// Points a tag at the image of nothing.
pub(super) fn tag_image(wire: &mut Wire, repository: &str, tag: &str) -> anyhow::Result<()> {
    let config = Descriptor::of(media_type::OCI_EMPTY, b"{}");
    let manifest = serde_json::to_vec(&serde_json::json!({
        "schemaVersion": 2,
        "mediaType": media_type::OCI_MANIFEST,
        "config": config,
        "layers": [config],
    }))?;
    let fields = format!("Content-Type: {}\r\n", media_type::OCI_MANIFEST);
    let target = format!("/v2/{repository}/manifests/{tag}");
    expect(&wire.send("PUT", &target, &fields, &[&manifest])?, 201)
}

/// Fails when a reply is another.
pub(super) fn expect(reply: &Reply, status: u16) -> anyhow::Result<()> {
    ensure!(reply.status == status, "status {} instead of {status}", reply.status);
    Ok(())
}

/// Bytes that do not repeat and are the same for the same seed (xorshift64*).
pub(super) fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let words = std::iter::repeat_with(|| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()
    });
    words.flatten().take(length).collect()
}
