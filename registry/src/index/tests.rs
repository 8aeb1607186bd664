use std::collections::{BTreeMap, BTreeSet};

use kybernate_spec::{Descriptor, Digest, RepositoryName, Tag, media_type};
use proptest::prelude::*;

use super::change::{List, prefix};
use super::database::Database;
use super::{Change, Index, IndexError, ReferrersWanted};
use crate::gc::LinkKind;
use crate::store::{Page, Window};

fn repository(n: u8) -> RepositoryName {
    // One is a prefix of another, and of a path below it.
    ["r", "r-x", "r/x", "rx"][usize::from(n % 4)].parse().unwrap()
}

fn tag(n: u8) -> Tag {
    format!("v{n}").parse().unwrap()
}

fn digest(n: u8) -> Digest {
    Digest::of(&[n])
}

fn referrer(n: u8) -> Descriptor {
    let mut referrer = Descriptor::new(media_type::OCI_MANIFEST, digest(n), u64::from(n));
    referrer.artifact_type = Some(format!("type/{}", n % 3));
    referrer
}

#[derive(Debug, Clone)]
enum Step {
    Tag(u8, u8, bool),
    Link(u8, u8, Option<u16>),
    Referrer(u8, u8, u8, bool),
    Sync,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4u8, 0..40u8, any::<bool>()).prop_map(|(r, t, there)| Step::Tag(r, t, there)),
        6 => (0..4u8, 0..20u8, any::<Option<u16>>()).prop_map(|(r, d, n)| Step::Link(r, d, n)),
        6 => (0..4u8, 0..3u8, 0..20u8, any::<bool>())
            .prop_map(|(r, s, d, there)| Step::Referrer(r, s, d, there)),
        1 => Just(Step::Sync),
        1 => Just(Step::Reopen),
    ]
}

#[derive(Default)]
struct Model {
    tags: BTreeSet<(String, String)>,
    links: BTreeMap<(String, String), u64>,
    repositories: BTreeSet<String>,
    referrers: BTreeMap<(String, u8, String), Descriptor>,
}

fn pages(limit: usize, mut page: impl FnMut(&Window) -> Page<String>) -> Vec<String> {
    let mut all = Vec::new();
    let mut window = Window { after: None, limit };
    loop {
        let Page { items, next } = page(&window);
        assert!(items.len() <= limit);
        all.extend(items);
        match next {
            Some(next) => window.after = Some(next),
            None => return all,
        }
    }
}

fn agrees(database: &Database, model: &Model, limit: usize) {
    let names = pages(limit, |window| database.names(List::Repositories, &[], window).unwrap());
    assert_eq!(names, model.repositories.iter().cloned().collect::<Vec<_>>());
    for n in 0..4 {
        let name = repository(n);
        let of = |(other, _): &&(String, String)| other == name.as_str();
        let tags =
            pages(limit, |window| database.names(List::Tags, &prefix(&name), window).unwrap());
        let expected: Vec<_> = model.tags.iter().filter(of).map(|(_, tag)| tag.clone()).collect();
        assert_eq!(tags, expected);
        let sum: u64 = model.links.iter().filter(|(key, _)| of(key)).map(|(_, sum)| sum).sum();
        let known = model.repositories.contains(name.as_str());
        assert_eq!(database.bytes(&name).unwrap(), known.then_some(sum));
        for subject in 0..3 {
            for artifact_type in [None, Some("type/1")] {
                let found = pages(limit, |window| {
                    let wanted = ReferrersWanted { artifact_type, window, bytes_max: 2_000 };
                    let page = database.referrers(&name, &digest(subject), &wanted).unwrap();
                    let items = page.items.iter().map(|item| crate::store::file_name(&item.digest));
                    Page { items: items.collect(), next: page.next }
                });
                let mut expected: Vec<_> = model
                    .referrers
                    .iter()
                    .filter(|((r, s, _), _)| r == name.as_str() && *s == subject)
                    .filter(|(_, referrer)| {
                        artifact_type.is_none()
                            || referrer.artifact_type.as_deref() == artifact_type
                    })
                    .map(|((_, _, file), _)| file.clone())
                    .collect();
                expected.sort();
                assert_eq!(found, expected);
            }
        }
    }
}

