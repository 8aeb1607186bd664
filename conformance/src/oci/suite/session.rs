//! The life of an upload: its status, its end, and what is no upload (any more).

use bytes::Bytes;
use kybernate_spec::Digest;
use reqwest::{Method, Url};

use crate::oci::check::{Checks, DEV_MUST, DEV_SHOULD, MUST, SHOULD, Stop, Verdict, skip};
use crate::oci::reply::Reply;
use crate::oci::repo::Repo;

pub(super) fn add(checks: &mut Checks) {
    add_status(checks);
    add_unknown(checks);
    add_ended(checks);
    add_cancel(checks);
}

fn add_status(checks: &mut Checks) {
    checks.section("Pushing a blob in chunks: status");
    let mut group = checks.on("push.upload.status.chunk", move |repo: Repo| async move {
        let session = chunked(&repo).await?;
        repo.at(Method::GET, &session).send().await
    });
    group.look(MUST, "no-content", "the status of an upload is 204", |reply| {
        reply.is(204).map(drop)
    });
    group.look(MUST, "location", "the status has a Location", |reply| {
        reply.is(204)?.location().map(drop)
    });
    group.look(MUST, "range", "the status tells the last byte: 0-99", |reply| {
        reply.is(204)?.header_is("range", "0-99").map(drop)
    });
    let mut group = checks.on("push.upload.status.fresh", move |repo: Repo| async move {
        let session = repo.begin().await?;
        repo.at(Method::GET, &session).send().await
    });
    group.look(MUST, "no-content", "the status of a fresh upload is 204", |reply| {
        reply.is(204).map(drop)
    });
    group.look(MUST, "location", "its status has a Location", |reply| {
        reply.is(204)?.location().map(drop)
    });
    let title = "asking for the status changes nothing";
    checks.add(MUST, "push.upload.status.repeated", title, move |repo: Repo| async move {
        let session = chunked(&repo).await?;
        for _ in 0..3 {
            repo.at(Method::GET, &session).send().await?.is(204)?.header_is("range", "0-99")?;
        }
        let content = repo.bytes("blob", 100);
        let digest = Digest::of(&content).to_string();
        repo.finish(&session, &digest, Bytes::new()).send().await?.is(201).map(drop)
    });
    let title = "an upload goes on at the Location its status tells";
    checks.add(MUST, "push.upload.status.location-works", title, move |repo: Repo| async move {
        let session = chunked(&repo).await?;
        let session = repo.at(Method::GET, &session).send().await?.is(204)?.location()?;
        let content = repo.bytes("blob", 200);
        let reply = repo.chunk(&session, 100, content.slice(100..)).send().await?;
        let session = reply.is(202)?.location()?;
        let digest = Digest::of(&content).to_string();
        repo.finish(&session, &digest, Bytes::new()).send().await?.is(201).map(drop)
    });
    let title = "two uploads of one repository do not mix";
    checks.add(MUST, "push.upload.two-at-once", title, two_at_once);
}

/// Begins an upload and sends 100 bytes.
async fn chunked(repo: &Repo) -> Result<Url, Stop> {
    let session = repo.begin().await?;
    // Bytes are made so that a longer content begins with the shorter one.
    let reply = repo.chunk(&session, 0, repo.bytes("blob", 100)).send().await?;
    reply.is(202)?.location()
}

async fn two_at_once(repo: Repo) -> Verdict {
    let contents = [repo.bytes("one", 200), repo.bytes("two", 200)];
    let mut sessions = [repo.begin().await?, repo.begin().await?];
    for start in [0, 100] {
        for (session, content) in sessions.iter_mut().zip(&contents) {
            let reply = repo.chunk(session, start, content.slice(start..start + 100)).send();
            *session = reply.await?.is(202)?.location()?;
        }
    }
    for (session, content) in sessions.iter().zip(&contents) {
        let digest = Digest::of(content).to_string();
        repo.finish(session, &digest, Bytes::new()).send().await?.is(201)?;
        repo.get(&format!("blobs/{digest}")).send().await?.is(200)?.body_is(content)?;
    }
    Ok(())
}

/// The Location of an upload with another identifier in it.
async fn unknown(repo: &Repo) -> Result<Url, Stop> {
    let session = repo.begin().await?;
    let name = "00000000-0000-4000-8000-000000000000";
    let url = repo.client().url(&format!("/v2/{}/blobs/uploads/{name}", repo.name()))?;
    if session.path().starts_with(&format!("/v2/{}/blobs/uploads/", repo.name())) {
        return Ok(url);
    }
    skip("uploads are elsewhere, so none can be made up")
}

/// Sends something to an upload.
async fn send(repo: &Repo, method: &str, session: &Url) -> Result<Reply, Stop> {
    let content = repo.bytes("blob", 200);
    let call = match method {
        "get" => repo.at(Method::GET, session),
        "patch" => repo.chunk(session, 0, content),
        "put" => repo.finish(session, &Digest::of(&content).to_string(), content),
        _ => repo.at(Method::DELETE, session),
    };
    call.send().await
}

