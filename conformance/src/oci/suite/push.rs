//! "Pushing a blob monolithically": POST then PUT, and a single POST.

use bytes::Bytes;
use kybernate_spec::{Algorithm, Digest};
use reqwest::Method;

use crate::oci::check::{
    Checks, DEV_MAY, DEV_MUST, DEV_SHOULD, Group, MAY, MUST, SHOULD, Stop, Verdict, skip,
};
use crate::oci::reply::{Reply, digest_of};
use crate::oci::repo::Repo;

/// What is pushed, and the reply to it.
struct Pushed {
    content: Bytes,
    digest: Digest,
    reply: Reply,
    repo: Repo,
}

pub(super) fn add(checks: &mut Checks) {
    checks.section("POST then PUT");
    add_begin(checks);
    add_put(checks);
    add_refused(checks);
    add_single(checks);
    add_sha512(checks);
}

fn add_begin(checks: &mut Checks) {
    let mut post =
        checks.on("push.blob.begin", move |repo: Repo| async move { repo.post("").send().await });
    post.look(MUST, "accepted", "POST begins an upload: 202", |reply| reply.is(202).map(drop));
    post.look(MUST, "location", "the upload has a Location", |reply| {
        reply.is(202)?.location().map(drop)
    });
    post.look(MUST, "min-length", "the least length of a chunk is a number", |reply| {
        match reply.is(202)?.header("oci-chunk-min-length") {
            None => skip("the registry has no least length of a chunk"),
            Some(text) if text.parse::<u64>().is_ok() => Ok(()),
            Some(_) => reply.wrong("OCI-Chunk-Min-Length: <a number>"),
        }
    });
    let title = "every upload has a Location of its own";
    checks.add(MUST, "push.blob.begin.unique", title, move |repo: Repo| async move {
        let reply = repo.post("").send().await?;
        let (one, two) = (reply.is(202)?.location()?, repo.begin().await?);
        if one == two { reply.wrong("a Location that no other upload has") } else { Ok(()) }
    });
    let title = "the Location cannot be guessed: it has a part of at least 16 letters";
    checks.add(SHOULD, "push.blob.begin.unguessable", title, move |repo: Repo| async move {
        let reply = repo.post("").send().await?;
        let location = reply.is(202)?.location()?;
        let text = format!("{}?{}", location.path(), location.query().unwrap_or_default());
        let words = text.split(|letter: char| "/?&=".contains(letter));
        let id = words
            .map(|word| word.replace('-', ""))
            .filter(|word| word.len() >= 16 && !repo.name().contains(word.as_str()));
        if id.count() > 0 { Ok(()) } else { reply.wrong("a Location with a unique session ID") }
    });
    checks.add(
        SHOULD,
        "push.blob.begin.no-slash",
        "POST without the last slash",
        move |repo: Repo| async move {
            let reply = repo.call(Method::POST, "blobs/uploads").body(Bytes::new()).send().await?;
            reply.is_no_crash().map(drop)
        },
    );
}

/// Adds the requirements on a push that succeeds.
fn created(group: &mut Group<'_, Pushed>, what: &str) {
    let title = format!("{what} is answered with 201");
    group.look(MUST, "created", title, |pushed| pushed.reply.is(201).map(drop));
    let title = format!("{what} is answered with a Location");
    group.look(MUST, "location", title, |pushed| pushed.reply.is(201)?.location().map(drop));
    let title = format!("the digest told after {what} is the content's");
    group.look(MUST, "digest", title, |pushed| {
        pushed.reply.is(201)?.digest_header_fits(&pushed.content).map(drop)
    });
}