fn take(step: &Step, database: &Database, model: &mut Model) {
    match *step {
        Step::Tag(r, t, there) => {
            let key = (repository(r).as_str().to_owned(), tag(t).as_str().to_owned());
            if there {
                database.apply(&Change::tag(&repository(r), &tag(t))).unwrap();
                model.tags.insert(key);
            } else {
                database.apply(&Change::no_tag(&repository(r), &tag(t))).unwrap();
                model.tags.remove(&key);
            }
        }
        Step::Link(r, d, bytes) => {
            let name = repository(r);
            let key = (name.as_str().to_owned(), digest(d).to_string());
            if let Some(bytes) = bytes {
                let change = Change::link(&name, LinkKind::Blob, &digest(d), bytes.into());
                database.apply(&change).unwrap();
                model.links.insert(key, bytes.into());
            } else {
                let change = Change::no_link(&name, LinkKind::Blob, &digest(d));
                database.apply(&change).unwrap();
                model.links.remove(&key);
            }
            model.repositories.insert(name.as_str().to_owned());
        }
        Step::Referrer(r, s, d, there) => {
            let (name, referrer) = (repository(r), referrer(d));
            let key = (name.as_str().to_owned(), s, crate::store::file_name(&referrer.digest));
            if there {
                database.apply(&Change::referrer(&name, &digest(s), &referrer).unwrap()).unwrap();
                model.referrers.insert(key, referrer);
            } else {
                let gone = Change::no_referrer(&name, &digest(s), &referrer.digest);
                database.apply(&gone).unwrap();
                model.referrers.remove(&key);
            }
        }
        Step::Sync => database.sync().unwrap(),
        Step::Reopen => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn the_database_agrees_with_a_map(
        steps in proptest::collection::vec(step(), 1..120),
        limit in 1..7usize,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut database = Database::create(dir.path(), "d").unwrap();
        let mut model = Model::default();
        for step in &steps {
            take(step, &database, &mut model);
            if matches!(step, Step::Reopen) {
                let seal = database.close().unwrap();
                database = Database::unseal(dir.path(), "d", &seal).unwrap();
            }
        }
        agrees(&database, &model, limit);
    }
}

#[test]
fn a_database_is_trusted_only_as_it_was_closed() {
    let dir = tempfile::tempdir().unwrap();
    let database = Database::create(dir.path(), "d").unwrap();
    database.apply(&Change::tag(&repository(0), &tag(1))).unwrap();
    let seal = database.close().unwrap();
    let unsealed = |name: &str, seal: &str| Database::unseal(dir.path(), name, seal);
    assert!(matches!(unsealed("d", "0123456789abcdef"), Err(IndexError::Unsealed)));
    assert!(matches!(unsealed("e", &seal), Err(IndexError::Gone)));
    let open = unsealed("d", &seal).unwrap();
    open.apply(&Change::tag(&repository(0), &tag(2))).unwrap();
    drop(open);
    assert!(matches!(unsealed("d", &seal), Err(IndexError::Unsealed)));
}

#[test]
fn spoiled_files_are_not_opened() {
    let spoilers: [fn(&mut Vec<u8>); 3] = [
        |bytes| bytes.truncate(bytes.len() / 2),
        |bytes| bytes.push(0),
        |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        },
    ];
    for spoil in spoilers {
        for part in ["metadata", "slabs"] {
            let dir = tempfile::tempdir().unwrap();
            let database = Database::create(dir.path(), "d").unwrap();
            for n in 0..200 {
                database.apply(&Change::tag(&repository(0), &tag(n))).unwrap();
            }
            let seal = database.close().unwrap();
            let files = std::fs::read_dir(dir.path().join("d").join(part)).unwrap();
            let path = files.map(|entry| entry.unwrap().path());
            let path = path.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
            let mut bytes = fs_err::read(&path).unwrap();
            spoil(&mut bytes);
            fs_err::write(&path, bytes).unwrap();
            let opened = Database::unseal(dir.path(), "d", &seal);
            assert!(matches!(opened, Err(IndexError::Unsealed)), "{part}");
        }
    }
}

#[test]
fn more_changes_than_can_wait_make_the_index_absent() {
    let index = Index::new(true);
    for _ in 0..=super::WAITING_MAX {
        index.note(Change::tag(&repository(0), &tag(1)));
    }
    let dir = tempfile::tempdir().unwrap();
    let database = std::sync::Arc::new(Database::create(dir.path(), "d").unwrap());
    assert!(!index.opened(&database).unwrap(), "a change is missing");
    assert!(!index.is_ready());
}
