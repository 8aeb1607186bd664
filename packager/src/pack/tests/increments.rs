//! Checkpoints that are compared with an earlier one, in layouts on disk.

use super::*;
use crate::copy::copy;
use crate::criu::{Memfd, MemfdInode, OpenFile};

/// A process with three mappings, of which some pages may have changed since.
fn process(directory: &Path, changes: impl FnOnce(&mut Vec<(u64, Vec<u8>)>)) -> PathBuf {
    let mut mappings = vec![
        (0x10_0000, noise(3 * MIB, 1)),
        (0x100_0000, vec![0; 2 << 20]),
        (0x1000_0000, noise(70 * MIB, 2)),
    ];
    changes(&mut mappings);
    fs::create_dir(directory).unwrap();
    dump(directory, &mappings)
}

fn change(mappings: &mut [(u64, Vec<u8>)], mapping: usize, page: usize) {
    mappings[mapping].1[page * 4096 + 5] ^= 0xff;
}

async fn base(location: &Location, store: &Store) -> Base {
    let checkpoint = Checkpoint::open(store, location).await.unwrap();
    Base { store: store.clone(), checkpoint }
}

fn tagged(scratch: &Path, tag: &str) -> Location {
    format!("oci:{}:{tag}", scratch.join("layout").display()).parse().unwrap()
}

async fn check(store: &Store, location: &Location, dump: &Path) {
    let checkpoint = Checkpoint::open(store, location).await.unwrap();
    let out = tempfile::tempdir().unwrap();
    let target = out.path().join("out");
    unpack(store, &checkpoint, &target, Limits::default(), &Progress::default()).await.unwrap();
    let mut expected = files(dump);
    expected.remove("dump.log");
    assert!(files(&target) == expected, "the content differs");
    assert!(on_demand::all(store, location).await == expected, "on demand, it differs");
}

#[tokio::test]
async fn only_changed_pages_are_stored_and_the_artifact_stands_alone() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, store) = open(&scratch.path().join("layout")).await;
    let before = process(&scratch.path().join("1"), |_| ());
    let full = pack_and_tag(request(&before), &first, &store).await;
    assert_eq!((full.lineage, full.added_bytes), (Lineage::default(), 73 * MIB));

    // One page of the small mapping, one zero page that is written to, two pages of the large one,
    // one page that becomes zero, and a mapping that was not there.
    let after = process(&scratch.path().join("2"), |mappings| {
        change(mappings, 0, 7);
        change(mappings, 1, 100);
        change(mappings, 2, 0);
        change(mappings, 2, 17_000);
        mappings[2].1[4096 * 50..4096 * 51].fill(0);
        mappings.push((0x4000_0000, noise(MIB, 3)));
    });
    let second = tagged(scratch.path(), "v2");
    let base = base(&first, &store).await;
    let based = PackRequest { base: Some(base.clone()), ..request(&after) };
    let packed = pack_and_tag(based, &second, &store).await;
    assert_eq!(packed.added_bytes, MIB + 4 * 4096);
    assert_eq!(packed.sizes.page_bytes, 74 * MIB);
    assert_eq!(packed.lineage.generation, 1);
    assert_eq!(packed.lineage.base, Some(full.index.digest));
    let checkpoint = Checkpoint::open(&store, &second).await.unwrap();
    assert_eq!(checkpoint.shards.len(), base.checkpoint.shards.len() + 1);
    check(&store, &second, &after).await;

    // Copied without its base it is whole.
    let elsewhere: Location =
        format!("oci:{}:v2", scratch.path().join("elsewhere").display()).parse().unwrap();
    let target = Store::open(&elsewhere, &ConnectOptions::default()).await.unwrap();
    let root = store.resolve(&second).await.unwrap();
    copy(&store, root, &target, elsewhere.tag(), &Progress::default()).await.unwrap();
    fs::remove_dir_all(scratch.path().join("layout")).unwrap();
    check(&target, &elsewhere, &after).await;
}

