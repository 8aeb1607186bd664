//! "Error Codes" and "Warnings": the form of what a registry says when it refuses or warns.

use futures::FutureExt as _;
use futures::future::BoxFuture;
use kybernate_spec::{Digest, media_type};
use reqwest::Method;
use serde_json::{Value, json};

use super::manifest::NOBODY;
use crate::oci::check::{Checks, MUST, SHOULD, Stop, Verdict, skip};
use crate::oci::content::Doc;
use crate::oci::reply::{CODES, Reply};
use crate::oci::repo::Repo;

/// Does something that is refused.
type Act = fn(Repo) -> BoxFuture<'static, Result<Reply, Stop>>;

/// Requests that are refused, and the codes that tell why.
const REFUSALS: &[(&str, Act, &[&str])] = &[
    ("blob-unknown", |repo| get(repo, format!("blobs/{NOBODY}")), &["BLOB_UNKNOWN"]),
    ("manifest-unknown", |repo| get(repo, "manifests/missing".into()), &["MANIFEST_UNKNOWN"]),
    (
        "manifest-digest-unknown",
        |repo| get(repo, format!("manifests/{NOBODY}")),
        &["MANIFEST_UNKNOWN"],
    ),
    (
        "name-unknown",
        |repo| async move { repo.beside("missing").get("tags/list").send().await }.boxed(),
        &["NAME_UNKNOWN"],
    ),
    (
        "name-invalid",
        |repo| async move { repo.named("UPPER").get("manifests/latest").send().await }.boxed(),
        &["NAME_INVALID", "NAME_UNKNOWN", "MANIFEST_UNKNOWN"],
    ),
    (
        "digest-malformed",
        |repo| get(repo, "blobs/sha256:abc".into()),
        &["DIGEST_INVALID", "BLOB_UNKNOWN"],
    ),
    ("digest-invalid", |repo| wrong_digest(repo).boxed(), &["DIGEST_INVALID"]),
    (
        "upload-out-of-order",
        |repo| out_of_order(repo).boxed(),
        &["BLOB_UPLOAD_INVALID", "SIZE_INVALID"],
    ),
    ("manifest-invalid", |repo| bad_manifest(repo).boxed(), &["MANIFEST_INVALID"]),
    ("manifest-blob-unknown", |repo| missing_blob(repo).boxed(), &["MANIFEST_BLOB_UNKNOWN"]),
    ("tag-invalid", |repo| bad_tag(repo).boxed(), &["MANIFEST_INVALID", "NAME_INVALID"]),
    (
        "method",
        |repo| async move { repo.call(Method::PATCH, "manifests/latest").send().await }.boxed(),
        &["UNSUPPORTED"],
    ),
];

pub(super) fn add(checks: &mut Checks) {
    checks.section("Error Codes");
    for (id, act, codes) in REFUSALS {
        let act = move |repo: Repo| async move {
            let reply = act(repo).await?;
            if reply.status < 300 {
                return skip("the registry does not refuse this");
            }
            reply.is_refused()?;
            if !reply.is_json() {
                return skip("the body is not JSON, which the specification permits");
            }
            Ok(reply)
        };
        let mut group = checks.on(format!("error.{id}"), act);
        let title = format!("a refusal ({id}) in JSON has a list \"errors\" of codes");
        group.look(MUST, "form", title, form);
        let title = format!("its codes ({id}) are among those of the specification");
        group.look(MUST, "known", title, known);
        let title = format!("its code ({id}) is {}", codes.join(" or "));
        group.look(SHOULD, "code", title, |reply| reply.code_is(codes).map(drop));
        let title = format!("its message ({id}), if there is one, is a text");
        group.look(SHOULD, "message", title, message);
        let title = format!("the refusal ({id}) comes as application/json");
        group.look(SHOULD, "type", title, |reply| {
            if reply.header("content-type").is_some_and(|text| text.contains("json")) {
                return Ok(());
            }
            reply.wrong("Content-Type: application/json")
        });
    }
    add_warnings(checks);
}

