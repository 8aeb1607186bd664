//! "Pushing Manifests with Subject" and "Listing Referrers".

use std::collections::BTreeMap;

use kybernate_spec::{Algorithm, Digest, media_type};
use reqwest::Method;
use serde_json::{Value, json};

use super::manifest::NOBODY;
use crate::oci::check::{Checks, MUST, SHOULD, Stop, Verdict, skip};
use crate::oci::content::Doc;
use crate::oci::reply::{Reply, digest_of};
use crate::oci::repo::{Image, Repo, same};

/// The type of most referrers here.
pub(super) const KIND: &str = "application/vnd.example.signature.v1+json";
/// Pages at most.
const PAGES_MAX: usize = 100;

pub(super) fn add(checks: &mut Checks) {
    add_push(checks);
    add_empty(checks);
    add_fields(checks);
    add_life(checks);
    add_pages(checks);
}

/// A subject and an image that is about it, pushed in this order.
pub(super) struct Pair {
    pub(super) repo: Repo,
    pub(super) subject: Image,
    pub(super) referrer: Doc,
    pub(super) pushed: Reply,
}

/// Makes an artifact about a subject; `more` is added to the manifest.
pub(super) async fn about(repo: &Repo, subject: &Doc, more: Value) -> Result<Doc, Stop> {
    let config = repo.push_as(media_type::OCI_EMPTY, &"{}".into()).await?;
    let layer = repo.push_as("application/json", &repo.bytes("signature", 40)).await?;
    let mut fields = json!({
        "artifactType": KIND,
        "subject": subject.descriptor(),
        "annotations": { "org.example.key": "value" },
    });
    if let (Value::Object(fields), Value::Object(more)) = (&mut fields, more) {
        fields.extend(more);
    }
    Ok(Doc::image(&config, &[layer], fields))
}

pub(super) async fn pair(repo: Repo, more: Value) -> Result<Pair, Stop> {
    let subject = repo.push_image("subject").await?;
    let referrer = about(&repo, &subject.doc, more).await?;
    let pushed = repo.put(&referrer.digest().to_string(), &referrer).send().await?;
    pushed.is(201)?;
    Ok(Pair { repo, subject, referrer, pushed })
}

/// Asks for the referrers of a digest, and skips where nobody answers such questions.
pub(super) async fn query(repo: &Repo, subject: &str, query: &str) -> Result<Reply, Stop> {
    let reply = repo.get(&format!("referrers/{subject}{query}")).send().await?;
    match reply.status {
        404 | 405 => skip("the registry has no referrers API"),
        _ => Ok(reply),
    }
}

/// Returns the descriptors of a reply.
pub(super) fn manifests(reply: &Reply) -> Result<Vec<Value>, Stop> {
    let body = reply.is(200)?.json()?;
    match body.get("manifests").and_then(Value::as_array) {
        Some(list) => Ok(list.clone()),
        None => reply.wrong("a list \"manifests\""),
    }
}

/// Returns the digests of a reply, sorted.
pub(super) fn digests(reply: &Reply) -> Result<Vec<String>, Stop> {
    let list = manifests(reply)?;
    let text = |entry: &Value| Some(entry.get("digest")?.as_str()?.to_owned());
    let mut digests: Vec<String> = list.iter().filter_map(text).collect();
    digests.sort();
    Ok(digests)
}

