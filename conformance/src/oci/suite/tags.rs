//! "Listing Tags".

use std::collections::BTreeSet;

use reqwest::Method;
use serde_json::{Value, json};

use crate::oci::check::{Checks, MUST, SHOULD, Stop, Verdict, skip};
use crate::oci::reply::Reply;
use crate::oci::repo::{Repo, same};

/// The tags of most checks, in an order that is lexical whether or not letters have a case.
const TAGS: [&str; 5] = ["alpha", "beta", "delta", "gamma", "omega"];

/// Pages at most, so that a registry that always has a next one is found out.
const PAGES_MAX: usize = 100;

pub(super) fn add(checks: &mut Checks) {
    checks.section("Listing Tags");
    add_list(checks);
    add_pages(checks);
    add_links(checks);
    add_changes(checks);
}

async fn listed(repo: Repo, query: &str) -> Result<Reply, Stop> {
    // Pushed in another order than they are listed.
    repo.push_tags(&["gamma", "alpha", "omega", "beta", "delta"]).await?;
    repo.get(&format!("tags/list{query}")).send().await
}

/// Returns the tags of a reply.
fn tags(reply: &Reply) -> Result<Vec<String>, Stop> {
    let body = reply.is(200)?.json()?;
    let list = body.get("tags").and_then(Value::as_array);
    let tags = list.map(|list| list.iter().filter_map(Value::as_str).map(str::to_owned));
    match tags {
        Some(tags) => Ok(tags.collect()),
        None => reply.wrong("a list \"tags\""),
    }
}

/// Asks for these tags in this order.
fn are(reply: &Reply, wanted: &[&str]) -> Verdict {
    let wanted: Vec<String> = wanted.iter().map(|&tag| tag.to_owned()).collect();
    same(reply, &tags(reply)?, &wanted)
}

fn add_list(checks: &mut Checks) {
    let mut group = checks.on("list.tags", move |repo| async move { listed(repo, "").await });
    group
        .look(MUST, "ok", "the list of tags is answered with 200", |reply| reply.is(200).map(drop));
    group.look(MUST, "json", "the list is a JSON object", |reply| {
        if reply.is(200)?.json()?.is_object() { Ok(()) } else { reply.wrong("a JSON object") }
    });
    group
        .look(MUST, "complete", "every tag is listed, in lexical order", |reply| are(reply, &TAGS));
    group.look(SHOULD, "type", "it comes as application/json", |reply| {
        if reply.has("content-type")?.starts_with("application/json") {
            return Ok(());
        }
        reply.wrong("Content-Type: application/json")
    });
    let title = "the list tells the repository's name";
    checks.add(MUST, "list.tags.name", title, move |repo: Repo| async move {
        let name = repo.name().to_owned();
        let reply = listed(repo, "").await?;
        let body = reply.is(200)?.json()?;
        same(&reply, &body.get("name"), &Some(&json!(name)))
    });
    let mut group = checks.on("list.tags.no-repository", move |repo: Repo| async move {
        repo.get("tags/list").send().await
    });
    group.look(MUST, "not-found", "a repository that does not exist answers 404", |reply| {
        reply.is(404).map(drop)
    });
    group.look(SHOULD, "code", "the code for it is NAME_UNKNOWN", |reply| {
        reply.is(404)?.code_is(&["NAME_UNKNOWN"]).map(drop)
    });
    let title = "a repository without tags has an empty list";
    checks.add(SHOULD, "list.tags.empty", title, move |repo: Repo| async move {
        let image = repo.image_with("image", json!({})).await?;
        repo.put(&image.digest.to_string(), &image.doc).send().await?.is(201)?;
        are(&repo.get("tags/list").send().await?, &[])
    });
    let title = "capitals stand where ASCII or the alphabet puts them";
    checks.add(MUST, "list.tags.order-of-capitals", title, capitals);
    let title = "digits, dots and dashes stand in order";
    checks.add(MUST, "list.tags.order-of-versions", title, move |repo: Repo| async move {
        repo.push_tags(&["1.10", "1.9", "1-a", "10", "2"]).await?;
        are(&repo.get("tags/list").send().await?, &["1-a", "1.10", "1.9", "10", "2"])
    });
    let title = "a tag is listed once, however often it was pushed";
    checks.add(MUST, "list.tags.once", title, move |repo: Repo| async move {
        repo.push_tags(&["same", "same", "same"]).await?;
        repo.push_image("same").await?;
        are(&repo.get("tags/list").send().await?, &["same"])
    });
    let title = "tags of other repositories are not listed";
    checks.add(MUST, "list.tags.other-repository", title, move |repo: Repo| async move {
        repo.push_image("ours").await?;
        repo.beside("other").push_image("theirs").await?;
        repo.named(&format!("{}/below", repo.name())).push_image("below").await?;
        are(&repo.get("tags/list").send().await?, &["ours"])
    });
}

