//! What is measured.

use std::path::Path;
use std::time::{Duration, Instant};

use kybernate_spec::Digest;

use super::load::{
    Bulk, Load, REPOSITORY, beside, expect, hammer, noise, push, push_image, push_small, tag_image,
    together,
};
use super::server::{Program, Server};
use super::wire::Wire;

/// How long small requests are repeated.
const SPAN: Duration = Duration::from_secs(2);
/// Clients that ask for what is there.
const READERS: u64 = 16;
/// Streams of a bulk pull.
const PULLS: u64 = 8;
/// Blobs of 64 MiB pushed side by side.
const PUSHES: u64 = 4;

/// A figure's name, with its unit, and its value.
pub(super) type Figure = (String, f64);

/// What belongs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Part {
    /// Bulk pulls.
    Pull,
    /// Bulk pushes.
    Push,
    /// Pushes of 4 KiB.
    Small,
    /// HEAD of a manifest and of a blob.
    Head,
    /// GET of 4 KiB.
    Get,
    /// A start.
    Start,
}

impl Part {
    pub(super) const ALL: [Self; 6] =
        [Self::Push, Self::Pull, Self::Small, Self::Head, Self::Get, Self::Start];
}

/// Measures one part on one server. `round` makes its content new.
pub(super) fn measure(part: Part, server: &Server, round: u64) -> anyhow::Result<Vec<Figure>> {
    server.forget_memory()?;
    match part {
        Part::Pull => pull(server),
        Part::Push => bulk_push(server, round),
        Part::Small => small(server, round),
        Part::Head => head(server),
        Part::Get => get(server),
        Part::Start => Ok(vec![figure("start to first answer, ms", milliseconds(server.started))]),
    }
}

/// Starts a registry that has many tags, several times.
pub(super) fn starts(
    program: &Program,
    root: &Path,
    tags: u32,
    rounds: u32,
) -> anyhow::Result<Vec<Vec<Figure>>> {
    let server = program.start(root)?;
    let clients = 16;
    together(clients, |client| {
        let mut wire = Wire::connect(server.address)?;
        let repository = format!("bench/tags-{client}");
        let own = (u64::from(tags) / clients).max(1);
        (0..own).try_for_each(|tag| match tag {
            0 => push_image(&mut wire, &repository, "t0"),
            tag => tag_image(&mut wire, &repository, &format!("t{tag}")),
        })
    })?;
    server.stop()?;
    let name = format!("start to first answer with {tags} tags, ms");
    let start = |_| {
        let server = program.start(root)?;
        let figures = vec![figure(&name, milliseconds(server.started))];
        server.stop()?;
        Ok(figures)
    };
    (0..rounds).map(start).collect()
}

fn pull(server: &Server) -> anyhow::Result<Vec<Figure>> {
    let blob = Bulk::new(1024, 7);
    let mut wire = Wire::connect(server.address)?;
    if wire.ask("HEAD", &blob.path())?.status != 200 {
        blob.push(&mut wire)?;
    }
    // From the page cache: the disk is the same for all.
    expect(&wire.ask("GET", &blob.path())?, 200)?;
    server.forget_memory()?;
    let cost = Cost::of(server, PULLS * 1024, || {
        let pull = |_| expect(&Wire::connect(server.address)?.ask("GET", &blob.path())?, 200);
        together(PULLS, pull).map(drop)
    })?;
    Ok(vec![
        figure("pull 8 × 1 GiB, CPU-s/GiB", cost.processor),
        figure("pull 8 × 1 GiB, MiB/s", cost.rate),
        figure("resident with 8 pulls, MiB", server.memory()?),
    ])
}

fn bulk_push(server: &Server, round: u64) -> anyhow::Result<Vec<Figure>> {
    let large = Bulk::new(1024, 1_000 + round);
    let many: Vec<Bulk> = (0..PUSHES).map(|n| Bulk::new(64, 2_000 + round * 16 + n)).collect();
    let one = Cost::of(server, 1024, || large.push(&mut Wire::connect(server.address)?))?;
    rustix::fs::sync();
    let four = Cost::of(server, PUSHES * 64, || {
        let next = |n| many.get(usize::try_from(n).unwrap_or(0));
        let push = |n| next(n).map_or(Ok(()), |b| b.push(&mut Wire::connect(server.address)?));
        together(PUSHES, push).map(drop)
    })?;
    Ok(vec![
        figure("push 1 × 1 GiB, CPU-s/GiB", one.processor),
        figure("push 1 × 1 GiB, MiB/s", one.rate),
        figure("push 4 × 64 MiB, CPU-s/GiB", four.processor),
        figure("push 4 × 64 MiB, MiB/s", four.rate),
        figure("resident with pushes, MiB", server.memory()?),
    ])
}

