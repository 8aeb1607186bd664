//! Pack and unpack together, against an image layout on disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_spec::page_index::{Reader, Record};
use kybernate_spec::{Location, Tag};
use prost::Message as _;

use super::*;
use crate::artifact::{ArtifactError, Checkpoint};
use crate::criu::{Inventory, Magic, Mapping, Memory, PagemapEntry, PagemapHead, Process};
use crate::store::ConnectOptions;
use crate::unpack::{Limits, UnpackError, unpack};

mod cancelled;
mod changed;
mod device;
mod increments;
mod on_demand;
mod parents;
mod refused;

const MIB: u64 = 1 << 20;

/// Writes one of CRIU's images.
fn write_image(path: &Path, magic: Magic, messages: &[Vec<u8>]) {
    let mut bytes = 0x5456_4319_u32.to_le_bytes().to_vec();
    bytes.extend(magic.0.to_le_bytes());
    for message in messages {
        bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
        bytes.extend(message);
    }
    fs::write(path, bytes).unwrap();
}

/// A dump directory of one process with these mappings: address and content of each.
fn dump(directory: &Path, mappings: &[(u64, Vec<u8>)]) -> PathBuf {
    let dump = directory.join("dump");
    fs::create_dir(&dump).unwrap();
    let image = |name: &str, magic: Magic, messages: &[Vec<u8>]| {
        write_image(&dump.join(name), magic, messages);
    };
    let inventory = Inventory { img_version: 2, ..Inventory::default() };
    image("inventory.img", Magic::INVENTORY, &[inventory.encode_to_vec()]);
    let process = Process { pid: 1, ppid: 0, threads: vec![1, 2] };
    image("pstree.img", Magic::PSTREE, &[process.encode_to_vec()]);
    image("core-1.img", Magic(0x5505_3847), &[]);
    let size = |content: &Vec<u8>| u64::try_from(content.len()).unwrap();
    let areas = mappings.iter().map(|(start, content)| Mapping {
        start: *start,
        end: start + size(content),
        shared: 0,
        status: 1 << 9,
    });
    image("mm-1.img", Magic::MM, &[Memory { mappings: areas.collect() }.encode_to_vec()]);
    let mut pagemap = vec![PagemapHead { pages_id: 1 }.encode_to_vec()];
    let mut pages = Vec::new();
    for (start, content) in mappings {
        let entry = PagemapEntry {
            address: *start,
            flags: Some(4),
            pages: Some(size(content) / 4096),
            ..PagemapEntry::default()
        };
        pagemap.push(entry.encode_to_vec());
        pages.extend(content);
    }
    image("pagemap-1.img", Magic::PAGEMAP, &pagemap);
    fs::write(dump.join("pages-1.img"), pages).unwrap();
    fs::write(dump.join("dump.log"), "not part of it").unwrap();
    dump
}

/// Bytes that no page repeats.
fn noise(bytes: u64, seed: u64) -> Vec<u8> {
    let mut reader = blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof();
    let mut content = vec![0; usize::try_from(bytes).unwrap()];
    reader.fill(&mut content);
    content
}

fn request(dump: &Path) -> PackRequest {
    PackRequest {
        dump: dump.to_owned(),
        config: CheckpointConfig::default(),
        image: None,
        rootfs_diff: None,
        volumes: Vec::new(),
        runnable: Runnable::Auto,
        subject: true,
        base: None,
        page_hashes: false,
        resend: false,
        scratch: None,
    }
}

async fn open(directory: &Path) -> (Location, Store) {
    let location: Location = format!("oci:{}:v1", directory.display()).parse().unwrap();
    let store = Store::open(&location, &ConnectOptions::default()).await.unwrap();
    (location, store)
}

async fn pack_and_tag(request: PackRequest, location: &Location, store: &Store) -> Packed {
    let packed = pack(request, store, &Progress::default()).await.unwrap();
    store.tag(&packed.index, location.tag().unwrap()).await.unwrap();
    packed
}

fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
    };
    fs::read_dir(directory).unwrap().map(|entry| read(entry.unwrap())).collect()
}

/// Noise, holes, single pages between holes, an odd tail, and a mapping with shards of its own.
fn various() -> Vec<(u64, Vec<u8>)> {
    let mut scattered = vec![0; 5 << 20];
    for page in (0..1280).step_by(3) {
        scattered[page * 4096 + page] = 1;
    }
    vec![
        (0x10_0000, noise(9 * MIB, 1)),
        (0x100_0000, vec![0; 6 << 20]),
        (0x200_0000, scattered),
        (0x1000_0000, noise(70 * MIB, 2)),
        (0x4000_0000, noise(4096, 3)),
    ]
}

#[tokio::test]
async fn a_dump_survives_the_round_trip_byte_for_byte() {
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), &various());
    // A file above 1 MiB that is no pages file and ends in the middle of a page.
    fs::write(dump.join("tmpfs-7.tar.gz.img"), noise(3 * MIB + 5, 4)).unwrap();
    let (location, store) = open(&scratch.path().join("layout")).await;
    let packed = pack_and_tag(request(&dump), &location, &store).await;
    assert_eq!((packed.sizes.processes, packed.sizes.threads), (1, 2));

    let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
    let out = scratch.path().join("out");
    unpack(&store, &checkpoint, &out, Limits::default(), &Progress::default()).await.unwrap();
    let mut expected = files(&dump);
    expected.remove("dump.log");
    let unpacked = files(&out);
    assert_eq!(unpacked.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    assert!(unpacked == expected, "the content differs");
    assert!(on_demand::all(&store, &location).await == expected, "on demand, it differs");
}

#[tokio::test]
async fn zero_pages_are_not_stored_and_holes_stay_holes() {
    use std::os::unix::fs::MetadataExt as _;
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), &[(0, vec![0; 32 << 20]), (0x800_0000, noise(MIB, 1))]);
    let (location, store) = open(&scratch.path().join("layout")).await;
    let packed = pack_and_tag(request(&dump), &location, &store).await;
    assert_eq!((packed.sizes.bulk_bytes, packed.sizes.page_bytes), (33 * MIB, MIB));
    let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
    let out = scratch.path().join("out");
    unpack(&store, &checkpoint, &out, Limits::default(), &Progress::default()).await.unwrap();
    let blocks = fs::metadata(out.join("pages-1.img")).unwrap().blocks();
    assert!(blocks * 512 <= 2 * MIB, "{blocks} blocks are allocated");
}

#[tokio::test]
async fn equal_dumps_have_equal_digests() {
    let mut digests = Vec::new();
    for _ in 0..2 {
        let scratch = tempfile::tempdir().unwrap();
        let dump = dump(scratch.path(), &various());
        let (location, store) = open(&scratch.path().join("layout")).await;
        digests.push(pack_and_tag(request(&dump), &location, &store).await.index.digest);
    }
    assert_eq!(digests[0], digests[1]);
}

#[tokio::test]
async fn a_large_mapping_has_the_same_shards_wherever_it_lies() {
    let weights = noise(130 * MIB, 9);
    let mut shards = Vec::new();
    for (before, address) in [(3, 0x1000_0000), (11, 0x7000_0000)] {
        let scratch = tempfile::tempdir().unwrap();
        let mappings = [(0x1000, noise(before * MIB, before)), (address, weights.clone())];
        let dump = dump(scratch.path(), &mappings);
        let (location, store) = open(&scratch.path().join("layout")).await;
        pack_and_tag(request(&dump), &location, &store).await;
        let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
        let digests: Vec<_> = checkpoint.shards.into_iter().map(|shard| shard.digest).collect();
        shards.push(digests);
    }
    let common = shards[0].iter().filter(|digest| shards[1].contains(digest)).count();
    assert_eq!((shards[0].len(), common), (4, 3), "64 + 64 + 2 MiB of weights, and the rest");
}

