//! `kyb ls` and `kyb tree`

use clap::Args;
use jiff::Timestamp;
use kybernate_packager::listing::{Chain, Link, Listed, Listing, Signed, chain, list};
use kybernate_spec::{Digest, Location};

use super::page::{Cell, Page, Table, Tone};
use super::trust::Trust;
use super::{Connection, Failure};
use crate::terminal::{Terminal, bytes};

/// Digits shown of a digest.
const DIGITS: usize = 12;

/// Tags shown of a checkpoint; `--json` has all of them.
const TAGS_MAX: usize = 8;

/// List the checkpoints of a repository or image layout that have a tag, the newest first.
///
/// Who signed them is what the signatures say, which proves nothing, unless keys or a policy are
/// given.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb ls registry.example.com/team/job --key team.pub\n  \
    kyb ls registry.example.com/team/job --policy policy.toml")]
pub(super) struct Ls {
    /// The repository.
    #[arg(value_name = "REPOSITORY")]
    repository: Location,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    connection: Connection,
}

/// Show what a checkpoint was compared with, and that one, and so on.
///
/// Each checkpoint stands alone: one that is no longer there is missed by none that came after it.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb tree registry.example.com/team/job:v7")]
pub(super) struct Tree {
    /// Where to begin.
    #[arg(value_name = "REF")]
    reference: Location,
    #[command(flatten)]
    trust: Trust,
    #[command(flatten)]
    connection: Connection,
}

impl Ls {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        if self.repository.tag().is_some() || self.repository.digest().is_some() {
            let text = "a repository has no tag and no digest: `kyb inspect` shows one checkpoint";
            return Err(Failure::usage(text));
        }
        let trusted = self.trust.read().await?;
        let store = self.connection.open(&self.repository).await?;
        let listing = list(&store, trusted.judge(&self.repository)).await?;
        terminal.print_page(&listing, &tell_listing(&listing)).map_err(Failure::failed)
    }
}

impl Tree {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let trusted = self.trust.read().await?;
        let store = self.connection.open(&self.reference).await?;
        let chain = chain(&store, &self.reference, trusted.judge(&self.reference)).await?;
        terminal.print_page(&chain, &tell_chain(&chain)).map_err(Failure::failed)
    }
}

fn tell_listing(listing: &Listing) -> Page {
    let mut page = Page::default();
    let headings = ["TAG", "DIGEST", "AGE", "SIZE", "GENERATION", "BASE", "SIGNED", "CONTAINER"];
    let mut table = Table::new(&headings, usize::MAX);
    for one in &listing.checkpoints {
        table.row(vec![
            tags(&one.tags).into(),
            short(&one.digest).into(),
            age(one).into(),
            Cell::number(&bytes(one.bytes)),
            Cell::number(&one.generation.to_string()),
            one.base.as_ref().map_or_else(|| "-".to_owned(), short).into(),
            signed(&one.signed),
            container(one).into(),
        ]);
    }
    page.table("", table);
    if listing.checkpoints.is_empty() {
        page.fact("checkpoints", "none");
    }
    if !listing.other_tags.is_empty() {
        page.fact("other tags", listing.other_tags.join(", "));
    }
    for one in &listing.unreadable {
        page.fact("unreadable", Cell::new(&format!("{}: {}", one.tag, one.message), Tone::Bad));
    }
    page
}

fn tell_chain(chain: &Chain) -> Page {
    let mut page = Page::default();
    let headings = ["DIGEST", "AGE", "GENERATION", "ADDED", "FROM ITS BASE", "SIGNED", "CONTAINER"];
    let mut table = Table::new(&headings, usize::MAX);
    for Link { checkpoint, added_page_bytes, shared_page_bytes } in &chain.links {
        table.row(vec![
            short(&checkpoint.digest).into(),
            age(checkpoint).into(),
            Cell::number(&checkpoint.generation.to_string()),
            Cell::number(&bytes(*added_page_bytes)),
            Cell::number(&bytes(*shared_page_bytes)),
            signed(&checkpoint.signed),
            container(checkpoint).into(),
        ]);
    }
    page.table("", table);
    if let Some(missing) = &chain.missing {
        let text = format!("{missing}: its base, which is not here and is not needed");
        page.fact("then", Cell::new(&text, Tone::Faint));
    }
    page
}

/// Returns the first tags, and how many more there are.
fn tags(all: &[String]) -> String {
    let some = all.get(..TAGS_MAX).unwrap_or(all);
    let more = all.len() - some.len();
    let some = some.join(",");
    if more > 0 { format!("{some} and {more} more") } else { some }
}

fn container(one: &Listed) -> String {
    let named = [&one.namespace, &one.container];
    let named: Vec<&str> = named.into_iter().flatten().map(String::as_str).collect();
    if named.is_empty() { "-".to_owned() } else { named.join("/") }
}

fn signed(signed: &Signed) -> Cell {
    match signed {
        Signed::No => Cell::new("no", Tone::Odd),
        Signed::Verified { key, rule: None } => {
            Cell::new(&format!("verified, {}", cut(key)), Tone::Good)
        }
        Signed::Verified { key, rule: Some(rule) } => {
            Cell::new(&format!("verified, {}, rule {rule}", cut(key)), Tone::Good)
        }
        Signed::Tolerated { rule, .. } => Cell::new(&format!("tolerated, rule {rule}"), Tone::Odd),
        Signed::NotLooked { rule } => Cell::new(&format!("not looked at, rule {rule}"), Tone::Odd),
        Signed::Refused { objection, .. } => Cell::new(&format!("refused, {objection}"), Tone::Bad),
        Signed::Unverified { keys } => {
            let keys: Vec<String> = keys.iter().map(|key| cut(key)).collect();
            format!("by {}, not verified", keys.join(", ")).into()
        }
    }
}

/// Returns the beginning of a key's name.
fn cut(key: &str) -> String {
    key.chars().take(DIGITS).collect()
}

fn short(digest: &Digest) -> String {
    digest.hex().chars().take(DIGITS).collect()
}

/// Returns how long ago a checkpoint was taken, as it says itself.
fn age(one: &Listed) -> String {
    let Some(taken) = one.created.as_deref() else { return "-".to_owned() };
    let Ok(taken) = taken.parse::<Timestamp>() else { return "?".to_owned() };
    elapsed(Timestamp::now().as_second().saturating_sub(taken.as_second()))
}

fn elapsed(seconds: i64) -> String {
    match seconds {
        ..0 => "in the future".to_owned(),
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_tags_some_are_shown() {
        let told =
            |count: usize| tags(&(0..count).map(|number| format!("t{number}")).collect::<Vec<_>>());
        assert_eq!((told(1), told(8)), ("t0".to_owned(), "t0,t1,t2,t3,t4,t5,t6,t7".to_owned()));
        assert_eq!(told(130), "t0,t1,t2,t3,t4,t5,t6,t7 and 122 more");
    }

    #[test]
    fn ages_are_told_in_one_unit() {
        let told = [-5, 0, 119, 120, 7199, 7200, 172_799, 172_800].map(elapsed);
        assert_eq!(
            told,
            ["in the future", "0 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 d"]
        );
    }
}
