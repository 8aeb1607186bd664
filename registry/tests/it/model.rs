//! A random history of operations, on the registry and on a map that cannot be wrong.

#![expect(clippy::indexing_slicing, reason = "a failed step here is a failed test")]

use std::collections::{BTreeMap, BTreeSet};

use http::Method;
use kybernate_spec::{Digest, media_type};
use proptest::prelude::*;

use crate::harness::{TestRegistry, image, noise};

const REPOSITORIES: [&str; 2] = ["m", "m/n"];
const TAGS: [&str; 3] = ["v1", "v2", "latest"];
/// Histories, and the longest of them.
const CASES: u32 = 20;
const LENGTH: usize = 40;

#[derive(Debug, Clone)]
enum Operation {
    Push {
        repository: usize,
        content: usize,
    },
    Mount {
        from: usize,
        repository: usize,
        content: usize,
    },
    DeleteBlob {
        repository: usize,
        content: usize,
    },
    /// An image whose layer is `content`; its config is the first content.
    Tag {
        repository: usize,
        tag: usize,
        content: usize,
    },
    DeleteTag {
        repository: usize,
        tag: usize,
    },
    DeleteImage {
        repository: usize,
        content: usize,
    },
    Restart,
}

/// What a repository has.
#[derive(Debug, Default)]
struct Model {
    blobs: BTreeSet<usize>,
    images: BTreeSet<usize>,
    tags: BTreeMap<usize, usize>,
}

/// One of nothing, of few bytes, of more than is checked by digest, and of more than a chunk.
fn contents() -> Vec<Vec<u8>> {
    vec![b"{}".to_vec(), Vec::new(), noise(100, 1), noise(70_000, 2), noise((1 << 20) + 9, 3)]
}

fn operation() -> impl Strategy<Value = Operation> {
    let (repository, content, tag) = (0..REPOSITORIES.len(), 0..contents().len(), 0..TAGS.len());
    let (r, c, t) = (repository, content, tag);
    prop_oneof![
        6 => (r.clone(), c.clone())
            .prop_map(|(repository, content)| Operation::Push { repository, content }),
        3 => (r.clone(), r.clone(), c.clone())
            .prop_map(|(from, repository, content)| Operation::Mount { from, repository, content }),
        2 => (r.clone(), c.clone())
            .prop_map(|(repository, content)| Operation::DeleteBlob { repository, content }),
        6 => (r.clone(), t.clone(), c.clone())
            .prop_map(|(repository, tag, content)| Operation::Tag { repository, tag, content }),
        2 => (r.clone(), t).prop_map(|(repository, tag)| Operation::DeleteTag { repository, tag }),
        2 => (r, c).prop_map(|(repository, content)| Operation::DeleteImage { repository, content }),
        1 => Just(Operation::Restart),
    ]
}

