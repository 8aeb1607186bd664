//! "Pushing Manifests".

use bytes::Bytes;
use kybernate_spec::{Algorithm, Descriptor, Digest, media_type};
use reqwest::Method;
use serde_json::{Value, json};

use super::manifest::NOBODY;
use crate::oci::check::{Checks, DEV_MUST, DEV_SHOULD, MAY, MUST, SHOULD, Stop, Verdict, skip};
use crate::oci::content::Doc;
use crate::oci::reply::{Reply, digest_of};
use crate::oci::repo::{Image, Repo};

pub(super) mod kinds;

pub(super) fn add(checks: &mut Checks) {
    checks.section("Pushing Manifests");
    kinds::add(checks);
    add_replies(checks);
    add_digests(checks);
    add_missing(checks);
    add_malformed(checks);
    add_sizes(checks);
    add_types(checks);
    add_tags(checks);
    add_tag_parameters(checks);
}

/// An image, and the reply to its push.
type Pushed = (Repo, Image, Reply);

async fn pushed(repo: Repo, by_tag: bool) -> Result<Pushed, Stop> {
    let image = repo.image_with("image", json!({})).await?;
    let reference = if by_tag { "latest".to_owned() } else { image.digest.to_string() };
    let reply = repo.put(&reference, &image.doc).send().await?;
    Ok((repo, image, reply))
}

fn add_replies(checks: &mut Checks) {
    for by in ["tag", "digest"] {
        let act = move |repo| async move { pushed(repo, by == "tag").await };
        let mut group = checks.on(format!("push.manifest.by-{by}"), act);
        let title = format!("a manifest pushed by {by} is answered with 201");
        group.look(MUST, "created", title, |(_, _, reply)| reply.is(201).map(drop));
        let title = format!("a manifest pushed by {by} has a Location");
        group.look(MUST, "location", title, |(_, _, reply)| reply.is(201)?.location().map(drop));
        let title = format!("the digest told after a push by {by} is the content's");
        group.look(MUST, "digest", title, |(_, image, reply)| {
            reply.is(201)?.digest_header_fits(&image.doc.content).map(drop)
        });
        group.look(MUST, "no-subject", "no OCI-Subject without a subject", |(_, _, reply)| {
            reply.is(201)?.lacks("oci-subject").map(drop)
        });
        let title = format!("the Location of a push by {by} is a URL to pull from");
        let id = format!("push.manifest.by-{by}.location-pullable");
        checks.add(MUST, id, title, move |repo| async move {
            let (repo, image, reply) = act(repo).await?;
            let location = reply.is(201)?.location()?;
            let reply = repo.at(Method::GET, &location).send().await?;
            reply.is(200)?.body_is(&image.doc.content).map(drop)
        });
        let title = format!("a manifest pushed by {by} is found by its digest");
        let id = format!("push.manifest.by-{by}.pullable");
        checks.add(MUST, id, title, move |repo| async move {
            let (repo, image, reply) = act(repo).await?;
            reply.is(201)?;
            let path = format!("manifests/{}", image.digest);
            repo.head(&path).send().await?.is(200)?;
            repo.get(&path).send().await?.is(200)?.body_is(&image.doc.content).map(drop)
        });
    }
    let title = "a manifest pushed by digest has no tag";
    checks.add(MUST, "push.manifest.by-digest.no-tag", title, move |repo| async move {
        let (repo, _, reply) = pushed(repo, false).await?;
        reply.is(201)?;
        let reply = repo.get("tags/list").send().await?;
        if reply.status == 404 {
            return Ok(());
        }
        let none = reply
            .is(200)?
            .json()?
            .get("tags")
            .is_none_or(|tags| tags.as_array().is_none_or(Vec::is_empty));
        if none { Ok(()) } else { reply.wrong("no tags") }
    });
}

