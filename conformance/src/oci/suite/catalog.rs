//! What stands beside the specification: `_catalog` (Docker's API) and `ns` (main branch).

use reqwest::Method;
use serde_json::Value;

use crate::oci::check::{Checks, DEV_MAY, DEV_SHOULD, MAY, Stop, Verdict, skip};
use crate::oci::reply::Reply;
use crate::oci::repo::Repo;

/// Pages at most.
const PAGES_MAX: usize = 2000;

pub(super) fn add(checks: &mut Checks) {
    checks.section("Appendix: Docker Registry HTTP API V2, _catalog");
    let mut group = checks.on("catalog.list", move |repo| async move { catalog(&repo, "").await });
    group.look(MAY, "json", "the catalog is a list \"repositories\"", |reply| {
        names(reply).map(drop)
    });
    group.look(MAY, "order", "the catalog is in order", |reply| {
        let names = names(reply)?;
        let folded: Vec<String> = names.iter().map(|name| name.to_lowercase()).collect();
        if names.is_sorted() || folded.is_sorted() { Ok(()) } else { reply.wrong("an order") }
    });
    let title = "a repository that was pushed to is in the catalog";
    checks.add(MAY, "catalog.complete", title, complete);
    let title = "n limits the catalog";
    checks.add(MAY, "catalog.n", title, move |repo: Repo| async move {
        repo.beside("second").push_image("latest").await?;
        let reply = catalog(&repo, "?n=1").await?;
        if names(&reply)?.len() == 1 { Ok(()) } else { reply.wrong("one repository") }
    });
    checks.section("Registry Proxying");
    let title = "a pull with ns, the registry's own host, brings the same";
    checks.add(DEV_SHOULD, "proxy.ns.manifest", title, move |repo: Repo| async move {
        let image = repo.push_image("latest").await?;
        let host = host(&repo);
        let reply = repo.get(&format!("manifests/latest?ns={host}")).send().await?;
        reply.is(200)?.body_is(&image.doc.content).map(drop)
    });
    let title = "a blob with ns, the registry's own host, is the same";
    checks.add(DEV_SHOULD, "proxy.ns.blob", title, move |repo: Repo| async move {
        let content = repo.bytes("blob", 100);
        let digest = repo.push_blob(&content).await?;
        let host = host(&repo);
        let reply = repo.get(&format!("blobs/{digest}?ns={host}")).send().await?;
        reply.is(200)?.body_is(&content).map(drop)
    });
    let title = "OCI-Namespace, where it is sent, is the ns of the request";
    checks.add(DEV_MAY, "proxy.ns.header", title, move |repo: Repo| async move {
        repo.push_image("latest").await?;
        let host = host(&repo);
        let reply = repo.get(&format!("manifests/latest?ns={host}")).send().await?;
        if reply.is(200)?.header("oci-namespace").is_none() {
            return skip("the registry ignores ns, as it may");
        }
        reply.header_is("oci-namespace", &host).map(drop)
    });
}

fn host(repo: &Repo) -> String {
    let base = repo.client().base();
    let host = base.host_str().unwrap_or_default();
    base.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
}

async fn catalog(repo: &Repo, query: &str) -> Result<Reply, Stop> {
    repo.push_image("latest").await?;
    let reply = repo.root(Method::GET, &format!("/v2/_catalog{query}")).send().await?;
    match reply.status {
        200 => Ok(reply),
        400..500 => skip("the registry has no catalog, or not for us"),
        _ => reply.wrong("status 200"),
    }
}

fn names(reply: &Reply) -> Result<Vec<String>, Stop> {
    let body = reply.is(200)?.json()?;
    let Some(list) = body.get("repositories").and_then(Value::as_array) else {
        return reply.wrong("a list \"repositories\"");
    };
    Ok(list.iter().filter_map(Value::as_str).map(str::to_owned).collect())
}

async fn complete(repo: Repo) -> Verdict {
    let mut reply = catalog(&repo, "").await?;
    for _ in 0..PAGES_MAX {
        if names(&reply)?.iter().any(|name| name == repo.name()) {
            return Ok(());
        }
        let Some(next) = reply.next()? else { break };
        reply = repo.at(Method::GET, &next).send().await?;
    }
    reply.wrong(format!("{:?} among the repositories", repo.name()))
}
