//! "Pulling blobs" and what HEAD says of them.

use bytes::Bytes;
use kybernate_spec::Digest;

use super::manifest::NOBODY;
use crate::oci::check::{Checks, Group, MUST, SHOULD, SHOULD_THEN_MUST, Stop, Verdict};
use crate::oci::reply::Reply;
use crate::oci::repo::Repo;

/// A blob and the reply to a request for it.
type Pulled = (Bytes, Reply);

pub(super) fn add(checks: &mut Checks) {
    checks.section("Pulling blobs");
    let mut get = checks.on("pull.blob.get", move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        pulled(repo, content, false).await
    });
    get.look(MUST, "ok", "GET of a blob answers 200", |(_, reply)| reply.is(200).map(drop));
    get.look(MUST, "body", "GET brings the bytes that were pushed", |(content, reply)| {
        reply.is(200)?.body_is(content).map(drop)
    });
    get.look(MUST, "not-encoded", "the content comes as it is", |(_, reply)| {
        reply.is(200)?.lacks("content-encoding").map(drop)
    });
    described(&mut get);
    checks.section("Checking if content exists in the registry");
    let mut head = checks.on("pull.blob.head", move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        pulled(repo, content, true).await
    });
    head.look(MUST, "ok", "HEAD of a blob answers 200", |(_, reply)| reply.is(200).map(drop));
    head.look(MUST, "no-body", "HEAD brings no body", |(_, reply)| {
        reply.is(200)?.body_is(b"").map(drop)
    });
    head.look(SHOULD_THEN_MUST, "length-there", "Content-Length is there", |(_, reply)| {
        reply.is(200)?.has("content-length").map(drop)
    });
    described(&mut head);
    add_contents(checks);
    add_missing(checks);
}

fn described(group: &mut Group<'_, Pulled>) {
    group.look(SHOULD_THEN_MUST, "digest-there", "the digest is in a header", |(_, reply)| {
        reply.is(200)?.has("docker-content-digest").map(drop)
    });
    group.look(MUST, "digest", "the digest, if told, is the content's", |(content, reply)| {
        reply.is(200)?.digest_header_fits(content).map(drop)
    });
    group.look(MUST, "length", "the length, if told, is the content's", |(content, reply)| {
        reply.is(200)?.header_is_if_there("content-length", &content.len().to_string()).map(drop)
    });
    group.look(SHOULD, "type", "there is a Content-Type", |(_, reply)| {
        reply.is(200)?.has("content-type").map(drop)
    });
}

async fn pulled(repo: Repo, content: Bytes, head: bool) -> Result<Pulled, Stop> {
    let path = format!("blobs/{}", repo.push_blob(&content).await?);
    let call = if head { repo.head(&path) } else { repo.get(&path) };
    Ok((content, call.send().await?))
}

/// Makes the content of a blob from its repository.
type Content = fn(&Repo) -> Bytes;

