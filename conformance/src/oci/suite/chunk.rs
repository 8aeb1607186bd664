//! "Pushing a blob in chunks".

use bytes::Bytes;
use kybernate_spec::Digest;
use reqwest::{Method, Url};

use crate::oci::check::{Checks, DEV_MUST, MAY, MUST, SHOULD, Stop, Verdict, skip};
use crate::oci::reply::Reply;
use crate::oci::repo::Repo;

/// An upload after a chunk, and the reply to the chunk.
type Sent = (Repo, Reply);

pub(super) fn add(checks: &mut Checks) {
    checks.section("Pushing a blob in chunks");
    add_replies(checks);
    add_whole(checks);
    add_order(checks);
    add_ranges(checks);
}

/// Adds the requirements on the reply to each chunk.
fn add_replies(checks: &mut Checks) {
    let acts = [("first", 1, "0-99"), ("second", 2, "0-199"), ("third", 3, "0-299")];
    for (id, count, range) in acts {
        let act = move |repo| async move { sent(repo, count).await };
        let mut group = checks.on(format!("push.blob.chunked.{id}"), act);
        let title = format!("the {id} chunk is answered with 202");
        group.look(MUST, "accepted", title, |(_, reply)| reply.is(202).map(drop));
        let title = format!("the reply to the {id} chunk has a Location");
        group.look(MUST, "location", title, |(_, reply)| reply.is(202)?.location().map(drop));
        let title = format!("the reply to the {id} chunk has Range: {range}");
        group.look(MUST, "range", title, move |(_, reply)| {
            reply.is(202)?.header_is("range", range).map(drop)
        });
    }
}

/// Sends some chunks of 100 bytes, and returns the reply to the last.
async fn sent(repo: Repo, count: usize) -> Result<Sent, Stop> {
    let content = repo.bytes("blob", 100 * count);
    let mut session = repo.begin().await?;
    let mut last = None;
    for (number, chunk) in content.chunks(100).enumerate() {
        let chunk = Bytes::copy_from_slice(chunk);
        let reply = repo.chunk(&session, number * 100, chunk).send().await?;
        session = reply.is(202)?.location()?;
        last = Some(reply);
    }
    match last {
        Some(reply) => Ok((repo, reply)),
        None => skip("no chunk was sent"),
    }
}

/// How a content is cut: the lengths of the chunks, and of the one that the PUT brings.
type Cut = (&'static str, &'static [usize], usize);

const CUTS: &[Cut] = &[
    ("one-chunk", &[1000], 0),
    ("two-chunks", &[500, 500], 0),
    ("last-in-put", &[500], 500),
    ("three-and-put", &[100, 1, 399], 500),
    ("single-bytes", &[1, 1, 1, 1, 1], 1),
    ("growing", &[1, 10, 100, 1000, 10_000, 100_000], 0),
    ("large", &[3 << 20, 3 << 20], 1 << 20),
    ("twenty", &[50; 20], 0),
];

fn add_whole(checks: &mut Checks) {
    for (id, chunks, last) in CUTS {
        let act = move |repo| async move { cut(repo, chunks, *last).await };
        let mut group = checks.on(format!("push.blob.chunked.{id}"), act);
        let title = format!("a blob in chunks ({id}) is closed with 201");
        group.look(MUST, "created", title, |(_, reply)| reply.is(201).map(drop));
        let title = format!("the blob in chunks ({id}) has a Location");
        group.look(MUST, "location", title, |(_, reply)| reply.is(201)?.location().map(drop));
        let title = format!("the blob in chunks ({id}) comes back byte by byte");
        checks.add(
            MUST,
            format!("push.blob.chunked.{id}.pullable"),
            title,
            move |repo| async move {
                let ((content, repo), reply) = cut(repo, chunks, *last).await?;
                reply.is(201)?;
                let path = format!("blobs/{}", Digest::of(&content));
                repo.get(&path).send().await?.is(200)?.body_is(&content).map(drop)
            },
        );
    }
    checks.add(
        MUST,
        "push.blob.chunked.none.created",
        "an upload without a chunk",
        move |repo: Repo| async move {
            let session = repo.begin().await?;
            let digest = Digest::of(b"").to_string();
            repo.finish(&session, &digest, Bytes::new()).send().await?.is(201).map(drop)
        },
    );
    let title = "a chunk without length and range (as docker push sends it) is taken";
    checks.add(SHOULD, "push.blob.chunked.streamed", title, streamed);
    let title = "chunks that do not say their range are put one after the other";
    checks.add(MAY, "push.blob.chunked.no-range", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 300);
        let mut session = repo.begin().await?;
        for chunk in content.chunks(100) {
            let call = repo.at(Method::PATCH, &session).body(Bytes::copy_from_slice(chunk));
            let reply = call.header("content-type", "application/octet-stream").send().await?;
            session = reply.is(202)?.location()?;
        }
        closed(&repo, &session, &content).await
    });
    let title = "chunks that together are another content are refused at the end";
    checks.add(MUST, "push.blob.chunked.wrong-digest", title, move |repo: Repo| async move {
        let claimed = Digest::of(&repo.bytes("claimed", 100));
        let session = repo.begin().await?;
        let reply = repo.chunk(&session, 0, repo.bytes("sent", 100)).send().await?;
        let session = reply.is(202)?.location()?;
        let call = repo.finish(&session, &claimed.to_string(), Bytes::new());
        call.send().await?.is_refused()?;
        repo.push_blob(&repo.bytes("other", 10)).await?;
        repo.head(&format!("blobs/{claimed}")).send().await?.is(404).map(drop)
    });
}

