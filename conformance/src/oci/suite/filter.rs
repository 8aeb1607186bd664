//! "Listing Referrers": the filter on `artifactType`.

use kybernate_spec::media_type;
use serde_json::{Value, json};

use super::referrer::{KIND, about, digests, is_of, manifests, query};
use crate::oci::check::{Checks, MUST, SHOULD, Stop, Verdict, skip};
use crate::oci::content::Doc;
use crate::oci::reply::Reply;
use crate::oci::repo::{Repo, same};

/// Another type, with a letter that queries treat in their own way.
const OTHER: &str = "application/vnd.example.sbom.v1+json";

/// What is asked for: an identifier, a query, and the types that come.
type Question = (&'static str, &'static str, &'static [&'static str]);

const QUESTIONS: &[Question] = &[
    ("first", "application%2Fvnd.example.signature.v1%2Bjson", &[KIND]),
    ("second", "application%2Fvnd.example.sbom.v1%2Bjson", &[OTHER]),
    ("slash-as-it-is", "application/vnd.example.sbom.v1%2Bjson", &[OTHER]),
    ("config", "application%2Fvnd.oci.empty.v1%2Bjson", &[media_type::OCI_EMPTY]),
    ("nobody", "application%2Fvnd.example.nobody", &[]),
    ("part", "application%2Fvnd.example", &[]),
];

pub(super) fn add(checks: &mut Checks) {
    checks.section("Listing Referrers: artifactType");
    for (id, filter, wanted) in QUESTIONS {
        let act = move |repo| async move { filtered(repo, filter).await };
        let mut group = checks.on(format!("list.referrers.filter.{id}"), act);
        let title = format!("artifactType={filter} brings {} of three", wanted.len());
        group.look(MUST, "matching", title, |(reply, _)| {
            applied(reply)?;
            let kind = |entry: &Value| Some(entry.get("artifactType")?.as_str()?.to_owned());
            let found: Vec<String> = manifests(reply)?.iter().filter_map(kind).collect();
            let wanted: Vec<String> = wanted.iter().map(|&kind| kind.to_owned()).collect();
            same(reply, &found, &wanted)
        });
        let title = format!("who filters by {filter} says so in OCI-Filters-Applied");
        group.look(MUST, "told", title, |(reply, all)| {
            if manifests(reply)?.len() == *all {
                return skip("the registry does not filter");
            }
            reply.header_is("oci-filters-applied", "artifactType").map(drop)
        });
    }
    let title = "the registry filters by artifactType";
    checks.add(SHOULD, "list.referrers.filter.supported", title, move |repo| async move {
        let (reply, _) = filtered(repo, "application%2Fvnd.example.nobody").await?;
        reply.is(200)?.header_is("oci-filters-applied", "artifactType").map(drop)
    });
    let title = "who does not filter does not say so";
    checks.add(MUST, "list.referrers.filter.none", title, move |repo: Repo| async move {
        let (subject, _) = three(&repo).await?;
        query(&repo, &subject, "").await?.is(200)?.lacks("oci-filters-applied").map(drop)
    });
    let title = "a filter on what nothing refers to brings an empty list";
    checks.add(MUST, "list.referrers.filter.empty", title, move |repo: Repo| async move {
        let image = repo.push_image("subject").await?;
        let reply = query(&repo, &image.digest.to_string(), "?artifactType=text%2Fplain").await?;
        same(&reply, &digests(&reply)?, &Vec::new())
    });
    let title = "a filter comes with the fields of the descriptors";
    checks.add(MUST, "list.referrers.filter.fields", title, fields);
    let title = "a parameter nobody knows changes nothing";
    checks.add(SHOULD, "list.referrers.filter.unknown", title, move |repo: Repo| async move {
        let (subject, docs) = three(&repo).await?;
        let reply = query(&repo, &subject, "?unknownParameter=1").await?;
        same(&reply, &digests(&reply)?.len(), &docs.len())
    });
}

/// Skips where the filter was not applied, which a registry may leave out.
fn applied(reply: &Reply) -> Verdict {
    match reply.is(200)?.header("oci-filters-applied") {
        None => skip("the registry does not filter"),
        Some(_) => Ok(()),
    }
}

/// A subject with three referrers of different types.
async fn three(repo: &Repo) -> Result<(String, Vec<Doc>), Stop> {
    let subject = repo.push_image("subject").await?;
    let mut docs = Vec::new();
    for kind in [json!(KIND), json!(OTHER), Value::Null] {
        let doc = about(repo, &subject.doc, json!({ "artifactType": kind })).await?;
        repo.put(&doc.digest().to_string(), &doc).send().await?.is(201)?;
        docs.push(doc);
    }
    Ok((subject.digest.to_string(), docs))
}

async fn filtered(repo: Repo, filter: &str) -> Result<(Reply, usize), Stop> {
    let (subject, docs) = three(&repo).await?;
    let reply = query(&repo, &subject, &format!("?artifactType={filter}")).await?;
    Ok((reply, docs.len()))
}

async fn fields(repo: Repo) -> Verdict {
    let (subject, docs) = three(&repo).await?;
    let filter = "?artifactType=application%2Fvnd.example.sbom.v1%2Bjson";
    let reply = query(&repo, &subject, filter).await?;
    applied(&reply)?;
    let list = manifests(&reply)?;
    let text = |name: &str| list.first()?.get(name).cloned();
    let digest = text("digest").unwrap_or_default();
    let known = docs.get(1).is_some_and(|doc| is_of(digest.as_str().unwrap_or_default(), doc));
    let annotations = json!({ "org.example.key": "value" });
    if known && text("annotations") == Some(annotations) {
        return Ok(());
    }
    reply.wrong("the descriptor of the second referrer, with annotations")
}