fn add_push(checks: &mut Checks) {
    checks.section("Pushing Manifests with Subject");
    let mut group =
        checks.on("push.subject", move |repo| async move { pair(repo, json!({})).await });
    group.look(MUST, "created", "a manifest with a subject is taken: 201", |pair| {
        pair.pushed.is(201).map(drop)
    });
    for (id, kind) in [("image", "an image"), ("index", "an index"), ("by-tag", "a push by tag")] {
        let title = format!("OCI-Subject tells that the subject of {kind} was seen");
        checks.add(
            MUST,
            format!("push.subject.header.{id}"),
            title,
            move |repo: Repo| async move {
                let subject = repo.push_image("subject").await?;
                query(&repo, &subject.digest.to_string(), "").await?;
                let doc = if id == "index" {
                    Doc::index(&[], json!({ "subject": subject.doc.descriptor() }))
                } else {
                    about(&repo, &subject.doc, json!({})).await?
                };
                let digest = doc.digest().to_string();
                let reference = if id == "by-tag" { "referrer" } else { digest.as_str() };
                let reply = repo.put(reference, &doc).send().await?;
                reply.is(201)?.header_is("oci-subject", &subject.digest.to_string()).map(drop)
            },
        );
    }
    let title = "a subject that is not there is no reason to refuse";
    checks.add(MUST, "push.subject.missing.created", title, move |repo: Repo| async move {
        let subject = repo.image_with("never pushed", json!({})).await?;
        let doc = about(&repo, &subject.doc, json!({})).await?;
        repo.put("referrer", &doc).send().await?.is(201).map(drop)
    });
    let title = "an index whose subject is not there is taken, too";
    checks.add(MUST, "push.subject.missing.index", title, move |repo: Repo| async move {
        let subject = repo.image_with("never pushed", json!({})).await?;
        let doc = Doc::index(&[], json!({ "subject": subject.doc.descriptor() }));
        repo.put("referrer", &doc).send().await?.is(201).map(drop)
    });
    let title = "a manifest with a subject comes back byte by byte";
    checks.add(MUST, "push.subject.exact", title, move |repo| async move {
        let Pair { repo, referrer, .. } = pair(repo, json!({})).await?;
        let reply = repo.get(&format!("manifests/{}", referrer.digest())).send().await?;
        reply.is(200)?.body_is(&referrer.content).map(drop)
    });
}

fn add_empty(checks: &mut Checks) {
    checks.section("Listing Referrers");
    let title = "the registry has a referrers API";
    checks.add(SHOULD, "list.referrers.supported", title, move |repo: Repo| async move {
        let image = repo.push_image("subject").await?;
        repo.get(&format!("referrers/{}", image.digest)).send().await?.is(200).map(drop)
    });
    for (id, what) in [("none", "nothing refers to"), ("missing", "nobody has")] {
        let act = move |repo: Repo| async move {
            let image = repo.push_image("subject").await?;
            let digest = if id == "none" { image.digest.to_string() } else { NOBODY.to_owned() };
            query(&repo, &digest, "").await
        };
        let mut group = checks.on(format!("list.referrers.{id}"), act);
        let title = format!("referrers of what {what}: 200");
        group.look(MUST, "ok", title, |reply| reply.is(200).map(drop));
        let title = format!("referrers of what {what}: an empty list");
        group.look(MUST, "empty", title, |reply| same(reply, &manifests(reply)?, &Vec::new()));
        let title = format!("referrers of what {what}: an image index");
        group.look(MUST, "type", title, |reply| {
            reply.is(200)?.header_is("content-type", media_type::OCI_INDEX).map(drop)
        });
        let title = format!("referrers of what {what}: schemaVersion and mediaType");
        group.look(MUST, "index", title, |reply| {
            let body = reply.is(200)?.json()?;
            let pair = (body.get("schemaVersion").cloned(), body.get("mediaType").cloned());
            same(reply, &pair, &(Some(json!(2)), Some(json!(media_type::OCI_INDEX))))
        });
    }
}

/// The only descriptor in the list of a subject.
async fn listed(repo: Repo, more: Value) -> Result<(Pair, Reply, Value), Stop> {
    let pair = pair(repo, more).await?;
    let reply = query(&pair.repo, &pair.subject.digest.to_string(), "").await?;
    let mut list = manifests(&reply)?;
    match (list.pop(), list.is_empty()) {
        (Some(entry), true) => Ok((pair, reply, entry)),
        _ => reply.wrong("exactly one descriptor"),
    }
}

