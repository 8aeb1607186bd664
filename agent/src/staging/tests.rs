use futures::future::join_all;
use kybernate_packager::agent_api as api;

use super::shelf::IMAGES;
use super::*;
use crate::config::TierConfig;
use crate::stage;

const BUDGET: u64 = 1 << 20;

fn open(top: &Path) -> Arc<Staging> {
    open_with(top, true)
}

fn open_with(top: &Path, verify: bool) -> Arc<Staging> {
    let nvme = TierConfig { directory: top.join("nvme"), budget: BUDGET, verify };
    let config =
        StagingConfig { tmpfs: top.join("tmpfs"), memory_share: 0.5, ram: None, nvme: Some(nvme) };
    Staging::open(&config, Figures::default()).unwrap()
}

fn wish(name: &str, bytes: u64) -> Wish {
    Wish {
        tier: Tier::Nvme,
        digest: Digest::of(name.as_bytes()),
        bytes,
        operation: name.to_owned(),
        reference: format!("localhost:5000/{name}:v1"),
    }
}

/// Stages as an operation does; returns whether it was the one who made it.
async fn put(staging: &Arc<Staging>, wish: &Wish) -> Result<bool, StagingError> {
    let Granted::Room(reservation) = staging.reserve(wish).await? else { return Ok(false) };
    let directory = staging.temporary(wish.tier, &wish.operation).unwrap();
    stage::make(&directory.join(IMAGES)).unwrap();
    let content = vec![1; usize::try_from(wish.bytes).unwrap()];
    fs_err::write(directory.join(IMAGES).join("pages-1.img"), content).unwrap();
    let record = reservation.describe(&directory, wish, &Progress::default()).await?;
    reservation.publish(&directory, wish, record).await?;
    Ok(true)
}

fn evict(reference: &str) -> Wanted {
    let request =
        api::EvictRequest { reference: reference.to_owned(), ..api::EvictRequest::default() };
    Wanted::parse(&request).unwrap()
}

#[tokio::test]
async fn two_who_want_the_same_get_it_once() {
    let top = tempfile::tempdir().unwrap();
    let staging = open(top.path());
    let wish = wish("a", 4096);
    let made = join_all((0..8).map(|_| put(&staging, &wish))).await;
    assert_eq!(made.into_iter().filter(|made| *made.as_ref().unwrap()).count(), 1);
    // Who was to make it failed: the next one does.
    let other = Wish { digest: Digest::of(b"b"), ..wish.clone() };
    let Granted::Room(reservation) = staging.reserve(&other).await.unwrap() else { panic!() };
    let (made, ()) = tokio::join!(put(&staging, &other), async { drop(reservation) });
    assert!(made.unwrap());
}

#[tokio::test]
async fn what_is_read_stays_until_it_was() {
    let top = tempfile::tempdir().unwrap();
    let staging = open(top.path());
    let (a, b) = (wish("a", 700 << 10), wish("b", 600 << 10));
    assert!(put(&staging, &a).await.unwrap());
    let reading = staging.take(&a.digest, "restore-1").await.unwrap();
    assert!(reading.images().join("pages-1.img").exists());
    let told = put(&staging, &b).await.unwrap_err().to_string();
    let needed = b.bytes.to_string();
    for part in ["nvme", "1048576", &needed, "in use", "restore-1", a.digest.hex()] {
        assert!(told.contains(part), "{part} is missing in {told}");
    }
    let refused = staging.evict(&evict(&a.reference)).await.unwrap_err();
    assert!(matches!(refused, EvictError::InUse(..)), "{refused}");
    assert!(staging.to_api()[0].staged[0].pinned);
    drop(reading);
    assert!(put(&staging, &b).await.unwrap());
    assert!(staging.take(&a.digest, "restore-2").await.is_none(), "it had to go");
    assert!(staging.to_api()[0].used_bytes <= BUDGET);
}

