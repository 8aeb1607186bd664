//! A dump's memory read where it is stored.

use futures::future::try_join_all;
use kybernate_spec::page_index::CHUNK_BYTES;

use super::*;
use crate::unpack::on_demand::{OnDemand, PagesReader, READ_BYTES_MAX};

/// Opens a checkpoint's memory; its other files go into `directory`.
pub(super) async fn begin(
    store: &Store,
    location: &Location,
    directory: &Path,
    progress: &Progress,
) -> Result<OnDemand, UnpackError> {
    let checkpoint = Checkpoint::open(store, location).await.unwrap();
    fs::create_dir(directory).unwrap();
    let limits = Limits::default();
    crate::unpack::unpack_images(store, &checkpoint, directory, progress).await.unwrap();
    OnDemand::open(store, &checkpoint, directory, limits, progress).await
}

/// Reads a file to its end, so many bytes at once.
async fn read(reader: &PagesReader, bytes: u32) -> Vec<u8> {
    let mut content = Vec::new();
    loop {
        let part = reader.at(content.len().try_into().unwrap(), bytes).await.unwrap();
        if part.is_empty() {
            return content;
        }
        content.extend_from_slice(&part);
    }
}

/// Returns all files of a dump: the pages as they are read on demand, the others as they are written.
pub(super) async fn all(store: &Store, location: &Location) -> BTreeMap<String, Vec<u8>> {
    let out = tempfile::tempdir().unwrap();
    let directory = out.path().join("out");
    let pages = begin(store, location, &directory, &Progress::default()).await.unwrap();
    let mut all = files(&directory);
    for file in pages.files() {
        let content = read(&pages.read(file).unwrap(), READ_BYTES_MAX).await;
        assert_eq!(content.len(), usize::try_from(file.length).unwrap());
        assert!(all.insert(file.name.clone(), content).is_none(), "a file of pages was written");
    }
    all
}

struct Packed {
    scratch: tempfile::TempDir,
    location: Location,
    store: Store,
    dump: PathBuf,
}

impl Packed {
    async fn of(mappings: &[(u64, Vec<u8>)]) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let dump = dump(scratch.path(), mappings);
        let (location, store) = open(&scratch.path().join("layout")).await;
        pack_and_tag(request(&dump), &location, &store).await;
        Self { scratch, location, store, dump }
    }

    async fn begin(&self, progress: &Progress) -> Result<OnDemand, UnpackError> {
        begin(&self.store, &self.location, &self.scratch.path().join("out"), progress).await
    }

    fn pages(&self) -> Vec<u8> {
        fs::read(self.dump.join("pages-1.img")).unwrap()
    }
}

#[tokio::test]
async fn in_order_every_chunk_is_fetched_once() {
    let mut small = various();
    small.remove(3);
    // The large one has shards of its own: what was left for it is needed again after it.
    for (mappings, again) in [(small, 0), (various(), 1)] {
        let packed = Packed::of(&mappings).await;
        for bytes in [4096, 100_000, READ_BYTES_MAX, u32::MAX] {
            let progress = Progress::default();
            fs::remove_dir_all(packed.scratch.path().join("out")).ok();
            let pages = packed.begin(&progress).await.unwrap();
            assert!(pages.is_all());
            let before = progress.snapshot().transferred;
            pages.begin(packed.scratch.path());
            let [file] = pages.files() else { panic!("not one file") };
            let reader = pages.read(file).unwrap();
            assert!(read(&reader, bytes).await == packed.pages(), "it differs, read by {bytes}");
            let fetched = progress.snapshot().transferred - before;
            let most = pages.bytes() + again * u64::from(CHUNK_BYTES);
            assert!((pages.bytes()..=most).contains(&fetched), "{fetched} bytes, read by {bytes}");
        }
    }
}

