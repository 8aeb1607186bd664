//! Methods an endpoint does not know (main branch, "API": RFC 9110 where the text is silent).

use reqwest::Method;

use super::manifest::NOBODY;
use crate::oci::check::{Checks, MUST, SHOULD, Stop, skip};
use crate::oci::reply::Reply;
use crate::oci::repo::Repo;

/// Endpoints, each with methods that are not in the table of endpoints.
const WRONG: &[(&str, &str, &[Method])] = &[
    ("blob", "blobs", &[Method::POST, Method::PUT, Method::PATCH]),
    ("manifest", "manifests/latest", &[Method::POST, Method::PATCH]),
    ("uploads", "blobs/uploads/", &[Method::PUT, Method::PATCH, Method::DELETE]),
    ("tags", "tags/list", &[Method::POST, Method::PUT, Method::PATCH, Method::DELETE]),
    ("referrers", "referrers", &[Method::POST, Method::PUT, Method::PATCH, Method::DELETE]),
];

pub(super) fn add(checks: &mut Checks) {
    checks.section("Endpoints: methods");
    for (id, path, methods) in WRONG {
        for method in *methods {
            let act = move |repo| async move { wrong(repo, path, method.clone()).await };
            let name = method.as_str().to_lowercase();
            let mut group = checks.on(format!("method.{id}.{name}"), act);
            let title = format!("{method} of {path} is refused");
            group.look(MUST, "refused", title, |reply| reply.is_refused().map(drop));
            let title = format!("{method} of {path} is answered with 405 or 404");
            group.look(SHOULD, "not-allowed", title, |reply| reply.is_any(&[405, 404]).map(drop));
            let title = format!("405 to {method} of {path} tells what is allowed");
            group.look(SHOULD, "allow", title, |reply| {
                if reply.status != 405 {
                    return skip("the registry does not answer 405");
                }
                reply.has("allow").map(drop)
            });
        }
    }
}

async fn wrong(repo: Repo, path: &str, method: Method) -> Result<Reply, Stop> {
    let image = repo.push_image("latest").await?;
    let path = match path {
        "blobs" => format!("blobs/{}", image.layer.digest),
        "referrers" => format!("referrers/{NOBODY}"),
        path => path.to_owned(),
    };
    repo.call(method, &path).body("{}").send().await
}