fn add_digests(checks: &mut Checks) {
    let act = move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        let reply = repo.put(NOBODY, &image.doc).send().await?;
        Ok((repo, image, reply))
    };
    let mut group = checks.on("push.manifest.wrong-digest", act);
    group.look(
        MUST,
        "refused",
        "a manifest that is not its digest's is refused",
        |pushed: &Pushed| pushed.2.is_refused().map(drop),
    );
    group.look(SHOULD, "bad-request", "it is refused with 400", |(_, _, reply)| {
        reply.is(400).map(drop)
    });
    group.look(SHOULD, "code", "the code for it is DIGEST_INVALID", |(_, _, reply)| {
        reply.is_refused()?.code_is(&["DIGEST_INVALID"]).map(drop)
    });
    let title = "it is not stored";
    checks.add(MUST, "push.manifest.wrong-digest.absent", title, move |repo| async move {
        let (repo, _, _) = act(repo).await?;
        repo.get(&format!("manifests/{NOBODY}")).send().await?.is(404).map(drop)
    });
    let act = move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        let digest = digest_of(Algorithm::Sha512, &image.doc.content);
        let reply = repo.put(&digest.to_string(), &image.doc).send().await?;
        if reply.status == 400 {
            return skip("the registry does not know sha512");
        }
        Ok((repo, image, reply))
    };
    let mut group = checks.on("push.manifest.sha512", act);
    let title = "a manifest with a sha512 digest is answered with 201";
    group.look(MUST, "created", title, |pushed: &Pushed| pushed.2.is(201).map(drop));
    let title = "the digest told is the sha512 the client has given";
    group.look(MUST, "digest", title, |(_, image, reply)| {
        let digest = digest_of(Algorithm::Sha512, &image.doc.content).to_string();
        reply.is(201)?.header_is_if_there("docker-content-digest", &digest).map(drop)
    });
    let title = "a manifest with a sha512 digest can be pulled";
    checks.add(MUST, "push.manifest.sha512.pullable", title, move |repo| async move {
        let (repo, image, reply) = act(repo).await?;
        reply.is(201)?;
        let digest = digest_of(Algorithm::Sha512, &image.doc.content);
        let reply = repo.get(&format!("manifests/{digest}")).send().await?;
        reply.is(200)?.body_is(&image.doc.content).map(drop)
    });
}

/// Manifests that refer to what is not there.
fn add_missing(checks: &mut Checks) {
    let gone = |media_type: &str| Descriptor::of(media_type, b"nobody has this");
    for id in ["config", "layer", "every-blob", "child"] {
        let act = move |repo: Repo| async move {
            let image = repo.image_with("image", json!({})).await?;
            let (config, layer) = (gone(media_type::OCI_CONFIG), gone(media_type::OCI_LAYER_TAR));
            let doc = match id {
                "config" => Doc::image(&config, &[image.layer], json!({})),
                "layer" => Doc::image(&image.config, &[image.layer, layer], json!({})),
                "every-blob" => Doc::image(&config, &[layer], json!({})),
                _ => Doc::index(&[gone(media_type::OCI_MANIFEST)], json!({})),
            };
            repo.put("latest", &doc).send().await
        };
        let mut group = checks.on(format!("push.manifest.missing-{id}"), act);
        let title = format!("a manifest whose {id} is missing is taken or refused with 4xx");
        group.look(MUST, "answered", title, |reply| {
            if reply.status == 201 { Ok(()) } else { reply.is_refused().map(drop) }
        });
        let title = format!("a refusal for a missing {id} says MANIFEST_BLOB_UNKNOWN");
        group.look(MUST, "code", title, |reply| {
            if reply.status == 201 {
                return skip("the registry takes it, as it may");
            }
            reply.code_is(&["MANIFEST_BLOB_UNKNOWN"]).map(drop)
        });
    }
    let title = "a manifest that was refused for a missing blob is taken once it is there";
    checks.add(
        MUST,
        "push.manifest.missing-layer.then-there",
        title,
        move |repo: Repo| async move {
            let (image, content) =
                (repo.image_with("image", json!({})).await?, repo.bytes("late", 9));
            let layers = [image.layer, Descriptor::of(media_type::OCI_LAYER_TAR, &content)];
            let doc = Doc::image(&image.config, &layers, json!({}));
            let reply = repo.put("latest", &doc).send().await?;
            if reply.status == 201 {
                return skip("the registry takes it without, as it may");
            }
            repo.push_blob(&content).await?;
            repo.put("latest", &doc).send().await?.is(201).map(drop)
        },
    );
    let title = "a manifest that was refused is not there";
    checks.add(MUST, "push.manifest.missing-layer.absent", title, move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        let layer = Descriptor::of(media_type::OCI_LAYER_TAR, b"nobody has this");
        let doc = Doc::image(&image.config, &[layer], json!({}));
        if repo.put("latest", &doc).send().await?.status == 201 {
            return skip("the registry takes it, as it may");
        }
        repo.get("manifests/latest").send().await?.is(404)?;
        repo.get(&format!("manifests/{}", doc.digest())).send().await?.is(404).map(drop)
    });
}

