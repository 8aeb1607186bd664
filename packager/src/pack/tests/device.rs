//! Device memory in files of its own.

use kybernate_spec::checkpoint::{DeviceFacts, DeviceStorage, DeviceStream};

use super::*;
use crate::interchange::containerd;

const GPU: &str = "GPU-00000000-0000-0000-0000-00000000000a";

/// What a process has on its GPU: weights, with zero pages, and a cache behind them.
fn memory(cache: u64) -> Vec<u8> {
    let mut memory = noise(130 * MIB, 7);
    for page in memory.chunks_mut(4096).step_by(9) {
        page.fill(0);
    }
    memory.extend(noise(MIB, cache));
    memory.extend([5; 100]);
    memory
}

fn with_device(directory: &Path, memory: &[u8]) -> PackRequest {
    fs::create_dir(directory).unwrap();
    let dump = dump(directory, &[(0x10_0000, noise(MIB, 1))]);
    let file = crate::criu::device_file(1, GPU).unwrap();
    fs::write(dump.join(&file), memory).unwrap();
    let bytes = u64::try_from(memory.len()).unwrap();
    let stream = DeviceStream { file, pid: 1, gpu: GPU.to_owned(), bytes };
    let storage = DeviceStorage::Device;
    let device = DeviceFacts { storage, gpus: vec![GPU.to_owned()], streams: vec![stream] };
    let config = CheckpointConfig { device, ..CheckpointConfig::default() };
    PackRequest { config, page_hashes: true, ..request(&dump) }
}

async fn shards(store: &Store, location: &Location) -> Vec<Descriptor> {
    let checkpoint = Checkpoint::open(store, location).await.unwrap();
    let titles = checkpoint.shards.iter().map(|shard| &shard.annotations[annotation::TITLE]);
    for (title, shard) in titles.zip(&checkpoint.shards) {
        let is_device = shard.media_type == media_type::DEVICE;
        assert_eq!(title.starts_with("device-"), is_device, "{title}");
    }
    let is_device = |shard: &Descriptor| shard.media_type == media_type::DEVICE;
    checkpoint.shards.into_iter().filter(is_device).map(|shard| shard.bare()).collect()
}

async fn is_whole(store: &Store, location: &Location, dump: &Path) {
    let out = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(store, location).await.unwrap();
    let target = out.path().join("out");
    unpack(store, &checkpoint, &target, Limits::default(), &Progress::default()).await.unwrap();
    let mut expected = files(dump);
    expected.remove("dump.log");
    assert!(files(&target) == expected, "the content differs");
    // It is there before CRIU runs.
    let directory = out.path().join("before");
    let pages = on_demand::begin(store, location, &directory, &Progress::default()).await.unwrap();
    assert!(pages.files().iter().all(|file| file.name == "pages-1.img"), "{:?}", pages.files());
    let file = crate::criu::device_file(1, GPU).unwrap();
    assert!(fs::read(directory.join(&file)).unwrap() == expected[&file]);
}

#[tokio::test]
async fn equal_weights_are_equal_shards_in_full_and_in_increments() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, store) = open(&scratch.path().join("layout")).await;
    let before = with_device(&scratch.path().join("1"), &memory(1));
    pack_and_tag(before.clone(), &first, &store).await;
    is_whole(&store, &first, &before.dump).await;
    let full = shards(&store, &first).await;
    // 64 MiB of the file each, without their zero pages; what shares none with the weights is last.
    assert_eq!(full.len(), 3);
    assert!(full.iter().all(|shard| shard.size < 64 * MIB));

    let after = with_device(&scratch.path().join("2"), &memory(2));
    let second: Location =
        format!("oci:{}:v2", scratch.path().join("layout").display()).parse().unwrap();
    let checkpoint = Checkpoint::open(&store, &first).await.unwrap();
    let base = Some(Base { store: store.clone(), checkpoint });
    pack_and_tag(PackRequest { base, ..after.clone() }, &second, &store).await;
    is_whole(&store, &second, &after.dump).await;
    let increment = shards(&store, &second).await;
    assert_eq!(increment[..2], full[..2], "the weights");
    assert_ne!(increment[2], full[2], "what has changed");
}

#[tokio::test]
async fn facts_and_files_must_have_the_same_device_memory() {
    let scratch = tempfile::tempdir().unwrap();
    let request = with_device(&scratch.path().join("1"), &noise(8192, 1));
    let changes: [fn(&mut DeviceFacts); 6] = [
        |device| device.streams.clear(),
        |device| device.streams[0].bytes += 1,
        |device| device.streams[0].pid = 2,
        |device| device.gpus = vec!["GPU-b".to_owned()],
        |device| device.storage = DeviceStorage::Pages,
        |device| device.streams.push(device.streams[0].clone()),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut wrong = request.clone();
        change(&mut wrong.config.device);
        let layout = scratch.path().join(format!("wrong-{number}"));
        let (_, store) = open(&layout).await;
        let error = pack(wrong, &store, &Progress::default()).await.unwrap_err();
        let PackError::Unreadable(error) = error else { panic!("{number}: {error}") };
        assert_eq!(error.reason(), Some(kybernate_spec::Reason::Device), "{number}");
        assert!(!layout.exists(), "something was stored");
    }
}

/// Whoever restores another format asks no driver.
#[tokio::test]
async fn device_memory_is_not_exported() {
    let scratch = tempfile::tempdir().unwrap();
    let (location, store) = open(&scratch.path().join("layout")).await;
    let request = with_device(&scratch.path().join("1"), &noise(8192, 1));
    pack_and_tag(request, &location, &store).await;
    let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
    let (mounts, volumes) = (BTreeMap::new(), crate::interchange::Volumes::Refuse);
    let error = crate::interchange::exportable(containerd::FORMAT, &checkpoint, &mounts, volumes);
    assert!(error.unwrap_err().to_string().contains("no place for device memory"));
}