/// Adds that what was pushed can be pulled, from its path and from the Location.
fn pullable<F, R>(checks: &mut Checks, prefix: &str, push: F)
where
    F: Fn(Repo) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Result<Pushed, Stop>> + Send + 'static,
{
    let act = push.clone();
    let title = "what was pushed can be pulled";
    checks.add(MUST, format!("{prefix}.pullable"), title, move |repo| {
        let acting = act(repo);
        async move {
            let Pushed { content, digest, reply, repo } = acting.await?;
            reply.is(201)?;
            repo.head(&format!("blobs/{digest}")).send().await?.is(200)?;
            let reply = repo.get(&format!("blobs/{digest}")).send().await?;
            reply.is(200)?.body_is(&content).map(drop)
        }
    });
    let title = "the Location is a URL to pull from";
    checks.add(MUST, format!("{prefix}.location-pullable"), title, move |repo| {
        let acting = push(repo);
        async move {
            let Pushed { content, reply, repo, .. } = acting.await?;
            let location = reply.is(201)?.location()?;
            repo.at(Method::GET, &location).send().await?.is(200)?.body_is(&content).map(drop)
        }
    });
}

async fn put(repo: Repo, algorithm: Algorithm, content: Bytes) -> Result<Pushed, Stop> {
    let digest = digest_of(algorithm, &content);
    let session = repo.begin().await?;
    let reply = repo.finish(&session, &digest.to_string(), content.clone()).send().await?;
    Ok(Pushed { content, digest, reply, repo })
}

fn add_put(checks: &mut Checks) {
    let act = move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        put(repo, Algorithm::Sha256, content).await
    };
    created(&mut checks.on("push.blob.monolithic.post-put", act), "a blob pushed by POST and PUT");
    pullable(checks, "push.blob.monolithic.post-put", act);
    let empty = move |repo: Repo| async move { put(repo, Algorithm::Sha256, Bytes::new()).await };
    created(&mut checks.on("push.blob.monolithic.empty", empty), "an empty blob");
    pullable(checks, "push.blob.monolithic.empty", empty);
    let large = move |repo: Repo| async move {
        let content = repo.bytes("large", 12 << 20);
        put(repo, Algorithm::Sha256, content).await
    };
    created(&mut checks.on("push.blob.monolithic.large", large), "a blob of 12 MiB");
    pullable(checks, "push.blob.monolithic.large", large);
    let title = "a PUT without a length (chunked transfer coding) is a push too";
    checks.add(SHOULD, "push.blob.monolithic.streamed", title, move |repo: Repo| async move {
        let content = repo.bytes("streamed", 30_000);
        let digest = Digest::of(&content);
        let session = repo.begin().await?;
        let pieces = content.chunks(10_000).map(Bytes::copy_from_slice).collect();
        let call = repo.at(Method::PUT, &session).query(&format!("digest={digest}"));
        let call = call.header("content-type", "application/octet-stream").pieces(pieces);
        call.send().await?.is(201)?;
        repo.get(&format!("blobs/{digest}")).send().await?.is(200)?.body_is(&content).map(drop)
    });
    let title = "a digest with its colon percent-encoded is the same digest";
    checks.add(MUST, "push.blob.monolithic.encoded-digest", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 100);
        let digest = Digest::of(&content);
        let session = repo.begin().await?;
        let text = digest.to_string().replace(':', "%3A");
        repo.finish(&session, &text, content.clone()).send().await?.is(201)?;
        repo.get(&format!("blobs/{digest}")).send().await?.is(200)?.body_is(&content).map(drop)
    });
    let title = "a PUT without Content-Type is a push too";
    checks.add(MAY, "push.blob.monolithic.no-type", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 100);
        let digest = Digest::of(&content);
        let session = repo.begin().await?;
        let call = repo.at(Method::PUT, &session).query(&format!("digest={digest}"));
        call.body(content).send().await?.is(201).map(drop)
    });
}

/// A push whose content is not what its digest says.
async fn lied(repo: Repo) -> Result<Pushed, Stop> {
    let content = repo.bytes("claimed", 100);
    let digest = Digest::of(&content);
    let session = repo.begin().await?;
    let reply = repo.finish(&session, &digest.to_string(), repo.bytes("sent", 100)).send().await?;
    Ok(Pushed { content, digest, reply, repo })
}