/// What is no manifest of the media type it is pushed as.
const MALFORMED: &[(&str, &str)] = &[
    ("empty", ""),
    ("no-json", "this is no JSON"),
    ("cut", r#"{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json""#),
    ("array", "[]"),
    ("null", "null"),
    ("text", r#""manifest""#),
    ("no-config", r#"{"schemaVersion":2,"layers":[]}"#),
    ("layers-is-text", r#"{"schemaVersion":2,"config":{},"layers":"none"}"#),
    (
        "bad-digest",
        r#"{"schemaVersion":2,"layers":[],"config":{"digest":"sha256:x","size":1,
        "mediaType":"application/vnd.oci.image.config.v1+json"}}"#,
    ),
];

fn add_malformed(checks: &mut Checks) {
    for (id, text) in MALFORMED {
        let act = move |repo: Repo| async move {
            repo.push_blob(&repo.bytes("makes it exist", 10)).await?;
            repo.put("latest", &Doc::raw(media_type::OCI_MANIFEST, *text)).send().await
        };
        let mut group = checks.on(format!("push.manifest.malformed.{id}"), act);
        let title = format!("a manifest that is malformed ({id}) is refused");
        group.look(SHOULD, "refused", title, |reply| reply.is_refused().map(drop));
        let title = format!("the code for it ({id}) is MANIFEST_INVALID");
        group.look(SHOULD, "code", title, |reply| {
            let codes = ["MANIFEST_INVALID", "DIGEST_INVALID", "MANIFEST_BLOB_UNKNOWN"];
            reply.is_refused()?.code_is(&codes).map(drop)
        });
    }
    let title = "bytes that are no UTF-8 are refused";
    checks.add(SHOULD, "push.manifest.malformed.not-utf8", title, move |repo: Repo| async move {
        let doc = Doc::raw(media_type::OCI_MANIFEST, Bytes::from_static(b"{\"a\":\"\xff\"}"));
        repo.put("latest", &doc).send().await?.is_refused().map(drop)
    });
    let title = "JSON that is a hundred thousand levels deep is refused";
    checks.add(SHOULD, "push.manifest.malformed.deep", title, move |repo: Repo| async move {
        let doc = Doc::raw(media_type::OCI_MANIFEST, "[".repeat(100_000));
        repo.put("latest", &doc).send().await?.is_refused().map(drop)
    });
    let title = "what was refused as malformed is not there";
    checks.add(MUST, "push.manifest.malformed.absent", title, move |repo: Repo| async move {
        let doc = Doc::raw(media_type::OCI_MANIFEST, "this is no JSON");
        if repo.put("latest", &doc).send().await?.status == 201 {
            return skip("the registry takes it");
        }
        repo.get("manifests/latest").send().await?.is(404).map(drop)
    });
}

/// An image whose manifest has a length of its own, through one annotation.
async fn sized(repo: &Repo, length: usize) -> Result<Doc, Stop> {
    let image = repo.image_with("image", json!({})).await?;
    let with = |text: String| json!({ "annotations": { "filler": text } });
    let make = |more: Value| Doc::image(&image.config, std::slice::from_ref(&image.layer), more);
    let rest = length.saturating_sub(make(with(String::new())).content.len());
    Ok(make(with("x".repeat(rest))))
}

fn add_sizes(checks: &mut Checks) {
    for (id, length) in [("100-kb", 100_000), ("1-mb", 1_000_000), ("4-mb", 4_000_000)] {
        let title = format!("a manifest of {id} is taken and comes back");
        checks.add(
            SHOULD,
            format!("push.manifest.size.{id}"),
            title,
            move |repo: Repo| async move {
                let doc = sized(&repo, length).await?;
                repo.put("latest", &doc).send().await?.is(201)?;
                let reply = repo.get("manifests/latest").send().await?;
                reply.is(200)?.body_is(&doc.content).map(drop)
            },
        );
    }
    let title = "there is a limit on a manifest's size, and beyond it is 413";
    checks.add(SHOULD, "push.manifest.size.too-large", title, move |repo: Repo| async move {
        let mut reply = repo.put("latest", &sized(&repo, 5 << 20).await?).send().await?;
        if reply.status == 201 {
            reply = repo.put("latest", &sized(&repo, 32 << 20).await?).send().await?;
        }
        reply.is(413).map(drop)
    });
    let title = "a manifest beyond the limit is not stored";
    checks.add(MUST, "push.manifest.size.too-large-absent", title, move |repo: Repo| async move {
        let doc = sized(&repo, 5 << 20).await?;
        if repo.put("latest", &doc).send().await?.status == 201 {
            return skip("the registry takes manifests of 5 MiB");
        }
        repo.get("manifests/latest").send().await?.is(404).map(drop)
    });
    let title = "a thousand layers are taken";
    checks.add(SHOULD, "push.manifest.size.thousand-layers", title, move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        let doc = Doc::image(&image.config, &vec![image.layer; 1000], json!({}));
        repo.put("latest", &doc).send().await?.is(201).map(drop)
    });
}

fn add_types(checks: &mut Checks) {
    let title = "parameters of the Content-Type are ignored";
    checks.add(SHOULD, "push.manifest.type.parameters", title, move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        let call = repo.call(Method::PUT, "manifests/latest").body(image.doc.content.clone());
        let with = format!("{}; charset=utf-8", media_type::OCI_MANIFEST);
        call.header("content-type", with).send().await?.is(201)?;
        let reply = repo.get("manifests/latest").send().await?;
        reply.is(200)?.header_is("content-type", media_type::OCI_MANIFEST).map(drop)
    });
    let title = "a manifest that says to be something else is no failure of the registry";
    checks.add(MUST, "push.manifest.type.mismatch", title, move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        let doc = Doc::raw(media_type::OCI_INDEX, image.doc.content);
        repo.put("latest", &doc).send().await?.is_no_crash().map(drop)
    });
    let title = "a manifest without a Content-Type is no failure of the registry";
    checks.add(MUST, "push.manifest.type.absent", title, move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        let call = repo.call(Method::PUT, "manifests/latest").body(image.doc.content.clone());
        call.send().await?.is_no_crash().map(drop)
    });
    let title = "a manifest without the field mediaType is taken";
    checks.add(SHOULD, "push.manifest.type.no-field", title, move |repo: Repo| async move {
        let image = repo.image_with("image", json!({ "mediaType": null })).await?;
        repo.put("latest", &image.doc).send().await?.is(201)?;
        let reply = repo.get("manifests/latest").send().await?;
        reply.is(200)?.header_is("content-type", media_type::OCI_MANIFEST).map(drop)
    });
}