#[tokio::test]
async fn what_came_before_it_is_read_lies_ready() {
    let content = noise(40 * MIB, 1);
    let packed = Packed::of(&[(0x10_0000, content.clone())]).await;
    let progress = Progress::default();
    let pages = packed.begin(&progress).await.unwrap();
    let before = progress.snapshot().transferred;
    let fetched = || (progress.snapshot().transferred - before) / u64::from(CHUNK_BYTES);
    pages.begin(packed.scratch.path());
    let all = async {
        while fetched() < 4 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(1), all).await.unwrap();
    // There is room for these, and what lies there is not fetched again.
    let reader = pages.read(&pages.files()[0]).unwrap();
    assert!(read(&reader, READ_BYTES_MAX).await == content);
    assert_eq!(fetched(), 10);
}

#[tokio::test]
async fn it_comes_before_it_is_read_while_a_hole_is_read() {
    let mut content = noise(4 * MIB, 1);
    content.extend(vec![0; 8 << 20]);
    content.extend(noise(40 * MIB, 2));
    let packed = Packed::of(&[(0x10_0000, content.clone())]).await;
    let progress = Progress::default();
    let pages = packed.begin(&progress).await.unwrap();
    let before = progress.snapshot().transferred;
    let fetched = || (progress.snapshot().transferred - before) / u64::from(CHUNK_BYTES);
    let reader = pages.read(&pages.files()[0]).unwrap();
    assert!(reader.at(0, READ_BYTES_MAX).await.unwrap() == content[..1 << 20]);
    pages.begin(packed.scratch.path());
    // The reader has one, and has three fetched; nobody else fetches.
    for turn in 0..1000 {
        tokio::task::yield_now().await;
        assert!(fetched() <= 4, "{} in turn {turn}", fetched());
    }
    assert!(reader.at(6 * MIB, 4096).await.unwrap() == [0; 4096][..]);
    let more = async {
        while fetched() < 8 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(1), more).await.unwrap();
    assert!(read(&reader, READ_BYTES_MAX).await == content);
    assert_eq!(fetched(), 11);
}

#[tokio::test]
async fn anywhere_and_by_several_at_once_it_is_the_same() {
    let packed = Packed::of(&various()).await;
    let pages = packed.begin(&Progress::default()).await.unwrap();
    let (file, content) = (&pages.files()[0], packed.pages());
    let reader = pages.read(file).unwrap();
    let mut random = noise(4000, 11).into_iter();
    let mut number = || {
        let bytes: Vec<u8> = random.by_ref().take(8).collect();
        u64::from_le_bytes(bytes.try_into().unwrap())
    };
    for _ in 0..100 {
        let (offset, length) = (number() % file.length, number() % 2_000_000);
        let part = reader.at(offset, length.try_into().unwrap()).await.unwrap();
        let from = usize::try_from(offset).unwrap();
        let expected = usize::try_from(length.min(READ_BYTES_MAX.into())).unwrap();
        let expected = &content[from..content.len().min(from + expected)];
        assert!(part == expected, "{length} bytes from {offset} differ");
    }
    assert!(reader.at(file.length, 1).await.unwrap().is_empty());
    assert!(reader.at(u64::MAX, u32::MAX).await.unwrap().is_empty());
    let readers: Vec<_> = (0..12).map(|_| pages.read(file).unwrap()).collect();
    let reading = readers.iter().map(async |reader| Ok::<_, ()>(read(reader, 1 << 18).await));
    for read in try_join_all(reading).await.unwrap() {
        assert!(read == content);
    }
}

