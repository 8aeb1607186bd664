//! The page index as a sequence of records.

use kybernate_spec::Reason;

use super::super::artifact::{Artifact, Pool};
use super::super::page_index::{Chunks, PageIndex, pages};

type Bytes = &'static [u8];

/// Length of the one bulk file.
const LENGTH: u64 = 2 * 4096;

pub(super) fn add(pool: &mut Pool) -> anyhow::Result<()> {
    header(pool)?;
    ends(pool)?;
    lengths(pool)?;
    order(pool)?;
    chunk_tables(pool)?;
    shards(pool)?;
    names(pool)?;
    large(pool)
}

/// An artifact of two pages in a shard, one file and this page index.
pub(super) fn with(page_index: Vec<u8>) -> Artifact {
    Artifact::small().with_pages(page_index, vec![pages(1, 2)], LENGTH, 2)
}

fn bad(
    pool: &mut Pool,
    name: &'static str,
    reason: Reason,
    what: &'static str,
    page_index: Vec<u8>,
) -> anyhow::Result<()> {
    pool.bad(name, "5", reason, what, with(page_index))
}

/// A header and a shard, as they should be.
fn begun() -> PageIndex {
    PageIndex::new(1, 1).shard(&pages(1, 2))
}

/// All but the end.
fn whole() -> PageIndex {
    begun().file("pages-1.img", LENGTH).run(0, 0)
}

fn header(pool: &mut Pool) -> anyhow::Result<()> {
    use Reason::{Header, Unsupported};
    let cases: [(Reason, &str, &str, usize, Bytes); 13] = [
        (Header, "index-magic", "another magic", 7, b"s"),
        (Unsupported, "index-version-0", "version 0", 8, &[0]),
        (Unsupported, "index-version-2", "version 2", 8, &[2]),
        (Unsupported, "index-version-257", "version 257", 9, &[1]),
        (Unsupported, "index-hash-0", "a hash that is none", 10, &[0]),
        (Unsupported, "index-hash-3", "a hash of a later version", 10, &[3]),
        (Unsupported, "index-flags", "a flag of a later version", 11, &[1]),
        (Header, "index-chunk-bytes", "chunks of 8 MiB", 20, &[0, 0, 0x80, 0]),
        (Header, "index-page-bytes", "pages of 64 KiB", 24, &[0, 0, 1, 0]),
        (Header, "index-page-bytes-0", "pages of no bytes", 24, &[0, 0]),
        (Header, "index-zero", "a number that must be zero is not", 31, &[1]),
        (Header, "index-shards-many", "65,537 shards announced", 12, &[1, 0, 1, 0]),
        (Header, "index-files-many", "1,048,577 files announced", 16, &[1, 0, 0x10, 0]),
    ];
    for (reason, name, what, at, bytes) in cases {
        bad(pool, name, reason, what, whole().patch(at, bytes).end())?;
    }
    Ok(())
}

fn ends(pool: &mut Pool) -> anyhow::Result<()> {
    // Header 32, shard 5 + 49, file 5 + 8 + 11, run 5 + 4, end 5.
    for (name, what, length) in [
        ("index-no-bytes", "a page index of no bytes", 0),
        ("index-cut-header", "an end in the header", 31),
        ("index-cut-after-header", "an end behind the header", 32),
        ("index-cut-length", "an end in the length of a record", 34),
        ("index-cut-kind", "an end before the kind of a record", 36),
        ("index-cut-chunk", "an end in a chunk", 60),
        ("index-cut-after-shard", "an end behind the shards", 86),
        ("index-cut-file", "an end in a file's record", 100),
        ("index-cut-after-file", "an end behind a file", 110),
        ("index-cut-run", "an end in a run", 117),
        ("index-cut-before-end", "an end before the end record", 119),
        ("index-cut-in-end", "an end in the end record", 123),
    ] {
        let cut = whole().end().get(..length).unwrap_or_default().to_vec();
        bad(pool, name, Reason::Truncated, what, cut)?;
    }
    let more = [&*whole().end(), &[0]].concat();
    bad(pool, "index-trailing", Reason::Trailing, "a byte behind the end record", more)?;
    let twice = whole().record(0, &[]).end();
    bad(pool, "index-two-ends", Reason::Trailing, "two end records", twice)
}

