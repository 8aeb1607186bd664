//! "Content Management": deleting tags, manifests and blobs.

use bytes::Bytes;
use kybernate_spec::Digest;
use serde_json::json;

use super::manifest::NOBODY;
use crate::oci::check::{Checks, MUST, SHOULD, Stop, Verdict, fail, skip};
use crate::oci::content::Doc;
use crate::oci::reply::Reply;
use crate::oci::repo::{Image, Repo};

pub(super) fn add(checks: &mut Checks) {
    add_tags(checks);
    add_manifests(checks);
    add_blobs(checks);
    add_again(checks);
}

/// Skips where a registry declares that it does not delete: 405, or 400.
fn enabled(reply: &Reply) -> Verdict {
    match reply.or_unsupported()?.status {
        400 => skip(format!("the registry has deletion disabled ({})", reply.request)),
        _ => Ok(()),
    }
}

/// Asks for one of the statuses an endpoint may answer with.
fn answered(reply: &Reply) -> Verdict {
    reply.is_any(&[202, 400, 405]).map(drop)
}

async fn tag(repo: Repo) -> Result<(Repo, Image, Reply), Stop> {
    let image = repo.push_tags(&["goes", "stays"]).await?;
    let reply = repo.delete("manifests/goes").send().await?;
    Ok((repo, image, reply))
}

/// Deletes a tag, as far as tags are deleted.
async fn tag_gone(repo: Repo) -> Result<(Repo, Image), Stop> {
    let (repo, image, reply) = tag(repo).await?;
    enabled(&reply)?;
    reply.is(202)?;
    Ok((repo, image))
}

fn add_tags(checks: &mut Checks) {
    checks.section("Deleting tags");
    checks.add(
        MUST,
        "delete.tag.answered",
        "deleting a tag: 202, 400 or 405",
        move |repo| async move { answered(&tag(repo).await?.2) },
    );
    for method in ["get", "head"] {
        let title = format!("{method} of a tag that was deleted answers 404");
        checks.add(MUST, format!("delete.tag.then-{method}"), title, move |repo| async move {
            let (repo, _) = tag_gone(repo).await?;
            let path = "manifests/goes";
            let call = if method == "get" { repo.get(path) } else { repo.head(path) };
            call.send().await?.is(404).map(drop)
        });
    }
    let title = "the manifest of a tag that was deleted is still there by digest";
    checks.add(SHOULD, "delete.tag.manifest-stays", title, move |repo| async move {
        let (repo, image) = tag_gone(repo).await?;
        let reply = repo.get(&format!("manifests/{}", image.digest)).send().await?;
        reply.is(200)?.body_is(&image.doc.content).map(drop)
    });
    let title = "the other tags of the manifest stay";
    checks.add(MUST, "delete.tag.others-stay", title, move |repo| async move {
        let (repo, image) = tag_gone(repo).await?;
        repo.get("manifests/stays").send().await?.is(200)?.body_is(&image.doc.content).map(drop)
    });
    let title = "deleting a tag that is not there answers 404";
    checks.add(SHOULD, "delete.tag.missing", title, move |repo: Repo| async move {
        repo.push_image("latest").await?;
        let reply = repo.delete("manifests/missing").send().await?;
        enabled(&reply)?;
        reply.is(404).map(drop)
    });
    let title = "deleting a tag twice answers 404 the second time";
    checks.add(SHOULD, "delete.tag.twice", title, move |repo| async move {
        let (repo, _) = tag_gone(repo).await?;
        repo.delete("manifests/goes").send().await?.is(404).map(drop)
    });
    let title = "deleting a tag of a repository that does not exist answers 404";
    checks.add(MUST, "delete.tag.no-repository", title, move |repo: Repo| async move {
        let reply = repo.delete("manifests/latest").send().await?;
        enabled(&reply)?;
        reply.is(404).map(drop)
    });
}

async fn manifest(repo: Repo) -> Result<(Repo, Image, Reply), Stop> {
    repo.push_image("other").await?;
    let image = repo.push_tags(&["one", "two"]).await?;
    let reply = repo.delete(&format!("manifests/{}", image.digest)).send().await?;
    Ok((repo, image, reply))
}

/// Deletes a manifest that has two tags, as far as manifests are deleted.
async fn manifest_gone(repo: Repo) -> Result<(Repo, Image), Stop> {
    let (repo, image, reply) = manifest(repo).await?;
    enabled(&reply)?;
    reply.is(202)?;
    Ok((repo, image))
}