#[tokio::test]
async fn a_base_elsewhere_has_its_shards_copied_first() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, store) = open(&scratch.path().join("base")).await;
    let before = process(&scratch.path().join("1"), |_| ());
    pack_and_tag(request(&before), &first, &store).await;
    let after = process(&scratch.path().join("2"), |mappings| change(mappings, 2, 9));
    let (second, target) = open(&scratch.path().join("target")).await;
    let based = PackRequest { base: Some(base(&first, &store).await), ..request(&after) };
    let packed = pack_and_tag(based, &second, &target).await;
    assert_eq!(packed.added_bytes, 4096);
    fs::remove_dir_all(scratch.path().join("base")).unwrap();
    check(&target, &second, &after).await;
}

#[tokio::test]
async fn when_little_of_the_base_is_live_everything_is_stored_anew() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, store) = open(&scratch.path().join("layout")).await;
    let before = process(&scratch.path().join("1"), |_| ());
    pack_and_tag(request(&before), &first, &store).await;
    // A page in twenty of the large mapping is left.
    let after = process(&scratch.path().join("2"), |mappings| {
        let pages = mappings[2].1.chunks_mut(4096).enumerate();
        pages.filter(|(page, _)| page % 20 != 0).for_each(|(_, page)| page.fill(0));
    });
    let second = tagged(scratch.path(), "v2");
    let based = PackRequest { base: Some(base(&first, &store).await), ..request(&after) };
    let packed = pack_and_tag(based, &second, &store).await;
    assert_eq!(packed.lineage.generation, 0);
    assert!(packed.lineage.base.is_some());
    assert_eq!(packed.added_bytes, packed.sizes.page_bytes);
    check(&store, &second, &after).await;
}

#[tokio::test]
async fn after_eight_generations_everything_is_stored_anew() {
    let scratch = tempfile::tempdir().unwrap();
    let (mut last, store) = open(&scratch.path().join("layout")).await;
    let small = |number: usize| {
        let directory = scratch.path().join(number.to_string());
        fs::create_dir(&directory).unwrap();
        let mut content = noise(2 * MIB, 1);
        content[number * 4096] ^= 1;
        dump(&directory, &[(0, content)])
    };
    pack_and_tag(request(&small(0)), &last, &store).await;
    let mut generations = Vec::new();
    for number in 1..=10 {
        let next = tagged(scratch.path(), &format!("n{number}"));
        let dump = small(number);
        let based = PackRequest { base: Some(base(&last, &store).await), ..request(&dump) };
        generations.push(pack_and_tag(based, &next, &store).await.lineage.generation);
        check(&store, &next, &dump).await;
        last = next;
    }
    assert_eq!(generations, [1, 2, 3, 4, 5, 6, 7, 8, 0, 1]);
}

#[tokio::test]
async fn another_process_as_base_costs_bytes_and_nothing_else() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, store) = open(&scratch.path().join("layout")).await;
    let before = process(&scratch.path().join("1"), |mappings| {
        mappings.insert(0, (0x1000, noise(MIB / 2, 8)));
        mappings[3].0 += 0x5000;
    });
    pack_and_tag(request(&before), &first, &store).await;
    let after = process(&scratch.path().join("2"), |_| ());
    let second = tagged(scratch.path(), "v2");
    let based = PackRequest { base: Some(base(&first, &store).await), ..request(&after) };
    let packed = pack_and_tag(based, &second, &store).await;
    assert_eq!(packed.added_bytes, 70 * MIB);
    check(&store, &second, &after).await;
}