impl PageIndex {
    fn odd(self, length: u32, bytes: &[u8]) -> Vec<u8> {
        self.raw(&length.to_le_bytes()).raw(bytes).end()
    }
}

fn lengths(pool: &mut Pool) -> anyhow::Result<()> {
    let file = || begun().file("pages-1.img", LENGTH);
    let cases: [(&str, &str, Vec<u8>); 14] = [
        ("record-empty", "a record of no bytes", file().odd(0, &[])),
        ("record-large", "a record of 16,385 bytes", file().odd(16_385, &vec![6; 16_385])),
        ("record-huge", "a record of 4 GiB: half a billion runs", file().odd(u32::MAX, &[6; 9])),
        ("chunk-short", "a chunk of 48 bytes", PageIndex::new(1, 1).record(1, &[0; 48]).end()),
        (
            "chunk-and-more",
            "a chunk and a byte",
            PageIndex::new(1, 1).record(1, &one_and_more()).end(),
        ),
        ("file-short", "a file record of seven bytes", begun().record(2, &[0; 7]).end()),
        ("hole-with-payload", "a hole with a payload", file().record(3, &[0]).end()),
        ("run-short", "a run of three bytes", file().record(4, &[0; 3]).end()),
        ("run-long", "a run of five bytes", file().record(4, &[0; 5]).end()),
        (
            "bitmap-short",
            "a bitmap of 1,016 bits",
            file().record(5, &[[0; 4].as_slice(), &[1; 127]].concat()).end(),
        ),
        (
            "bitmap-long",
            "a bitmap of 1,032 bits",
            file().record(5, &[[0; 4].as_slice(), &[1; 129]].concat()).end(),
        ),
        ("bitmap-empty", "a bitmap without a bit", file().bitmap(0, 0, []).end()),
        ("list-odd", "a list of seven bytes", file().record(6, &[0; 7]).end()),
        ("list-empty", "a list without a run", file().runs(&[]).end()),
    ];
    for (name, what, index) in cases {
        bad(pool, name, Reason::Record, what, index)?;
    }
    let end = whole().record(0, &[0]).bytes;
    bad(pool, "end-with-payload", Reason::Record, "an end record with a payload", end)?;
    let unknown = file().record(7, &[0; 4]).end();
    bad(pool, "record-unknown", Reason::Unsupported, "a record of a later version", unknown)?;
    let unknown = whole().record(255, &[]).end();
    bad(
        pool,
        "record-unknown-last",
        Reason::Unsupported,
        "a record of kind 255 before the end",
        unknown,
    )
}

/// A chunk as it should be, and a byte.
fn one_and_more() -> Vec<u8> {
    let index = begun().bytes;
    [index.get(37..).unwrap_or_default(), &[0]].concat()
}

