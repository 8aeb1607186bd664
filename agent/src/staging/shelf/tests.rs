use std::os::unix::fs::symlink;

use super::*;

/// A shelf with one checkpoint on it.
struct Fixture {
    top: tempfile::TempDir,
    shelf: Shelf,
    digest: Digest,
}

impl Fixture {
    fn new() -> Self {
        let top = tempfile::tempdir().unwrap();
        let shelf = shelf(top.path());
        assert_eq!(shelf.open().unwrap(), []);
        let digest = Digest::of(b"index");
        put(&shelf, &digest);
        Self { top, shelf, digest }
    }

    fn images(&self) -> PathBuf {
        self.shelf.path(&self.digest).join(IMAGES)
    }

    /// Opens it as the next agent does.
    fn found(&self) -> Vec<Digest> {
        let found = shelf(self.top.path()).open().unwrap();
        found.into_iter().map(|record| record.digest).collect()
    }
}

fn shelf(top: &Path) -> Shelf {
    let config = TierConfig { directory: top.join("nvme"), budget: 1 << 20, verify: false };
    Shelf::new(Tier::Nvme, config)
}

fn put(shelf: &Shelf, digest: &Digest) {
    let temporary = shelf.temporary("op");
    stage::make(&temporary.join(IMAGES)).unwrap();
    fs::write(temporary.join(IMAGES).join("pages-1.img"), [7; 5000]).unwrap();
    fs::write(temporary.join(IMAGES).join("inventory.img"), "x").unwrap();
    let record = Record::describe(&temporary, digest.clone(), "a/b:v1".to_owned()).unwrap();
    Shelf::seal(&temporary, &record).unwrap();
    assert!(record.bytes >= 5000, "{record:?}");
    shelf.publish(&temporary, digest).unwrap();
}

#[test]
fn a_whole_checkpoint_is_found_again() {
    let fixture = Fixture::new();
    let found = shelf(fixture.top.path()).open().unwrap();
    assert_eq!((found.len(), &found[0].references), (1, &vec!["a/b:v1".to_owned()]));
    fixture.shelf.refer(&fixture.digest, vec!["c".to_owned()]).unwrap();
    let again = shelf(fixture.top.path()).open().unwrap();
    assert_eq!((&*again[0].references, again[0].bytes), (&["c".to_owned()][..], found[0].bytes));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(fixture.shelf.directory()), 0o700);
    assert_eq!(mode(&fixture.shelf.path(&fixture.digest).join("record.json")), 0o600);
}

#[test]
fn the_last_use_outlives_the_agent() {
    let fixture = Fixture::new();
    let record = fixture.shelf.path(&fixture.digest).join("record.json");
    let long_ago = std::time::SystemTime::UNIX_EPOCH;
    fs::OpenOptions::new().write(true).open(record).unwrap().set_modified(long_ago).unwrap();
    let used_at = || shelf(fixture.top.path()).open().unwrap()[0].used_at;
    assert_eq!(used_at(), jiff::Timestamp::UNIX_EPOCH);
    fixture.shelf.check(&fixture.digest).unwrap();
    assert!(used_at() > jiff::Timestamp::UNIX_EPOCH);
}

#[test]
fn what_was_not_finished_is_removed() {
    let fixture = Fixture::new();
    stage::make(&fixture.shelf.temporary("01a200000000deadbeef").join(IMAGES)).unwrap();
    let old = format!("old-{}", Digest::of(b"old").hex());
    stage::make(&fixture.shelf.directory().join(old)).unwrap();
    let torn = Digest::of(b"torn");
    stage::make(&fixture.shelf.path(&torn).join(IMAGES)).unwrap();
    fs::write(fixture.shelf.path(&torn).join("record.json"), "{").unwrap();
    assert_eq!(fixture.found(), std::slice::from_ref(&fixture.digest));
    assert_eq!(fs::read_dir(fixture.shelf.directory()).unwrap().count(), 1);
}

#[test]
fn what_somebody_else_calls_so_is_left_alone() {
    let fixture = Fixture::new();
    let directory = fixture.shelf.directory().to_owned();
    for name in ["new-photos", "old-backups"] {
        stage::make(&directory.join(name)).unwrap();
        assert!(shelf(fixture.top.path()).open().is_err(), "{name}");
        fs::remove_dir(directory.join(name)).unwrap();
    }
    stage::make(&directory.join("lost+found")).unwrap();
    assert_eq!(fixture.found(), std::slice::from_ref(&fixture.digest));
    assert!(directory.join("lost+found").exists());
}

#[test]
fn a_dump_that_was_changed_is_no_staged_checkpoint() {
    type Change = fn(&Path);
    let changes: [(&str, Change); 5] = [
        ("written to", |images| fs::write(images.join("pages-1.img"), [8; 5000]).unwrap()),
        ("shorter", |images| fs::write(images.join("inventory.img"), "").unwrap()),
        ("more", |images| fs::write(images.join("stats-restore"), "x").unwrap()),
        ("fewer", |images| fs::remove_file(images.join("inventory.img")).unwrap()),
        ("a link", |images| {
            fs::rename(images.join("pages-1.img"), images.join("../moved")).unwrap();
            symlink("../moved", images.join("pages-1.img")).unwrap();
        }),
    ];
    for (what, change) in changes {
        let fixture = Fixture::new();
        change(&fixture.images());
        assert!(fixture.shelf.check(&fixture.digest).is_err(), "{what}");
        assert_eq!(fixture.found(), [], "{what}");
        assert!(!fixture.images().exists(), "{what}");
    }
}