fn small(server: &Server, round: u64) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let run = |clients: u64, salt: u64| {
        hammer(server.address, clients, SPAN, |wire, client, number| {
            push_small(wire, (((round * 8 + salt) << 8) + client) << 24 | number)
        })
    };
    for (salt, clients) in [(1, 8), (2, 32)] {
        let load = run(clients, salt)?;
        figures.push(figure(&format!("push 4 KiB, {clients} clients, /s"), load.rate()));
        figures.push(figure(&format!("push 4 KiB, {clients} clients, p99 ms"), load.p99()));
    }
    let blobs: Vec<Bulk> = (0..8).map(|n| Bulk::new(256, 3_000 + round * 16 + n)).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let load = beside(
        || run(8, 3),
        || {
            let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let blob = blobs.get(at % blobs.len());
            blob.map_or(Ok(()), |blob| blob.push(&mut Wire::connect(server.address)?))
        },
    )?;
    figures.push(figure("push 4 KiB beside a bulk push, 8 clients, /s", load.rate()));
    figures.push(figure("push 4 KiB beside a bulk push, 8 clients, p99 ms", load.p99()));
    Ok(figures)
}

fn head(server: &Server) -> anyhow::Result<Vec<Figure>> {
    let mut wire = Wire::connect(server.address)?;
    push_image(&mut wire, REPOSITORY, "head")?;
    let mut figures = Vec::new();
    let blob = format!("/v2/{REPOSITORY}/blobs/{}", Digest::of(b"{}"));
    let manifest = format!("/v2/{REPOSITORY}/manifests/head");
    for (name, path) in [("manifest", manifest), ("blob", blob)] {
        let (load, micros) = read(server, "HEAD", &path)?;
        figures.push(figure(&format!("HEAD {name}, 16 clients, /s"), load.rate()));
        figures.push(figure(&format!("HEAD {name}, 16 clients, p99 ms"), load.p99()));
        figures.push(figure(&format!("HEAD {name}, CPU µs each"), micros));
    }
    Ok(figures)
}

fn get(server: &Server) -> anyhow::Result<Vec<Figure>> {
    let content = noise(4096, 4_000);
    let digest = Digest::of(&content);
    push(&mut Wire::connect(server.address)?, REPOSITORY, &digest, &[&content])?;
    let path = format!("/v2/{REPOSITORY}/blobs/{digest}");
    let (load, micros) = read(server, "GET", &path)?;
    Ok(vec![
        figure("GET 4 KiB, 16 clients, /s", load.rate()),
        figure("GET 4 KiB, 16 clients, p99 ms", load.p99()),
        figure("GET 4 KiB, CPU µs each", micros),
    ])
}

/// Repeats a request that succeeds, and returns what one costs the server in microseconds.
fn read(server: &Server, method: &str, path: &str) -> anyhow::Result<(Load, f64)> {
    let before = server.processor()?;
    let load =
        hammer(server.address, READERS, SPAN, |wire, _, _| expect(&wire.ask(method, path)?, 200))?;
    let used = server.processor()?.saturating_sub(before);
    let micros = used.as_secs_f64() * 1e6 / load.count();
    Ok((load, micros))
}

/// What moving bytes costs.
struct Cost {
    /// Processor time of the server, seconds per GiB.
    processor: f64,
    /// MiB per second.
    rate: f64,
}

impl Cost {
    fn of(
        server: &Server,
        mib: u64,
        work: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let (before, began) = (server.processor()?, Instant::now());
        work()?;
        let time = began.elapsed().as_secs_f64();
        let used = server.processor()?.saturating_sub(before).as_secs_f64();
        let mib = f64::from(u32::try_from(mib)?);
        Ok(Self { processor: used * 1024.0 / mib, rate: mib / time })
    }
}

fn figure(name: &str, value: f64) -> Figure {
    (name.to_owned(), value)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
