//! "Mounting a blob from another repository".

use bytes::Bytes;
use kybernate_spec::{Algorithm, Descriptor, Digest, media_type};
use reqwest::Method;
use serde_json::json;

use super::manifest::NOBODY;
use crate::oci::check::{Checks, MUST, SHOULD, Stop, Verdict, skip};
use crate::oci::content::Doc;
use crate::oci::reply::Reply;
use crate::oci::repo::Repo;

/// A mount: where the blob is, where it is wanted, what was answered.
struct Mounted {
    source: Repo,
    target: Repo,
    content: Bytes,
    digest: Digest,
    reply: Reply,
}

pub(super) fn add(checks: &mut Checks) {
    checks.section("Mounting a blob from another repository");
    add_reply(checks);
    add_then(checks);
    add_not(checks);
}

async fn mount(repo: Repo) -> Result<Mounted, Stop> {
    mount_as(repo, Algorithm::Sha256).await
}

async fn mount_as(source: Repo, algorithm: Algorithm) -> Result<Mounted, Stop> {
    let (target, content) = (source.beside("target"), source.bytes("blob", 1000));
    let digest = source.push_blob_as(algorithm, &content).await?;
    let call = target.post(&format!("?mount={digest}&from={}", source.name()));
    let reply = call.send().await?;
    Ok(Mounted { source, target, content, digest, reply })
}

/// Skips where the registry wants the blob to be uploaded.
async fn mounted(repo: Repo) -> Result<Mounted, Stop> {
    let mounted = mount(repo).await?;
    match mounted.reply.status {
        202 => skip("the registry mounts nothing"),
        _ => Ok(mounted),
    }
}

fn add_reply(checks: &mut Checks) {
    let mut group = checks.on("push.blob.mount", mount);
    group.look(MUST, "answered", "a mount is answered with 201 or 202", |mount| {
        mount.reply.is_any(&[201, 202]).map(drop)
    });
    group.look(SHOULD, "created", "a blob that is there is mounted: 201", |mount| {
        mount.reply.is(201).map(drop)
    });
    let mut group = checks.on("push.blob.mount", mounted);
    group.look(MUST, "location", "a mount has a Location", |mount| {
        mount.reply.is(201)?.location().map(drop)
    });
    group.look(MUST, "digest", "the digest told is the content's", |mount| {
        mount.reply.is(201)?.digest_header_fits(&mount.content).map(drop)
    });
    let title = "who mounts nothing begins an upload instead";
    checks.add(MUST, "push.blob.mount.or-upload", title, move |repo| async move {
        let Mounted { target, content, digest, reply, .. } = mount(repo).await?;
        if reply.status != 202 {
            return skip("the registry mounts");
        }
        let session = reply.location()?;
        target.finish(&session, &digest.to_string(), content).send().await?.is(201).map(drop)
    });
}

fn add_then(checks: &mut Checks) {
    let title = "the Location of a mount is a URL to pull from";
    checks.add(MUST, "push.blob.mount.location-pullable", title, move |repo| async move {
        let mount = mounted(repo).await?;
        let location = mount.reply.is(201)?.location()?;
        let reply = mount.target.at(Method::GET, &location).send().await?;
        reply.is(200)?.body_is(&mount.content).map(drop)
    });
    for method in ["get", "head"] {
        let title = format!("{method} finds the blob where it was mounted");
        checks.add(MUST, format!("push.blob.mount.{method}"), title, move |repo| async move {
            let mount = mounted(repo).await?;
            let path = format!("blobs/{}", mount.digest);
            if method == "head" {
                return mount.target.head(&path).send().await?.is(200).map(drop);
            }
            mount.target.get(&path).send().await?.is(200)?.body_is(&mount.content).map(drop)
        });
    }
    let title = "a mount leaves the blob where it was";
    checks.add(MUST, "push.blob.mount.source-keeps", title, move |repo| async move {
        let mount = mounted(repo).await?;
        let reply = mount.source.get(&format!("blobs/{}", mount.digest)).send().await?;
        reply.is(200)?.body_is(&mount.content).map(drop)
    });
    let title = "a mounted blob stays when it is deleted where it came from";
    checks.add(MUST, "push.blob.mount.source-deleted", title, move |repo| async move {
        let mount = mounted(repo).await?;
        let path = format!("blobs/{}", mount.digest);
        let reply = mount.source.delete(&path).send().await?;
        if reply.or_unsupported()?.status == 400 {
            return skip("the registry deletes no blobs");
        }
        reply.is(202)?;
        mount.target.get(&path).send().await?.is(200)?.body_is(&mount.content).map(drop)
    });
    let title = "a mount may be repeated";
    checks.add(MUST, "push.blob.mount.repeated", title, move |repo| async move {
        let mount = mounted(repo).await?;
        let query = format!("?mount={}&from={}", mount.digest, mount.source.name());
        mount.target.post(&query).send().await?.is(201).map(drop)
    });
    let title = "a blob with a sha512 digest is mounted too";
    checks.add(MUST, "push.blob.mount.sha512", title, sha512);
    let title = "a manifest may refer to a mounted blob";
    checks.add(MUST, "push.blob.mount.in-a-manifest", title, move |repo| async move {
        let Mounted { target, content, .. } = mounted(repo).await?;
        let config = target.push_as(media_type::OCI_CONFIG, &"{}".into()).await?;
        let layer = Descriptor::of(media_type::OCI_LAYER_TAR, &content);
        let doc = Doc::image(&config, &[layer], json!({}));
        target.put("latest", &doc).send().await?.is(201).map(drop)
    });
    let title = "a blob is mounted from its own repository";
    checks.add(MUST, "push.blob.mount.same-repository", title, move |repo: Repo| async move {
        let digest = repo.push_blob(&repo.bytes("blob", 100)).await?;
        let query = format!("?mount={digest}&from={}", repo.name());
        repo.post(&query).send().await?.is_any(&[201, 202])?;
        repo.head(&format!("blobs/{digest}")).send().await?.is(200).map(drop)
    });
}

