//! "Pulling manifests" and what HEAD says of them.

use kybernate_spec::{Digest, media_type};
use serde_json::json;

use crate::oci::check::{Checks, MUST, SHOULD, SHOULD_THEN_MUST, Stop, Verdict};
use crate::oci::content::Doc;
use crate::oci::reply::Reply;
use crate::oci::repo::{Image, Repo};

/// A digest that no content has.
pub(super) const NOBODY: &str =
    "sha256:0000000000000000000000000000000000000000000000000000000000000000";

/// An image and the reply to a request for it.
type Pulled = (Image, Reply);

pub(super) fn add(checks: &mut Checks) {
    checks.section("Pulling manifests");
    for by in ["tag", "digest"] {
        let act = move |repo: Repo| async move { pulled(repo, by == "tag", false).await };
        let mut get = checks.on(format!("pull.manifest.get-by-{by}"), act);
        let title = format!("GET of a manifest by {by} answers 200");
        get.look(MUST, "ok", title, |(_, reply)| reply.is(200).map(drop));
        let title = format!("GET by {by} brings the bytes that were pushed");
        get.look(MUST, "body", title, |(image, reply)| {
            reply.is(200)?.body_is(&image.doc.content).map(drop)
        });
        described(&mut get);
    }
    checks.section("Checking if content exists in the registry");
    for by in ["tag", "digest"] {
        let act = move |repo: Repo| async move { pulled(repo, by == "tag", true).await };
        let mut head = checks.on(format!("pull.manifest.head-by-{by}"), act);
        let title = format!("HEAD of a manifest by {by} answers 200");
        head.look(MUST, "ok", title, |(_, reply)| reply.is(200).map(drop));
        let title = format!("HEAD by {by} brings no body");
        head.look(MUST, "no-body", title, |(_, reply)| reply.is(200)?.body_is(b"").map(drop));
        described(&mut head);
        head.look(SHOULD_THEN_MUST, "length-there", "Content-Length is there", |(_, reply)| {
            reply.is(200)?.has("content-length").map(drop)
        });
    }
    add_missing(checks);
    add_negotiation(checks);
}

/// What GET and HEAD both say of a manifest.
fn described(group: &mut crate::oci::check::Group<'_, Pulled>) {
    group.look(SHOULD, "type", "Content-Type is what was pushed", |(image, reply)| {
        reply.is(200)?.header_is("content-type", &image.doc.media_type).map(drop)
    });
    group.look(SHOULD, "type-plain", "Content-Type has no parameters", |(_, reply)| {
        if reply.is(200)?.has("content-type")?.contains(';') {
            return reply.wrong("a Content-Type without parameters");
        }
        Ok(())
    });
    group.look(SHOULD_THEN_MUST, "digest-there", "the digest is in a header", |(_, reply)| {
        reply.is(200)?.has("docker-content-digest").map(drop)
    });
    group.look(MUST, "digest", "the digest, if told, is the content's", |(image, reply)| {
        reply.is(200)?.digest_header_fits(&image.doc.content).map(drop)
    });
    group.look(MUST, "length", "the length, if told, is the content's", |(image, reply)| {
        let length = image.doc.content.len().to_string();
        reply.is(200)?.header_is_if_there("content-length", &length).map(drop)
    });
}

async fn pulled(repo: Repo, by_tag: bool, head: bool) -> Result<Pulled, Stop> {
    let image = repo.push_image("latest").await?;
    let reference = if by_tag { "latest".to_owned() } else { image.digest.to_string() };
    let path = format!("manifests/{reference}");
    let call = if head { repo.head(&path) } else { repo.get(&path) };
    Ok((image, call.send().await?))
}