fn add_fields(checks: &mut Checks) {
    let mut group =
        checks.on("list.referrers.entry", move |repo| async move { listed(repo, json!({})).await });
    group.look(MUST, "digest", "a descriptor has the digest", |(pair, reply, entry)| {
        same(reply, &entry.get("digest"), &Some(&json!(pair.referrer.digest())))
    });
    group.look(MUST, "size", "a descriptor has the size", |(pair, reply, entry)| {
        same(reply, &entry.get("size"), &Some(&json!(pair.referrer.content.len())))
    });
    group.look(MUST, "media-type", "a descriptor has the media type", |(_, reply, entry)| {
        same(reply, &entry.get("mediaType"), &Some(&json!(media_type::OCI_MANIFEST)))
    });
    group.look(MUST, "artifact-type", "a descriptor has the artifactType", |(_, reply, entry)| {
        same(reply, &entry.get("artifactType"), &Some(&json!(KIND)))
    });
    group.look(MUST, "annotations", "a descriptor has the annotations", |(_, reply, entry)| {
        let wanted = json!({ "org.example.key": "value" });
        same(reply, &entry.get("annotations"), &Some(&wanted))
    });
    for (id, value) in [("missing", Value::Null), ("empty", json!(""))] {
        let title = format!("where artifactType is {id}, the config's type stands in");
        checks.add(MUST, format!("list.referrers.artifact-type.{id}"), title, move |repo| {
            let value = value.clone();
            async move {
                let more = json!({ "artifactType": value });
                let (_, reply, entry) = listed(repo, more).await?;
                same(&reply, &entry.get("artifactType"), &Some(&json!(media_type::OCI_EMPTY)))
            }
        });
    }
    let title = "an index with an artifactType is listed with it";
    checks.add(MUST, "list.referrers.artifact-type.index", title, move |repo: Repo| async move {
        let (reply, entry) = index(repo, json!({ "artifactType": KIND })).await?;
        same(&reply, &entry.get("artifactType"), &Some(&json!(KIND)))?;
        same(&reply, &entry.get("mediaType"), &Some(&json!(media_type::OCI_INDEX)))
    });
    let title = "an index without an artifactType is listed without one";
    checks.add(
        MUST,
        "list.referrers.artifact-type.index-without",
        title,
        move |repo: Repo| async move {
            let (reply, entry) = index(repo, json!({})).await?;
            same(&reply, &entry.get("artifactType"), &None)
        },
    );
    let title = "annotations of an index are listed";
    checks.add(MUST, "list.referrers.annotations.index", title, move |repo: Repo| async move {
        let annotations = json!({ "org.example.b": "2", "org.example.a": "ä" });
        let (reply, entry) = index(repo, json!({ "annotations": annotations })).await?;
        same(&reply, &entry.get("annotations"), &Some(&annotations))
    });
}

/// Pushes an index about a subject and returns its descriptor.
async fn index(repo: Repo, mut fields: Value) -> Result<(Reply, Value), Stop> {
    let subject = repo.push_image("subject").await?;
    if let Value::Object(fields) = &mut fields {
        fields.insert("subject".to_owned(), json!(subject.doc.descriptor()));
    }
    let doc = Doc::index(&[], fields);
    repo.put("index", &doc).send().await?.is(201)?;
    let reply = query(&repo, &subject.digest.to_string(), "").await?;
    match manifests(&reply)?.as_slice() {
        [entry] => Ok((reply, entry.clone())),
        _ => reply.wrong("exactly one descriptor"),
    }
}

