//! Random histories against a model that cannot be wrong.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    /// Push a blob.
    Push(usize, u8),
    /// Push a manifest of these blobs and manifests of the past, perhaps attached, perhaps tagged.
    Put {
        repository: usize,
        blobs: Vec<u8>,
        children: Vec<usize>,
        subject: Option<usize>,
        tag: Option<u8>,
    },
    /// Push an old manifest again under a tag.
    Tag(usize, u8),
    Untag(usize, u8),
    Delete(usize),
    Mount(u8),
    Collect,
    CollectNoted,
}

fn step() -> impl Strategy<Value = Step> {
    let put = (
        0..2usize,
        prop::collection::vec(0..8u8, 0..3),
        prop::collection::vec(0..6usize, 0..3),
        prop::option::weighted(0.3, 0..6usize),
        prop::option::of(0..3u8),
    );
    prop_oneof![
        3 => (0..2usize, 0..8u8).prop_map(|(repository, blob)| Step::Push(repository, blob)),
        5 => put.prop_map(|(repository, blobs, children, subject, tag)| Step::Put {
            repository, blobs, children, subject, tag
        }),
        1 => (0..6usize, 0..3u8).prop_map(|(manifest, tag)| Step::Tag(manifest, tag)),
        2 => (0..2usize, 0..3u8).prop_map(|(repository, tag)| Step::Untag(repository, tag)),
        1 => (0..6usize).prop_map(Step::Delete),
        1 => (0..8u8).prop_map(Step::Mount),
        2 => Just(Step::Collect),
        2 => Just(Step::CollectNoted),
    ]
}

const REPOSITORIES: [&str; 2] = ["a", "b/c"];

#[derive(Debug, Clone)]
struct Manifest {
    repository: usize,
    document: Value,
    digest: Digest,
    subject: Option<Digest>,
    names: BTreeSet<Digest>,
}

/// What was acknowledged and not deleted.
#[derive(Debug, Default)]
struct Model {
    pushed: Vec<Manifest>,
    /// Collected while nothing needed it; what needs it later may bring it back.
    gone: Vec<Manifest>,
    tags: BTreeMap<(usize, u8), Digest>,
}

impl Model {
    /// What must be there, by the rules and the slow way.
    fn needed(&self, repository: usize) -> BTreeSet<Digest> {
        let tags = self.tags.iter().filter(|((at, _), _)| *at == repository);
        let mut needed: BTreeSet<Digest> = tags.map(|(_, digest)| digest.clone()).collect();
        loop {
            let before = needed.len();
            for manifest in self.pushed.iter().filter(|m| m.repository == repository) {
                if manifest.subject.as_ref().is_some_and(|subject| needed.contains(subject)) {
                    needed.insert(manifest.digest.clone());
                }
                if needed.contains(&manifest.digest) {
                    needed.extend(manifest.names.iter().cloned());
                }
            }
            if needed.len() == before {
                return needed;
            }
        }
    }

    /// Takes note of what was collected rightly, and of what came back.
    fn follow(&mut self, house: &House) {
        let shown = |manifest: &Manifest| {
            let repository = name(REPOSITORIES[manifest.repository]);
            house.store.manifest(&repository, &manifest.digest).unwrap().is_some()
        };
        let (back, gone) = std::mem::take(&mut self.gone).into_iter().partition(shown);
        self.gone = gone;
        self.pushed.extend::<Vec<_>>(back);
        let needed = [self.needed(0), self.needed(1)];
        let stays = |m: &Manifest| shown(m) || needed[m.repository].contains(&m.digest);
        let (pushed, gone) = std::mem::take(&mut self.pushed).into_iter().partition(stays);
        self.pushed = pushed;
        self.gone.extend::<Vec<_>>(gone);
    }

    fn forget(&mut self, repository: usize, digest: &Digest) {
        self.pushed
            .retain(|manifest| manifest.repository != repository || manifest.digest != *digest);
        self.tags.retain(|(at, _), named| *at != repository || named != digest);
    }
}

fn blob(number: u8) -> Vec<u8> {
    format!("blob {number}").into_bytes()
}

fn document(house: &House, model: &Model, step: &Step) -> Option<Manifest> {
    let Step::Put { repository, blobs, children, subject, .. } = step else { return None };
    let here: Vec<_> = model.pushed.iter().filter(|m| m.repository == *repository).collect();
    let pick = |at: &usize| {
        here.get(*at).map(|manifest| {
            let media_type = manifest.document["mediaType"].as_str().unwrap();
            Descriptor::of(media_type, manifest.document.to_string().as_bytes())
        })
    };
    let subject = subject.as_ref().and_then(pick);
    let children: Vec<_> = children.iter().filter_map(pick).collect();
    let mut document = if children.is_empty() {
        for number in blobs {
            house.push(REPOSITORIES[*repository], &blob(*number));
        }
        house.push(REPOSITORIES[*repository], b"{}");
        let layer = |number: &u8| Descriptor::of(media_type::OCI_LAYER_TAR, &blob(*number));
        let layers: Vec<_> = blobs.iter().map(layer).collect();
        image(&layers.iter().collect::<Vec<_>>(), None)
    } else {
        index(&children.iter().collect::<Vec<_>>())
    };
    if let Some(subject) = &subject {
        document["subject"] = json!(subject);
    }
    let names = names(document["mediaType"].as_str(), document.to_string().as_bytes());
    Some(Manifest {
        repository: *repository,
        digest: Digest::of(document.to_string().as_bytes()),
        document,
        subject: subject.map(|subject| subject.digest),
        names: names.into_iter().collect(),
    })
}

