//! Page indexes, right and wrong, byte by byte as the specification draws them.

use sha2::{Digest as _, Sha256};

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;
/// Bytes of a chunk and of a segment.
pub(super) const CHUNK: usize = 4 << 20;

/// Identifier of BLAKE3.
pub(super) const BLAKE3: u8 = 1;
/// Identifier of SHA-256.
pub(super) const SHA256: u8 = 2;

/// A page index that is being written. Nothing is checked.
#[derive(Clone, Debug)]
pub(super) struct PageIndex {
    pub(super) bytes: Vec<u8>,
    hash: u8,
}

/// Chunks as the record has them: offset, stored length, plain length, encoding.
pub(super) type Chunks<'a> = &'a [(u64, u32, u32, u8)];
/// `n` runs as the record has them: page in the segment, pages, shard, page.
pub(super) type Runs<'a> = &'a [(u16, u16, u16, u16)];

impl PageIndex {
    /// Begins with a header that says BLAKE3.
    pub(super) fn new(shards: u32, files: u32) -> Self {
        Self::hashed(BLAKE3, shards, files)
    }

    /// Begins with a header that says `hash`.
    pub(super) fn hashed(hash: u8, shards: u32, files: u32) -> Self {
        let mut bytes = b"KYBPAGES\x01\x00".to_vec();
        bytes.extend([hash, 0]);
        for number in [shards, files, 4 << 20, 4096, 0] {
            bytes.extend(number.to_le_bytes());
        }
        Self { bytes, hash }
    }

    /// Replaces bytes that were written.
    pub(super) fn patch(mut self, at: usize, with: &[u8]) -> Self {
        for (byte, new) in self.bytes.iter_mut().skip(at).zip(with) {
            *byte = *new;
        }
        self
    }

    /// Adds bytes.
    pub(super) fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Adds a record.
    pub(super) fn record(self, kind: u8, payload: &[u8]) -> Self {
        let length = u32::try_from(payload.len() + 1).unwrap_or(u32::MAX);
        self.raw(&length.to_le_bytes()).raw(&[kind]).raw(payload)
    }

    /// Adds the chunk table of a shard with this content.
    pub(super) fn shard(self, content: &[u8]) -> Self {
        let table = self.table(content);
        self.record(1, &table)
    }

    /// Adds a chunk table of these chunks, with some hash.
    pub(super) fn chunks(self, chunks: Chunks<'_>) -> Self {
        let mut table = Vec::new();
        for (offset, stored, plain, encoding) in chunks {
            table.extend(offset.to_le_bytes());
            table.extend(stored.to_le_bytes());
            table.extend(plain.to_le_bytes());
            table.push(*encoding);
            table.extend([7; 32]);
        }
        self.record(1, &table)
    }

    fn table(&self, content: &[u8]) -> Vec<u8> {
        let mut table = Vec::new();
        let mut offset = 0_u64;
        for chunk in content.chunks(CHUNK) {
            let length = u32::try_from(chunk.len()).unwrap_or(u32::MAX);
            table.extend(offset.to_le_bytes());
            table.extend(length.to_le_bytes());
            table.extend(length.to_le_bytes());
            table.push(0);
            let hash: [u8; 32] = match self.hash {
                SHA256 => Sha256::digest(chunk).into(),
                _ => blake3::hash(chunk).into(),
            };
            table.extend(hash);
            offset += u64::from(length);
        }
        table
    }

    /// Begins a file.
    pub(super) fn file(self, name: impl AsRef<[u8]>, length: u64) -> Self {
        self.record(2, &[&length.to_le_bytes(), name.as_ref()].concat())
    }

    /// Adds a segment that is a hole.
    pub(super) fn hole(self) -> Self {
        self.record(3, &[])
    }

    /// Adds a segment of which every page is stored.
    pub(super) fn run(self, shard: u16, page: u16) -> Self {
        self.record(4, &place(shard, page))
    }

    /// Adds a segment whose stored pages are these.
    pub(super) fn bitmap(
        self,
        shard: u16,
        page: u16,
        pages: impl IntoIterator<Item = u16>,
    ) -> Self {
        let mut bits = [0_u8; 128];
        for page in pages {
            if let Some(byte) = bits.get_mut(usize::from(page / 8)) {
                *byte |= 1 << (page % 8);
            }
        }
        self.record(5, &[&place(shard, page)[..], &bits].concat())
    }

    /// Adds a segment whose stored pages are these runs.
    pub(super) fn runs(self, runs: Runs<'_>) -> Self {
        let mut payload = Vec::new();
        for (first, pages, shard, page) in runs {
            payload.extend(first.to_le_bytes());
            payload.extend(pages.to_le_bytes());
            payload.extend(place(*shard, *page));
        }
        self.record(6, &payload)
    }

    /// Ends it.
    pub(super) fn end(self) -> Vec<u8> {
        self.record(0, &[]).bytes
    }
}

fn place(shard: u16, page: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (shard.to_le_bytes(), page.to_le_bytes());
    [a, b, c, d]
}

/// Returns `count` pages, each of its own content and none zero. `seed` is below 256.
pub(super) fn pages(seed: u32, count: u32) -> Vec<u8> {
    let word = |page: u32| (seed << 24 | (page + 1)).to_le_bytes();
    (0..count).flat_map(|page| word(page).repeat(PAGE / 4)).collect()
}