fn add_life(checks: &mut Checks) {
    let title = "referrers that came before their subject are listed";
    checks.add(MUST, "list.referrers.before-the-subject", title, move |repo: Repo| async move {
        let subject = repo.image_with("late", json!({})).await?;
        let doc = about(&repo, &subject.doc, json!({})).await?;
        repo.put("referrer", &doc).send().await?.is(201)?;
        let wanted = vec![doc.digest().to_string()];
        let digest = subject.digest.to_string();
        let reply = query(&repo, &digest, "").await?;
        same(&reply, &digests(&reply)?, &wanted)?;
        repo.put("late", &subject.doc).send().await?.is(201)?;
        let reply = query(&repo, &digest, "").await?;
        same(&reply, &digests(&reply)?, &wanted)
    });
    let title = "a referrer that is pushed again is listed once";
    checks.add(MUST, "list.referrers.once", title, move |repo| async move {
        let Pair { repo, subject, referrer, .. } = pair(repo, json!({})).await?;
        for tag in ["one", "two"] {
            repo.put(tag, &referrer).send().await?.is(201)?;
        }
        let reply = query(&repo, &subject.digest.to_string(), "").await?;
        same(&reply, &digests(&reply)?, &vec![referrer.digest().to_string()])
    });
    let title = "a referrer is listed in its own repository alone";
    checks.add(MUST, "list.referrers.other-repository", title, move |repo| async move {
        let Pair { repo, subject, .. } = pair(repo, json!({})).await?;
        let other = repo.beside("other");
        other.push_image("any").await?;
        let reply = query(&other, &subject.digest.to_string(), "").await?;
        same(&reply, &digests(&reply)?, &Vec::new())
    });
    let title = "a referrer may have referrers";
    checks.add(MUST, "list.referrers.chain", title, move |repo| async move {
        let Pair { repo, subject, referrer, .. } = pair(repo, json!({})).await?;
        let second = about(&repo, &referrer, json!({})).await?;
        repo.put("second", &second).send().await?.is(201)?;
        for (about, from) in [(subject.digest, &referrer), (referrer.digest(), &second)] {
            let reply = query(&repo, &about.to_string(), "").await?;
            same(&reply, &digests(&reply)?, &vec![from.digest().to_string()])?;
        }
        Ok(())
    });
    let title = "a referrer that was deleted is not listed";
    checks.add(MUST, "list.referrers.deleted", title, move |repo| async move {
        let Pair { repo, subject, referrer, .. } = pair(repo, json!({})).await?;
        let digest = subject.digest.to_string();
        query(&repo, &digest, "").await?;
        let reply = repo.delete(&format!("manifests/{}", referrer.digest())).send().await?;
        if reply.or_unsupported()?.status == 400 {
            return skip("the registry deletes no manifests");
        }
        reply.is(202)?;
        let reply = query(&repo, &digest, "").await?;
        same(&reply, &digests(&reply)?, &Vec::new())
    });
    let title = "a subject may have a sha512 digest";
    checks.add(MUST, "list.referrers.sha512", title, sha512);
}

async fn sha512(repo: Repo) -> Verdict {
    let subject = repo.image_with("subject", json!({})).await?;
    let digest = digest_of(Algorithm::Sha512, &subject.doc.content);
    if repo.put(&digest.to_string(), &subject.doc).send().await?.status != 201 {
        return skip("the registry does not know sha512");
    }
    let descriptor = json!({ "mediaType": subject.doc.media_type, "digest": digest,
        "size": subject.doc.content.len() });
    let doc = about(&repo, &subject.doc, json!({ "subject": descriptor })).await?;
    repo.put("referrer", &doc).send().await?.is(201)?;
    let reply = query(&repo, &digest.to_string(), "").await?;
    same(&reply, &digests(&reply)?, &vec![doc.digest().to_string()])
}

fn add_pages(checks: &mut Checks) {
    let title = "forty referrers are listed, each once, over as many pages as it takes";
    checks.add(MUST, "list.referrers.many", title, move |repo: Repo| async move {
        many(repo, "").await
    });
    let title = "a registry that pages by n finds all, too";
    checks.add(MUST, "list.referrers.many-by-n", title, move |repo: Repo| async move {
        many(repo, "?n=7").await
    });
}

async fn many(repo: Repo, start: &str) -> Verdict {
    let subject = repo.push_image("subject").await?;
    let digest = subject.digest.to_string();
    let mut wanted = BTreeMap::new();
    for number in 0..40 {
        let annotations = json!({ "annotations": { "number": number.to_string() } });
        let doc = about(&repo, &subject.doc, annotations).await?;
        repo.put(&doc.digest().to_string(), &doc).send().await?.is(201)?;
        wanted.insert(doc.digest().to_string(), 1);
    }
    let mut reply = query(&repo, &digest, start).await?;
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    for _ in 0..PAGES_MAX {
        for digest in digests(&reply)? {
            *found.entry(digest).or_default() += 1;
        }
        let Some(next) = reply.next()? else { break };
        reply = repo.at(Method::GET, &next).send().await?;
        reply.is(200)?.header_is("content-type", media_type::OCI_INDEX)?;
    }
    same(&reply, &found, &wanted)
}

/// Whether this is a digest of the content.
pub(super) fn is_of(digest: &str, doc: &Doc) -> bool {
    digest.parse::<Digest>().is_ok_and(|digest| digest == doc.digest())
}
