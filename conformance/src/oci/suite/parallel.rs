//! Many at once: "If process A and B upload the same layer at the same time, both operations will
//! proceed" ("Use Cases").

use std::collections::BTreeSet;

use bytes::Bytes;
use futures::future::try_join_all;
use kybernate_spec::Digest;
use serde_json::json;

use super::referrer::{about, digests, query};
use crate::oci::check::{Checks, MUST, SHOULD, Stop, Verdict, skip};
use crate::oci::repo::{Repo, same};

/// How many do the same at once.
const MANY: usize = 8;

pub(super) fn add(checks: &mut Checks) {
    checks.section("Use Cases: Layer Upload De-duplication");
    let title = "eight clients push the same blob at once, and all succeed";
    checks.add(MUST, "parallel.blob.same", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 200_000);
        let digests = try_join_all((0..MANY).map(|_| repo.push_blob(&content))).await?;
        let digest = digests.first().map(ToString::to_string).unwrap_or_default();
        let reply = repo.get(&format!("blobs/{digest}")).send().await?;
        reply.is(200)?.body_is(&content).map(drop)
    });
    let title = "eight clients push the same blob to eight repositories at once";
    checks.add(MUST, "parallel.blob.repositories", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 100_000);
        let repos: Vec<Repo> = (0..MANY).map(|n| repo.beside(&n.to_string())).collect();
        try_join_all(repos.iter().map(|repo| repo.push_blob(&content))).await?;
        for repo in repos {
            let path = format!("blobs/{}", Digest::of(&content));
            repo.get(&path).send().await?.is(200)?.body_is(&content)?;
        }
        Ok(())
    });
    checks.add(MUST, "parallel.blob.chunked", "eight uploads in chunks do not mix", chunked);
    let title = "a blob is absent or whole while it is pushed";
    checks.add(MUST, "parallel.blob.pull-while-pushed", title, while_pushed);
    let title = "eight pulls of a blob at once bring the same";
    checks.add(MUST, "parallel.blob.pulls", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 500_000);
        let path = format!("blobs/{}", repo.push_blob(&content).await?);
        let pull = async || repo.get(&path).send().await?.is(200)?.body_is(&content).map(drop);
        try_join_all((0..MANY).map(|_| pull())).await.map(drop)
    });
    add_manifests(checks);
}

fn add_manifests(checks: &mut Checks) {
    checks.section("Pushing Manifests");
    let title = "eight clients push the same manifest at once, and all succeed";
    checks.add(MUST, "parallel.manifest.same", title, move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        let push = async || repo.put("latest", &image.doc).send().await?.is(201).map(drop);
        try_join_all((0..MANY).map(|_| push())).await?;
        let reply = repo.get("manifests/latest").send().await?;
        reply.is(200)?.body_is(&image.doc.content).map(drop)
    });
    let title = "eight manifests pushed to one tag at once: it names one of them";
    checks.add(MUST, "parallel.tag.race", title, race);
    let title = "eight tags pushed at once are all listed";
    checks.add(MUST, "parallel.tag.different", title, move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        let tags: Vec<String> = (0..MANY).map(|number| format!("t{number}")).collect();
        let push = async |tag: &str| repo.put(tag, &image.doc).send().await?.is(201).map(drop);
        try_join_all(tags.iter().map(|tag| push(tag))).await?;
        let reply = repo.get("tags/list").send().await?;
        let body = reply.is(200)?.json()?;
        same(&reply, &body.get("tags"), &Some(&json!(tags)))
    });
    checks.section("Listing Referrers");
    let title = "eight referrers pushed at once are all listed";
    checks.add(MUST, "parallel.referrers", title, referrers);
    checks.section("Deleting Manifests");
    let title = "a manifest deleted by eight at once is gone, and nobody sees a failure";
    checks.add(SHOULD, "parallel.delete", title, move |repo: Repo| async move {
        let image = repo.push_image("latest").await?;
        let path = format!("manifests/{}", image.digest);
        let delete = async || {
            let reply = repo.delete(&path).send().await?;
            if reply.or_unsupported()?.status == 400 {
                return skip("the registry deletes no manifests");
            }
            reply.is_any(&[202, 404]).map(drop)
        };
        try_join_all((0..MANY).map(|_| delete())).await?;
        repo.get(&path).send().await?.is(404).map(drop)
    });
}

async fn chunked(repo: Repo) -> Verdict {
    let one = async |number: usize| -> Result<(), Stop> {
        let content = repo.bytes(&number.to_string(), 30_000);
        let digest = Digest::of(&content).to_string();
        let mut session = repo.begin().await?;
        for start in [0, 10_000, 20_000] {
            let chunk = content.slice(start..start + 10_000);
            let reply = repo.chunk(&session, start, chunk).send().await?;
            session = reply.is(202)?.location()?;
        }
        repo.finish(&session, &digest, Bytes::new()).send().await?.is(201)?;
        let reply = repo.get(&format!("blobs/{digest}")).send().await?;
        reply.is(200)?.body_is(&content).map(drop)
    };
    try_join_all((0..MANY).map(one)).await.map(drop)
}

async fn while_pushed(repo: Repo) -> Verdict {
    repo.push_blob(&repo.bytes("makes it exist", 10)).await?;
    let content = repo.bytes("blob", 4 << 20);
    let path = format!("blobs/{}", Digest::of(&content));
    let pull = async || -> Result<(), Stop> {
        for _ in 0..10 {
            let reply = repo.get(&path).send().await?;
            reply.is_any(&[200, 404])?;
            if reply.status == 200 {
                reply.body_is(&content)?;
            }
        }
        Ok(())
    };
    let (pushed, pulled) = futures::join!(repo.push_blob(&content), pull());
    pushed?;
    pulled?;
    repo.get(&path).send().await?.is(200)?.body_is(&content).map(drop)
}

async fn race(repo: Repo) -> Verdict {
    let mut images = Vec::new();
    for number in 0..MANY {
        images.push(repo.image_with(&number.to_string(), json!({})).await?);
    }
    let push = async |number: usize| -> Result<(), Stop> {
        let Some(image) = images.get(number) else { return Ok(()) };
        repo.put("latest", &image.doc).send().await?.is(201).map(drop)
    };
    try_join_all((0..MANY).map(push)).await?;
    let reply = repo.get("manifests/latest").send().await?;
    let known: BTreeSet<&[u8]> = images.iter().map(|image| image.doc.content.as_ref()).collect();
    if !known.contains(reply.is(200)?.body.as_ref()) {
        return reply.wrong("one of the manifests that were pushed");
    }
    for image in &images {
        let reply = repo.get(&format!("manifests/{}", image.digest)).send().await?;
        reply.is(200)?.body_is(&image.doc.content)?;
    }
    Ok(())
}

async fn referrers(repo: Repo) -> Verdict {
    let subject = repo.push_image("subject").await?;
    let digest = subject.digest.to_string();
    query(&repo, &digest, "").await?;
    let push = async |number: usize| -> Result<String, Stop> {
        let more = json!({ "annotations": { "number": number.to_string() } });
        let doc = about(&repo, &subject.doc, more).await?;
        repo.put(&doc.digest().to_string(), &doc).send().await?.is(201)?;
        Ok(doc.digest().to_string())
    };
    let mut wanted = try_join_all((0..MANY).map(push)).await?;
    wanted.sort();
    let reply = query(&repo, &digest, "").await?;
    same(&reply, &digests(&reply)?, &wanted)
}
