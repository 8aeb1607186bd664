//! A dump directory as CRIU leaves it, small.

use std::path::{Path, PathBuf};

use kybernate_packager::criu::{
    Inventory, Magic, Mapping, Memory, PagemapEntry, PagemapHead, Process,
};
use prost::Message as _;

use crate::artifact::noise;

const PAGE: usize = 4096;

/// Makes `directory/dump`: one process with `pages` pages of noise.
pub(crate) fn dump(directory: &Path, pages: usize) -> PathBuf {
    let dump = directory.join("dump");
    fs_err::create_dir(&dump).unwrap();
    let image = |name: &str, magic: Magic, messages: &[Vec<u8>]| {
        // The first word of every image but the inventory, then which image it is.
        let mut bytes = 0x5456_4319_u32.to_le_bytes().to_vec();
        bytes.extend(magic.0.to_le_bytes());
        for message in messages {
            bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            bytes.extend(message);
        }
        fs_err::write(dump.join(name), bytes).unwrap();
    };
    let size = u64::try_from(pages * PAGE).unwrap();
    let start = 0x10_0000;
    let inventory = Inventory { img_version: 2, ..Inventory::default() };
    image("inventory.img", Magic::INVENTORY, &[inventory.encode_to_vec()]);
    let process = Process { pid: 1, ppid: 0, threads: vec![1] };
    image("pstree.img", Magic::PSTREE, &[process.encode_to_vec()]);
    image("core-1.img", Magic(0x5505_3847), &[]);
    let memory =
        Memory { mappings: vec![Mapping { start, end: start + size, ..Mapping::default() }] };
    image("mm-1.img", Magic::MM, &[memory.encode_to_vec()]);
    let entry = PagemapEntry {
        address: start,
        flags: Some(4),
        pages: Some(u64::try_from(pages).unwrap()),
        ..PagemapEntry::default()
    };
    let head = PagemapHead { pages_id: 1 };
    image("pagemap-1.img", Magic::PAGEMAP, &[head.encode_to_vec(), entry.encode_to_vec()]);
    fs_err::write(dump.join("pages-1.img"), noise(pages * PAGE, 1)).unwrap();
    dump
}
