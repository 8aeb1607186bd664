//! Dump directories as CRIU writes them, of one process that never was.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use fs_err as fs;

const PAGE_BYTES: usize = 4096;

/// The pages of a mapping are all of one kind.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Random,
    Zero,
    /// One word over and over, another one on each page.
    Repeating,
}

/// Where the mappings begin, far enough from each other.
const MAPPINGS: [(u64, Kind); 3] = [
    (0x1000_0000_0000, Kind::Random),
    (0x2000_0000_0000, Kind::Zero),
    (0x3000_0000_0000, Kind::Repeating),
];

/// First words of images (CRIU, `criu/include/magic.h`).
const COMMON: u32 = 0x5456_4319;
const INVENTORY: u32 = 0x5831_3116;
const PSTREE: u32 = 0x5027_3030;
const CORE: u32 = 0x5505_3847;
const MM: u32 = 0x5749_2820;
const PAGEMAP: u32 = 0x5608_4025;

/// Writes the dump of a process of `mib` MiB: a third each random, zero and repeating pages. Every
/// `changed`-th page of the first and the last third is another than with `None`.
pub(super) fn write(directory: &Path, mib: u32, seed: u64, changed: Option<u64>) -> io::Result<()> {
    let pages = u64::from(mib) * 256 / 3;
    fs::create_dir(directory)?;
    process(directory, pages)?;
    let mut entries = vec![field(1, 1)];
    let file = fs::File::create(directory.join("pages-1.img"))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    for (start, kind) in MAPPINGS {
        // Address, number of pages twice (before and since CRIU 4.2), and that they are there.
        entries.push([field(1, start), field(2, pages), field(4, 4), field(5, pages)].concat());
        for page in 0..pages {
            let new = changed.is_some_and(|every| page % every == 0);
            let seed = seed.wrapping_mul(0x100_0000).wrapping_add(page).wrapping_mul(2);
            let content = content(kind, start.wrapping_add(seed).wrapping_add(u64::from(new)));
            out.write_all(&content)?;
        }
    }
    out.flush()?;
    image(directory, "pagemap-1.img", PAGEMAP, &entries)
}

/// Writes a dump of next to no memory and `count` small images, of 0.5 to 4 KiB.
pub(super) fn write_small(directory: &Path, count: u32, seed: u64) -> io::Result<()> {
    write(directory, 1, seed, None)?;
    for number in 0..count {
        let mut random = Random(seed.wrapping_add(u64::from(number)));
        let words = 64 + random.word() % 448;
        let content: Vec<u8> = (0..words).flat_map(|_| random.word().to_le_bytes()).collect();
        fs::write(directory.join(format!("fdinfo-{number:x}.img")), content)?;
    }
    Ok(())
}

fn process(directory: &Path, pages: u64) -> io::Result<()> {
    let page_bytes = u64::try_from(PAGE_BYTES).map_err(io::Error::other)?;
    image(directory, "inventory.img", INVENTORY, &[field(1, 2)])?;
    image(directory, "pstree.img", PSTREE, &[[field(1, 1), field(2, 0), field(5, 1)].concat()])?;
    image(directory, "core-1.img", CORE, &[])?;
    let mut memory = Vec::new();
    for (start, _) in MAPPINGS {
        let mapping = [field(1, start), field(2, start + pages * page_bytes), field(7, 1 << 9)];
        let mapping = mapping.concat();
        memory.extend(varint((14 << 3) | 2));
        memory.extend(varint(u64::try_from(mapping.len()).map_err(io::Error::other)?));
        memory.extend(mapping);
    }
    image(directory, "mm-1.img", MM, &[memory])
}

fn image(directory: &Path, name: &str, magic: u32, records: &[Vec<u8>]) -> io::Result<()> {
    let mut content = [COMMON.to_le_bytes(), magic.to_le_bytes()].concat();
    for record in records {
        let length = u32::try_from(record.len()).map_err(io::Error::other)?;
        content.extend(length.to_le_bytes());
        content.extend(record);
    }
    fs::write(directory.join(name), content)
}

/// A number as a field of a protobuf message.
fn field(number: u64, value: u64) -> Vec<u8> {
    [varint(number << 3), varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let [low, ..] = value.to_le_bytes();
        value >>= 7;
        if value == 0 {
            bytes.push(low & 0x7f);
            return bytes;
        }
        bytes.push(low | 0x80);
    }
}

fn content(kind: Kind, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let words = PAGE_BYTES / 8;
    match kind {
        Kind::Zero => vec![0; PAGE_BYTES],
        Kind::Random => (0..words).flat_map(|_| random.word().to_le_bytes()).collect(),
        Kind::Repeating => random.word().to_le_bytes().repeat(words),
    }
}

/// Numbers without a pattern that a compressor or a deduplicating store would find (splitmix64).
struct Random(u64);

impl Random {
    const fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_has_its_pages_and_so_many_of_them_change() {
        let home = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| home.path().join(name));
        write(&one, 3, 7, None).unwrap();
        write(&two, 3, 7, Some(50)).unwrap();
        let [one, two] = [one, two].map(|at| fs::read(at.join("pages-1.img")).unwrap());
        assert_eq!(one.len(), 3 << 20);
        let pairs = one.chunks(PAGE_BYTES).zip(two.chunks(PAGE_BYTES));
        // 256 pages of each kind; zero pages do not change.
        assert_eq!(pairs.filter(|(old, new)| old != new).count(), 12);
        let zeros = one.chunks(PAGE_BYTES).filter(|page| page.iter().all(|byte| *byte == 0));
        assert_eq!(zeros.count(), 256);
        assert_eq!(varint(300), [0xac, 2]);
    }
}
