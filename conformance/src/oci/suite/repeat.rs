//! Every write may be repeated: a client that lost the reply asks again.

use bytes::Bytes;
use kybernate_spec::Digest;
use serde_json::json;

use crate::oci::check::{Checks, MUST, SHOULD};
use crate::oci::repo::{Repo, same};

pub(super) fn add(checks: &mut Checks) {
    checks.section("Use Cases: Layer Upload De-duplication");
    let title = "a blob that is there can be pushed again";
    checks.add(MUST, "repeat.blob.post-put", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        for _ in 0..3 {
            let path = format!("blobs/{}", repo.push_blob(&content).await?);
            repo.get(&path).send().await?.is(200)?.body_is(&content)?;
        }
        Ok(())
    });
    let title = "a single POST of a blob that is there succeeds";
    checks.add(MUST, "repeat.blob.single-post", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        let query = format!("?digest={}", repo.push_blob(&content).await?);
        let call = repo.post(&query).body(content.clone());
        let reply = call.header("content-type", "application/octet-stream").send().await?;
        reply.is_any(&[201, 202]).map(drop)
    });
    let title = "a blob that is there can be pushed in chunks";
    checks.add(MUST, "repeat.blob.chunked", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        let digest = repo.push_blob(&content).await?.to_string();
        let session = repo.begin().await?;
        let reply = repo.chunk(&session, 0, content.clone()).send().await?;
        let session = reply.is(202)?.location()?;
        repo.finish(&session, &digest, Bytes::new()).send().await?.is(201).map(drop)
    });
    let title = "a PUT that closed an upload, sent again, is 201 or 404";
    checks.add(SHOULD, "repeat.blob.same-put", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        let digest = Digest::of(&content).to_string();
        let session = repo.begin().await?;
        repo.finish(&session, &digest, content.clone()).send().await?.is(201)?;
        let reply = repo.finish(&session, &digest, content.clone()).send().await?;
        reply.is_any(&[201, 404])?;
        let reply = repo.get(&format!("blobs/{digest}")).send().await?;
        reply.is(200)?.body_is(&content).map(drop)
    });
    let title = "a refused push of a blob that is there does not harm it";
    checks.add(MUST, "repeat.blob.refused", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        let digest = repo.push_blob(&content).await?.to_string();
        let session = repo.begin().await?;
        let call = repo.finish(&session, &digest, repo.bytes("other", 1000));
        call.send().await?.is_refused()?;
        let reply = repo.get(&format!("blobs/{digest}")).send().await?;
        reply.is(200)?.body_is(&content).map(drop)
    });
    add_manifests(checks);
}

fn add_manifests(checks: &mut Checks) {
    checks.section("Pushing Manifests");
    for by in ["tag", "digest"] {
        let title = format!("a manifest can be pushed by {by} again");
        checks.add(MUST, format!("repeat.manifest.by-{by}"), title, move |repo: Repo| async move {
            let image = repo.image_with("image", json!({})).await?;
            let digest = image.digest.to_string();
            let reference = if by == "tag" { "latest" } else { digest.as_str() };
            for _ in 0..3 {
                let reply = repo.put(reference, &image.doc).send().await?;
                reply.is(201)?.digest_header_fits(&image.doc.content)?;
            }
            let reply = repo.get(&format!("manifests/{reference}")).send().await?;
            reply.is(200)?.body_is(&image.doc.content).map(drop)
        });
    }
    let title = "a refused push to a tag leaves the tag as it was";
    checks.add(MUST, "repeat.manifest.refused", title, move |repo: Repo| async move {
        let image = repo.push_image("latest").await?;
        let kind = kybernate_spec::media_type::OCI_MANIFEST;
        let doc = crate::oci::content::Doc::raw(kind, "no JSON");
        let refused = repo.put("latest", &doc).send().await?;
        if refused.status == 201 {
            return crate::oci::check::skip("the registry takes what is no JSON");
        }
        let reply = repo.get("manifests/latest").send().await?;
        reply.is(200)?.body_is(&image.doc.content).map(drop)
    });
    let title = "a repeated push makes no second tag";
    checks.add(MUST, "repeat.manifest.one-tag", title, move |repo: Repo| async move {
        let image = repo.push_image("latest").await?;
        repo.put("latest", &image.doc).send().await?.is(201)?;
        let reply = repo.get("tags/list").send().await?;
        let body = reply.is(200)?.json()?;
        same(&reply, &body.get("tags"), &Some(&json!(["latest"])))
    });
}
