//! What is condemned comes back when somebody needs it.

use super::*;

#[test]
fn a_manifest_revives_what_it_names() {
    let house = House::hasty();
    house.push("a", b"{}");
    let layer = house.push("a", b"layer");
    assert_eq!(house.noted(HOUR).condemned, 2);
    assert!(!house.has_blob("a", b"layer"), "a condemned blob is a 404");
    house.put("a", &image(&[&layer], None), &["v1"]);
    assert!(house.has_blob("a", b"layer") && house.has_blob("a", b"{}"));
    house.everything(HOUR);
    house.everything(HOUR);
    assert!(house.has_blob("a", b"layer"));

    // Another repository's quarantine is none of ours.
    assert_eq!(house.try_put("b", &image(&[&layer], None), &["v1"]).len(), 2);
}

/// What comes back takes room again, so it is known before.
#[test]
fn what_comes_back_with_a_manifest_is_counted() {
    let house = House::hasty();
    house.push("a", b"{}");
    let layer = house.push("a", b"layer");
    let child_document = image(&[&layer], None);
    let child = house.put("a", &child_document, &[]);
    let document = index(&[&child]);
    let bytes = || {
        let content = document.to_string();
        let (_, references) = References::parse(None, content.as_bytes()).unwrap();
        let digest = Digest::of(content.as_bytes());
        house.store.revivable_bytes(&name("a"), &digest, &references).unwrap()
    };
    assert_eq!(bytes(), 0, "all of it is there");
    assert_eq!(house.noted(HOUR).condemned, 3);
    assert_eq!(bytes(), 2 + 5 + u64::try_from(child_document.to_string().len()).unwrap());
    house.put("a", &document, &["v1"]);
    assert!(house.has_blob("a", b"layer") && house.has_manifest("a", &child));
    assert_eq!(bytes(), 0);
}

/// Who deletes what was condemned once and pushed again does not find it back.
#[test]
fn what_was_deleted_is_not_revived() {
    let house = House::hasty();
    let layer = house.push("a", b"layer");
    assert_eq!(house.noted(HOUR).condemned, 1);
    house.push("a", b"layer");
    house.push("a", b"{}");
    assert!(house.store.unlink(&name("a"), &layer.digest).unwrap());
    assert_eq!(house.try_put("a", &image(&[&layer], None), &["v1"]), [layer.digest]);
}

#[test]
fn a_manifest_that_names_what_is_gone_is_refused() {
    let house = House::hasty();
    house.push("a", b"{}");
    let layer = house.push("a", b"layer");
    house.noted(HOUR);
    house.noted(HOUR);
    assert_eq!(house.contents().len(), 0);
    assert_eq!(house.try_put("a", &image(&[&layer], None), &["v1"]).len(), 2);
    assert_eq!(house.store.tag(&name("a"), &"v1".parse().unwrap()).unwrap(), None);
}

#[test]
fn an_index_revives_its_children_and_all_they_need() {
    let house = House::hasty();
    let child = house.image("a", &["layer"], &[]);
    let inner = house.put("a", &index(&[&child]), &[]);
    let signature = house.put("a", &image(&[], Some(&child)), &[]);
    assert_eq!(house.noted(HOUR).condemned, 5);
    assert!(!house.has_manifest("a", &inner) && !house.has_manifest("a", &child));
    house.put("a", &index(&[&inner]), &["v1"]);
    assert!(house.has_manifest("a", &inner) && house.has_manifest("a", &child));
    assert!(house.has_blob("a", b"layer"));
    house.everything(HOUR);
    assert!(house.has_manifest("a", &signature), "what is attached comes back with its subject");
    assert_eq!(house.everything(HOUR).condemned, 0);
}

/// Indexes of indexes, each of which names all of the next level, over something that is gone: there
/// are 8¹⁴ ways down.
#[test]
fn what_cannot_come_back_is_tried_once() {
    let house = House::hasty();
    let layer = house.push("a", b"layer");
    house.push("a", b"{}");
    let mut level = vec![house.put("a", &image(&[&layer], None), &[])];
    for _ in 0..14 {
        let children: Vec<_> = level.iter().collect();
        let next = (0..8).map(|number| {
            let mut document = index(&children);
            document["annotations"] = json!({ "number": number.to_string() });
            house.put("a", &document, &[])
        });
        level = next.collect();
    }
    assert!(house.store.unlink(&name("a"), &layer.digest).unwrap());
    assert_eq!(house.noted(HOUR).condemned, 1 + 14 * 8 + 1);
    let top = index(&level.iter().collect::<Vec<_>>());
    assert_eq!(house.try_put("a", &top, &["v1"]).len(), 8);
    house.push("a", b"layer");
    assert_eq!(house.try_put("a", &top, &["v1"]), [], "now that all of it is there");
    assert!(level.iter().all(|manifest| house.has_manifest("a", manifest)));
}

#[test]
fn a_push_and_a_mount_bring_a_blob_back() {
    let house = House::hasty();
    house.push("a", b"pushed");
    house.push("a", b"mounted");
    house.noted(HOUR);
    house.push("a", b"pushed");
    let digest = Digest::of(b"mounted");
    assert!(house.store.mount(&name("a"), &name("a"), &digest).unwrap());
    assert!(house.store.mount(&name("a"), &name("b"), &digest).unwrap());
    assert!(!house.store.mount(&name("c"), &name("b"), &digest).unwrap());
    for (repository, content) in [("a", &b"pushed"[..]), ("a", b"mounted"), ("b", b"mounted")] {
        assert!(house.has_blob(repository, content), "{repository}");
    }
    // Collected again, with the old quarantine beside the new link.
    house.noted(HOUR);
    house.noted(HOUR);
    house.noted(HOUR);
    assert_eq!(house.contents().len(), 0);
}

#[test]
fn what_a_client_was_shown_is_kept_for_the_grace() {
    let house = House::new(Settings { grace: HOUR, ..Settings::default() });
    house.push("a", b"shown");
    house.push("a", b"not shown");
    house.everything(HOUR / 2);
    assert!(house.has_blob("a", b"shown"));
    assert_eq!(house.everything(HOUR * 3 / 2).condemned, 1, "what nobody has looked at");
    assert_eq!(house.everything(HOUR * 5 / 2).condemned, 1, "what was looked at two hours ago");
}

/// The moments between a client's look and its manifest, while a collection runs: what is pushed
/// while the repository is looked at is needed, also when it was not there when that began.
#[test]
fn what_is_pushed_during_a_collection_is_needed() {
    let house = House::hasty();
    let child = house.image("a", &["layer"], &[]);
    let stray = house.push("a", b"stray");
    let run = Run {
        store: &house.store,
        scope: Scope::Everything,
        dry_run: false,
        now: house.began + HOUR,
        tell: &mut |_| {},
        pace: &mut |_| true,
    };
    std::thread::scope(|threads| {
        let pusher = threads.spawn(|| {
            for round in 0..200 {
                let tag = format!("t{round}");
                if house.try_put("a", &image(&[&stray], None), &[&tag]).is_empty() {
                    assert_eq!(house.try_put("a", &index(&[&child]), &["i"]), []);
                    break;
                }
            }
        });
        run.collect().unwrap();
        pusher.join().unwrap();
    });
    house.everything(HOUR);
    house.everything(HOUR);
    assert!(house.has_blob("a", b"stray") && house.has_blob("a", b"layer"));
    assert!(house.has_manifest("a", &child));
}