fn form(reply: &Reply) -> Verdict {
    match reply.codes() {
        Some(codes) if !codes.is_empty() => Ok(()),
        _ => reply.wrong(r#"{"errors":[{"code":"…"}]}"#),
    }
}

fn known(reply: &Reply) -> Verdict {
    let codes = reply.codes().unwrap_or_default();
    match codes.iter().find(|code| !CODES.contains(&code.as_str())) {
        None => Ok(()),
        Some(_) => reply.wrong(format!("one of {}", CODES.join(", "))),
    }
}

fn message(reply: &Reply) -> Verdict {
    let body = reply.json()?;
    let errors = body.get("errors").and_then(Value::as_array);
    let text = |error: &Value| error.get("message").is_none_or(Value::is_string);
    if errors.is_some_and(|errors| errors.iter().all(text)) {
        return Ok(());
    }
    reply.wrong("a message that is a string")
}

/// Asks a repository that exists.
fn get(repo: Repo, path: String) -> BoxFuture<'static, Result<Reply, Stop>> {
    async move {
        repo.push_image("latest").await?;
        repo.get(&path).send().await
    }
    .boxed()
}

async fn wrong_digest(repo: Repo) -> Result<Reply, Stop> {
    let digest = Digest::of(&repo.bytes("claimed", 10)).to_string();
    let session = repo.begin().await?;
    repo.finish(&session, &digest, repo.bytes("sent", 10)).send().await
}

async fn out_of_order(repo: Repo) -> Result<Reply, Stop> {
    let session = repo.begin().await?;
    repo.chunk(&session, 100, repo.bytes("chunk", 10)).send().await
}

async fn bad_manifest(repo: Repo) -> Result<Reply, Stop> {
    repo.put("latest", &Doc::raw(media_type::OCI_MANIFEST, "no JSON")).send().await
}

async fn missing_blob(repo: Repo) -> Result<Reply, Stop> {
    let image = repo.image_with("image", json!({})).await?;
    let layer = kybernate_spec::Descriptor::of(media_type::OCI_LAYER_TAR, b"nobody has this");
    repo.put("latest", &Doc::image(&image.config, &[layer], json!({}))).send().await
}

async fn bad_tag(repo: Repo) -> Result<Reply, Stop> {
    let image = repo.image_with("image", json!({})).await?;
    repo.put("-bad-", &image.doc).send().await
}

/// Replies that might carry a warning.
const MAY_WARN: &[(&str, &str)] = &[
    ("blob", "blobs"),
    ("manifest", "manifests/latest"),
    ("tags", "tags/list"),
    ("missing", "manifests/missing"),
];

fn add_warnings(checks: &mut Checks) {
    checks.section("Warnings");
    for (id, path) in MAY_WARN {
        let act = move |repo: Repo| async move {
            let image = repo.push_image("latest").await?;
            let path = match *path {
                "blobs" => format!("blobs/{}", image.layer.digest),
                path => path.to_owned(),
            };
            repo.get(&path).send().await
        };
        let mut group = checks.on(format!("warning.{id}"), act);
        let title = format!("a warning with a reply ({id}) is 299 - \"…\", without a date");
        group.look(MUST, "form", title, |reply| {
            let all = warnings(reply)?;
            let right = |text: &String| {
                let text = text.strip_prefix("299 - \"");
                text.is_some_and(|text| text.ends_with('"') && !text.ends_with("\\\""))
            };
            if all.iter().all(right) { Ok(()) } else { reply.wrong("Warning: 299 - \"text\"") }
        });
        let title = format!("warnings with a reply ({id}) have at most 4096 bytes");
        group.look(MUST, "size", title, |reply| {
            let length: usize = warnings(reply)?.iter().map(String::len).sum();
            if length <= 4096 { Ok(()) } else { reply.wrong("at most 4096 bytes of warnings") }
        });
    }
}

fn warnings(reply: &Reply) -> Result<Vec<String>, Stop> {
    let all = reply.headers.get_all("warning").iter();
    let all: Vec<String> =
        all.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()).collect();
    if all.is_empty() { skip("the registry does not warn") } else { Ok(all) }
}