fn put(house: &House, model: &mut Model, manifest: Manifest, tag: Option<u8>) {
    let tag_name = tag.map(|tag| format!("t{tag}"));
    let tags: Vec<&str> = tag_name.iter().map(String::as_str).collect();
    let repository = manifest.repository;
    // What was collected meanwhile is missing, and then nothing may have changed.
    if house.try_put(REPOSITORIES[repository], &manifest.document, &tags).is_empty() {
        if let Some(tag) = tag {
            model.tags.insert((repository, tag), manifest.digest.clone());
        }
        model.forget_untagged(&manifest);
        model.pushed.push(manifest);
    }
}

impl Model {
    /// One entry for each manifest, however often it is pushed.
    fn forget_untagged(&mut self, manifest: &Manifest) {
        let other =
            |m: &Manifest| m.repository != manifest.repository || m.digest != manifest.digest;
        self.pushed.retain(other);
        self.gone.retain(other);
    }
}

fn take(house: &House, model: &mut Model, step: &Step) {
    match step {
        Step::Push(repository, number) => {
            house.push(REPOSITORIES[*repository], &blob(*number));
        }
        Step::Put { tag, .. } => {
            let manifest = document(house, model, step).unwrap();
            put(house, model, manifest, *tag);
        }
        Step::Tag(at, tag) => {
            if let Some(manifest) = model.pushed.get(*at).cloned() {
                put(house, model, manifest, Some(*tag));
            }
        }
        Step::Untag(repository, tag) => {
            let deleted = house
                .store
                .delete_tag(&name(REPOSITORIES[*repository]), &format!("t{tag}").parse().unwrap());
            assert_eq!(deleted.unwrap(), model.tags.remove(&(*repository, *tag)).is_some());
        }
        Step::Delete(at) => {
            if let Some(Manifest { repository, digest, .. }) = model.pushed.get(*at).cloned() {
                house.store.delete_manifest(&name(REPOSITORIES[repository]), &digest).unwrap();
                model.forget(repository, &digest);
            }
        }
        Step::Mount(number) => {
            let (from, to) = (name(REPOSITORIES[0]), name(REPOSITORIES[1]));
            let there = house.store.mount(&from, &to, &Digest::of(&blob(*number))).unwrap();
            assert!(!there || house.has_blob(REPOSITORIES[1], &blob(*number)));
        }
        Step::Collect => {
            house.everything(HOUR);
        }
        Step::CollectNoted => {
            house.noted(HOUR);
        }
    }
}

/// Whatever happened: what is needed is there, and no manifest is shown without its parts.
fn check(house: &House, model: &Model) {
    for (repository, repository_name) in REPOSITORIES.iter().enumerate() {
        let needed = model.needed(repository);
        let here = name(repository_name);
        for manifest in model.pushed.iter().filter(|m| m.repository == repository) {
            let shown = house.store.read_manifest(&here, &manifest.digest).unwrap().is_some();
            assert!(shown || !needed.contains(&manifest.digest), "{manifest:?} is lost");
            // A child that was deleted on its own is its deleter's doing.
            let deleted = |digest: &Digest| {
                let manifests = house.store.manifest(&here, digest).unwrap().is_some();
                !manifests
                    && !model
                        .pushed
                        .iter()
                        .any(|m| m.digest == *digest && m.repository == repository)
            };
            for part in manifest.names.iter().filter(|_| shown) {
                let there = house.store.blob(&here, part).unwrap().is_some()
                    || house.store.manifest(&here, part).unwrap().is_some();
                let is_index = manifest.document["manifests"].is_array();
                assert!(there || (is_index && deleted(part)), "{manifest:?} is without {part}");
            }
        }
        for ((_, tag), digest) in model.tags.iter().filter(|((at, _), _)| *at == repository) {
            let tag = format!("t{tag}").parse().unwrap();
            assert_eq!(house.store.tag(&here, &tag).unwrap().as_ref(), Some(digest));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn nothing_needed_is_lost_and_nothing_else_stays(steps in prop::collection::vec(step(), 1..60)) {
        let house = House::hasty();
        let mut model = Model::default();
        for step in &steps {
            take(&house, &mut model, step);
            model.follow(&house);
            check(&house, &model);
        }
        // What was noted is enough: nobody has to look everywhere.
        for _ in 0..3 {
            house.noted(HOUR);
            model.follow(&house);
        }
        check(&house, &model);
        let mut expected = BTreeSet::new();
        for (repository, repository_name) in REPOSITORIES.iter().enumerate() {
            let needed = model.needed(repository);
            let here = name(repository_name);
            let there = needed.into_iter().filter(|digest| {
                house.store.blob(&here, digest).unwrap().is_some()
                    || house.store.manifest(&here, digest).unwrap().is_some()
            });
            expected.extend(there);
        }
        prop_assert_eq!(house.contents(), expected);
    }
}
