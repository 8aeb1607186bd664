//! Collections on a real store, with the clock in our hands.

mod history;
mod looking;
mod revival;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use kybernate_spec::{Descriptor, Digest, RepositoryName, media_type};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::manifest::References;
use crate::store::{ChunkSums, Commit, NewManifest, Sink, Store, UploadId};

const HOUR: Duration = Duration::from_hours(1);

/// A store whose collections happen when the test says.
pub(super) struct House {
    pub(super) store: Store,
    root: TempDir,
    began: SystemTime,
}

impl House {
    pub(super) fn new(settings: Settings) -> Self {
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let root = tempfile::tempdir_in(base).unwrap();
        let store = Store::open(root.path()).unwrap();
        store.set_gc(settings);
        Self { store, root, began: SystemTime::now() }
    }

    /// With no time between: what nothing needs is condemned by the first collection and gone
    /// with the second.
    pub(super) fn hasty() -> Self {
        Self::new(Settings {
            grace: Duration::ZERO,
            untagged: Some(Duration::ZERO),
            quarantine: Duration::ZERO,
        })
    }

    pub(super) fn push(&self, repository: &str, content: &[u8]) -> Descriptor {
        let repository = name(repository);
        let file =
            self.store.upload_file(&repository, &UploadId::random(SystemTime::now()).unwrap());
        drop(file.create().unwrap());
        let sink = Sink::open(&file, 0, 0).unwrap().unwrap();
        let mut sums = ChunkSums::default();
        sums.update(content);
        let mut rest = self.store.buffer(content.len());
        rest.fill_from(content);
        let commit = Commit {
            digest: Digest::of(content),
            file: Arc::new(sink),
            upload: file,
            rest,
            length: u64::try_from(content.len()).unwrap(),
            sums: sums.finish(),
            repository,
        };
        self.store.commit(&commit).unwrap();
        Descriptor::of(media_type::OCI_LAYER_TAR, content)
    }

    /// Pushes a manifest under tags and returns what was missing for it.
    pub(super) fn try_put(&self, repository: &str, document: &Value, tags: &[&str]) -> Vec<Digest> {
        let content = Bytes::from(document.to_string());
        let (media_type, references) = References::parse(None, &content).unwrap();
        let new = NewManifest {
            digest: Digest::of(&content),
            media_type,
            content,
            references,
            tags: tags.iter().map(|tag| tag.parse().unwrap()).collect(),
        };
        self.store.put_manifest(&name(repository), &new).unwrap()
    }

    pub(super) fn put(&self, repository: &str, document: &Value, tags: &[&str]) -> Descriptor {
        assert_eq!(self.try_put(repository, document, tags), []);
        let media_type = document["mediaType"].as_str().unwrap();
        Descriptor::of(media_type, document.to_string().as_bytes())
    }

    /// Pushes an image of these layers, all of it.
    pub(super) fn image(&self, repository: &str, layers: &[&str], tags: &[&str]) -> Descriptor {
        self.push(repository, b"{}");
        let layers: Vec<_> =
            layers.iter().map(|layer| self.push(repository, layer.as_bytes())).collect();
        self.put(repository, &image(&layers.iter().collect::<Vec<_>>(), None), tags)
    }

    pub(super) fn collect(&self, scope: Scope, after: Duration, dry_run: bool) -> Vec<Event> {
        let mut events = Vec::new();
        let run = Run {
            store: &self.store,
            scope,
            dry_run,
            now: self.began + after,
            tell: &mut |event| events.push(event.clone()),
            pace: &mut |_| true,
        };
        run.collect().unwrap();
        events
    }

    /// Collects what was noted, `after` the beginning, and returns how much of it went where.
    pub(super) fn noted(&self, after: Duration) -> Summary {
        summary(&self.collect(Scope::Noted, after, false))
    }

    pub(super) fn everything(&self, after: Duration) -> Summary {
        summary(&self.collect(Scope::Everything, after, false))
    }

    pub(super) fn has_blob(&self, repository: &str, content: &[u8]) -> bool {
        self.store.blob(&name(repository), &Digest::of(content)).unwrap().is_some()
    }

    pub(super) fn has_manifest(&self, repository: &str, manifest: &Descriptor) -> bool {
        self.store.read_manifest(&name(repository), &manifest.digest).unwrap().is_some()
    }

    /// Names every content on disk.
    pub(super) fn contents(&self) -> BTreeSet<Digest> {
        let mut contents = BTreeSet::new();
        let each = |digest| {
            contents.insert(digest);
            Ok(std::ops::ControlFlow::Continue(()))
        };
        self.store.each_content(None, each).unwrap();
        contents
    }

    fn path(&self, below: &str) -> std::path::PathBuf {
        self.root.path().join(below)
    }
}

pub(super) fn name(text: &str) -> RepositoryName {
    text.parse().unwrap()
}