#[test]
fn captured_mounts_are_as_they_were_staged() {
    type Change = fn(&Path);
    let changes: [(&str, Change, bool); 4] = [
        ("as it was", |_| {}, true),
        ("written to", |volumes| fs::write(volumes.join("0.tar"), "worse").unwrap(), false),
        ("more", |volumes| fs::write(volumes.join("1.tar"), "x").unwrap(), false),
        ("none", |volumes| fs::remove_dir_all(volumes).unwrap(), false),
    ];
    for (what, change, is_whole) in changes {
        let fixture = Fixture::new();
        let (digest, temporary) = (Digest::of(b"with mounts"), fixture.shelf.temporary("op"));
        stage::make(&temporary.join(IMAGES)).unwrap();
        stage::make(&temporary.join(VOLUMES)).unwrap();
        fs::write(temporary.join(VOLUMES).join("0.tar"), [7; 5000]).unwrap();
        let record = Record::describe(&temporary, digest.clone(), "a/b:v2".to_owned()).unwrap();
        Shelf::seal(&temporary, &record).unwrap();
        assert!(record.bytes >= 5000, "{record:?}");
        fixture.shelf.publish(&temporary, &digest).unwrap();
        change(&fixture.shelf.path(&digest).join(VOLUMES));
        assert_eq!(fixture.shelf.check(&digest).is_ok(), is_whole, "{what}");
        assert_eq!(fixture.found().contains(&digest), is_whole, "{what}");
    }
}

#[test]
fn what_nobody_could_prove_is_no_staged_checkpoint_of_who_proves() {
    let fixture = Fixture::new();
    let config = TierConfig { verify: true, ..fixture.shelf.config.clone() };
    assert_eq!(Shelf::new(Tier::Nvme, config).open().unwrap(), []);
    assert!(!fixture.images().exists());
}

#[test]
fn what_an_earlier_agent_staged_has_no_captured_mounts() {
    let fixture = Fixture::new();
    let path = fixture.shelf.path(&fixture.digest).join("record.json");
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    record.as_object_mut().unwrap().remove("volumes").unwrap();
    fs::write(&path, record.to_string()).unwrap();
    fixture.shelf.check(&fixture.digest).unwrap();
    assert_eq!(fixture.found(), std::slice::from_ref(&fixture.digest));
}

#[test]
fn links_and_other_owners_are_refused() {
    let fixture = Fixture::new();
    let elsewhere = fixture.top.path().join("elsewhere");
    fs::rename(fixture.shelf.path(&fixture.digest), &elsewhere).unwrap();
    symlink(&elsewhere, fixture.shelf.path(&fixture.digest)).unwrap();
    assert_eq!(fixture.found(), []);
    assert!(elsewhere.join("record.json").exists(), "what a link leads to was removed");

    fs::rename(&elsewhere, fixture.shelf.path(&fixture.digest)).unwrap();
    assert_eq!(fixture.found(), std::slice::from_ref(&fixture.digest));
    let moved = fixture.top.path().join("moved");
    fs::rename(fixture.shelf.directory(), &moved).unwrap();
    symlink(&moved, fixture.shelf.directory()).unwrap();
    let error = shelf(fixture.top.path()).open().unwrap_err().to_string();
    assert!(error.contains("symbolic link"), "{error}");
    fs::remove_file(fixture.shelf.directory()).unwrap();
    fs::rename(&moved, fixture.shelf.directory()).unwrap();
    if rustix::process::geteuid().is_root() {
        let nobody = Some(65534);
        std::os::unix::fs::chown(fixture.images().join("pages-1.img"), nobody, nobody).unwrap();
        assert_eq!(fixture.found(), []);
        std::os::unix::fs::chown(fixture.shelf.directory(), nobody, nobody).unwrap();
        let error = shelf(fixture.top.path()).open().unwrap_err().to_string();
        assert!(error.contains("belongs to user 65534"), "{error}");
    }
}

#[test]
fn a_directory_with_somebodys_files_is_not_taken() {
    let top = tempfile::tempdir().unwrap();
    let shelf = shelf(top.path());
    fs::create_dir(shelf.directory()).unwrap();
    fs::write(shelf.directory().join("thesis.txt"), "x").unwrap();
    let error = shelf.open().unwrap_err().to_string();
    assert!(error.contains("thesis.txt"), "{error}");
    assert!(shelf.directory().join("thesis.txt").exists());
}

#[test]
fn what_was_removed_can_be_staged_again() {
    let fixture = Fixture::new();
    fixture.shelf.remove(&fixture.digest).unwrap();
    fixture.shelf.remove(&fixture.digest).unwrap();
    assert_eq!(fixture.found(), []);
    put(&fixture.shelf, &fixture.digest);
    assert_eq!(fixture.found(), std::slice::from_ref(&fixture.digest));
}