fn add_tags(checks: &mut Checks) {
    let title = "a tag that is pushed again names the new manifest";
    checks.add(MUST, "push.manifest.tag.moves", title, move |repo: Repo| async move {
        repo.push_image("latest").await?;
        let new = repo.image_with("new", json!({})).await?;
        repo.put("latest", &new.doc).send().await?.is(201)?;
        let reply = repo.get("manifests/latest").send().await?;
        reply.is(200)?.body_is(&new.doc.content)?;
        repo.head("manifests/latest").send().await?.digest_header_fits(&new.doc.content).map(drop)
    });
    let title = "a manifest whose tag has moved is still there by digest";
    checks.add(MUST, "push.manifest.tag.moved-from", title, move |repo: Repo| async move {
        let old = repo.push_image("latest").await?;
        let new = repo.image_with("new", json!({})).await?;
        repo.put("latest", &new.doc).send().await?.is(201)?;
        let reply = repo.get(&format!("manifests/{}", old.digest)).send().await?;
        reply.is(200)?.body_is(&old.doc.content).map(drop)
    });
    let title = "a tag can move back";
    checks.add(MUST, "push.manifest.tag.moves-back", title, move |repo: Repo| async move {
        let old = repo.push_image("latest").await?;
        let new = repo.image_with("new", json!({})).await?;
        for doc in [&new.doc, &old.doc] {
            repo.put("latest", doc).send().await?.is(201)?;
        }
        let reply = repo.get("manifests/latest").send().await?;
        reply.is(200)?.body_is(&old.doc.content).map(drop)
    });
    let title = "one manifest can have many tags";
    checks.add(MUST, "push.manifest.tag.many", title, move |repo: Repo| async move {
        let tags: Vec<String> = (0..10).map(|number| format!("t{number}")).collect();
        let names: Vec<&str> = tags.iter().map(String::as_str).collect();
        let image = repo.push_tags(&names).await?;
        for tag in names {
            let reply = repo.get(&format!("manifests/{tag}")).send().await?;
            reply.is(200)?.body_is(&image.doc.content)?;
        }
        Ok(())
    });
}