#[tokio::test]
async fn it_is_evicted_by_every_name_it_has() {
    let top = tempfile::tempdir().unwrap();
    let staging = open(top.path());
    let a = wish("a", 4096);
    let by_digest = format!("elsewhere.example/x@{}", a.digest);
    for name in [&a.reference, &a.digest.to_string(), &by_digest] {
        assert!(put(&staging, &a).await.unwrap());
        let gone = staging.evict(&evict(name)).await.unwrap();
        assert_eq!(gone[0].digest, a.digest.to_string());
        let again = staging.evict(&evict(name)).await.unwrap_err();
        assert!(matches!(again, EvictError::NotStaged(_)), "{again}");
    }
    assert_eq!(staging.to_api()[0].used_bytes, 0);
    // A second name that it was asked for by.
    assert!(put(&staging, &a).await.unwrap());
    let other = Wish { reference: "localhost:5000/b:v2".to_owned(), ..a.clone() };
    assert!(!put(&staging, &other).await.unwrap());
    assert_eq!(open(top.path()).to_api()[0].staged[0].references, [other.reference, a.reference]);
    assert_eq!(staging.evict(&evict("localhost:5000/b:v2")).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_dump_that_somebody_wrote_to_is_not_given_out() {
    let top = tempfile::tempdir().unwrap();
    let staging = open(top.path());
    let a = wish("a", 4096);
    assert!(put(&staging, &a).await.unwrap());
    let reading = staging.take(&a.digest, "one").await.unwrap();
    fs_err::write(reading.images().join("pages-1.img"), "worse").unwrap();
    drop(reading);
    assert!(staging.take(&a.digest, "two").await.is_none());
    assert_eq!(staging.to_api()[0].staged, []);
    assert!(put(&staging, &a).await.unwrap());
}

/// Changes a bit of what is staged; nothing but its bytes tells of it.
fn rot(images: &Path) {
    let path = images.join("pages-1.img");
    let modified = fs_err::metadata(&path).unwrap().modified().unwrap();
    let mut content = fs_err::read(&path).unwrap();
    content[7] ^= 1;
    fs_err::write(&path, content).unwrap();
    fs_err::OpenOptions::new().write(true).open(path).unwrap().set_modified(modified).unwrap();
}

#[tokio::test]
async fn what_has_rotted_is_not_given_out_as_proven() {
    let top = tempfile::tempdir().unwrap();
    let staging = open(top.path());
    let (a, progress) = (wish("a", 4096), Progress::default());
    assert!(put(&staging, &a).await.unwrap());
    assert!(staging.take_proven(&a.digest, "one", &progress).await.0.is_some());
    assert_eq!((progress.snapshot().step, progress.snapshot().done), ("prove", 4096));
    rot(&staging.take(&a.digest, "two").await.unwrap().images());
    // It looks as it did. What a caller finds out is told, and it is removed.
    let reading = staging.take(&a.digest, "three").await.unwrap();
    let told = chain(&reading.proven(&progress).await.unwrap_err()).to_string();
    assert!(told.contains("nvme") && told.contains("images/pages-1.img"), "{told}");
    assert_eq!(staging.to_api()[0].staged, []);
    assert!(put(&staging, &a).await.unwrap());
    rot(&staging.take(&a.digest, "four").await.unwrap().images());
    let (found, unused) = staging.take_proven(&a.digest, "five", &progress).await;
    assert!(found.is_none() && unused[0].contains("images/pages-1.img"), "{unused:?}");
    assert_eq!(staging.to_api()[0].staged, []);
}

#[tokio::test]
async fn what_was_staged_unproven_is_not_given_out_as_proven() {
    let top = tempfile::tempdir().unwrap();
    let (a, progress) = (wish("a", 4096), Progress::default());
    let unproven = open_with(top.path(), false);
    assert!(put(&unproven, &a).await.unwrap());
    rot(&unproven.take_proven(&a.digest, "one", &progress).await.0.unwrap().images());
    assert!(unproven.take_proven(&a.digest, "two", &progress).await.0.is_some());
    assert_eq!(progress.snapshot().step, "", "it was read");
    assert_eq!(open(top.path()).to_api()[0].staged, []);
}

#[tokio::test]
async fn what_has_rotted_goes_when_its_last_reader_has_ended() {
    let top = tempfile::tempdir().unwrap();
    let staging = open(top.path());
    let (a, progress) = (wish("a", 4096), Progress::default());
    assert!(put(&staging, &a).await.unwrap());
    let (reading, _) = staging.take_proven(&a.digest, "one", &progress).await;
    let images = reading.as_ref().unwrap().images();
    rot(&images);
    assert!(staging.take_proven(&a.digest, "two", &progress).await.0.is_none());
    // It is listed no more, and nobody gets it, but who reads it still may.
    assert_eq!(staging.to_api()[0].staged, []);
    assert!(staging.take(&a.digest, "three").await.is_none() && images.exists());
    let (anew, ()) = tokio::join!(put(&staging, &a), async { drop(reading) });
    assert!(anew.unwrap(), "it was there");
    assert!(staging.take_proven(&a.digest, "four", &progress).await.0.is_some());
}

#[tokio::test]
async fn what_somebody_removed_is_not_claimed_and_can_be_staged_again() {
    use std::os::unix::fs::PermissionsExt as _;
    let top = tempfile::tempdir().unwrap();
    let staging = open(top.path());
    let (a, b) = (wish("a", 4096), wish("b", 4096));
    for wish in [&a, &b] {
        assert!(put(&staging, wish).await.unwrap());
    }
    let directory = top.path().join("nvme");
    let images = staging.take(&a.digest, "one").await.unwrap().images();
    // Half of it, and all of it.
    for removed in [&*images, images.parent().unwrap()] {
        fs_err::remove_dir_all(removed).unwrap();
        staging.look().await;
        let told = staging.to_api();
        assert_eq!(told[0].staged.len(), 1);
        assert_eq!(told[0].staged[0].digest, b.digest.to_string());
        assert!(put(&staging, &a).await.unwrap());
    }

    fs_err::remove_dir_all(&directory).unwrap();
    assert!(put(&staging, &b).await.unwrap(), "it is not there");
    let mode = fs_err::metadata(&directory).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o700);
    assert!(staging.take(&b.digest, "two").await.is_some());
    assert_eq!(staging.to_api()[0].staged.len(), 1);

    // What nobody can make is told of.
    fs_err::remove_dir_all(&directory).unwrap();
    fs_err::write(&directory, "mine").unwrap();
    let error = put(&staging, &a).await.unwrap_err();
    let told = chain(&error).to_string();
    assert!(told.contains("failed to prepare the nvme tier") && told.contains("nvme"), "{told}");
    staging.look().await;
    assert_eq!(fs_err::read_to_string(&directory).unwrap(), "mine");
}

#[tokio::test]
async fn a_tier_without_a_budget_is_told_of() {
    let top = tempfile::tempdir().unwrap();
    let wish = Wish { tier: Tier::Ram, ..wish("a", 1) };
    let told = put(&open(top.path()), &wish).await.unwrap_err().to_string();
    assert!(told.contains("no ram tier"), "{told}");
}

#[test]
fn a_disk_with_a_fault_is_told_from_a_wrong_setting() {
    // What nobody has mapped cannot be read.
    assert!(is_fault(&fs_err::read("/proc/self/mem").unwrap_err()));
    assert!(is_fault(&rustix::io::Errno::ROFS.into()));
    for errno in [rustix::io::Errno::ACCESS, rustix::io::Errno::NOTDIR, rustix::io::Errno::INVAL] {
        assert!(!is_fault(&errno.into()));
    }
    assert!(!is_fault(&fs_err::read("/none/such").unwrap_err()));
}
