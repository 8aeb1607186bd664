//! Where the pages are.

use kybernate_spec::Reason;

use super::super::artifact::{Artifact, Pool};
use super::super::page_index::{PageIndex, Runs, SHA256, pages};

/// Pages of the one shard.
const PAGES: u32 = 8;

pub(super) fn add(pool: &mut Pool) -> anyhow::Result<()> {
    ranges(pool)?;
    order(pool)?;
    twice(pool)?;
    hashes(pool)
}

fn begun(files: u32) -> PageIndex {
    PageIndex::new(1, files).shard(&pages(1, PAGES))
}

fn bad(
    pool: &mut Pool,
    name: &'static str,
    reason: Reason,
    what: &'static str,
    (index, bulk_bytes, stored_pages): (PageIndex, u64, u64),
) -> anyhow::Result<()> {
    let artifact =
        Artifact::small().with_pages(index.end(), vec![pages(1, PAGES)], bulk_bytes, stored_pages);
    pool.bad(name, "5", reason, what, artifact)
}

fn one_list(runs: Runs<'_>, pages: u64) -> (PageIndex, u64, u64) {
    let stored = runs.iter().map(|(_, pages, ..)| u64::from(*pages)).sum();
    let length = pages * 4096;
    (begun(1).file("pages-1.img", length).runs(runs), length, stored)
}

fn ranges(pool: &mut Pool) -> anyhow::Result<()> {
    let reason = Reason::PageRange;
    let run = |shard, page, pages: u64| {
        let index = begun(1).file("pages-1.img", pages * 4096).run(shard, page);
        (index, pages * 4096, pages)
    };
    bad(pool, "run-beyond", reason, "a run that ends behind its shard", run(0, 0, 9))?;
    bad(pool, "run-behind", reason, "a run that begins behind its shard", run(0, 8, 1))?;
    bad(
        pool,
        "run-far-behind",
        reason,
        "a run at the last place there can be",
        run(0, u16::MAX, 2),
    )?;
    bad(pool, "run-no-shard", reason, "a run in a shard that is not there", run(1, 0, 1))?;
    bad(
        pool,
        "run-last-shard",
        reason,
        "a run in the last shard there can be",
        run(u16::MAX, 0, 1),
    )?;
    let list = one_list(&[(0, 1, 0, 0), (1, 2, 0, 7)], 3);
    bad(pool, "list-beyond", reason, "a listed run that ends behind its shard", list)?;
    let list = one_list(&[(0, 1, 0, 0), (1, 1, 1, 0)], 3);
    bad(pool, "list-no-shard", reason, "a listed run in a shard that is not there", list)?;
    let bitmap = |page, bits: [u16; 2]| {
        (begun(1).file("pages-1.img", 4 << 20).bitmap(0, page, bits), 4 << 20, 2)
    };
    bad(
        pool,
        "bitmap-beyond",
        reason,
        "a bitmap whose last page lies behind the shard",
        bitmap(7, [3, 500]),
    )?;
    bad(
        pool,
        "bitmap-wraps",
        reason,
        "a bitmap whose second page would be the shard's first again",
        bitmap(u16::MAX, [3, 500]),
    )
}