async fn capitals(repo: Repo) -> Verdict {
    repo.push_tags(&["b", "A", "a", "B", "c"]).await?;
    let reply = repo.get("tags/list").send().await?;
    let found = tags(&reply)?;
    let ascii = ["A", "B", "a", "b", "c"];
    let folded: Vec<String> = found.iter().map(|tag| tag.to_lowercase()).collect();
    let alphabetic = found.len() == ascii.len() && folded.is_sorted();
    if found == ascii || alphabetic {
        return Ok(());
    }
    reply.wrong("A B a b c, or the alphabet without regard to case")
}

/// Queries and the tags they bring.
type Page = (&'static str, &'static str, &'static [&'static str]);

const PAGES: &[Page] = &[
    ("n-1", "?n=1", &["alpha"]),
    ("n-2", "?n=2", &["alpha", "beta"]),
    ("n-4", "?n=4", &["alpha", "beta", "delta", "gamma"]),
    ("n-all", "?n=5", &TAGS),
    ("n-more", "?n=50", &TAGS),
    ("last-first", "?last=alpha", &["beta", "delta", "gamma", "omega"]),
    ("last-middle", "?last=delta", &["gamma", "omega"]),
    ("last-last", "?last=omega", &[]),
    ("last-beyond", "?last=zzz", &[]),
    ("n-and-last", "?n=2&last=beta", &["delta", "gamma"]),
    ("last-and-n", "?last=beta&n=1", &["delta"]),
    ("n-beyond-the-end", "?n=10&last=gamma", &["omega"]),
];

fn add_pages(checks: &mut Checks) {
    for (id, query, wanted) in PAGES {
        let title = format!("tags/list{query} of five brings {wanted:?}");
        checks.add(MUST, format!("list.tags.page.{id}"), title, move |repo| async move {
            let reply = listed(repo, query).await?;
            if reply.headers.contains_key("link") {
                // With a Link a page may be shorter than was asked for.
                let found = tags(&reply)?;
                let wanted: Vec<String> = wanted.iter().map(|&tag| tag.to_owned()).collect();
                return same(&reply, &wanted.starts_with(&found), &true);
            }
            are(&reply, wanted)
        });
    }
    let mut group =
        checks.on("list.tags.page.n-0", move |repo| async move { listed(repo, "?n=0").await });
    group.look(MUST, "empty", "n=0 brings an empty list", |reply| are(reply, &[]));
    group.look(MUST, "no-link", "n=0 brings no Link", |reply| {
        reply.is(200)?.lacks("link").map(drop)
    });
    let title = "a tag that is not there works as last, too";
    checks.add(SHOULD, "list.tags.page.last-between", title, move |repo| async move {
        are(&listed(repo, "?last=charlie").await?, &["delta", "gamma", "omega"])
    });
    for (id, query) in
        [("letters", "?n=abc"), ("negative", "?n=-1"), ("too-large", "?n=99999999999999999999")]
    {
        let title = format!("tags/list{query} is no failure of the registry");
        checks.add(SHOULD, format!("list.tags.page.n-{id}"), title, move |repo| async move {
            listed(repo, query).await?.is_no_crash().map(drop)
        });
    }
}