fn order(pool: &mut Pool) -> anyhow::Result<()> {
    let shard = pages(1, 2);
    let plain = |shards, files| PageIndex::new(shards, files).shard(&shard);
    let cases: [(&str, &str, Vec<u8>); 13] = [
        (
            "file-before-shard",
            "a file before the shard",
            PageIndex::new(1, 1)
                .file("pages-1.img", LENGTH)
                .runs(&[(0, 2, 0, 0)])
                .shard(&shard)
                .end(),
        ),
        (
            "shard-after-file",
            "a shard more, behind the files",
            plain(2, 1).file("pages-1.img", LENGTH).run(0, 0).shard(&shard).end(),
        ),
        (
            "shard-over",
            "a shard more than announced",
            plain(1, 1).shard(&shard).file("pages-1.img", LENGTH).run(0, 0).end(),
        ),
        ("shards-missing", "a shard fewer than announced", plain(2, 0).end()),
        (
            "file-over",
            "a file more than announced",
            plain(1, 0).file("pages-1.img", LENGTH).run(0, 0).end(),
        ),
        (
            "files-missing",
            "a file fewer than announced",
            plain(1, 2).file("pages-1.img", LENGTH).run(0, 0).end(),
        ),
        (
            "segment-first",
            "a segment before any file",
            plain(1, 1).hole().file("pages-1.img", LENGTH).run(0, 0).end(),
        ),
        ("segment-over", "a segment beyond the file's length", whole().hole().end()),
        (
            "segment-missing",
            "a file without its segment",
            begun().file("pages-1.img", LENGTH).end(),
        ),
        (
            "segment-of-nothing",
            "a segment of a file without bytes",
            plain(1, 2).file("pages-2.img", 0).hole().file("pages-1.img", LENGTH).run(0, 0).end(),
        ),
        (
            "file-in-file",
            "a file before the last segment of another",
            plain(1, 2).file("pages-1.img", LENGTH).file("pages-2.img", 0).run(0, 0).end(),
        ),
        (
            "segments-few",
            "a file of 16 EiB with one segment",
            begun().file("pages-1.img", u64::MAX).run(0, 0).end(),
        ),
        ("end-first", "an end record behind the header", PageIndex::new(1, 1).end()),
    ];
    for (name, what, index) in cases {
        let mut artifact = with(index);
        if name == "segments-few" {
            // A run of 1,024 pages would not fit: a hole does.
            artifact = with(begun().file("pages-1.img", u64::MAX).hole().end());
        }
        pool.bad(name, "5", Reason::Records, what, artifact)?;
    }
    Ok(())
}