fn add_refused(checks: &mut Checks) {
    let mut group = checks.on("push.blob.wrong-digest", lied);
    group.look(MUST, "refused", "content that is not its digest's is refused", |pushed| {
        pushed.reply.is_refused().map(drop)
    });
    group.look(DEV_SHOULD, "bad-request", "it is refused with 400", |pushed| {
        pushed.reply.is(400).map(drop)
    });
    group.look(MUST, "code", "the code for it is DIGEST_INVALID", |pushed| {
        pushed.reply.is_refused()?.code_is(&["DIGEST_INVALID"]).map(drop)
    });
    let title = "content that is not its digest's is not stored under it";
    checks.add(MUST, "push.blob.wrong-digest.absent", title, move |repo| async move {
        let Pushed { digest, repo, .. } = lied(repo).await?;
        repo.push_blob(&repo.bytes("other", 10)).await?;
        repo.get(&format!("blobs/{digest}")).send().await?.is(404)?;
        repo.head(&format!("blobs/{digest}")).send().await?.is(404).map(drop)
    });
    let title = "after a refused digest the blob can be pushed";
    checks.add(MUST, "push.blob.wrong-digest.again", title, move |repo| async move {
        let Pushed { content, repo, .. } = lied(repo).await?;
        repo.push_blob(&content).await.map(drop)
    });
    let title = "a digest of the right content with one letter changed is refused";
    checks.add(MUST, "push.blob.wrong-digest.one-letter", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 100);
        let text = Digest::of(&content).to_string();
        let (begin, last) = text.split_at(text.len() - 1);
        let other = format!("{begin}{}", if last == "0" { '1' } else { '0' });
        let session = repo.begin().await?;
        repo.finish(&session, &other, content).send().await?.is_refused().map(drop)
    });
    let title = "content cut short is refused";
    checks.add(MUST, "push.blob.wrong-digest.cut", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        let digest = Digest::of(&content).to_string();
        let session = repo.begin().await?;
        repo.finish(&session, &digest, content.slice(..999)).send().await?.is_refused().map(drop)
    });
    let title = "a PUT without a digest is refused";
    checks.add(MUST, "push.blob.no-digest.refused", title, move |repo: Repo| async move {
        let session = repo.begin().await?;
        let call = repo.at(Method::PUT, &session).body(repo.bytes("blob", 100));
        call.send().await?.is_refused().map(drop)
    });
}

async fn single(repo: Repo, algorithm: Algorithm, content: Bytes) -> Result<Pushed, Stop> {
    let digest = digest_of(algorithm, &content);
    let call = repo.post(&format!("?digest={digest}")).body(content.clone());
    let reply = call.header("content-type", "application/octet-stream").send().await?;
    Ok(Pushed { content, digest, reply, repo })
}

/// Skips where the registry wants a PUT to follow.
fn took(pushed: Pushed) -> Result<Pushed, Stop> {
    match pushed.reply.status {
        202 => skip("the registry takes no single POST"),
        _ => Ok(pushed),
    }
}

fn add_single(checks: &mut Checks) {
    checks.section("Single POST");
    let any = move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        single(repo, Algorithm::Sha256, content).await
    };
    let mut group = checks.on("push.blob.monolithic.single-post", any);
    group.look(SHOULD, "answered", "a single POST is answered with 201 or 202", |pushed| {
        pushed.reply.is_any(&[201, 202]).map(drop)
    });
    let title = "who takes no single POST names a Location to go on with";
    checks.add(SHOULD, "push.blob.monolithic.single-post.goes-on", title, move |repo| async move {
        let Pushed { content, digest, reply, repo } = any(repo).await?;
        if reply.status != 202 {
            return skip("the registry takes a single POST");
        }
        let session = reply.location()?;
        repo.finish(&session, &digest.to_string(), content).send().await?.is(201).map(drop)
    });
    let act = move |repo| async move { any(repo).await.and_then(took) };
    let prefix = "push.blob.monolithic.single-post";
    created(&mut checks.on(prefix, act), "a single POST");
    pullable(checks, prefix, act);
    let empty = move |repo: Repo| async move {
        single(repo, Algorithm::Sha256, Bytes::new()).await.and_then(took)
    };
    let prefix = "push.blob.monolithic.single-post-empty";
    created(&mut checks.on(prefix, empty), "a single POST of nothing");
    let title = "a single POST of another content is refused";
    checks.add(
        MUST,
        "push.blob.monolithic.single-post.wrong-digest",
        title,
        move |repo: Repo| async move {
            let claimed = Digest::of(&repo.bytes("claimed", 100));
            let call = repo.post(&format!("?digest={claimed}")).body(repo.bytes("sent", 100));
            let reply = call.header("content-type", "application/octet-stream").send().await?;
            if reply.status == 202 {
                return skip("the registry takes no single POST");
            }
            reply.is_refused()?;
            repo.push_blob(&repo.bytes("other", 10)).await?;
            repo.head(&format!("blobs/{claimed}")).send().await?.is(404).map(drop)
        },
    );
}