/// Contents that a registry might treat as something else than bytes.
const CONTENTS: &[(&str, Content)] = &[
    ("empty", |_| Bytes::new()),
    ("one-byte", |repo| repo.bytes("one", 1)),
    ("one-mib", |repo| repo.bytes("mib", 1 << 20)),
    ("one-mib-and-a-byte", |repo| repo.bytes("more", (1 << 20) + 1)),
    ("eight-mib", |repo| repo.bytes("large", 8 << 20)),
    ("zeros", |_| vec![0; 4096].into()),
    ("every-byte", |repo| (0..=255).chain(repo.bytes("every", 16)).collect::<Vec<u8>>().into()),
    ("like-a-manifest", |repo| {
        let name = repo.name();
        format!(r#"{{"schemaVersion":2,"manifests":[],"annotations":{{"a":"{name}"}}}}"#).into()
    }),
    ("like-gzip", |repo| [&[0x1f, 0x8b, 8, 0][..], &repo.bytes("gzip", 60)].concat().into()),
];

fn add_contents(checks: &mut Checks) {
    checks.section("Pulling blobs");
    for (id, content) in CONTENTS {
        let mut get = checks.on(format!("pull.blob.content.{id}"), move |repo: Repo| async move {
            let content = content(&repo);
            pulled(repo, content, false).await
        });
        let title = format!("a blob ({id}) comes back byte by byte");
        get.look(MUST, "body", title, |(content, reply)| reply.is(200)?.body_is(content).map(drop));
        let mut head = checks.on(format!("pull.blob.content.{id}"), move |repo: Repo| async move {
            let content = content(&repo);
            pulled(repo, content, true).await
        });
        let title = format!("HEAD of a blob ({id}) tells its length");
        head.look(SHOULD_THEN_MUST, "length", title, |(content, reply)| {
            reply.is(200)?.header_is("content-length", &content.len().to_string()).map(drop)
        });
    }
    checks.add(MUST, "pull.blob.get.repeated", "GET brings the same every time", repeated);
}

async fn repeated(repo: Repo) -> Verdict {
    let content = repo.bytes("blob", 3000);
    let path = format!("blobs/{}", repo.push_blob(&content).await?);
    for _ in 0..5 {
        repo.get(&path).send().await?.is(200)?.body_is(&content)?;
    }
    Ok(())
}

fn add_missing(checks: &mut Checks) {
    let mut get = checks.on("pull.blob.missing", move |repo: Repo| async move {
        repo.push_blob(&repo.bytes("other", 10)).await?;
        repo.get(&format!("blobs/{NOBODY}")).send().await
    });
    get.look(MUST, "get", "GET of a missing blob answers 404", |reply| reply.is(404).map(drop));
    get.look(MUST, "code", "the code for it is BLOB_UNKNOWN", |reply| {
        reply.is(404)?.code_is(&["BLOB_UNKNOWN"]).map(drop)
    });
    checks.section("Checking if content exists in the registry");
    checks.add(
        MUST,
        "pull.blob.missing.head",
        "HEAD of it answers 404",
        move |repo: Repo| async move {
            repo.push_blob(&repo.bytes("other", 10)).await?;
            repo.head(&format!("blobs/{NOBODY}")).send().await?.is(404)?.body_is(b"").map(drop)
        },
    );
    checks.add(
        MUST,
        "pull.blob.no-repository.head",
        "nor without repository",
        move |repo: Repo| async move {
            repo.head(&format!("blobs/{NOBODY}")).send().await?.is(404).map(drop)
        },
    );
    checks.section("Pulling blobs");
    let title = "a repository that does not exist answers 404";
    checks.add(MUST, "pull.blob.no-repository.get", title, move |repo: Repo| async move {
        repo.get(&format!("blobs/{NOBODY}")).send().await?.is(404).map(drop)
    });
    for method in ["get", "head"] {
        let title = format!("{method} finds a blob only in the repository it was pushed to");
        let id = format!("pull.blob.other-repository.{method}");
        checks.add(MUST, id, title, move |repo: Repo| async move {
            let digest = repo.push_blob(&repo.bytes("blob", 100)).await?;
            let other = repo.beside("other");
            other.push_blob(&other.bytes("other", 10)).await?;
            let path = format!("blobs/{digest}");
            let call = if method == "get" { other.get(&path) } else { other.head(&path) };
            call.send().await?.is(404).map(drop)
        });
    }
    checks.add(
        MUST,
        "pull.blob.manifest-digest",
        "another digest is another blob",
        move |repo| async move { unlike(repo).await },
    );
}

/// A blob is found under its own digest alone.
async fn unlike(repo: Repo) -> Verdict {
    let (one, two) = (repo.bytes("one", 50), repo.bytes("two", 50));
    repo.push_blob(&one).await?;
    repo.get(&format!("blobs/{}", Digest::of(&two))).send().await?.is(404)?;
    repo.push_blob(&two).await?;
    for content in [one, two] {
        let path = format!("blobs/{}", Digest::of(&content));
        repo.get(&path).send().await?.is(200)?.body_is(&content)?;
    }
    Ok(())
}