/// Tags in the query of a push by digest; what was answered, unless the registry ignores them.
async fn tagged(repo: Repo, tags: usize) -> Result<(Repo, Image, Vec<String>, Reply), Stop> {
    let image = repo.image_with("image", json!({})).await?;
    let names: Vec<String> = (0..tags).map(|number| format!("v{number}")).collect();
    let query: Vec<String> = names.iter().map(|name| format!("tag={name}")).collect();
    let call = repo.put(&image.digest.to_string(), &image.doc).query(&query.join("&"));
    let reply = call.send().await?;
    if reply.status == 201 && !reply.headers.contains_key("oci-tag") {
        return skip("the registry sets no tags from the query, as it may");
    }
    Ok((repo, image, names, reply))
}

/// Returns the tags in `OCI-Tag` headers, which may be one or a list (RFC 9110, 5).
fn told(reply: &Reply) -> Vec<String> {
    let lines = reply.headers.get_all("oci-tag").iter().filter_map(|value| value.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(|tag| tag.trim().to_owned()).collect()
}

fn add_tag_parameters(checks: &mut Checks) {
    checks.section("Pushing Manifests: tag parameters");
    for (id, need, count) in [("one", DEV_MUST, 1), ("four", DEV_MUST, 4), ("ten", DEV_SHOULD, 10)]
    {
        let act = move |repo| async move { tagged(repo, count).await };
        let mut group = checks.on(format!("push.manifest.tags.{id}"), act);
        let title = format!("a push by digest with {id} tags is answered with 201");
        group.look(need, "created", title, |(_, _, _, reply)| reply.is(201).map(drop));
        let title = format!("every tag of {id} is told in OCI-Tag");
        group.look(need, "told", title, |(_, _, names, reply)| {
            let mut found = told(reply);
            found.sort();
            if found == *names { Ok(()) } else { reply.wrong(format!("OCI-Tag: {names:?}")) }
        });
        let title = format!("every tag told of {id} names the manifest");
        checks.add(DEV_MUST, format!("push.manifest.tags.{id}.pullable"), title, {
            move |repo| async move { pullable(act(repo).await?).await }
        });
    }
    let title = "a push by digest with a malformed tag sets none";
    checks.add(DEV_SHOULD, "push.manifest.tags.malformed", title, move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        let call = repo.put(&image.digest.to_string(), &image.doc).query("tag=-bad-&tag=good");
        let reply = call.send().await?;
        if reply.status == 201 && !reply.headers.contains_key("oci-tag") {
            return skip("the registry sets no tags from the query, as it may");
        }
        if reply.status == 201 && told(&reply).iter().any(|tag| tag == "-bad-") {
            return reply.wrong("no OCI-Tag for a malformed tag");
        }
        reply.is_no_crash().map(drop)
    });
    checks.add(MAY, "push.manifest.tags.none", "no OCI-Tag without tags", move |repo| async move {
        let (_, _, reply) = pushed(repo, false).await?;
        reply.is(201)?.lacks("oci-tag").map(drop)
    });
}

async fn pullable((repo, image, _, reply): (Repo, Image, Vec<String>, Reply)) -> Verdict {
    for tag in told(reply.is(201)?) {
        let reply = repo.get(&format!("manifests/{tag}")).send().await?;
        reply.is(200)?.body_is(&image.doc.content)?;
        if Digest::of(&reply.body) != image.digest {
            return reply.wrong(image.digest.to_string());
        }
    }
    Ok(())
}
