//! Ranges of blobs ("Pulling blobs": a registry SHOULD support `Range`; RFC 9110, 14).

use bytes::Bytes;

use crate::oci::check::{Checks, MAY, MUST, SHOULD, Stop, Verdict, skip};
use crate::oci::reply::Reply;
use crate::oci::repo::Repo;

/// How long the blob is that ranges are taken of.
const LENGTH: usize = 1000;

/// Ranges that can be satisfied: what is asked for, the first byte and the last.
const SATISFIABLE: &[(&str, &str, usize, usize)] = &[
    ("first-byte", "bytes=0-0", 0, 0),
    ("begin", "bytes=0-99", 0, 99),
    ("middle", "bytes=500-599", 500, 599),
    ("last-byte", "bytes=999-999", 999, 999),
    ("whole", "bytes=0-999", 0, 999),
    ("open", "bytes=400-", 400, 999),
    ("open-from-begin", "bytes=0-", 0, 999),
    ("open-last-byte", "bytes=999-", 999, 999),
    ("suffix", "bytes=-100", 900, 999),
    ("suffix-one", "bytes=-1", 999, 999),
    ("suffix-too-long", "bytes=-5000", 0, 999),
    ("beyond-the-end", "bytes=900-5000", 900, 999),
];

/// Ranges that touch no byte.
const UNSATISFIABLE: &[(&str, &str)] = &[
    ("at-the-end", "bytes=1000-"),
    ("after-the-end", "bytes=5000-6000"),
    ("far-after-the-end", "bytes=99999999999-"),
    ("empty-suffix", "bytes=-0"),
];

/// Headers that are no ranges, and may be ignored or refused, never obeyed.
const MALFORMED: &[(&str, &str)] = &[
    ("backwards", "bytes=500-400"),
    ("letters", "bytes=abc"),
    ("nothing", "bytes="),
    ("only-a-dash", "bytes=-"),
    ("negative", "bytes=--5"),
    ("no-unit", "0-10"),
    ("too-large", "bytes=99999999999999999999-999999999999999999999"),
];

type Pulled = (Bytes, Reply);

pub(super) fn add(checks: &mut Checks) {
    checks.section("Pulling blobs: Range");
    for (id, range, first, last) in SATISFIABLE {
        add_satisfiable(checks, id, range, *first..*last + 1);
    }
    for (id, range) in UNSATISFIABLE {
        let act = move |repo| async move { ranged(repo, range).await };
        let mut group = checks.on(format!("pull.blob.range.{id}"), act);
        let title = format!("{range} of 1000 bytes is not satisfiable: 416");
        group.look(SHOULD, "status", title, |(_, reply)| reply.is(416).map(drop));
        let title = format!("416 to {range} tells the blob's length");
        group.look(SHOULD, "length", title, |(_, reply)| {
            if reply.status != 416 {
                return skip("the registry does not answer 416");
            }
            reply.header_is("content-range", "bytes */1000").map(drop)
        });
    }
    for (id, range) in MALFORMED {
        let act = move |repo| async move { ranged(repo, range).await };
        let title = format!("{range} is ignored or refused");
        let mut group = checks.on(format!("pull.blob.range.{id}"), act);
        group.look(MUST, "not-obeyed", title, |(content, reply)| {
            reply.is_any(&[200, 400, 416])?;
            if reply.status == 200 { reply.body_is(content).map(drop) } else { Ok(()) }
        });
    }
    add_several(checks);
    add_if_range(checks);
    add_others(checks);
}

fn add_satisfiable(
    checks: &mut Checks,
    id: &str,
    range: &'static str,
    part: std::ops::Range<usize>,
) {
    let act = move |repo| async move { ranged(repo, range).await };
    let mut group = checks.on(format!("pull.blob.range.{id}"), act);
    let title = format!("{range} brings a part: 206");
    group.look(SHOULD, "status", title, |(_, reply)| reply.is(206).map(drop));
    let (title, wanted) = (format!("the bytes of {range} are the right ones"), part.clone());
    group.look(MUST, "bytes", title, move |(content, reply)| {
        reply.is_any(&[200, 206])?;
        let part = if reply.status == 206 { wanted.clone() } else { 0..content.len() };
        reply.body_is(content.get(part).unwrap_or_default()).map(drop)
    });
    let title = format!("Content-Range of {range} tells first, last and length");
    group.look(MUST, "content-range", title, move |(_, reply)| {
        if reply.status != 206 {
            return skip("the registry does not answer 206");
        }
        let (first, last) = (part.start, part.end.saturating_sub(1));
        reply.header_is("content-range", &format!("bytes {first}-{last}/{LENGTH}")).map(drop)
    });
}