fn add_links(checks: &mut Checks) {
    let mut group =
        checks.on("list.tags.link", move |repo| async move { listed(repo, "?n=2").await });
    group.look(SHOULD, "there", "where more tags follow, there is a Link", |reply| {
        reply.is(200)?.has("link").map(drop)
    });
    group.look(MUST, "form", "a Link is <URL>; rel=\"next\"", |reply| {
        if !reply.is(200)?.headers.contains_key("link") {
            return skip("the registry sends no Link");
        }
        reply.next().map(drop)
    });
    let title = "where no more tags follow, there is no Link";
    checks.add(SHOULD, "list.tags.link.none", title, move |repo| async move {
        listed(repo, "?n=5").await?.is(200)?.lacks("link").map(drop)
    });
    for (id, n) in [("by-1", 1), ("by-2", 2), ("by-7", 7)] {
        let title = format!("following the Link {id} finds every tag once, in order");
        checks.add(MUST, format!("list.tags.link.follow-{id}"), title, move |repo| async move {
            follow(repo, n).await
        });
        let title = format!("following last {id} finds every tag once, in order");
        checks.add(MUST, format!("list.tags.last.follow-{id}"), title, move |repo| async move {
            follow_last(repo, n).await
        });
    }
}

/// Makes 15 tags and returns their names in order.
async fn many(repo: &Repo) -> Result<Vec<String>, Stop> {
    let names: Vec<String> = (10..25).map(|number| format!("v{number}")).collect();
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    repo.push_tags(&all).await?;
    Ok(names)
}

async fn follow(repo: Repo, n: usize) -> Verdict {
    let wanted = many(&repo).await?;
    let mut reply = repo.get(&format!("tags/list?n={n}")).send().await?;
    if !reply.is(200)?.headers.contains_key("link") {
        return skip("the registry sends no Link");
    }
    let mut found = tags(&reply)?;
    for _ in 0..PAGES_MAX {
        let Some(next) = reply.next()? else { break };
        reply = repo.at(Method::GET, &next).send().await?;
        found.extend(tags(&reply)?);
    }
    same(&reply, &found, &wanted)
}

async fn follow_last(repo: Repo, n: usize) -> Verdict {
    let wanted = many(&repo).await?;
    let mut found: Vec<String> = Vec::new();
    for _ in 0..PAGES_MAX {
        let last = found.last().map(|last| format!("&last={last}")).unwrap_or_default();
        let reply = repo.get(&format!("tags/list?n={n}{last}")).send().await?;
        let page = tags(&reply)?;
        if page.len() > n {
            return reply.wrong(format!("at most {n} tags"));
        }
        if page.is_empty() {
            return same(&reply, &found, &wanted);
        }
        found.extend(page);
    }
    let reply = repo.get("tags/list").send().await?;
    reply.wrong(format!("an end after {} tags", wanted.len()))
}

fn add_changes(checks: &mut Checks) {
    let title = "a tag is listed as soon as it was pushed";
    checks.add(MUST, "list.tags.fresh", title, move |repo: Repo| async move {
        let mut wanted = BTreeSet::new();
        for tag in ["c", "a", "b"] {
            repo.push_image(tag).await?;
            wanted.insert(tag.to_owned());
            let reply = repo.get("tags/list").send().await?;
            let found: BTreeSet<String> = tags(&reply)?.into_iter().collect();
            same(&reply, &found, &wanted)?;
        }
        Ok(())
    });
    let title = "a tag that was deleted is not listed";
    checks.add(MUST, "list.tags.deleted-tag", title, move |repo: Repo| async move {
        repo.push_image("stays").await?;
        repo.push_image("goes").await?;
        let reply = repo.delete("manifests/goes").send().await?;
        if reply.or_unsupported()?.status == 400 {
            return skip("the registry deletes no tags");
        }
        reply.is(202)?;
        are(&repo.get("tags/list").send().await?, &["stays"])
    });
    let title = "tags of a manifest that was deleted are not listed";
    checks.add(MUST, "list.tags.deleted-manifest", title, move |repo: Repo| async move {
        repo.push_image("stays").await?;
        let image = repo.push_image("goes").await?;
        let reply = repo.delete(&format!("manifests/{}", image.digest)).send().await?;
        if reply.or_unsupported()?.status == 400 {
            return skip("the registry deletes no manifests");
        }
        reply.is(202)?;
        are(&repo.get("tags/list").send().await?, &["stays"])
    });
}