fn chunk_tables(pool: &mut Pool) -> anyhow::Result<()> {
    let cases: [(&str, &str, Chunks<'_>); 12] = [
        ("chunks-none", "a shard without chunks", &[]),
        ("chunks-gap-first", "a chunk that does not begin at 0", &[(4096, 8192, 8192, 0)]),
        (
            "chunks-gap",
            "a gap between two chunks",
            &[(0, 4 << 20, 4 << 20, 0), (8 << 20, 4096, 4096, 0)],
        ),
        (
            "chunks-overlap",
            "two chunks that overlap",
            &[(0, 4 << 20, 4 << 20, 0), (4096, 4096, 4096, 0)],
        ),
        (
            "chunks-backwards",
            "an offset of 16 EiB less a page",
            &[(0, 4 << 20, 4 << 20, 0), (u64::MAX - 4095, 4096, 4096, 0)],
        ),
        ("chunks-plain", "a raw chunk whose lengths differ", &[(0, 8192, 4096, 0)]),
        ("chunks-empty", "a chunk of no bytes", &[(0, 8192, 8192, 0), (8192, 0, 0, 0)]),
        ("chunks-empty-alone", "a shard of no bytes", &[(0, 0, 0, 0)]),
        (
            "chunks-large",
            "a chunk of 4 MiB and a page",
            &[(0, (4 << 20) + 4096, (4 << 20) + 4096, 0)],
        ),
        ("chunks-huge", "a chunk of 4 GiB", &[(0, u32::MAX - 4095, u32::MAX - 4095, 0)]),
        ("chunks-unpadded", "a shard that does not end on a page", &[(0, 8191, 8191, 0)]),
        (
            "chunks-short",
            "a chunk of less than 4 MiB before another",
            &[(0, 4096, 4096, 0), (4096, 4096, 4096, 0)],
        ),
    ];
    for (name, what, chunks) in cases {
        let index = PageIndex::new(1, 1).chunks(chunks).file("pages-1.img", LENGTH).run(0, 0);
        bad(pool, name, Reason::ChunkTable, what, index.end())?;
    }
    for (name, what, encoding) in [
        ("encoding-zstd", "a compressed chunk, which is reserved", 1),
        ("encoding-aead", "an encrypted chunk, which is reserved", 2),
        ("encoding-both", "a compressed and encrypted chunk, which is reserved", 3),
        ("encoding-4", "an encoding that nobody knows", 4),
    ] {
        let index = PageIndex::new(1, 1)
            .chunks(&[(0, 8192, 8192, encoding)])
            .file("pages-1.img", LENGTH)
            .run(0, 0);
        bad(pool, name, Reason::Unsupported, what, index.end())?;
    }
    Ok(())
}

fn shards(pool: &mut Pool) -> anyhow::Result<()> {
    let mut fewer = with(whole().end());
    fewer.shards.push(pages(2, 1));
    pool.bad(
        "shards-fewer",
        "5",
        Reason::Shards,
        "a shard in the manifest that the page index does not have",
        fewer,
    )?;
    let more = PageIndex::new(2, 1)
        .shard(&pages(1, 2))
        .shard(&pages(2, 1))
        .file("pages-1.img", LENGTH)
        .run(0, 0);
    bad(
        pool,
        "shards-more",
        Reason::Shards,
        "a shard in the page index that the manifest does not have",
        more.end(),
    )?;
    let mut larger = with(whole().end());
    larger.shards = vec![pages(1, 3)];
    pool.bad(
        "shard-larger",
        "5",
        Reason::Shards,
        "a shard that is larger than in the page index",
        larger,
    )?;
    let mut smaller = with(
        PageIndex::new(1, 1)
            .shard(&pages(1, 2))
            .file("pages-1.img", LENGTH)
            .runs(&[(0, 1, 0, 0)])
            .end(),
    );
    smaller.shards = vec![pages(1, 1)];
    smaller.stored_pages = 1;
    pool.bad(
        "shard-smaller",
        "5",
        Reason::Shards,
        "a shard that is smaller than in the page index",
        smaller,
    )?;
    let mut swapped = Artifact::small().with_pages(
        PageIndex::new(2, 1)
            .shard(&pages(1, 2))
            .shard(&pages(2, 1))
            .file("pages-1.img", LENGTH)
            .run(0, 0)
            .end(),
        vec![pages(2, 1), pages(1, 2)],
        LENGTH,
        2,
    );
    swapped.page_hashes = None;
    pool.bad(
        "shards-swapped",
        "5",
        Reason::Shards,
        "shards in another order than the layers",
        swapped,
    )
}

fn names(pool: &mut Pool) -> anyhow::Result<()> {
    let long = format!("pages-{}.img", "1".repeat(300));
    let cases: [(&str, &str, &[u8]); 10] = [
        ("bulk-name-above", "a name that goes up", b"../pages-1.img"),
        ("bulk-name-absolute", "an absolute path", b"/pages-1.img"),
        ("bulk-name-empty", "no name", b""),
        ("bulk-name-parent", "CRIU's link to another dump", b"parent"),
        ("bulk-name-criu-conf", "CRIU's configuration", b"criu.conf"),
        ("bulk-name-log", "a log", b"dump.log"),
        ("bulk-name-unknown", "an image that CRIU does not know", b"memory-1.img"),
        ("bulk-name-nul", "a name with a NUL", b"pages-1.img\0"),
        ("bulk-name-no-utf8", "a name that is no UTF-8", b"pages-\xc3.img"),
        ("bulk-name-long", "a name of 310 bytes", long.as_bytes()),
    ];
    for (name, what, bytes) in cases {
        let index = begun().file(bytes, LENGTH).run(0, 0).end();
        bad(pool, name, Reason::FileName, what, index)?;
    }
    let twice = PageIndex::new(1, 3)
        .shard(&pages(1, 2))
        .file("pages-1.img", LENGTH)
        .run(0, 0)
        .file("pages-2.img", 0)
        .file("pages-1.img", 0);
    bad(pool, "bulk-name-twice", Reason::FileTwice, "two bulk files of one name", twice.end())?;
    let packed = begun().file("core-1.img", LENGTH).run(0, 0).end();
    bad(
        pool,
        "bulk-name-in-pack",
        Reason::FileTwice,
        "a bulk file with the name of one of the pack",
        packed,
    )
}

fn large(pool: &mut Pool) -> anyhow::Result<()> {
    let mut index =
        PageIndex::new(1, 12_500).shard(&pages(1, 2)).file("pages-1.img", LENGTH).run(0, 0);
    for number in 1..12_500 {
        index = index.file(format!("amdgpu-{number:064}.img"), 0);
    }
    bad(
        pool,
        "index-large",
        Reason::IndexTooLarge,
        "a page index of more than 1 MiB for two pages",
        index.end(),
    )
}