/// Requests for what is not there, with what is not there.
fn add_missing(checks: &mut Checks) {
    checks.section("Pulling manifests");
    for (id, reference) in [("tag", "missing"), ("digest", NOBODY)] {
        let path = format!("manifests/{reference}");
        for method in ["get", "head"] {
            let title = format!("{method} of a missing {id} answers 404");
            let path = path.clone();
            checks.add(MUST, format!("pull.manifest.missing-{id}.{method}"), title, {
                move |repo: Repo| {
                    let path = path.clone();
                    async move {
                        repo.push_image("latest").await?;
                        let call = if method == "get" { repo.get(&path) } else { repo.head(&path) };
                        call.send().await?.is(404).map(drop)
                    }
                }
            });
        }
        let title = format!("the code for a missing {id} is MANIFEST_UNKNOWN");
        checks.add(MUST, format!("pull.manifest.missing-{id}.code"), title, move |repo: Repo| {
            let path = path.clone();
            async move {
                repo.push_image("latest").await?;
                repo.get(&path).send().await?.is(404)?.code_is(&["MANIFEST_UNKNOWN"]).map(drop)
            }
        });
    }
    for (id, reference) in [("tag", "latest"), ("digest", NOBODY)] {
        let title = format!("a repository that does not exist answers 404 to a {id}");
        checks.add(MUST, format!("pull.manifest.no-repository.{id}"), title, {
            move |repo: Repo| async move {
                repo.get(&format!("manifests/{reference}")).send().await?.is(404).map(drop)
            }
        });
    }
    let title = "a manifest is found only in the repository it was pushed to";
    checks.add(MUST, "pull.manifest.other-repository", title, other_repository);
    let title = "a layer is no manifest";
    checks.add(MUST, "pull.manifest.blob", title, move |repo: Repo| async move {
        let image = repo.push_image("latest").await?;
        let path = format!("manifests/{}", image.layer.digest);
        repo.get(&path).send().await?.is(404).map(drop)
    });
}

async fn other_repository(repo: Repo) -> Verdict {
    let image = repo.push_image("latest").await?;
    let other = repo.beside("other");
    other.push_blob(&repo.bytes("makes it exist", 10)).await?;
    other.get("manifests/latest").send().await?.is(404)?;
    other.get(&format!("manifests/{}", image.digest)).send().await?.is(404).map(drop)
}

/// The `Accept` headers of clients that take what is there, with what they are about.
const ACCEPTS: &[(&str, &str)] = &[
    ("exact", media_type::OCI_MANIFEST),
    ("anything", "*/*"),
    ("list", "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"),
    ("with-weights", "application/vnd.oci.image.manifest.v1+json;q=0.9, */*;q=0.1"),
    (
        "docker-too",
        "application/vnd.docker.distribution.manifest.v2+json,\
         application/vnd.docker.distribution.manifest.list.v2+json,\
         application/vnd.oci.image.manifest.v1+json,application/vnd.oci.image.index.v1+json",
    ),
];

fn add_negotiation(checks: &mut Checks) {
    for (id, accept) in ACCEPTS {
        let title = format!("a client that accepts {id} gets the manifest as it is");
        checks.add(
            MUST,
            format!("pull.manifest.accept.{id}"),
            title,
            move |repo: Repo| async move {
                let image = repo.push_image("latest").await?;
                let reply = repo.get("manifests/latest").header("accept", *accept).send().await?;
                reply.is(200)?.body_is(&image.doc.content).map(drop)
            },
        );
    }
    let title = "an index is not turned into a manifest for a client that accepts it";
    checks.add(MUST, "pull.manifest.accept.index", title, move |repo: Repo| async move {
        let image = repo.push_image("latest").await?;
        let index = Doc::index(&[image.doc.descriptor()], json!({}));
        repo.put("index", &index).send().await?.is(201)?;
        let accept = format!("{}, {}", media_type::OCI_MANIFEST, media_type::OCI_INDEX);
        let reply = repo.get("manifests/index").header("accept", accept).send().await?;
        reply.is(200)?.body_is(&index.content).map(drop)
    });
    let title = "by digest, what was not asked for is never another content";
    checks.add(MUST, "pull.manifest.accept.other", title, move |repo: Repo| async move {
        let image = repo.push_image("latest").await?;
        let path = format!("manifests/{}", image.digest);
        let accept = "application/vnd.docker.distribution.manifest.v1+prettyjws";
        let reply = repo.get(&path).header("accept", accept).send().await?;
        reply.is_any(&[200, 404, 406])?;
        if reply.status == 200 && Digest::of(&reply.body) != image.digest {
            return reply.wrong("the content that has the digest, 404 or 406");
        }
        Ok(())
    });
}