async fn ranged(repo: Repo, range: &'static str) -> Result<Pulled, Stop> {
    let content = repo.bytes("blob", LENGTH);
    let path = format!("blobs/{}", repo.push_blob(&content).await?);
    let reply = repo.get(&path).header("range", range).send().await?;
    Ok((content, reply))
}

/// Several ranges at once (RFC 9110, 14.6).
fn add_several(checks: &mut Checks) {
    let mut group = checks.on("pull.blob.range.several", move |repo| async move {
        ranged(repo, "bytes=0-9,500-509,-10").await
    });
    group.look(SHOULD, "status", "three ranges bring a part: 206", |(_, reply)| {
        reply.is(206).map(drop)
    });
    group.look(MUST, "type", "206 to several is multipart/byteranges", |(_, reply)| {
        reply.is_any(&[200, 206])?;
        if reply.status == 200 {
            return skip("the registry ignores several ranges, as it may");
        }
        if boundary(reply).is_none() {
            return reply.wrong("Content-Type: multipart/byteranges; boundary=…");
        }
        Ok(())
    });
    group.look(MUST, "parts", "each part has its range and its bytes", |(content, reply)| {
        if reply.status != 206 {
            return skip("the registry ignores several ranges, as it may");
        }
        let wanted = [(0, 10), (500, 510), (990, 1000)];
        let found = parts(reply).unwrap_or_default();
        let right = found.len() == wanted.len()
            && found.iter().zip(wanted).all(|((range, body), (start, end))| {
                *range == format!("bytes {start}-{}/{LENGTH}", end - 1)
                    && content.get(start..end) == Some(body.as_slice())
            });
        if right { Ok(()) } else { reply.wrong("three parts, in order, with Content-Range") }
    });
    group.look(MUST, "whole", "who ignores several brings everything", |(content, reply)| {
        if reply.status == 206 { Ok(()) } else { reply.is(200)?.body_is(content).map(drop) }
    });
    let title = "hundreds of overlapping ranges are not multiplied";
    checks.add(SHOULD, "pull.blob.range.many", title, many);
    let act = move |repo| async move { ranged(repo, "bytes=5000-,0-9").await };
    let mut group = checks.on("pull.blob.range.some-satisfiable", act);
    let title = "ranges of which one is satisfiable are satisfied as far as possible";
    group.look(SHOULD, "status", title, |(_, reply)| reply.is_any(&[200, 206]).map(drop));
    let title = "ranges of which none is satisfiable are not";
    checks.add(SHOULD, "pull.blob.range.none-satisfiable", title, move |repo| async move {
        let (_, reply) = ranged(repo, "bytes=5000-,6000-7000").await?;
        reply.is_any(&[200, 416]).map(drop)
    });
}

async fn many(repo: Repo) -> Verdict {
    let content = repo.bytes("blob", LENGTH);
    let path = format!("blobs/{}", repo.push_blob(&content).await?);
    let ranges = vec!["0-"; 300].join(",");
    let reply = repo.get(&path).header("range", format!("bytes={ranges}")).send().await?;
    reply.is_no_crash()?;
    if reply.body.len() > 20 * LENGTH {
        return reply.wrong("a reply that is not hundreds of times the blob (RFC 9110, 17.15)");
    }
    Ok(())
}

fn boundary(reply: &Reply) -> Option<String> {
    let value = reply.header("content-type")?;
    let (kind, parameters) = value.split_once(';')?;
    let boundary = parameters.split(';').find_map(|text| text.trim().strip_prefix("boundary="))?;
    kind.trim()
        .eq_ignore_ascii_case("multipart/byteranges")
        .then(|| boundary.trim_matches('"').to_owned())
}

/// Reads a multipart body: the `Content-Range` and the bytes of each part (RFC 2046, 5.1.1).
fn parts(reply: &Reply) -> Option<Vec<(String, Vec<u8>)>> {
    // The content is random and may hold any byte, so it is cut by length, not by lines.
    let mark = format!("--{}", boundary(reply)?);
    let mut rest = reply.body.as_ref();
    let mut found = Vec::new();
    loop {
        let at = rest.windows(mark.len()).position(|window| window == mark.as_bytes())?;
        rest = rest.get(at + mark.len()..)?;
        if rest.starts_with(b"--") {
            return Some(found);
        }
        let end = rest.windows(4).position(|window| window == b"\r\n\r\n")?;
        let head = String::from_utf8_lossy(rest.get(..end)?).into_owned();
        let range = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-range").then(|| value.trim().to_owned())
        })?;
        let (first, last) = range.strip_prefix("bytes ")?.split_once('/')?.0.split_once('-')?;
        let length = last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1;
        found.push((range.clone(), rest.get(end + 4..end + 4 + length)?.to_vec()));
        rest = rest.get(end + 4 + length..)?;
    }
}