async fn sha512(repo: Repo) -> Verdict {
    let content = repo.bytes("probe", 10);
    if repo.push_blob_as(Algorithm::Sha512, &content).await.is_err() {
        return skip("the registry does not know sha512");
    }
    let mount = mount_as(repo, Algorithm::Sha512).await?;
    mount.reply.is_any(&[201, 202])?;
    if mount.reply.status == 202 {
        return skip("the registry mounts nothing");
    }
    let reply = mount.target.get(&format!("blobs/{}", mount.digest)).send().await?;
    reply.is(200)?.body_is(&mount.content).map(drop)
}

/// Mounts that cannot be: the query, and what is wrong with it.
const NOT: &[(&str, &str)] = &[
    ("missing-blob", "a blob that the source does not have"),
    ("missing-source", "a source that does not exist"),
    ("malformed-source", "a source whose name is malformed"),
];

fn add_not(checks: &mut Checks) {
    for (id, what) in NOT {
        let act = move |repo: Repo| async move {
            let digest = repo.push_blob(&repo.bytes("blob", 100)).await?;
            let (digest, from) = match *id {
                "missing-blob" => (NOBODY.to_owned(), repo.name().to_owned()),
                "missing-source" => (digest.to_string(), format!("{}-missing", repo.name())),
                _ => (digest.to_string(), "UPPER..CASE".to_owned()),
            };
            let target = repo.beside("target");
            let reply = target.post(&format!("?mount={digest}&from={from}")).send().await?;
            Ok((target, digest, reply))
        };
        let mut group = checks.on(format!("push.blob.mount.{id}"), act);
        let title = format!("a mount of {what} begins an upload: 202");
        group.look(SHOULD, "upload", title, |(_, _, reply)| reply.is(202).map(drop));
        let title = format!("a mount of {what} mounts nothing");
        // A registry that finds the blob elsewhere may mount it whatever `from` says.
        if *id == "missing-blob" {
            checks.add(
                MUST,
                format!("push.blob.mount.{id}.absent"),
                title,
                move |repo| async move {
                    let (target, digest, reply) = act(repo).await?;
                    reply.is_any(&[202, 400, 404])?;
                    target.head(&format!("blobs/{digest}")).send().await?.is(404).map(drop)
                },
            );
        }
    }
    let title = "a mount without from is answered with 201 or 202";
    checks.add(MUST, "push.blob.mount.no-source.answered", title, move |repo: Repo| async move {
        let digest = repo.push_blob(&repo.bytes("blob", 100)).await?;
        let target = repo.beside("target");
        target.post(&format!("?mount={digest}")).send().await?.is_any(&[201, 202]).map(drop)
    });
    let title = "a mount without from that was answered with 201 is one";
    checks.add(MUST, "push.blob.mount.no-source.pullable", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 100);
        let digest = repo.push_blob(&content).await?;
        let target = repo.beside("target");
        if target.post(&format!("?mount={digest}")).send().await?.status != 201 {
            return skip("the registry does not mount without from");
        }
        let reply = target.get(&format!("blobs/{digest}")).send().await?;
        reply.is(200)?.body_is(&content).map(drop)
    });
    let title = "a mount of a malformed digest mounts nothing";
    checks.add(MUST, "push.blob.mount.malformed-digest", title, move |repo: Repo| async move {
        let target = repo.beside("target");
        let query = format!("?mount=sha256:abc&from={}", repo.name());
        let reply = target.post(&query).send().await?;
        reply.is_any(&[202, 400, 404]).map(drop)
    });
}