fn add_unknown(checks: &mut Checks) {
    checks.section("Endpoints: end-5, end-6, end-13");
    for method in ["get", "patch", "put"] {
        let act = move |repo: Repo| async move {
            let session = unknown(&repo).await?;
            send(&repo, method, &session).await
        };
        let mut group = checks.on(format!("push.upload.unknown.{method}"), act);
        let title = format!("{method} of an upload that never was is refused");
        group.look(MUST, "refused", title, |reply| reply.is_refused().map(drop));
        let title = format!("{method} of an upload that never was answers 404");
        group.look(SHOULD, "not-found", title, |reply| reply.is(404).map(drop));
        let title = format!("the code for {method} of it is BLOB_UPLOAD_UNKNOWN");
        group.look(SHOULD, "code", title, |reply| {
            reply.is_refused()?.code_is(&["BLOB_UPLOAD_UNKNOWN", "BLOB_UPLOAD_INVALID"]).map(drop)
        });
    }
    let title = "an upload belongs to one repository";
    checks.add(SHOULD, "push.upload.other-repository", title, move |repo: Repo| async move {
        let session = repo.begin().await?;
        let (ours, other) = (format!("/{}/", repo.name()), repo.beside("other"));
        if !session.path().contains(&ours) {
            return skip("uploads are elsewhere, so none can be moved");
        }
        let mut moved = session.clone();
        moved.set_path(&session.path().replace(&ours, &format!("/{}/", other.name())));
        let content = repo.bytes("blob", 100);
        let call = other.finish(&moved, &Digest::of(&content).to_string(), content);
        call.send().await?.is_refused().map(drop)
    });
}

fn add_ended(checks: &mut Checks) {
    for method in ["get", "patch"] {
        let title = format!("{method} of an upload that was closed is refused");
        let id = format!("push.upload.closed.{method}");
        checks.add(MUST, id, title, move |repo: Repo| async move {
            let (session, content) = (repo.begin().await?, repo.bytes("closed", 100));
            let digest = Digest::of(&content).to_string();
            repo.finish(&session, &digest, content).send().await?.is(201)?;
            send(&repo, method, &session).await?.is_refused().map(drop)
        });
    }
    let title = "an upload that was not closed is no blob";
    checks.add(MUST, "push.upload.open.no-blob", title, move |repo: Repo| async move {
        let digest = {
            chunked(&repo).await?;
            Digest::of(&repo.bytes("blob", 100))
        };
        repo.push_blob(&repo.bytes("other", 10)).await?;
        repo.get(&format!("blobs/{digest}")).send().await?.is(404)?;
        repo.head(&format!("blobs/{digest}")).send().await?.is(404).map(drop)
    });
}

fn add_cancel(checks: &mut Checks) {
    checks.section("Cancel a blob upload");
    for id in ["fresh", "with-a-chunk"] {
        let act = move |repo: Repo| async move {
            let session = if id == "fresh" { repo.begin().await? } else { chunked(&repo).await? };
            let reply = repo.at(Method::DELETE, &session).send().await?;
            reply.or_unsupported()?;
            Ok((repo, session, reply))
        };
        let title = format!("an upload ({id}) is given up with 204");
        let mut group = checks.on(format!("push.upload.cancel.{id}"), act);
        group.look(DEV_SHOULD, "no-content", title, |(_, _, reply)| reply.is(204).map(drop));
        for method in ["get", "patch", "put", "delete"] {
            let title = format!("{method} of an upload ({id}) that was given up is refused");
            let id = format!("push.upload.cancel.{id}.then-{method}");
            checks.add(DEV_MUST, id, title, move |repo| async move {
                let (repo, session, reply) = act(repo).await?;
                reply.is_any(&[200, 202, 204])?;
                send(&repo, method, &session).await?.is_refused().map(drop)
            });
        }
    }
    let title = "giving up an upload that never was answers 404 or 400";
    checks.add(DEV_SHOULD, "push.upload.cancel.unknown", title, move |repo: Repo| async move {
        let session = unknown(&repo).await?;
        let reply = repo.at(Method::DELETE, &session).send().await?;
        reply.or_unsupported()?.is_any(&[404, 400]).map(drop)
    });
    let title = "what was sent to an upload that was given up is no blob";
    checks.add(DEV_MUST, "push.upload.cancel.no-blob", title, move |repo: Repo| async move {
        let session = chunked(&repo).await?;
        repo.at(Method::DELETE, &session).send().await?.or_unsupported()?;
        repo.push_blob(&repo.bytes("other", 10)).await?;
        let digest = Digest::of(&repo.bytes("blob", 100));
        repo.head(&format!("blobs/{digest}")).send().await?.is(404).map(drop)
    });
    let title = "giving up one upload leaves the others alone";
    checks.add(DEV_MUST, "push.upload.cancel.others", title, move |repo: Repo| async move {
        let (one, two) = (repo.begin().await?, repo.begin().await?);
        repo.at(Method::DELETE, &one).send().await?.or_unsupported()?;
        let content = repo.bytes("blob", 100);
        let digest = Digest::of(&content).to_string();
        repo.finish(&two, &digest, content).send().await?.is(201).map(drop)
    });
}