fn add_manifests(checks: &mut Checks) {
    checks.section("Deleting Manifests");
    let title = "deleting a manifest: 202, 400 or 405";
    checks.add(MUST, "delete.manifest.answered", title, move |repo| async move {
        answered(&manifest(repo).await?.2)
    });
    for (id, by_tag) in [("digest", false), ("tag", true)] {
        for method in ["get", "head"] {
            let title = format!("{method} by {id} of a manifest that was deleted answers 404");
            let id = format!("delete.manifest.then-{method}-by-{id}");
            checks.add(MUST, id, title, move |repo| async move {
                let (repo, image) = manifest_gone(repo).await?;
                let digest = image.digest.to_string();
                for reference in if by_tag { vec!["one", "two"] } else { vec![digest.as_str()] } {
                    let path = format!("manifests/{reference}");
                    let call = if method == "get" { repo.get(&path) } else { repo.head(&path) };
                    call.send().await?.is(404)?;
                }
                Ok(())
            });
        }
    }
    let title = "other manifests stay";
    checks.add(MUST, "delete.manifest.others-stay", title, move |repo| async move {
        let (repo, _) = manifest_gone(repo).await?;
        repo.get("manifests/other").send().await?.is(200).map(drop)
    });
    let title = "the blobs of a manifest that was deleted can be used by another";
    checks.add(SHOULD, "delete.manifest.blobs-stay", title, move |repo| async move {
        let (repo, image) = manifest_gone(repo).await?;
        repo.head(&format!("blobs/{}", image.layer.digest)).send().await?.is(200).map(drop)
    });
    add_manifest_neighbours(checks);
    add_manifest_missing(checks);
}

fn add_manifest_neighbours(checks: &mut Checks) {
    let title = "deleting an index leaves its children";
    checks.add(MUST, "delete.manifest.index-children-stay", title, move |repo: Repo| async move {
        let image = repo.push_image("child").await?;
        let index = Doc::index(&[image.doc.descriptor()], json!({}));
        repo.put("index", &index).send().await?.is(201)?;
        let reply = repo.delete(&format!("manifests/{}", index.digest())).send().await?;
        enabled(&reply)?;
        reply.is(202)?;
        repo.get("manifests/child").send().await?.is(200)?.body_is(&image.doc.content).map(drop)
    });
    let title = "a manifest stays in the other repositories that have it";
    checks.add(MUST, "delete.manifest.other-repository", title, move |repo: Repo| async move {
        let (other, content) = (repo.beside("other"), repo.bytes("shared", 50));
        for repo in [&repo, &other] {
            let config = repo.push_as(kybernate_spec::media_type::OCI_CONFIG, &content).await?;
            repo.put("shared", &Doc::image(&config, &[], json!({}))).send().await?.is(201)?;
        }
        let reply = repo.get("manifests/shared").send().await?;
        let digest = Digest::of(&reply.is(200)?.body);
        let deleted = repo.delete(&format!("manifests/{digest}")).send().await?;
        enabled(&deleted)?;
        deleted.is(202)?;
        other.get(&format!("manifests/{digest}")).send().await?.is(200)?;
        other.get("manifests/shared").send().await?.is(200)?.body_is(&reply.body).map(drop)
    });
}

fn add_manifest_missing(checks: &mut Checks) {
    let title = "deleting a manifest that is not there answers 404";
    checks.add(SHOULD, "delete.manifest.missing", title, move |repo: Repo| async move {
        repo.push_image("latest").await?;
        let reply = repo.delete(&format!("manifests/{NOBODY}")).send().await?;
        enabled(&reply)?;
        reply.is(404).map(drop)
    });
    let title = "deleting a manifest twice answers 404 the second time";
    checks.add(SHOULD, "delete.manifest.twice", title, move |repo| async move {
        let (repo, image) = manifest_gone(repo).await?;
        repo.delete(&format!("manifests/{}", image.digest)).send().await?.is(404).map(drop)
    });
    let title = "deleting a manifest of a repository that does not exist answers 404";
    checks.add(MUST, "delete.manifest.no-repository", title, move |repo: Repo| async move {
        let reply = repo.delete(&format!("manifests/{NOBODY}")).send().await?;
        enabled(&reply)?;
        reply.is(404).map(drop)
    });
}

async fn blob(repo: Repo) -> Result<(Repo, Bytes, String, Reply), Stop> {
    let content = repo.bytes("blob", 500);
    repo.push_blob(&repo.bytes("other", 500)).await?;
    let path = format!("blobs/{}", repo.push_blob(&content).await?);
    let reply = repo.delete(&path).send().await?;
    Ok((repo, content, path, reply))
}

/// Deletes a blob, as far as blobs are deleted.
async fn blob_gone(repo: Repo) -> Result<(Repo, Bytes, String), Stop> {
    let (repo, content, path, reply) = blob(repo).await?;
    enabled(&reply)?;
    reply.is(202)?;
    Ok((repo, content, path))
}