/// Adds shared memory that nobody maps.
fn add_shared(dump: &Path, id: u32, content: &[u8]) {
    let pages = u64::try_from(content.len()).unwrap() / 4096;
    let entry = PagemapEntry { flags: Some(4), pages: Some(pages), ..PagemapEntry::default() };
    let head = PagemapHead { pages_id: id }.encode_to_vec();
    let name = format!("pagemap-shmem-{id}.img");
    write_image(&dump.join(name), Magic::PAGEMAP, &[head, entry.encode_to_vec()]);
    fs::write(dump.join(format!("pages-{id}.img")), content).unwrap();
}

#[tokio::test]
async fn large_shared_memory_has_the_same_shards_whatever_is_before_it() {
    let large = noise(64 * MIB, 7);
    let mut lengths = Vec::new();
    let mut digests = Vec::new();
    for before in [&[][..], &[(2, MIB), (3, 66 * MIB)]] {
        let scratch = tempfile::tempdir().unwrap();
        let dump = dump(scratch.path(), &[(0x1000, noise(MIB, 1))]);
        for (id, bytes) in before {
            add_shared(&dump, *id, &noise(*bytes, u64::from(*id)));
        }
        add_shared(&dump, 9, &large);
        let (location, store) = open(&scratch.path().join("layout")).await;
        pack_and_tag(request(&dump), &location, &store).await;
        let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
        lengths.push(checkpoint.shards.iter().map(|shard| shard.size / MIB).collect::<Vec<_>>());
        digests.push(checkpoint.shards.into_iter().map(|shard| shard.digest).collect::<Vec<_>>());
    }
    // What is small shares the first shard.
    assert_eq!(lengths, [vec![1, 64], vec![2, 64, 2, 64]]);
    assert_eq!(digests[0].last(), digests[1].last());
}

#[tokio::test]
async fn a_pagemap_of_more_pages_than_there_are_is_refused_at_once() {
    let cut = refusal(|dump| {
        add_shared(dump, 2, &noise(MIB, 1));
        let entry =
            PagemapEntry { flags: Some(4), pages: Some(1 << 50), ..PagemapEntry::default() };
        let head = PagemapHead { pages_id: 2 }.encode_to_vec();
        let messages = [head, entry.encode_to_vec()];
        write_image(&dump.join("pagemap-shmem-2.img"), Magic::PAGEMAP, &messages);
    });
    assert!(cut.await.contains("describes 4611686018427387904"));
}

#[tokio::test]
async fn every_page_of_a_shard_is_named_once() {
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), &various());
    let (location, store) = open(&scratch.path().join("layout")).await;
    pack_and_tag(request(&dump), &location, &store).await;
    let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
    let hex = checkpoint.page_index.digest.hex().to_owned();
    let index = fs::read(scratch.path().join("layout/blobs/sha256").join(hex)).unwrap();
    let mut reader = Reader::new(&*index).unwrap();
    let (mut named, mut stored) = (0_u64, 0_u64);
    while let Some(record) = reader.next_record().unwrap() {
        match record {
            Record::Segment(runs) => {
                named += runs.iter().map(|run| u64::from(run.pages)).sum::<u64>();
            }
            Record::Shard(chunks) => {
                stored +=
                    chunks.iter().map(|chunk| u64::from(chunk.plain_bytes) / 4096).sum::<u64>();
            }
            Record::File { .. } => {}
        }
    }
    assert_eq!(named, stored);
}

async fn refusal(change: impl FnOnce(&Path)) -> String {
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), &[(0, noise(2 * MIB, 1))]);
    change(&dump);
    let layout = scratch.path().join("layout");
    let (_, store) = open(&layout).await;
    let error = pack(request(&dump), &store, &Progress::default()).await.unwrap_err();
    let text = kybernate_spec::chain(&error).to_string();
    assert!(!layout.join("index.json").exists(), "something was named");
    text.replace(&dump.display().to_string(), "DUMP")
}