fn order(pool: &mut Pool) -> anyhow::Result<()> {
    let reason = Reason::PageOrder;
    let cases: [(&str, &str, Runs<'_>); 7] = [
        ("runs-overlap", "two runs that overlap", &[(0, 2, 0, 0), (1, 1, 0, 4)]),
        ("runs-same", "two runs of one page", &[(2, 1, 0, 0), (2, 1, 0, 4)]),
        ("runs-descending", "runs in descending order", &[(3, 1, 0, 0), (0, 1, 0, 4)]),
        ("runs-of-nothing", "a run of no pages", &[(0, 1, 0, 0), (1, 0, 0, 4)]),
        ("runs-past-end", "a run past the end of the file", &[(2, 3, 0, 0)]),
        ("runs-behind-end", "a run behind the end of the file", &[(0, 1, 0, 0), (4, 1, 0, 4)]),
        (
            "runs-wrap",
            "a run whose end is more than 16 bits hold",
            &[(0, 1, 0, 0), (u16::MAX, 2, 0, 4)],
        ),
    ];
    for (name, what, runs) in cases {
        bad(pool, name, reason, what, one_list(runs, 4))?;
    }
    let past = (begun(1).file("pages-1.img", 8 << 20).runs(&[(1023, 2, 0, 0)]).hole(), 8 << 20, 2);
    bad(pool, "runs-past-segment", reason, "a run over the border of two segments", past)?;
    let bits = (begun(1).file("pages-1.img", 4 * 4096).bitmap(0, 0, [0, 4]), 4 * 4096, 2);
    bad(pool, "bitmap-past-end", reason, "a bit behind the end of the file", bits)?;
    let last = (
        begun(1).file("pages-1.img", (4 << 20) + 1).hole().bitmap(0, 0, [0, 1023]),
        (4 << 20) + 1,
        2,
    );
    bad(
        pool,
        "bitmap-past-end-later",
        reason,
        "the last bit in the second segment of a file with a page in it",
        last,
    )
}

fn twice(pool: &mut Pool) -> anyhow::Result<()> {
    let reason = Reason::PageTwice;
    let list = one_list(&[(0, 2, 0, 0), (2, 1, 0, 1)], 3);
    bad(pool, "page-twice-in-segment", reason, "a page of a shard twice in a segment", list)?;
    let segments = (
        begun(1).file("pages-1.img", (4 << 20) + 4096).bitmap(0, 0, [0, 5]).run(0, 1),
        (4 << 20) + 4096,
        3,
    );
    bad(pool, "page-twice-in-file", reason, "a page of a shard in two segments", segments)?;
    let files = (
        begun(2).file("pages-1.img", 8192).run(0, 0).file("pages-2.img", 4096).run(0, 0),
        3 * 4096,
        3,
    );
    bad(pool, "page-twice-in-dump", reason, "a page of a shard in two files", files)
}

fn hashes(pool: &mut Pool) -> anyhow::Result<()> {
    for (name, what, hash) in [
        ("chunk-hash", "a chunk with another hash, in a shard that is as its digest says", 1),
        (
            "chunk-hash-sha256",
            "a chunk with another SHA-256, in a shard that is as its digest says",
            SHA256,
        ),
    ] {
        let shard = pages(1, 2);
        let mut index = PageIndex::hashed(hash, 1, 1).shard(&shard);
        if let Some(last) = index.bytes.last_mut() {
            *last ^= 0x80;
        }
        let index = index.file("pages-1.img", 8192).run(0, 0).end();
        let artifact = Artifact::small().with_pages(index, vec![shard], 8192, 2);
        pool.bad(name, "5", Reason::ChunkHash, what, artifact)?;
    }
    let shard = pages(1, 2);
    let index = PageIndex::hashed(SHA256, 1, 1).shard(&shard).file("pages-1.img", 8192).run(0, 0);
    let other = Artifact::small().with_pages(index.patch(10, &[1]).end(), vec![shard], 8192, 2);
    pool.bad(
        "chunk-hash-other",
        "5",
        Reason::ChunkHash,
        "a SHA-256 where BLAKE3 is announced",
        other,
    )?;

    let large = pages(9, 1026);
    let mut index = PageIndex::hashed(SHA256, 1, 1).shard(&large);
    if let Some(last) = index.bytes.last_mut() {
        *last ^= 1;
    }
    let index = index.file("pages-1.img", 8192).runs(&[(0, 1, 0, 0), (1, 1, 0, 1025)]).end();
    let second = Artifact::small().with_pages(index, vec![large], 8192, 2);
    pool.bad(
        "chunk-hash-second",
        "5",
        Reason::ChunkHash,
        "the second chunk with another hash, and a page that lies in it",
        second,
    )
}