pub(super) fn image(layers: &[&Descriptor], subject: Option<&Descriptor>) -> Value {
    let mut document = json!({
        "schemaVersion": 2,
        "mediaType": media_type::OCI_MANIFEST,
        "config": Descriptor::of(media_type::OCI_EMPTY, b"{}"),
        "layers": layers,
    });
    if let Some(subject) = subject {
        document["subject"] = json!(subject);
    }
    document
}

pub(super) fn index(manifests: &[&Descriptor]) -> Value {
    json!({ "schemaVersion": 2, "mediaType": media_type::OCI_INDEX, "manifests": manifests })
}

pub(super) fn summary(events: &[Event]) -> Summary {
    match events.last() {
        Some(Event::Done(summary)) => Summary { duration_ms: 0, ..*summary },
        other => panic!("a collection ended with {other:?}"),
    }
}

fn quiet() -> Summary {
    Summary { repositories: 1, ..Summary::default() }
}

#[test]
fn what_a_deleted_manifest_needed_goes_in_steps_and_the_rest_stays() {
    let house = House::new(Settings::default());
    house.image("a", &["base", "one"], &["v1"]);
    let two = house.image("a", &["base", "two"], &["v2"]);
    house.image("b", &["two"], &["v1"]);
    // Everything is old and seen by nobody.
    house.everything(HOUR * 5);
    house.everything(HOUR * 25);
    assert!(house.store.delete_manifest(&name("a"), &two.digest).unwrap());
    assert!(house.has_blob("a", b"two"));

    house.noted(HOUR * 30);
    let condemned = house.noted(HOUR * 35);
    assert_eq!(condemned, Summary { condemned: 1, ..quiet() });
    assert!(!house.has_blob("a", b"two") && house.has_blob("b", b"two"));
    assert_eq!(house.noted(HOUR * 36), Summary::default(), "nothing is looked at before its time");
    let purged = house.noted(HOUR * 48);
    assert_eq!(purged, Summary { purged: 1, ..quiet() });
    assert!(house.has_blob("b", b"two"), "another repository has it");
    for layer in [&b"{}"[..], b"base", b"one"] {
        assert!(house.has_blob("a", layer));
    }
    assert!(!house.contents().contains(&two.digest), "the manifest's own content went too");
    assert_eq!(house.contents().len(), 4 + 2);
}

#[test]
fn a_moved_tag_leaves_its_manifest_alone_for_a_while() {
    let house = House::new(Settings { grace: HOUR, ..Settings::default() });
    let first = house.image("a", &["one"], &["latest"]);
    house.image("a", &["two"], &["latest"]);
    for hours in [2, 4, 23] {
        house.noted(HOUR * hours);
        assert_eq!(house.everything(HOUR * hours).condemned, 0);
    }
    assert!(house.has_manifest("a", &first), "a client may have resolved the tag just before");
    house.noted(HOUR * 25);
    assert_eq!(house.noted(HOUR * 27).condemned, 2);
    assert!(!house.has_manifest("a", &first) && !house.has_blob("a", b"one"));
    assert!(house.has_blob("a", b"two") && house.has_blob("a", b"{}"));
    assert_eq!(house.noted(HOUR * 40).purged, 2);
    assert_eq!(house.contents().len(), 3);
}

#[test]
fn untagged_manifests_can_be_kept_for_ever() {
    let house = House::new(Settings { untagged: None, grace: HOUR, quarantine: HOUR });
    let image = house.image("a", &["one"], &[]);
    house.push("a", b"stray");
    for years in 1..4 {
        house.everything(HOUR * 24 * 365 * years);
    }
    assert!(house.has_manifest("a", &image) && house.has_blob("a", b"one"));
    assert!(!house.contents().contains(&Digest::of(b"stray")));
}

#[test]
fn an_abandoned_push_goes_and_one_under_way_stays() {
    let house = House::new(Settings::default());
    house.push("a", b"old");
    assert_eq!(house.noted(HOUR * 3), Summary::default());
    house.noted(HOUR * 5);
    assert_eq!(house.noted(HOUR * 10).condemned, 1);
    assert_eq!(
        house.noted(HOUR * 23),
        Summary { purged: 1, removed: 1, removed_bytes: 3, ..quiet() }
    );
    assert_eq!(house.contents().len(), 0);
}