async fn streamed(repo: Repo) -> Verdict {
    let content = repo.bytes("blob", 50_000);
    let session = repo.begin().await?;
    let pieces = content.chunks(10_000).map(Bytes::copy_from_slice).collect();
    let call = repo.at(Method::PATCH, &session).pieces(pieces);
    let reply = call.header("content-type", "application/octet-stream").send().await?;
    let session = reply.is(202)?.header_is("range", "0-49999")?.location()?;
    closed(&repo, &session, &content).await
}

/// Closes an upload that has everything, and pulls the blob.
async fn closed(repo: &Repo, session: &Url, content: &Bytes) -> Verdict {
    let digest = Digest::of(content).to_string();
    repo.finish(session, &digest, Bytes::new()).send().await?.is(201)?;
    repo.get(&format!("blobs/{digest}")).send().await?.is(200)?.body_is(content).map(drop)
}

type Closed = ((Bytes, Repo), Reply);

async fn cut(repo: Repo, chunks: &[usize], last: usize) -> Result<Closed, Stop> {
    let content = repo.bytes("blob", chunks.iter().sum::<usize>() + last);
    let mut session = repo.begin().await?;
    let mut start = 0;
    for length in chunks {
        let chunk = content.slice(start..start + length);
        let reply = repo.chunk(&session, start, chunk).send().await?;
        session = reply.is(202)?.location()?;
        start += length;
    }
    let digest = Digest::of(&content).to_string();
    let mut call = repo.finish(&session, &digest, content.slice(start..));
    if last > 0 {
        call = call.header("content-range", format!("{start}-{}", start + last - 1));
    }
    let reply = call.send().await?;
    Ok(((content, repo), reply))
}

/// Chunks that are not where the upload is: the ranges of two chunks.
const OUT_OF_ORDER: &[(&str, Option<usize>, usize, &str)] = &[
    ("not-from-zero", None, 100, "a first chunk that does not begin with 0"),
    ("gap", Some(0), 150, "a chunk that leaves a gap"),
    ("repeated", Some(0), 0, "a chunk that was sent before"),
    ("overlap", Some(0), 50, "a chunk that overlaps the one before"),
];

fn add_order(checks: &mut Checks) {
    for (id, first, start, what) in OUT_OF_ORDER {
        let act = move |repo| async move { out_of_order(repo, *first, *start).await };
        let mut group = checks.on(format!("push.blob.chunked.{id}"), act);
        let title = format!("{what} is answered with 416");
        group.look(MUST, "refused", title, |(_, _, reply)| reply.is(416).map(drop));
        let title = format!("after {what} the upload can go on");
        checks.add(
            MUST,
            format!("push.blob.chunked.{id}.goes-on"),
            title,
            move |repo| async move {
                let (repo, session, reply) = out_of_order(repo, *first, *start).await?;
                reply.is(416)?;
                goes_on(repo, session, if first.is_some() { 100 } else { 0 }).await
            },
        );
    }
    let title = "a last chunk (in the PUT) that leaves a gap is answered with 416";
    checks.add(
        DEV_MUST,
        "push.blob.chunked.put-gap.refused",
        title,
        move |repo: Repo| async move { put_at(repo, 150).await?.is(416).map(drop) },
    );
    let title = "a last chunk (in the PUT) that overlaps is answered with 416";
    checks.add(
        DEV_MUST,
        "push.blob.chunked.put-overlap.refused",
        title,
        move |repo: Repo| async move { put_at(repo, 50).await?.is(416).map(drop) },
    );
    let title = "a last chunk (in the PUT) that leaves a gap closes nothing";
    checks.add(MUST, "push.blob.chunked.put-gap.no-blob", title, move |repo: Repo| async move {
        put_at(repo, 150).await?.is_refused().map(drop)
    });
}