fn add_blobs(checks: &mut Checks) {
    checks.section("Deleting Blobs");
    checks.add(
        MUST,
        "delete.blob.answered",
        "deleting a blob: 202, 400 or 405",
        move |repo| async move { answered(&blob(repo).await?.3) },
    );
    for method in ["get", "head"] {
        let title = format!("{method} of a blob that was deleted answers 404");
        checks.add(MUST, format!("delete.blob.then-{method}"), title, move |repo| async move {
            let (repo, _, path) = blob_gone(repo).await?;
            let call = if method == "get" { repo.get(&path) } else { repo.head(&path) };
            call.send().await?.is(404).map(drop)
        });
    }
    checks.add(MUST, "delete.blob.others-stay", "other blobs stay", move |repo| async move {
        let (repo, _, _) = blob_gone(repo).await?;
        let other = repo.bytes("other", 500);
        let reply = repo.get(&format!("blobs/{}", Digest::of(&other))).send().await?;
        reply.is(200)?.body_is(&other).map(drop)
    });
    let title = "a blob stays in the other repositories that have it";
    checks.add(MUST, "delete.blob.other-repository", title, move |repo: Repo| async move {
        let (other, content) = (repo.beside("other"), repo.bytes("shared", 500));
        other.push_blob(&content).await?;
        let path = format!("blobs/{}", repo.push_blob(&content).await?);
        let reply = repo.delete(&path).send().await?;
        enabled(&reply)?;
        reply.is(202)?;
        other.get(&path).send().await?.is(200)?.body_is(&content).map(drop)
    });
    for id in ["missing", "no-repository"] {
        let act = move |repo: Repo| async move {
            if id == "missing" {
                repo.push_blob(&repo.bytes("other", 10)).await?;
            }
            let reply = repo.delete(&format!("blobs/{NOBODY}")).send().await?;
            enabled(&reply)?;
            Ok(reply)
        };
        let mut group = checks.on(format!("delete.blob.{id}"), act);
        let title = format!("deleting a blob ({id}) answers 404");
        group.look(MUST, "not-found", title, |reply: &Reply| reply.is(404).map(drop));
        let title = format!("the code for it ({id}) is BLOB_UNKNOWN");
        group.look(SHOULD, "code", title, |reply| {
            reply.is(404)?.code_is(&["BLOB_UNKNOWN", "NAME_UNKNOWN"]).map(drop)
        });
    }
    let title = "deleting a blob twice answers 404 the second time";
    checks.add(MUST, "delete.blob.twice", title, move |repo| async move {
        let (repo, _, path) = blob_gone(repo).await?;
        repo.delete(&path).send().await?.is(404).map(drop)
    });
}

/// What was deleted can be pushed again.
fn add_again(checks: &mut Checks) {
    checks.section("Deleting Blobs");
    let title = "a blob that was deleted can be pushed again";
    checks.add(MUST, "delete.blob.then-push", title, move |repo| async move {
        let (repo, content, path) = blob_gone(repo).await?;
        repo.push_blob(&content).await?;
        repo.get(&path).send().await?.is(200)?.body_is(&content).map(drop)
    });
    checks.section("Deleting Manifests");
    let title = "a manifest that was deleted can be pushed again";
    checks.add(MUST, "delete.manifest.then-push", title, move |repo| async move {
        let (repo, image) = manifest_gone(repo).await?;
        for reference in ["again".to_owned(), image.digest.to_string()] {
            let reply = repo.put(&reference, &image.doc).send().await?;
            reply.is(201)?;
            let reply = repo.get(&format!("manifests/{reference}")).send().await?;
            reply.is(200)?.body_is(&image.doc.content)?;
        }
        Ok(())
    });
    checks.section("Deleting tags");
    let title = "a tag that was deleted can be pushed again";
    checks.add(MUST, "delete.tag.then-push", title, move |repo| async move {
        let (repo, _) = tag_gone(repo).await?;
        let new = repo.push_image("goes").await?;
        repo.get("manifests/goes").send().await?.is(200)?.body_is(&new.doc.content).map(drop)
    });
    let title = "a manifest that was deleted does not come back with its neighbour";
    checks.add(MUST, "delete.manifest.stays-gone", title, move |repo| async move {
        let (repo, image) = manifest_gone(repo).await?;
        repo.push_image("neighbour").await?;
        let reply = repo.get(&format!("manifests/{}", image.digest)).send().await?;
        if reply.status == 200 {
            return fail(reply.request, "status 404", "200: it came back");
        }
        reply.is(404).map(drop)
    });
}