#[test]
fn children_live_with_their_index_and_referrers_with_their_subject() {
    let house = House::hasty();
    let child = house.image("a", &["child"], &[]);
    let inner = house.put("a", &index(&[&child]), &[]);
    let outer = house.put("a", &index(&[&inner]), &["v1"]);
    let layer = house.push("a", b"signature");
    let signature = house.put("a", &image(&[&layer], Some(&outer)), &[]);
    let layer = house.push("a", b"of signature");
    let second = house.put("a", &image(&[&layer], Some(&signature)), &[]);
    let layer = house.push("a", b"of nothing");
    let missing = Descriptor::of(media_type::OCI_MANIFEST, b"missing");
    let stray = house.put("a", &image(&[&layer], Some(&missing)), &[]);
    let kept = house.put("a", &image(&[&layer], Some(&child)), &["sha256-abc.sig"]);

    assert_eq!(house.everything(HOUR).condemned, 1);
    assert_eq!(house.everything(HOUR).purged, 1);
    for manifest in [&child, &inner, &outer, &signature, &second, &kept] {
        assert!(house.has_manifest("a", manifest));
    }
    assert!(!house.has_manifest("a", &stray) && house.has_blob("a", b"of nothing"));

    // A referrer with a tag of its own stays, and keeps nothing but what it consists of.
    assert!(house.store.delete_manifest(&name("a"), &outer.digest).unwrap());
    house.noted(HOUR);
    house.noted(HOUR);
    for manifest in [&child, &inner, &signature, &second] {
        assert!(!house.has_manifest("a", manifest));
    }
    assert!(house.has_manifest("a", &kept) && house.has_blob("a", b"of nothing"));
    let expected = [&b"{}"[..], b"of nothing"].map(Digest::of).into_iter().chain([kept.digest]);
    assert_eq!(house.contents(), expected.collect());
    assert!(
        !house.path(&format!("repositories/a/_referrers/sha256/{}", outer.digest.hex())).exists()
    );
}

#[test]
fn what_cannot_be_read_is_left_alone_and_told() {
    let house = House::hasty();
    let v1 = house.image("a", &["one"], &["v1"]);
    house.image("b", &["two"], &["v1"]);
    house.push("a", b"stray");
    house.push("b", b"stray");
    fs_err::write(house.path("repositories/a/_tags/v1"), "torn").unwrap();
    let events = house.collect(Scope::Everything, HOUR, false);
    let skipped = events.iter().find_map(|event| match event {
        Event::Skipped { repository, reason } => Some((repository.to_string(), reason.clone())),
        _ => None,
    });
    let (repository, reason) = skipped.unwrap();
    assert_eq!(repository, "a");
    assert!(reason.contains("_tags/v1") && reason.contains("push it again"), "{reason}");
    assert!(house.has_blob("a", b"stray") && !house.has_blob("b", b"stray"));

    house.image("a", &["one"], &["v1"]);
    let content =
        house.path(&format!("blobs/sha256/{}/{}", &v1.digest.hex()[..2], v1.digest.hex()));
    fs_err::write(&content, "rotten").unwrap();
    assert_eq!(house.everything(HOUR).skipped, 1);
    assert!(house.has_blob("a", b"one"));
    house.image("a", &["one"], &["v1"]);
    assert_eq!(
        house.everything(HOUR),
        Summary { repositories: 2, condemned: 1, ..Summary::default() },
        "healed, and b's stray went before"
    );
}

#[test]
fn a_dry_run_tells_what_the_real_one_does_and_changes_nothing() {
    let house = House::hasty();
    house.image("a", &["base", "one"], &["latest"]);
    house.image("a", &["base", "two"], &["latest"]);
    house.push("a", b"stray");
    house.push("b", b"stray");
    house.push("b", &vec![7; 100_000]);
    house.store.unlink(&name("b"), &Digest::of(b"stray")).unwrap();
    fs_err::write(house.path("blobs/sha256/00").join("0".repeat(64)), "never linked").unwrap();
    for round in 0..3 {
        for scope in [Scope::Noted, Scope::Everything] {
            let sorted = |mut events: Vec<Event>| {
                events.retain(|event| !matches!(event, Event::Done(_)));
                events.sort_by_key(|event| format!("{event:?}"));
                events
            };
            let before = house.contents();
            let told = sorted(house.collect(scope, HOUR, true));
            assert_eq!(sorted(house.collect(scope, HOUR, true)), told);
            assert_eq!(house.contents(), before);
            let done = sorted(house.collect(scope, HOUR, false));
            assert_eq!(done, told, "round {round}, {scope:?}");
        }
    }
    assert_eq!(house.contents().len(), 4);
    let left = fs_err::read_dir(house.path("repositories/b/_condemned")).unwrap().count();
    assert_eq!(left, 0);
}

#[test]
fn what_was_never_noted_is_found_when_everything_is_looked_at() {
    let house = House::hasty();
    house.image("a", &["one"], &["v1"]);
    house.push("a", b"stray");
    fs_err::remove_file(house.path("gc/candidates.log")).unwrap();
    let large = Digest::of(&vec![1; 100_000]);
    house.push("b", &vec![1; 100_000]);
    let shelf = house.path(&format!("blobs/sha256/{}", &large.hex()[..2]));
    fs_err::remove_file(house.path(&format!("repositories/b/_blobs/sha256/{}", large.hex())))
        .unwrap();
    fs_err::remove_file(shelf.join(large.hex())).unwrap();
    let House { store, root, began } = house;
    drop(store);
    let store = Store::open(root.path()).unwrap();
    let house = House { store, root, began };
    house.store.set_gc(House::hasty().store.gc_settings());
    house.everything(HOUR);
    house.everything(HOUR);
    assert_eq!(house.contents().len(), 3);
    assert!(!shelf.join(format!("{}.crc", large.hex())).exists(), "checksums of nothing");
}