/// Does an operation on both, and holds the reply's status to the model's.
async fn apply(
    registry: TestRegistry,
    models: &mut [Model; 2],
    contents: &[Vec<u8>],
    operation: Operation,
) -> TestRegistry {
    let digest = |content: usize| Digest::of(&contents[content]);
    let (expected, reply) = match operation {
        Operation::Push { repository, content } => {
            models[repository].blobs.insert(content);
            let name = REPOSITORIES[repository];
            let path = format!("/v2/{name}/blobs/uploads/?digest={}", digest(content));
            (201, registry.send(Method::POST, &path, &[], contents[content].clone()).await)
        }
        Operation::Mount { from, repository, content } => {
            let there = models[from].blobs.contains(&content);
            if there {
                models[repository].blobs.insert(content);
            }
            let (from, name) = (REPOSITORIES[from], REPOSITORIES[repository]);
            let digest = digest(content);
            let path = format!("/v2/{name}/blobs/uploads/?mount={digest}&from={from}");
            (if there { 201 } else { 202 }, registry.send(Method::POST, &path, &[], "").await)
        }
        Operation::DeleteBlob { repository, content } => {
            let there = models[repository].blobs.remove(&content);
            let path = format!("/v2/{}/blobs/{}", REPOSITORIES[repository], digest(content));
            (if there { 202 } else { 404 }, registry.delete(&path).await)
        }
        Operation::Tag { repository, tag, content } => {
            let model = &mut models[repository];
            let whole = model.blobs.contains(&0) && model.blobs.contains(&content);
            if whole {
                model.images.insert(content);
                model.tags.insert(tag, content);
            }
            let manifest = image(&contents[content], None);
            let (name, tag) = (REPOSITORIES[repository], TAGS[tag]);
            let reply = registry.put_manifest(name, tag, media_type::OCI_MANIFEST, manifest);
            (if whole { 201 } else { 400 }, reply.await)
        }
        Operation::DeleteTag { repository, tag } => {
            let there = models[repository].tags.remove(&tag).is_some();
            let path = format!("/v2/{}/manifests/{}", REPOSITORIES[repository], TAGS[tag]);
            (if there { 202 } else { 404 }, registry.delete(&path).await)
        }
        Operation::DeleteImage { repository, content } => {
            let there = models[repository].images.remove(&content);
            models[repository].tags.retain(|_, image| *image != content);
            let digest = Digest::of(&image(&contents[content], None));
            let path = format!("/v2/{}/manifests/{digest}", REPOSITORIES[repository]);
            (if there { 202 } else { 404 }, registry.delete(&path).await)
        }
        Operation::Restart => return registry.restart().await,
    };
    assert_eq!(reply.status, expected, "{reply:?}");
    registry
}

/// Holds everything that can be asked to the model.
async fn compare(registry: &TestRegistry, models: &[Model; 2], contents: &[Vec<u8>]) {
    for (name, model) in REPOSITORIES.iter().zip(models) {
        for (number, content) in contents.iter().enumerate() {
            let reply = registry.blob(name, &Digest::of(content)).await;
            let expected = model.blobs.contains(&number).then_some(content.as_slice());
            assert_eq!(reply.status, if expected.is_some() { 200 } else { 404 }, "{name} {number}");
            assert!(expected.is_none_or(|content| reply.body == content), "{name} {number}");
            let manifest = image(content, None);
            let path = format!("/v2/{name}/manifests/{}", Digest::of(&manifest));
            let status = registry.head(&path).await.status;
            assert_eq!(status == 200, model.images.contains(&number), "{path} {status}");
        }
        for (number, tag) in TAGS.iter().enumerate() {
            let reply = registry.get(&format!("/v2/{name}/manifests/{tag}")).await;
            let expected = model.tags.get(&number).map(|content| image(&contents[*content], None));
            assert_eq!(reply.status, if expected.is_some() { 200 } else { 404 }, "{name}:{tag}");
            assert!(expected.is_none_or(|manifest| reply.body == manifest), "{name}:{tag}");
        }
        let list = registry.get(&format!("/v2/{name}/tags/list")).await;
        let mut expected: Vec<&str> = model.tags.keys().map(|tag| TAGS[*tag]).collect();
        expected.sort_unstable();
        if list.status == 200 {
            assert_eq!(list.json()["tags"], serde_json::json!(expected), "{name}");
        } else {
            assert!(expected.is_empty(), "{name} {list:?}");
        }
    }
}

async fn play(history: Vec<Operation>) {
    let contents = contents();
    let mut models = [Model::default(), Model::default()];
    let mut registry = TestRegistry::start().await;
    for operation in history {
        registry = apply(registry, &mut models, &contents, operation).await;
    }
    compare(&registry, &models, &contents).await;
    let registry = registry.restart().await;
    compare(&registry, &models, &contents).await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history_agrees_with_the_model(history in prop::collection::vec(operation(), 1..LENGTH)) {
        tokio::runtime::Runtime::new().unwrap().block_on(play(history));
    }
}