async fn out_of_order(
    repo: Repo,
    first: Option<usize>,
    start: usize,
) -> Result<(Repo, Url, Reply), Stop> {
    let content = repo.bytes("blob", 300);
    let mut session = repo.begin().await?;
    if let Some(first) = first {
        let reply = repo.chunk(&session, first, content.slice(..100)).send().await?;
        session = reply.is(202)?.location()?;
    }
    let chunk = content.slice(start..start + 100);
    let reply = repo.chunk(&session, start, chunk).send().await?;
    Ok((repo, session, reply))
}

/// Asks where the upload is, sends the rest and closes it.
async fn goes_on(repo: Repo, session: Url, wanted: usize) -> Verdict {
    let content = repo.bytes("blob", 300);
    let status = repo.at(Method::GET, &session).send().await?;
    let session = status.is(204)?.location()?;
    if wanted > 0 {
        status.header_is("range", &format!("0-{}", wanted - 1))?;
    }
    let reply = repo.chunk(&session, wanted, content.slice(wanted..)).send().await?;
    closed(&repo, &reply.is(202)?.location()?, &content).await
}

/// Sends 100 bytes as a chunk, and more in a PUT that says they begin at `start`.
async fn put_at(repo: Repo, start: usize) -> Result<Reply, Stop> {
    let content = repo.bytes("blob", 300);
    let session = repo.begin().await?;
    let reply = repo.chunk(&session, 0, content.slice(..100)).send().await?;
    let session = reply.is(202)?.location()?;
    let call = repo.finish(&session, &Digest::of(&content).to_string(), content.slice(start..));
    call.header("content-range", format!("{start}-299")).send().await
}

/// Values of `Content-Range` that do not match `^[0-9]+-[0-9]+$` or the chunk of 100 bytes.
const WRONG_RANGES: &[(&str, &str)] = &[
    ("backwards", "99-0"),
    ("letters", "abc-def"),
    ("empty", "-"),
    ("no-end", "0-"),
    ("negative", "-1-98"),
    ("shorter-than-the-chunk", "0-49"),
    ("longer-than-the-chunk", "0-199"),
    ("too-large", "0-99999999999999999999999"),
];

fn add_ranges(checks: &mut Checks) {
    for (id, range) in WRONG_RANGES {
        let title = format!("100 bytes with Content-Range {range:?} are refused");
        let id = format!("push.blob.chunked.range-{id}.refused");
        checks.add(SHOULD, id, title, move |repo: Repo| async move {
            let session = repo.begin().await?;
            let call = repo.at(Method::PATCH, &session).body(repo.bytes("blob", 100));
            let call = call.header("content-type", "application/octet-stream");
            call.header("content-range", *range).send().await?.is_refused().map(drop)
        });
    }
    let title = "who asks for chunks of a least length takes a shorter one at the end";
    checks.add(MUST, "push.blob.chunked.min-length.final", title, move |repo: Repo| async move {
        let reply = repo.post("").send().await?;
        let Some(text) = reply.is(202)?.header("oci-chunk-min-length") else {
            return skip("the registry has no least length of a chunk");
        };
        let length = text.parse::<usize>().unwrap_or_default();
        let content = repo.bytes("blob", length + 10);
        let sent = repo.chunk(&reply.location()?, 0, content.slice(..length)).send().await?;
        let sent =
            repo.chunk(&sent.is(202)?.location()?, length, content.slice(length..)).send().await?;
        closed(&repo, &sent.is(202)?.location()?, &content).await
    });
}