/// The same process with its shared memory as CRIU 4.2 has it: a file in memory that is open by
/// another number than the memory has. Both are others in the next dump.
fn shares(directory: &Path, id: u32, page: usize) -> PathBuf {
    let dump = process(directory, |_| ());
    let image = |name: &str, magic: Magic, messages: &[Vec<u8>]| {
        write_image(&dump.join(name), magic, messages);
    };
    let (file, inode) = (id + 7, id + 1);
    let mapping = |start, shared: u32, status| Mapping {
        start,
        end: start + 0x40_0000,
        shared: shared.into(),
        status,
    };
    let mappings = vec![
        mapping(0x10_0000, 0, 1 << 9),
        // A library, open by the number that the memory has.
        mapping(0x80_0000 + u64::from(id) * 0x40_0000, id, 1 << 7),
        mapping(0x9000_0000, file, (1 << 14) | (1 << 7)),
    ];
    image("mm-1.img", Magic::MM, &[Memory { mappings }.encode_to_vec()]);
    let open = |id, memfd| OpenFile { id, memfd }.encode_to_vec();
    let files = [open(id, None), open(file, Some(Memfd { inode }))];
    image("files.img", Magic::FILES, &files);
    let inode = MemfdInode { shared: id, id: inode.into() };
    image("memfd.img", Magic::MEMFD, &[inode.encode_to_vec()]);
    let entry =
        PagemapEntry { address: 0, flags: Some(4), pages: Some(512), ..PagemapEntry::default() };
    let pages_id = id + 40;
    let head = PagemapHead { pages_id }.encode_to_vec();
    let name = format!("pagemap-shmem-{id}.img");
    image(&name, Magic::PAGEMAP, &[head, entry.encode_to_vec()]);
    let mut content = noise(2 * MIB, 77);
    content[page * 4096] ^= 1;
    fs::write(dump.join(format!("pages-{pages_id}.img")), content).unwrap();
    dump
}

#[tokio::test]
async fn shared_memory_is_found_by_who_maps_it() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, store) = open(&scratch.path().join("layout")).await;
    pack_and_tag(request(&shares(&scratch.path().join("1"), 3, 0)), &first, &store).await;
    let after = shares(&scratch.path().join("2"), 5, 1);
    let second = tagged(scratch.path(), "v2");
    let based = PackRequest { base: Some(base(&first, &store).await), ..request(&after) };
    let packed = pack_and_tag(based, &second, &store).await;
    assert_eq!(packed.added_bytes, 2 * 4096);
    check(&store, &second, &after).await;
}

/// Changes a byte of every blob of a layout that holds pages.
fn damage(layout: &Path, shards: &[Descriptor]) {
    for shard in shards {
        let path = layout.join("blobs/sha256").join(shard.digest.hex());
        let mut content = fs::read(&path).unwrap();
        content[9 * 4096] ^= 1;
        fs::remove_file(&path).unwrap();
        fs::write(&path, content).unwrap();
    }
}

#[tokio::test]
async fn what_is_damaged_in_the_base_is_stored_again() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, store) = open(&scratch.path().join("layout")).await;
    let before = process(&scratch.path().join("1"), |_| ());
    pack_and_tag(request(&before), &first, &store).await;
    let base = base(&first, &store).await;
    assert_eq!(base.checkpoint.shards.len(), 3);
    damage(&scratch.path().join("layout"), &base.checkpoint.shards);
    let second = tagged(scratch.path(), "v2");
    let based = PackRequest { base: Some(base.clone()), ..request(&before) };
    let packed = pack_and_tag(based, &second, &store).await;
    // All of it: a shard that is not whole is not listed, or no copy of the new one could be made.
    assert_eq!((packed.added_bytes, packed.lineage.generation), (73 * MIB, 1));
    check(&store, &second, &before).await;
    let (there, target) = open(&scratch.path().join("target")).await;
    let found = store.resolve(&second).await.unwrap();
    copy(&store, found, &target, there.tag(), &Progress::default()).await.unwrap();
    check(&target, &there, &before).await;
}

