//! Tags as references ("Pulling manifests": `<reference>` as a tag).

use serde_json::json;

use crate::oci::check::{Checks, MUST, Verdict};
use crate::oci::repo::Repo;

/// Tags that the grammar knows.
const VALID: &[(&str, &str)] = &[
    ("letter", "a"),
    ("capital", "A"),
    ("digit", "0"),
    ("underscore", "_"),
    ("underscore-first", "_a"),
    ("version", "v1.2.3"),
    ("version-with-more", "1.0-rc.1_build"),
    ("dash", "a-b"),
    ("dash-last", "a-"),
    ("dot-last", "a."),
    ("two-dots", "a..b"),
    ("two-dashes", "a--b"),
    ("every-separator", "a._-b"),
    ("capitals", "MiXeD"),
    ("word-latest", "latest"),
    ("word-list", "list"),
    ("word-sha256", "sha256"),
    (
        "like-a-digest",
        "sha256-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.sig",
    ),
];

/// Tags that the grammar does not know, percent-encoded where a path would break.
const INVALID: &[(&str, &str)] = &[
    ("dot-first", ".a"),
    ("dash-first", "-a"),
    ("plus", "a%2Bb"),
    ("space", "a%20b"),
    ("tilde", "a~b"),
    ("at", "a@b"),
    ("umlaut", "%C3%A4"),
    ("nul", "a%00b"),
    ("comma", "a,b"),
    ("colon", "a:b"),
    ("backslash", "a%5Cb"),
];

pub(super) fn add(checks: &mut Checks) {
    checks.section("Pulling manifests: <reference>");
    for (id, tag) in VALID {
        let title = format!("the tag {tag:?} can be pushed and pulled");
        checks.add(MUST, format!("tag.valid.{id}"), title, move |repo| async move {
            valid(repo, tag).await
        });
    }
    checks.add(MUST, "tag.valid.longest", "a tag of 128 letters works", move |repo| async move {
        valid(repo, &"t".repeat(128)).await
    });
    for (id, tag) in INVALID {
        add_invalid(checks, id, (*tag).to_owned());
    }
    add_invalid(checks, "too-long", "t".repeat(129));
    checks.add(MUST, "tag.case", "tags that differ in case are two tags", case);
}

fn add_invalid(checks: &mut Checks, id: &str, tag: String) {
    let shown = if tag.len() > 40 { "t…".to_owned() } else { tag.clone() };
    let pushed = tag.clone();
    let title = format!("a manifest cannot be pushed as {shown:?}");
    checks.add(MUST, format!("tag.invalid.push.{id}"), title, move |repo: Repo| {
        let tag = pushed.clone();
        async move {
            let image = repo.image_with("any", json!({})).await?;
            repo.put(&tag, &image.doc).send().await?.is_refused().map(drop)
        }
    });
    let title = format!("nothing is found under {shown:?}");
    checks.add(MUST, format!("tag.invalid.pull.{id}"), title, move |repo: Repo| {
        let tag = tag.clone();
        async move {
            repo.push_image("latest").await?;
            repo.get(&format!("manifests/{tag}")).send().await?.is_any(&[400, 404]).map(drop)
        }
    });
}

async fn valid(repo: Repo, tag: &str) -> Verdict {
    let image = repo.push_image(tag).await?;
    let path = format!("manifests/{tag}");
    repo.get(&path).send().await?.is(200)?.body_is(&image.doc.content)?;
    repo.head(&path).send().await?.is(200)?;
    let reply = repo.get("tags/list").send().await?;
    let list = reply.is(200)?.json()?;
    if list.get("tags") == Some(&json!([tag])) {
        return Ok(());
    }
    reply.wrong(format!("the tags [{tag:?}]"))
}

async fn case(repo: Repo) -> Verdict {
    let (small, large) = (repo.push_image("release").await?, repo.push_image("Release").await?);
    for (tag, image) in [("release", small), ("Release", large)] {
        let reply = repo.get(&format!("manifests/{tag}")).send().await?;
        reply.is(200)?.body_is(&image.doc.content)?;
    }
    Ok(())
}