#[tokio::test]
async fn it_can_be_written_after_all() {
    let packed = Packed::of(&various()).await;
    fs::write(packed.dump.join("tmpfs-7.tar.gz.img"), noise(3 * MIB + 5, 4)).unwrap();
    pack_and_tag(request(&packed.dump), &packed.location, &packed.store).await;
    let pages = packed.begin(&Progress::default()).await.unwrap();
    assert!(!pages.is_all());
    let checkpoint = Checkpoint::open(&packed.store, &packed.location).await.unwrap();
    let out = packed.scratch.path().join("out");
    assert!(!out.join("pages-1.img").exists() && out.join("tmpfs-7.tar.gz.img").exists());
    pages.write(&checkpoint, &out).await.unwrap();
    let mut expected = files(&packed.dump);
    expected.remove("dump.log");
    assert!(files(&out) == expected, "the content differs");
}

#[tokio::test]
async fn a_changed_chunk_is_not_handed_out() {
    let packed = Packed::of(&[(0x10_0000, noise(9 * MIB, 1))]).await;
    let checkpoint = Checkpoint::open(&packed.store, &packed.location).await.unwrap();
    let [shard] = &checkpoint.shards[..] else { panic!("not one shard") };
    let blob = packed.scratch.path().join("layout/blobs/sha256").join(shard.digest.hex());
    let mut content = fs::read(&blob).unwrap();
    content[usize::try_from(CHUNK_BYTES).unwrap() + 7] ^= 1;
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, content).unwrap();

    let (store, location) = (&packed.store, &packed.location);
    for spooled in [false, true] {
        let out = packed.scratch.path().join(spooled.to_string());
        let pages = begin(store, location, &out, &Progress::default()).await.unwrap();
        if spooled {
            pages.begin(packed.scratch.path());
        }
        let reader = pages.read(&pages.files()[0]).unwrap();
        assert!(pages.failure().is_none());
        // The first is right, but the second was fetched meanwhile: whatever is read by then.
        let mut offset = 0;
        while let Ok(part) = reader.at(offset, READ_BYTES_MAX).await {
            offset += u64::try_from(part.len()).unwrap();
            assert!(offset <= u64::from(CHUNK_BYTES), "{offset} bytes were handed out");
        }
        let failure = pages.failure().unwrap();
        assert!(matches!(failure, UnpackError::Chunk { chunk: 1, .. }), "{failure}");
        assert!(failure.is_integrity());
    }
}

#[tokio::test]
async fn some_large_files_at_once_are_fetched_once() {
    let packed = Packed::of(&[(0x10_0000, noise(20 * MIB, 1))]).await;
    for id in [2, 3, 4] {
        add_process(&packed.dump, id, &noise(20 * MIB, id.into()));
    }
    pack_and_tag(request(&packed.dump), &packed.location, &packed.store).await;
    let progress = Progress::default();
    let pages = packed.begin(&progress).await.unwrap();
    assert_eq!(pages.files().len(), 4);
    let before = progress.snapshot().transferred;
    let readers: Vec<_> = pages.files().iter().map(|file| pages.read(file).unwrap()).collect();
    let mut offset = 0;
    while offset < 20 * MIB {
        // Each in its turn, and another one first in each round.
        for number in 0..readers.len() {
            let turn = usize::try_from(offset / MIB).unwrap() + number;
            let reader = &readers[turn % readers.len()];
            let part = match reader.at_once(offset, READ_BYTES_MAX) {
                Some(part) => part,
                None => reader.at(offset, READ_BYTES_MAX).await.unwrap(),
            };
            assert_eq!(part.len(), usize::try_from(MIB).unwrap());
        }
        offset += MIB;
    }
    // Chunks do not end where files do: each file's end and the next one's beginning share one.
    let (fetched, all) = (progress.snapshot().transferred - before, pages.bytes());
    assert!(fetched <= all + 4 * u64::from(CHUNK_BYTES), "{fetched} bytes were fetched of {all}");
}