#[tokio::test]
async fn a_truncated_pages_file_is_named() {
    let cut = refusal(|dump| {
        let pages = fs::OpenOptions::new().write(true).open(dump.join("pages-1.img")).unwrap();
        pages.set_len(MIB).unwrap();
    });
    assert_eq!(
        cut.await,
        "\"DUMP/pages-1.img\" is no dump that can be packed: it has 1048576 bytes, but its \
         pagemap pagemap-1.img describes 2097152"
    );
}

#[tokio::test]
async fn what_is_no_dump_is_refused_with_the_reason() {
    let missing = refusal(|dump| fs::remove_file(dump.join("pstree.img")).unwrap()).await;
    assert_eq!(missing, "\"DUMP\" is no dump that can be packed: pstree.img is missing");
    let foreign = refusal(|dump| fs::write(dump.join("notes.txt"), "x").unwrap()).await;
    assert!(foreign.contains("\"notes.txt\" is none of CRIU's images"), "{foreign}");
    let link = refusal(|dump| {
        fs::remove_file(dump.join("core-1.img")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dump.join("core-1.img")).unwrap();
    });
    assert!(link.await.contains("no regular file"));
    let garbage = refusal(|dump| fs::write(dump.join("pstree.img"), "garbage!").unwrap()).await;
    assert!(garbage.contains("pstree.img\" is no dump"), "{garbage}");
    let nowhere = refusal(|dump| fs::remove_dir_all(dump).unwrap()).await;
    assert!(nowhere.contains("No such file"), "{nowhere}");
}

#[tokio::test]
async fn one_changed_byte_in_a_shard_is_found_and_nothing_is_left() {
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), &various());
    let layout = scratch.path().join("layout");
    let (location, store) = open(&layout).await;
    pack_and_tag(request(&dump), &location, &store).await;
    let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
    let shard = checkpoint.shards[1].clone();
    let path = layout.join("blobs/sha256").join(shard.digest.hex());
    let mut content = fs::read(&path).unwrap();
    content[(5 << 20) + 77] ^= 1;
    fs::remove_file(&path).unwrap();
    fs::write(&path, content).unwrap();
    let out = scratch.path().join("out");
    let error = unpack(&store, &checkpoint, &out, Limits::default(), &Progress::default())
        .await
        .unwrap_err();
    assert!(error.is_integrity());
    assert!(matches!(&error, UnpackError::Chunk { shard: s, chunk: 1 } if *s == shard.digest));
    assert!(!out.exists());
    let left: Vec<_> = files_of(scratch.path()).filter(|name| name.starts_with('.')).collect();
    assert_eq!(left, [""; 0]);
}

fn files_of(directory: &Path) -> impl Iterator<Item = String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap())
}

#[tokio::test]
async fn a_directory_with_content_is_not_unpacked_into() {
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), &[(0, noise(MIB, 1))]);
    let (location, store) = open(&scratch.path().join("layout")).await;
    pack_and_tag(request(&dump), &location, &store).await;
    let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
    let error = unpack(&store, &checkpoint, &dump, Limits::default(), &Progress::default()).await;
    assert!(matches!(error, Err(UnpackError::NotEmpty(_))));
    assert!(files(&dump).contains_key("pages-1.img"));
}

#[tokio::test]
async fn more_than_the_limit_is_refused_before_anything_is_fetched() {
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), &[(0, noise(MIB, 1))]);
    let (location, store) = open(&scratch.path().join("layout")).await;
    pack_and_tag(request(&dump), &location, &store).await;
    let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
    let limits = Limits { dump_bytes_max: MIB - 1 };
    let out = scratch.path().join("out");
    let error = unpack(&store, &checkpoint, &out, limits, &Progress::default()).await;
    assert!(matches!(error, Err(UnpackError::TooLarge { bytes: MIB, .. })));
}