#[tokio::test]
async fn a_damaged_shard_that_comes_again_is_written_again() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, store) = open(&scratch.path().join("layout")).await;
    fs::create_dir(scratch.path().join("1")).unwrap();
    let before = dump(&scratch.path().join("1"), &[(0x10_0000, noise(2 * MIB, 1))]);
    pack_and_tag(request(&before), &first, &store).await;
    let base = base(&first, &store).await;
    damage(&scratch.path().join("layout"), &base.checkpoint.shards);
    let based = PackRequest { base: Some(base), ..request(&before) };
    let second = tagged(scratch.path(), "v2");
    assert_eq!(pack_and_tag(based, &second, &store).await.added_bytes, 2 * MIB);
    check(&store, &second, &before).await;
    check(&store, &first, &before).await;
}

#[tokio::test]
async fn what_is_damaged_unnoticed_is_sent_again_when_it_is_to_be() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, store) = open(&scratch.path().join("layout")).await;
    fs::create_dir(scratch.path().join("1")).unwrap();
    let before = dump(&scratch.path().join("1"), &[(0x10_0000, noise(2 * MIB, 1))]);
    pack_and_tag(request(&before), &first, &store).await;
    damage(&scratch.path().join("layout"), &base(&first, &store).await.checkpoint.shards);
    let second = tagged(scratch.path(), "v2");
    let (progress, resent) =
        (Progress::default(), PackRequest { resend: true, ..request(&before) });
    pack(request(&before), &store, &progress).await.unwrap();
    assert_eq!(progress.snapshot().transferred, 0, "it is believed to be there");
    pack_and_tag(resent, &second, &store).await;
    check(&store, &second, &before).await;
    check(&store, &first, &before).await;
}

#[tokio::test]
async fn what_is_lost_of_a_base_elsewhere_is_found_when_it_is_copied() {
    for gone in [false, true] {
        let scratch = tempfile::tempdir().unwrap();
        let (first, store) = open(&scratch.path().join("base")).await;
        let before = process(&scratch.path().join("1"), |_| ());
        pack_and_tag(request(&before), &first, &store).await;
        let base = base(&first, &store).await;
        // The large mapping's second shard, in a chunk that nobody looks at below.
        let shard = base.checkpoint.shards.iter().find(|shard| shard.size == 6 * MIB).unwrap();
        let path = scratch.path().join("base/blobs/sha256").join(shard.digest.hex());
        let mut content = fs::read(&path).unwrap();
        content[5 << 20] ^= 1;
        fs::remove_file(&path).unwrap();
        if !gone {
            fs::write(&path, content).unwrap();
        }
        let after = process(&scratch.path().join("2"), |mappings| {
            mappings[2].1.truncate(67 << 20);
        });
        let (second, target) = open(&scratch.path().join("target")).await;
        let based = PackRequest { base: Some(base), ..request(&after) };
        let packed = pack_and_tag(based, &second, &target).await;
        assert_eq!((packed.added_bytes, packed.lineage.generation), (3 * MIB, 1));
        check(&target, &second, &after).await;
    }
}

#[tokio::test]
async fn what_a_base_only_claims_to_have_is_stored() {
    let scratch = tempfile::tempdir().unwrap();
    let layout = scratch.path().join("layout");
    let (first, store) = open(&layout).await;
    let (mine, foreign) = (scratch.path().join("1"), scratch.path().join("2"));
    let dumps = [(&mine, 1), (&foreign, 2)].map(|(directory, seed)| {
        fs::create_dir(directory).unwrap();
        dump(directory, &[(0, noise(2 * MIB, seed))])
    });
    pack_and_tag(request(&dumps[1]), &first, &store).await;
    let base = base(&first, &store).await;
    // The layout has my pages where its index promises foreign ones.
    let shard = layout.join("blobs/sha256").join(base.checkpoint.shards[0].digest.hex());
    fs::remove_file(&shard).unwrap();
    fs::copy(dumps[0].join("pages-1.img"), &shard).unwrap();
    let second = tagged(scratch.path(), "v2");
    let based = PackRequest { base: Some(base), ..request(&dumps[0]) };
    let packed = pack_and_tag(based, &second, &store).await;
    assert_eq!(packed.added_bytes, 2 * MIB);
    check(&store, &second, &dumps[0]).await;
}