/// Adds the private memory of another process.
fn add_process(dump: &Path, pid: u32, content: &[u8]) {
    let pages = u64::try_from(content.len()).unwrap() / 4096;
    let entry = PagemapEntry { flags: Some(4), pages: Some(pages), ..PagemapEntry::default() };
    let head = PagemapHead { pages_id: pid }.encode_to_vec();
    let name = format!("pagemap-{pid}.img");
    write_image(&dump.join(name), Magic::PAGEMAP, &[head, entry.encode_to_vec()]);
    fs::write(dump.join(format!("pages-{pid}.img")), content).unwrap();
    fs::copy(dump.join("mm-1.img"), dump.join(format!("mm-{pid}.img"))).unwrap();
}

#[tokio::test]
async fn many_files_are_written() {
    let packed = Packed::of(&[(0x10_0000, noise(2 * MIB, 1))]).await;
    for pid in 2..=5 {
        add_process(&packed.dump, pid, &noise(2 * MIB, pid.into()));
        pack_and_tag(request(&packed.dump), &packed.location, &packed.store).await;
        fs::remove_dir_all(packed.scratch.path().join("out")).ok();
        let pages = packed.begin(&Progress::default()).await.unwrap();
        let left = if pid <= 4 { usize::try_from(pid).unwrap() } else { 0 };
        assert_eq!(pages.files().len(), left, "of {pid}");
        assert_eq!(packed.scratch.path().join("out/pages-5.img").exists(), left == 0);
    }
    assert!(all(&packed.store, &packed.location).await["pages-5.img"] == noise(2 * MIB, 5));
}

#[tokio::test]
async fn shared_memory_is_written() {
    let packed = Packed::of(&[(0x10_0000, noise(9 * MIB, 1))]).await;
    add_shared(&packed.dump, 2, &noise(5 * MIB, 2));
    // Two that name one file.
    add_process(&packed.dump, 3, &noise(5 * MIB, 3));
    for kind in ["pagemap", "mm"] {
        let image = |pid: u32| packed.dump.join(format!("{kind}-{pid}.img"));
        fs::copy(image(3), image(4)).unwrap();
    }
    pack_and_tag(request(&packed.dump), &packed.location, &packed.store).await;
    let pages = packed.begin(&Progress::default()).await.unwrap();
    let names: Vec<_> = pages.files().iter().map(|file| &*file.name).collect();
    assert_eq!(names, ["pages-1.img"]);
    let written = |id: u64| fs::read(packed.scratch.path().join(format!("out/pages-{id}.img")));
    assert!(written(2).unwrap() == noise(5 * MIB, 2) && written(3).unwrap() == noise(5 * MIB, 3));
}

#[tokio::test]
async fn what_lies_in_many_chunks_at_once_is_written() {
    let scratch = tempfile::tempdir().unwrap();
    let mut content = noise(24 * MIB, 1);
    let (_, store) = open(&scratch.path().join("layout")).await;
    let tagged = |number: usize| -> Location {
        format!("oci:{}:v{number}", scratch.path().join("layout").display()).parse().unwrap()
    };
    for generation in 0..8 {
        for page in (generation..content.len() / 4096).step_by(8) {
            content[page * 4096] ^= 1;
        }
        let directory = scratch.path().join(generation.to_string());
        fs::create_dir(&directory).unwrap();
        let dump = dump(&directory, &[(0x10_0000, content.clone())]);
        let base = if generation > 0 {
            let checkpoint = Checkpoint::open(&store, &tagged(generation - 1)).await.unwrap();
            Some(Base { store: store.clone(), checkpoint })
        } else {
            None
        };
        let based = PackRequest { base, page_hashes: true, ..request(&dump) };
        pack_and_tag(based, &tagged(generation), &store).await;
        let out = scratch.path().join("out");
        let progress = Progress::default();
        let pages = begin(&store, &tagged(generation), &out, &progress).await.unwrap();
        // Each page comes from another chunk than the one before it.
        assert_eq!(pages.files().len(), usize::from(generation < 3), "generation {generation}");
        drop(pages);
        fs::remove_dir_all(out).unwrap();
        assert!(all(&store, &tagged(generation)).await["pages-1.img"] == content);
    }
}