/// `If-Range` (RFC 9110, 13.1.5).
fn add_if_range(checks: &mut Checks) {
    let title = "a range with If-Range and the right ETag brings the part";
    checks.add(SHOULD, "pull.blob.if-range.same", title, move |repo: Repo| async move {
        let (content, path, tag) = tagged(&repo).await?;
        let call = repo.get(&path).header("range", "bytes=0-9").header("if-range", tag);
        call.send().await?.is(206)?.body_is(content.get(..10).unwrap_or_default()).map(drop)
    });
    let title = "a range with If-Range and another ETag brings everything";
    checks.add(MUST, "pull.blob.if-range.other", title, move |repo: Repo| async move {
        let (content, path, _) = tagged(&repo).await?;
        let call = repo.get(&path).header("range", "bytes=0-9").header("if-range", "\"other\"");
        call.send().await?.is(200)?.body_is(&content).map(drop)
    });
    let title = "If-Range without Range brings everything";
    checks.add(MUST, "pull.blob.if-range.alone", title, move |repo: Repo| async move {
        let (content, path, tag) = tagged(&repo).await?;
        let reply = repo.get(&path).header("if-range", tag).send().await?;
        reply.is(200)?.body_is(&content).map(drop)
    });
    let title = "If-Range with a weak ETag brings everything";
    checks.add(SHOULD, "pull.blob.if-range.weak", title, move |repo: Repo| async move {
        let (content, path, tag) = tagged(&repo).await?;
        let weak = format!("W/{}", tag.trim_start_matches("W/"));
        let call = repo.get(&path).header("range", "bytes=0-9").header("if-range", weak);
        call.send().await?.is(200)?.body_is(&content).map(drop)
    });
}

async fn tagged(repo: &Repo) -> Result<(Bytes, String, String), Stop> {
    let content = repo.bytes("blob", LENGTH);
    let path = format!("blobs/{}", repo.push_blob(&content).await?);
    let reply = repo.get(&path).send().await?;
    let Some(tag) = reply.is(200)?.header("etag") else {
        return skip("the registry sends no ETag");
    };
    Ok((content, path, tag.to_owned()))
}

fn add_others(checks: &mut Checks) {
    let title = "a registry that knows ranges says so in Accept-Ranges";
    checks.add(MAY, "pull.blob.range.accept-ranges", title, move |repo: Repo| async move {
        let path = format!("blobs/{}", repo.push_blob(&repo.bytes("blob", LENGTH)).await?);
        repo.head(&path).send().await?.is(200)?.header_is("accept-ranges", "bytes").map(drop)
    });
    let title = "Range does not change HEAD";
    checks.add(SHOULD, "pull.blob.range.head", title, move |repo: Repo| async move {
        let path = format!("blobs/{}", repo.push_blob(&repo.bytes("blob", LENGTH)).await?);
        let reply = repo.head(&path).header("range", "bytes=0-9").send().await?;
        reply.is(200)?.header_is_if_there("content-length", "1000").map(drop)
    });
    let title = "a unit nobody knows is ignored";
    checks.add(MUST, "pull.blob.range.unit", title, move |repo| async move {
        let (content, reply) = ranged(repo, "items=0-9").await?;
        reply.is(200)?.body_is(&content).map(drop)
    });
    let title = "a range of a missing blob is 404";
    checks.add(MUST, "pull.blob.range.missing", title, move |repo: Repo| async move {
        repo.push_blob(&repo.bytes("blob", LENGTH)).await?;
        let path = format!("blobs/{}", super::manifest::NOBODY);
        repo.get(&path).header("range", "bytes=0-9").send().await?.is(404).map(drop)
    });
    let title = "a pull that was cut goes on where it ended";
    checks.add(SHOULD, "pull.blob.range.resume", title, move |repo: Repo| async move {
        let content = repo.bytes("large", 300_000);
        let path = format!("blobs/{}", repo.push_blob(&content).await?);
        let mut have: Vec<u8> = Vec::new();
        while have.len() < content.len() {
            let range = format!("bytes={}-{}", have.len(), have.len() + 99_999);
            let reply = repo.get(&path).header("range", range).send().await?;
            have.extend_from_slice(&reply.is(206)?.body);
        }
        let reply = repo.get(&path).send().await?;
        reply.is(200)?.body_is(&have).map(drop)
    });
}
