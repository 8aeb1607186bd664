//! Repository names ("Pulling manifests": `<name>` MUST match the regular expression).

use crate::oci::check::{Checks, MUST, SHOULD, Verdict};
use crate::oci::repo::Repo;

/// Names that the grammar knows, to stand below a repository; with what they are about.
const VALID: &[(&str, &str)] = &[
    ("letter", "a"),
    ("digit", "0"),
    ("digits-first", "1a"),
    ("two-parts", "a/b"),
    ("six-parts", "a/b/c/d/e/f"),
    ("dot", "a.b"),
    ("dots-apart", "a.b.c"),
    ("underscore", "a_b"),
    ("two-underscores", "a__b"),
    ("dash", "a-b"),
    ("two-dashes", "a--b"),
    ("five-dashes", "a-----b"),
    ("every-separator", "a.b_c__d-e--f/0.1"),
    ("word-blobs", "blobs"),
    ("word-uploads", "blobs/uploads"),
    ("word-manifests", "manifests"),
    ("word-manifests-latest", "manifests/latest"),
    ("word-tags", "tags"),
    ("word-tags-list", "tags/list"),
    ("word-referrers", "referrers"),
    ("word-v2", "v2"),
    ("word-sha256", "sha256"),
    (
        "long-part",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ),
];

/// Names that the grammar does not know, percent-encoded where a path would break.
const INVALID: &[(&str, &str)] = &[
    ("uppercase", "Upper"),
    ("uppercase-inside", "loWer"),
    ("dash-first", "-a"),
    ("dash-last", "a-"),
    ("dot-first", ".a"),
    ("dot-last", "a."),
    ("underscore-first", "_a"),
    ("underscore-last", "a_"),
    ("two-dots", "a..b"),
    ("three-underscores", "a___b"),
    ("dot-and-underscore", "a._b"),
    ("dash-and-dot", "a-.b"),
    ("space", "a%20b"),
    ("plus", "a%2Bb"),
    ("tilde", "a~b"),
    ("at", "a@b"),
    ("colon", "a:b"),
    ("umlaut", "%C3%A4"),
    ("not-utf8", "a%FFb"),
    ("nul", "a%00b"),
    ("percent", "a%25b"),
    ("backslash", "a%5Cb"),
    ("newline", "a%0Ab"),
    ("encoded-parent", "a%2F..%2Fb"),
];

pub(super) fn add(checks: &mut Checks) {
    checks.section("Pulling manifests: <name>");
    for (id, name) in VALID {
        let title = format!("the name {name:?} can be pushed to and pulled from");
        checks.add(MUST, format!("name.valid.{id}"), title, move |repo| async move {
            valid(repo, name).await
        });
    }
    for (id, name) in INVALID {
        let title = format!("nothing is pulled from the name {name:?}");
        checks.add(MUST, format!("name.invalid.pull.{id}"), title, move |repo: Repo| async move {
            let below = repo.named(&format!("{}/{name}", repo.name()));
            below.get("manifests/latest").send().await?.is_refused().map(drop)
        });
        let title = format!("no upload begins under the name {name:?}");
        checks.add(MUST, format!("name.invalid.push.{id}"), title, move |repo: Repo| async move {
            let below = repo.named(&format!("{}/{name}", repo.name()));
            below.post("").send().await?.is_refused().map(drop)
        });
    }
    checks.add(
        SHOULD,
        "name.valid.long",
        "a name of 200 letters works",
        move |repo: Repo| async move {
            let wanted = 200_usize.saturating_sub(repo.name().len() + 1);
            valid(repo, &"x".repeat(wanted)).await
        },
    );
}

/// Pushes to a name and reads everything back, so that no word of the API is taken for its own.
async fn valid(repo: Repo, name: &str) -> Verdict {
    let below = repo.named(&format!("{}/{name}", repo.name()));
    let image = below.push_image("latest").await?;
    let layer = below.bytes("latest", 512);
    below.get(&format!("blobs/{}", image.layer.digest)).send().await?.is(200)?.body_is(&layer)?;
    for reference in ["latest".to_owned(), image.digest.to_string()] {
        let reply = below.get(&format!("manifests/{reference}")).send().await?;
        reply.is(200)?.body_is(&image.doc.content)?;
    }
    let reply = below.get("tags/list").send().await?;
    let list = reply.is(200)?.json()?;
    if list.get("name").and_then(|name| name.as_str()) == Some(below.name()) {
        return Ok(());
    }
    reply.wrong(format!("the name {:?}", below.name()))
}
