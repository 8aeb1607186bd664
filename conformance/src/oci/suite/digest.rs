//! Digests in paths and queries (image specification, "Digests").

use serde_json::json;

use crate::oci::check::{Checks, DEV_SHOULD, MUST, SHOULD, Verdict, skip};
use crate::oci::repo::Repo;

/// Texts that are no digest of an algorithm the specification registers.
const MALFORMED: &[(&str, &str)] = &[
    ("short", "sha256:abcdef"),
    ("long", "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
    ("uppercase", "sha256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"),
    ("not-hex", "sha256:zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz"),
    ("empty", "sha256:"),
    ("no-algorithm", ":aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
    (
        "unknown-algorithm",
        "sha255:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ),
    ("sha512-short", "sha512:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"),
];

pub(super) fn add(checks: &mut Checks) {
    for (id, text) in MALFORMED {
        checks.section("Pulling blobs");
        let title = format!("no blob is found under {id} digest");
        checks.add(MUST, format!("digest.{id}.blob-get"), title, move |repo: Repo| async move {
            repo.push_blob(&repo.bytes("any", 10)).await?;
            repo.get(&format!("blobs/{text}")).send().await?.is_any(&[400, 404]).map(drop)
        });
        checks.section("Pulling manifests");
        let title = format!("no manifest is found under {id} digest");
        checks.add(
            MUST,
            format!("digest.{id}.manifest-get"),
            title,
            move |repo: Repo| async move {
                repo.push_image("latest").await?;
                repo.get(&format!("manifests/{text}")).send().await?.is_any(&[400, 404]).map(drop)
            },
        );
        checks.section("Pushing Manifests");
        let title = format!("no manifest is pushed under {id} digest");
        checks.add(
            MUST,
            format!("digest.{id}.manifest-put"),
            title,
            move |repo: Repo| async move {
                let image = repo.image_with("any", json!({})).await?;
                repo.put(text, &image.doc).send().await?.is_refused().map(drop)
            },
        );
        checks.section("POST then PUT");
        let mut put = checks.on(format!("digest.{id}.blob-put"), move |repo: Repo| async move {
            let (session, content) = (repo.begin().await?, repo.bytes("any", 10));
            repo.finish(&session, text, content).send().await
        });
        let title = format!("no blob is pushed under {id} digest");
        put.look(MUST, "refused", title, |reply| reply.is_refused().map(drop));
        let title = format!("a push under {id} digest is answered with 400");
        put.look(DEV_SHOULD, "bad-request", title, |reply| reply.is(400).map(drop));
        checks.section("Listing Referrers");
        let title = format!("a query for referrers of {id} digest is answered with 400");
        checks.add(MUST, format!("digest.{id}.referrers"), title, move |repo| async move {
            referrers(repo, text).await
        });
    }
    checks.section("Single POST");
    let title = "a single POST under a malformed digest pushes nothing";
    checks.add(SHOULD, "digest.short.single-post", title, move |repo: Repo| async move {
        let content = repo.bytes("any", 10);
        let call = repo.post("?digest=sha256:abcdef").body(content);
        let reply = call.header("content-type", "application/octet-stream").send().await?;
        if reply.status == 202 {
            return skip("the registry takes no single POST");
        }
        reply.is_refused().map(drop)
    });
}

async fn referrers(repo: Repo, text: &str) -> Verdict {
    let image = repo.push_image("latest").await?;
    if repo.get(&format!("referrers/{}", image.digest)).send().await?.status == 404 {
        return skip("the registry has no referrers API");
    }
    repo.get(&format!("referrers/{text}")).send().await?.is(400).map(drop)
}