/// Digests of the second algorithm that is registered. Who does not know it says so with 400.
fn add_sha512(checks: &mut Checks) {
    checks.section("Pushing blobs");
    let act = move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        let pushed = put(repo, Algorithm::Sha512, content).await?;
        match pushed.reply.status {
            400 => skip("the registry does not know sha512"),
            _ => Ok(pushed),
        }
    };
    created(&mut checks.on("push.blob.sha512.post-put", act), "a blob with a sha512 digest");
    pullable(checks, "push.blob.sha512.post-put", act);
    checks.add(SHOULD, "push.blob.sha512.known", "sha512 is known", move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        put(repo, Algorithm::Sha512, content).await?.reply.is(201).map(drop)
    });
    let act = move |repo: Repo| async move {
        let content = repo.bytes("blob", 1000);
        let pushed = single(repo, Algorithm::Sha512, content).await.and_then(took)?;
        match pushed.reply.status {
            400 => skip("the registry does not know sha512"),
            _ => Ok(pushed),
        }
    };
    created(&mut checks.on("push.blob.sha512.single-post", act), "a single POST with sha512");
    let title = "content that is not its sha512 digest's is refused";
    checks.add(MUST, "push.blob.sha512.wrong", title, move |repo: Repo| async move {
        let digest = digest_of(Algorithm::Sha512, &repo.bytes("claimed", 100)).to_string();
        let session = repo.begin().await?;
        let call = repo.finish(&session, &digest, repo.bytes("sent", 100));
        call.send().await?.is_refused().map(drop)
    });
    checks.section("Pushing a blob in chunks: digest-algorithm");
    for (id, need, query, size) in [
        ("sha256", DEV_MAY, "?digest-algorithm=sha256", Algorithm::Sha256),
        ("sha512", DEV_MAY, "?digest-algorithm=sha512", Algorithm::Sha512),
    ] {
        let title = format!("an upload that announces {id} ends with such a digest");
        checks.add(
            need,
            format!("push.blob.digest-algorithm.{id}"),
            title,
            move |repo| async move { announced(repo, query, size).await },
        );
    }
    let title = "an algorithm nobody knows is refused with 400";
    checks.add(
        DEV_SHOULD,
        "push.blob.digest-algorithm.unknown",
        title,
        move |repo: Repo| async move {
            repo.post("?digest-algorithm=sha255").send().await?.is(400).map(drop)
        },
    );
    let title = "the parameter does not keep an upload from beginning";
    checks.add(
        DEV_MUST,
        "push.blob.digest-algorithm.accepted",
        title,
        move |repo: Repo| async move {
            repo.post("?digest-algorithm=sha512").send().await?.is_any(&[201, 202, 400]).map(drop)
        },
    );
}

async fn announced(repo: Repo, query: &str, algorithm: Algorithm) -> Verdict {
    let content = repo.bytes("blob", 2000);
    let digest = digest_of(algorithm, &content);
    let session = repo.post(query).send().await?.is(202)?.location()?;
    let half = content.slice(..1000);
    let reply = repo.chunk(&session, 0, half).send().await?;
    let call = repo.finish(&reply.is(202)?.location()?, &digest.to_string(), content.slice(1000..));
    call.header("content-range", "1000-1999").send().await?.is(201)?;
    repo.get(&format!("blobs/{digest}")).send().await?.is(200)?.body_is(&content).map(drop)
}
