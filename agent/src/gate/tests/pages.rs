//! Files of pages that are shorter than the pagemaps say.

use kybernate_packager::criu::{PagemapEntry, PagemapHead};

use super::*;

fn entry(pages: u64, flags: Option<u32>, in_parent: Option<bool>) -> Vec<u8> {
    let compat_pages = u32::try_from(pages).unwrap_or_default();
    let pages = Some(pages);
    PagemapEntry { address: 0x1000, compat_pages, in_parent, flags, pages }.encode_to_vec()
}

/// A pagemap of `pages-7.img`.
fn pagemap(entries: &[Vec<u8>]) -> Vec<u8> {
    let head = PagemapHead { pages_id: 7 }.encode_to_vec();
    image(Magic::PAGEMAP, &[&[head][..], entries].concat())
}

/// Returns how many bytes `pages-7.img` must have for pagemaps with these entries.
fn needed(pagemaps: &[(&str, &[Vec<u8>])]) -> u64 {
    let mut images = Dump::default().images();
    for (name, entries) in pagemaps {
        images.push(((*name).to_owned(), pagemap(entries)));
    }
    summarise(&images, &[]).unwrap().memory[&7]
}

#[test]
fn what_criu_reads_is_counted() {
    let of = |entries: &[Vec<u8>]| needed(&[("pagemap-1.img", entries)]);
    assert_eq!(of(&[]), 0);
    assert_eq!(of(&[entry(3, Some(4), None), entry(2, Some(4 | 2), None)]), 5 * 4096);
    // Before there were flags.
    assert_eq!(of(&[entry(3, None, None), entry(2, None, Some(true))]), 3 * 4096);
    // In the parent; and what is said to be nowhere, which CRIU reads all the same.
    assert_eq!(of(&[entry(3, Some(1), None)]), 0);
    assert_eq!(of(&[entry(3, Some(0), None), entry(2, Some(2), None)]), 5 * 4096);
    assert_eq!(of(&[entry(u64::MAX, Some(4), None), entry(2, Some(4), None)]), u64::MAX);
    let (one, two) = ([entry(3, Some(4), None)], [entry(2, Some(4), None)]);
    assert_eq!(needed(&[("pagemap-1.img", &one), ("pagemap-shmem-9.img", &two)]), 3 * 4096);
}

#[test]
fn a_pagemap_that_cannot_be_read_is_refused() {
    let whole = pagemap(&[entry(3, Some(4), None)]);
    let spoiled = [
        (image(Magic::MM, &[]), "magic"),
        (image(Magic::PAGEMAP, &[]), "ends early"),
        (whole[..whole.len() - 1].to_vec(), "ends early"),
        (image(Magic::PAGEMAP, &[vec![0xff]]), "decoded"),
    ];
    for (content, reason) in spoiled {
        let mut images = Dump::default().images();
        images.push(("pagemap-1.img".to_owned(), content));
        let refused = summarise(&images, &[]).unwrap_err();
        assert!(refused.contains("pagemap-1.img") && refused.contains(reason), "{refused}");
    }
}

/// A pagemap with more entries than other images may have bytes.
#[test]
fn a_pagemap_of_any_length_is_read() {
    let directory = tempfile::tempdir().unwrap();
    for (name, content) in Dump::default().images() {
        fs::write(directory.path().join(name), content).unwrap();
    }
    // A field that nobody knows makes them long.
    let filler = 1 << 16;
    let mut long = entry(1, Some(4), None);
    long.extend([0x7a, 0x80, 0x80, 0x04]);
    long.extend(vec![0; filler]);
    let count = usize::try_from(IMAGE_BYTES_MAX).unwrap() / filler + 1;
    fs::write(directory.path().join("pagemap-1.img"), pagemap(&vec![long; count])).unwrap();
    let mut sent = tempfile::tempfile().unwrap();
    send(directory.path(), sent.try_clone().unwrap()).unwrap();
    io::Seek::rewind(&mut sent).unwrap();
    let summary = decode(sent).unwrap();
    assert_eq!(summary.memory[&7], u64::try_from(count).unwrap() * 4096);
}

#[tokio::test]
async fn memory_that_is_not_there_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let told = async |bytes: u64| {
        let summary = Summary { memory: [(7, bytes)].into(), ..Summary::default() };
        lacking(&summary, directory.path(), BTreeMap::new()).await.unwrap().join("; ")
    };
    let path = directory.path().join("pages-7.img");
    assert_eq!(told(0).await, "");
    let missing = told(4096).await;
    assert!(missing.contains("\"pages-7.img\" is missing"), "{missing}");
    fs::write(&path, [0; 8191]).unwrap();
    assert_eq!(told(4096).await, "");
    let short = told(8192).await;
    assert!(short.contains("8191 bytes") && short.contains("8192"), "{short}");
    assert!(short.contains("take a checkpoint anew"), "{short}");
    fs::write(&path, [0; 8192]).unwrap();
    assert_eq!(told(8192).await, "");
    // Whatever a link leads to is no file of the dump's.
    fs::rename(&path, directory.path().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink("elsewhere", &path).unwrap();
    assert!(told(8192).await.contains("is missing"));
    fs::remove_file(&path).unwrap();
}

#[tokio::test]
async fn memory_that_comes_later_counts() {
    let directory = tempfile::tempdir().unwrap();
    let summary = Summary { memory: [(7, 8192)].into(), ..Summary::default() };
    for (length, lacks) in [(8191, true), (8192, false), (9000, false)] {
        let others = [("pages-7.img".to_owned(), length)].into();
        let told = lacking(&summary, directory.path(), others).await.unwrap();
        assert_eq!(!told.is_empty(), lacks, "{length}: {told:?}");
    }
}