#[tokio::test]
async fn an_ordinary_manifest_is_no_checkpoint() {
    let scratch = tempfile::tempdir().unwrap();
    let (location, store) = open(&scratch.path().join("layout")).await;
    let config = Bytes::from_static(b"{}");
    let described = Descriptor::of(media_type::OCI_EMPTY, &config);
    store.put_blob(&described, &BytesSource(config)).await.unwrap();
    let manifest = serde_json::to_vec(&Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: None,
        config: described,
        layers: Vec::new(),
        subject: None,
        annotations: Annotations::new(),
    });
    let content = Bytes::from(manifest.unwrap());
    let described = Descriptor::of(media_type::OCI_MANIFEST, &content);
    store.put_manifest(&described, content).await.unwrap();
    let tag: Tag = "v1".parse().unwrap();
    store.tag(&described, &tag).await.unwrap();
    let error = Checkpoint::open(&store, &location).await.unwrap_err();
    assert!(matches!(error, ArtifactError::NotACheckpoint(..)), "{error}");
}

#[tokio::test]
async fn a_large_mount_is_cut_into_parts_and_read_as_one() {
    use std::os::unix::fs::FileExt as _;

    use futures::TryStreamExt as _;
    let top = tempfile::tempdir().unwrap();
    let tar = top.path().join("shm.tar");
    // 300 MiB of holes with something at both ends.
    let size = 300 << 20;
    let mut header = tar::Header::new_gnu();
    header.set_path("segment").unwrap();
    header.set_size(size);
    header.set_cksum();
    let file = fs::File::create(&tar).unwrap();
    file.file().write_all_at(header.as_bytes(), 0).unwrap();
    file.file().write_all_at(b"first", 512).unwrap();
    file.file().write_all_at(b"last", 512 + size - 4).unwrap();
    file.set_len(512 + size + 1024).unwrap();
    let mut request = request(&dump(top.path(), &various()));
    let volume =
        |destination: &str| VolumeCapture { destination: destination.to_owned(), tar: tar.clone() };
    let small = top.path().join("small.tar");
    fs::write(&small, [0; 1024]).unwrap();
    request.volumes = vec![volume("/dev/shm"), volume("/data")];
    request.volumes[1].tar = small;
    let (location, store) = open(&top.path().join("layout")).await;
    pack_and_tag(request, &location, &store).await;
    let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
    let layers = &checkpoint.manifest.layers;
    assert!(layers.iter().all(|layer| layer.size <= SHARD_BYTES_MAX));
    let counts: Vec<_> =
        checkpoint.volumes.iter().map(|v| (v.destination.as_str(), v.parts.len())).collect();
    assert_eq!(counts, [("/dev/shm", 2), ("/data", 1)]);
    let mut read = checkpoint.volumes[0].read(&store);
    let (mut hasher, mut expected) = (blake3::Hasher::new(), blake3::Hasher::new());
    while let Some(bytes) = read.try_next().await.unwrap() {
        hasher.update(&bytes);
    }
    expected.update_reader(fs::File::open(&tar).unwrap()).unwrap();
    assert_eq!(hasher.finalize(), expected.finalize());
}

#[tokio::test]
async fn what_is_no_tar_is_refused_before_anything_is_stored() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("no.tar");
    fs::write(&path, "this is not a tar").unwrap();
    let source = dump(top.path(), &various());
    let volume = VolumeCapture { destination: "/data".to_owned(), tar: path.clone() };
    let with_volume = PackRequest { volumes: vec![volume], ..request(&source) };
    let with_diff = PackRequest { rootfs_diff: Some(path.into()), ..request(&source) };
    for request in [with_volume, with_diff] {
        let (_, store) = open(&top.path().join("layout")).await;
        let error = pack(request, &store, &Progress::default()).await.unwrap_err();
        assert!(error.to_string().contains("no.tar\" is no uncompressed tar"), "{error}");
    }
    assert!(!top.path().join("layout/blobs").exists());
}
