//! "Determining Support".

use reqwest::Method;

use crate::oci::check::{Checks, MAY, MUST, SHOULD, Verdict, fail, skip};
use crate::oci::repo::Repo;

pub(super) fn add(checks: &mut Checks) {
    checks.section("Determining Support");
    let mut get = checks
        .on("base.get", move |repo| async move { repo.root(Method::GET, "/v2/").send().await });
    get.look(MUST, "ok", "GET /v2/ answers 200", |reply| reply.is(200).map(drop));
    get.look(MAY, "version-header", "Docker's version header is registry/2.0", |reply| match reply
        .header("docker-distribution-api-version")
    {
        None => skip("the header is optional and not sent"),
        Some(_) => reply.header_is("docker-distribution-api-version", "registry/2.0").map(drop),
    });
    checks.add(
        SHOULD,
        "base.head.ok",
        "HEAD /v2/ answers as GET does",
        move |repo: Repo| async move {
            repo.root(Method::HEAD, "/v2/").send().await?.is(200)?.body_is(b"").map(drop)
        },
    );
    checks.add(
        MUST,
        "base.get.repeated",
        "GET /v2/ answers 200 every time",
        move |repo: Repo| async move {
            for _ in 0..5 {
                repo.root(Method::GET, "/v2/").send().await?.is(200)?;
            }
            Ok(())
        },
    );
    checks.add(MUST, "base.anonymous.challenge", "401 comes with a challenge", challenge);
    checks.add(
        MUST,
        "base.anonymous.code",
        "401 says UNAUTHORIZED",
        move |repo: Repo| async move {
            let reply = repo.root(Method::GET, "/v2/").anonymous().send().await?;
            if reply.status != 401 {
                return skip("the registry asks nobody who they are");
            }
            reply.code_is(&["UNAUTHORIZED"]).map(drop)
        },
    );
    checks.add(SHOULD, "base.anonymous.push", "who may not read may not push", anonymous_push);
    for (id, path) in [("v1", "/v1/"), ("unknown", "/v2/unknown-endpoint"), ("short", "/v2/a/b/c")]
    {
        let title = format!("GET {path} is refused");
        checks.add(SHOULD, format!("base.elsewhere.{id}"), title, move |repo: Repo| async move {
            repo.root(Method::GET, path).send().await?.is_refused().map(drop)
        });
    }
}

/// RFC 9110, 15.5.2: "The server generating a 401 response MUST send a WWW-Authenticate header".
async fn challenge(repo: Repo) -> Verdict {
    let reply = repo.root(Method::GET, "/v2/").anonymous().send().await?;
    if reply.status != 401 {
        return skip("the registry asks nobody who they are");
    }
    reply.has("www-authenticate").map(drop)
}

async fn anonymous_push(repo: Repo) -> Verdict {
    if repo.root(Method::GET, "/v2/").anonymous().send().await?.status != 401 {
        return skip("the registry asks nobody who they are");
    }
    let reply = repo.post("").anonymous().send().await?;
    if reply.status == 202 {
        return fail(reply.request, "status 401 or 403", "202: an upload has begun");
    }
    reply.is_any(&[401, 403]).map(drop)
}
