//! Retention rules.

#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, SystemTime};

use kybernate_registry::config::{Config, Retention};
use kybernate_registry::retention::{Fate, Mode, run};
use kybernate_registry::store::Store;
use kybernate_spec::{Digest, media_type};

use crate::harness::{TestRegistry, image, wait_until};

const DAY: Duration = Duration::from_hours(24);

fn rules(text: &str) -> Retention {
    Config::read(Path::new("test.toml"), text).unwrap().retention
}

/// Makes a file of the store as old as `age`.
fn age(path: &Path, age: Duration) {
    fs_err::File::open(path).unwrap().file().set_modified(SystemTime::now() - age).unwrap();
}

fn judge(store: &Store, rules: &Retention, mode: Mode) -> Vec<String> {
    let mut told = Vec::new();
    let mut each = |verdict: &kybernate_registry::retention::Verdict| {
        let fate = match verdict.fate {
            Fate::Kept { rule } => rule.to_string(),
            Fate::Attached => "attached".to_owned(),
            Fate::Dropped => "-".to_owned(),
        };
        told.push(format!("{}:{}={fate}", verdict.repository, verdict.tag));
        ControlFlow::Continue(())
    };
    run(store, rules, mode, SystemTime::now(), &mut each).unwrap();
    told
}

#[tokio::test]
async fn a_dry_run_tells_and_changes_nothing_and_a_run_does_what_it_told() {
    let registry = TestRegistry::start().await;
    let signed = registry.push_image("ci/a", "old", b"one", None).await;
    registry.push_image("ci/a", "older", b"two", None).await;
    registry.push_image("ci/a", "new", b"three", None).await;
    registry.push_image("prod/a", "old", b"one", None).await;
    let mut signature = image(b"signature", Some(&signed));
    let text = String::from_utf8(signature.clone()).unwrap();
    let typed = "{\"artifactType\":\"application/vnd.dev.sigstore.bundle.v0.3+json\",";
    signature = text.replacen('{', typed, 1).into_bytes();
    registry.push("ci/a", b"signature").await;
    let digest = Digest::of(&signature).to_string();
    let reply = registry.put_manifest("ci/a", &digest, media_type::OCI_MANIFEST, signature);
    assert_eq!(reply.await.status, 201);
    let attached = format!("sha256-{}.sbom", signed.digest.hex());
    registry.put_manifest("ci/a", &attached, "x/y", "sbom").await;
    for (name, tag, days) in [("ci/a", "old", 40), ("ci/a", "older", 50), ("prod/a", "old", 90)] {
        age(&registry.path(&format!("repositories/{name}/_tags/{tag}")), DAY * days);
    }
    let older = Digest::of(&image(b"two", None)).hex().to_owned();
    let older = registry.path(&format!("repositories/ci/a/_manifests/sha256/{older}"));
    age(&older, DAY * 50);

    let root = registry.stop().await;
    let store = Store::open(&root.path().join("store")).unwrap();
    let rules = rules(
        "[[retention.rule]]\nrepositories = ['ci/**']\nyounger_than = '30days'\n\
         [[retention.rule]]\nrepositories = ['ci/**']\nsigned = true\n",
    );
    let told = ["ci/a:new=0", "ci/a:old=1", "ci/a:older=-", &format!("ci/a:{attached}=attached")];
    assert_eq!(judge(&store, &rules, Mode::DryRun), told);
    assert_eq!(judge(&store, &rules, Mode::Remove), told);
    drop(store);
    // Who knows its digest finds it for as long as one that has lost its tag otherwise.
    let young = fs_err::metadata(&older).unwrap().modified().unwrap();
    assert!(SystemTime::now().duration_since(young).unwrap() < DAY);

    let registry = TestRegistry::start_in(root).await;
    let list = registry.get("/v2/ci/a/tags/list").await.json();
    assert_eq!(list["tags"], serde_json::json!(["new", "old", attached]));
    assert_eq!(
        registry.get("/v2/prod/a/tags/list").await.json()["tags"],
        serde_json::json!(["old"])
    );
    assert_eq!(registry.get("/v2/ci/a/manifests/older").await.status, 404);
}

#[tokio::test]
async fn tags_go_in_the_background_while_it_serves() {
    let registry = TestRegistry::start_set(
        "[retention]\ninterval = '1s'\n[[retention.rule]]\nrepositories = ['ci/*']\nnewest = 2\n",
    )
    .await;
    for n in 0..5u64 {
        let tag = format!("t{n}");
        registry.put_manifest("ci/a", &tag, "x/y", tag.clone()).await;
        registry.put_manifest("other", &tag, "x/y", tag.clone()).await;
        age(
            &registry.path(&format!("repositories/ci/a/_tags/{tag}")),
            DAY * (10 - u32::try_from(n).unwrap()),
        );
    }
    let tags = async |name: &str| -> BTreeSet<String> {
        let list = registry.get(&format!("/v2/{name}/tags/list")).await.json();
        serde_json::from_value(list["tags"].clone()).unwrap()
    };
    let newest: BTreeSet<_> = ["t3", "t4"].map(str::to_owned).into();
    wait_until("only the newest are left", async || tags("ci/a").await == newest).await;
    assert_eq!(tags("other").await.len(), 5);
    // Their manifests are left to garbage collection.
    let path = format!("/v2/ci/a/manifests/{}", Digest::of(b"t0"));
    assert_eq!(registry.get(&path).await.status, 200);
}

#[tokio::test]
async fn a_pull_keeps_for_a_while_and_writes_nothing() {
    let text = "[[retention.rule]]\nrepositories = ['r']\npulled_within = '7days'\n";
    let registry = TestRegistry::start_set(text).await;
    for tag in ["pulled", "resolved", "forgotten"] {
        registry.put_manifest("r", tag, "x/y", tag).await;
        age(&registry.path(&format!("repositories/r/_tags/{tag}")), DAY * 20);
        let hex = Digest::of(tag.as_bytes()).hex().to_owned();
        age(&registry.path(&format!("repositories/r/_manifests/sha256/{hex}")), DAY * 20);
    }
    let modified = |content: &str| {
        let hex = Digest::of(content.as_bytes()).hex().to_owned();
        let link = registry.path(&format!("repositories/r/_manifests/sha256/{hex}"));
        link.metadata().unwrap().modified().unwrap()
    };
    let before = modified("pulled");
    for _ in 0..3 {
        assert_eq!(registry.get("/v2/r/manifests/pulled").await.status, 200);
    }
    let digest = Digest::of(b"resolved");
    assert_eq!(registry.get(&format!("/v2/r/manifests/{digest}")).await.status, 200);
    assert_eq!(modified("pulled"), before, "a pull itself writes nothing");

    // What was gathered is noted at the end at the latest.
    let root = registry.stop().await;
    let store = Store::open(&root.path().join("store")).unwrap();
    let told = judge(&store, &rules(text), Mode::DryRun);
    assert_eq!(told, ["r:forgotten=-", "r:pulled=0", "r:resolved=0"]);
}
