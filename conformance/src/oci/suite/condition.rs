//! Conditional requests (RFC 9110, 13): what a registry that sends an `ETag` does with it.

use crate::oci::check::{Checks, MUST, SHOULD, Stop, skip};
use crate::oci::reply::Reply;
use crate::oci::repo::Repo;

/// A conditional request: its header, and how the value is made of the `ETag`.
#[derive(Clone, Copy)]
struct Condition {
    id: &'static str,
    header: &'static str,
    value: fn(&str) -> String,
    status: u16,
}

const CONDITIONS: &[Condition] = &[
    Condition { id: "none-match-same", header: "if-none-match", value: str::to_owned, status: 304 },
    Condition { id: "none-match-any", header: "if-none-match", value: |_| "*".into(), status: 304 },
    Condition {
        id: "none-match-list",
        header: "if-none-match",
        value: |tag| format!("\"other\", {tag}"),
        status: 304,
    },
    Condition {
        id: "none-match-weak",
        header: "if-none-match",
        value: |tag| format!("W/{}", tag.trim_start_matches("W/")),
        status: 304,
    },
    Condition {
        id: "none-match-other",
        header: "if-none-match",
        value: |_| "\"other\"".into(),
        status: 200,
    },
    Condition { id: "match-same", header: "if-match", value: str::to_owned, status: 200 },
    Condition { id: "match-any", header: "if-match", value: |_| "*".into(), status: 200 },
    Condition { id: "match-other", header: "if-match", value: |_| "\"other\"".into(), status: 412 },
];

pub(super) fn add(checks: &mut Checks) {
    for kind in ["blob", "manifest"] {
        checks.section("API: HTTP semantics (RFC 9110, 13)");
        let title = format!("the ETag of a {kind} is a quoted string");
        checks.add(
            MUST,
            format!("condition.{kind}.etag.form"),
            title,
            move |repo: Repo| async move {
                let (_, reply, tag) = tagged(&repo, kind).await?;
                let text = tag.strip_prefix("W/").unwrap_or(&tag);
                if text.len() >= 2 && text.starts_with('"') && text.ends_with('"') {
                    return Ok(());
                }
                reply.wrong("an ETag in quotes")
            },
        );
        let title = format!("the ETag of a {kind} is the same every time");
        checks.add(
            SHOULD,
            format!("condition.{kind}.etag.same"),
            title,
            move |repo: Repo| async move {
                let (path, _, tag) = tagged(&repo, kind).await?;
                repo.get(&path).send().await?.is(200)?.header_is("etag", &tag)?;
                repo.head(&path).send().await?.is(200)?.header_is("etag", &tag).map(drop)
            },
        );
        for condition in CONDITIONS {
            for method in ["get", "head"] {
                add_condition(checks, kind, *condition, method);
            }
        }
        let title = format!("304 for a {kind} has no body and tells the ETag");
        checks.add(
            MUST,
            format!("condition.{kind}.not-modified"),
            title,
            move |repo: Repo| async move {
                let (path, _, tag) = tagged(&repo, kind).await?;
                let reply = repo.get(&path).header("if-none-match", tag.clone()).send().await?;
                if reply.status != 304 {
                    return skip("the registry does not answer 304");
                }
                reply.body_is(b"")?.header_is("etag", &tag).map(drop)
            },
        );
    }
}

fn add_condition(
    checks: &mut Checks,
    kind: &'static str,
    condition: Condition,
    method: &'static str,
) {
    let Condition { id, header, value, status } = condition;
    let id = format!("condition.{kind}.{id}.{method}");
    let title = format!("{method} of a {kind} with {header} {}: {status}", value("(its ETag)"));
    // A registry that knows no conditions answers 200 to all; where 200 is right, it must.
    let need = if status == 200 { MUST } else { SHOULD };
    checks.add(need, id, title, move |repo: Repo| async move {
        let (path, _, tag) = tagged(&repo, kind).await?;
        let call = if method == "get" { repo.get(&path) } else { repo.head(&path) };
        let reply = call.header(header, value(&tag)).send().await?;
        reply.is(status).map(drop)
    });
}

async fn tagged(repo: &Repo, kind: &str) -> Result<(String, Reply, String), Stop> {
    let path = if kind == "blob" {
        format!("blobs/{}", repo.push_blob(&repo.bytes("blob", 100)).await?)
    } else {
        repo.push_image("latest").await?;
        "manifests/latest".to_owned()
    };
    let reply = repo.get(&path).send().await?;
    let Some(tag) = reply.is(200)?.header("etag").map(str::to_owned) else {
        return skip("the registry sends no ETag");
    };
    Ok((path, reply, tag))
}
