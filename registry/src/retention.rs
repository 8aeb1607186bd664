//! Retention: which tags of a repository go.
//!
//! Rules only ever keep. A tag goes when rules speak of its repository and none keeps it; its
//! manifest, once nothing else names it, is left to garbage collection. A tag that is an attachment
//! of another manifest (`sha256-<hex>.sig` and the like) stays as long as that one is there.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kybernate_spec::{Digest, RepositoryName, Tag, chain};
use tokio_util::sync::CancellationToken;

use crate::app::AppState;
use crate::config::{NotifyAction, Pattern, Period, Retention, RetentionRule};
use crate::notify::{Happening, Subject};
use crate::store::{Store, StoreError};

pub(crate) use self::pulls::Pulls;

mod pulls;

/// A repository's last pulls are noted that often.
const NOTE_EVERY: Duration = Duration::from_mins(10);

/// What is known of a tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagFacts {
    /// The tag.
    pub tag: Tag,
    /// The manifest it names.
    pub digest: Digest,
    /// When it was pushed last.
    pub pushed: SystemTime,
    /// When its manifest was last pulled or pushed, to the hour.
    pub used: SystemTime,
    /// Whether its manifest carries a signature.
    pub signed: bool,
    /// The manifest it is an attachment of, when that is here.
    pub attached_to: Option<Digest>,
}

/// What becomes of a tag, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case", tag = "fate")]
pub enum Fate {
    /// The rule of this number, from 0, keeps it.
    Kept {
        /// The first rule that keeps it.
        rule: usize,
    },
    /// It is an attachment of a manifest that is here.
    Attached,
    /// No rule keeps it.
    Dropped,
}

/// What retention does in one repository.
#[derive(Debug, serde::Serialize)]
pub struct Verdict {
    /// The repository.
    pub repository: RepositoryName,
    /// The tag.
    pub tag: Tag,
    /// The manifest it names.
    pub digest: Digest,
    /// What becomes of it.
    #[serde(flatten)]
    pub fate: Fate,
}

/// Decides what becomes of a repository's tags, in the order they are given in.
pub fn plan(rules: &[(usize, &RetentionRule)], now: SystemTime, tags: &[TagFacts]) -> Vec<Fate> {
    let kept: Vec<_> =
        rules.iter().map(|(number, rule)| (*number, keeps(rule, now, tags))).collect();
    let fate = |facts: &TagFacts| {
        if facts.attached_to.is_some() {
            return Fate::Attached;
        }
        let rule = kept.iter().find(|(_, kept)| kept.contains(&facts.tag));
        rule.map_or(Fate::Dropped, |(rule, _)| Fate::Kept { rule: *rule })
    };
    tags.iter().map(fate).collect()
}

/// Returns what one rule keeps.
fn keeps<'a>(rule: &RetentionRule, now: SystemTime, tags: &'a [TagFacts]) -> HashSet<&'a Tag> {
    let within = |period: Option<Period>, time: SystemTime| {
        // A time to come is no age at all.
        period.is_none_or(|Period(most)| {
            now.duration_since(time).is_ok_and(|age| age <= most) || time > now
        })
    };
    let mut kept: Vec<_> = tags
        .iter()
        .filter(|facts| facts.attached_to.is_none())
        .filter(|facts| {
            rule.matching.is_empty() || Pattern::any(&rule.matching, facts.tag.as_str())
        })
        .filter(|facts| within(rule.younger_than, facts.pushed))
        .filter(|facts| within(rule.pulled_within, facts.used))
        .filter(|facts| facts.signed || !rule.signed)
        .collect();
    if let Some(newest) = rule.newest {
        // Two of the same moment: whichever, but always the same one.
        kept.sort_by_key(|facts| (Reverse(facts.pushed), Reverse(facts.tag.as_str())));
        kept.truncate(newest);
    }
    kept.into_iter().map(|facts| &facts.tag).collect()
}

/// Decides for every repository that rules speak of and, unless it is a `dry_run`, removes what no
/// rule keeps. Shows `each` verdict, which says whether to go on. Blocks.
pub fn run(
    store: &Store,
    retention: &Retention,
    mode: Mode,
    now: SystemTime,
    each: &mut dyn FnMut(&Verdict) -> ControlFlow<()>,
) -> Result<(), StoreError> {
    let expire = |name: &RepositoryName, facts: &TagFacts| store.expire_tag(name, facts);
    let remove: Option<Remove<'_>> = (mode == Mode::Remove).then_some(&expire);
    judge(store, retention, (remove, now), each)
}

/// Removes a tag unless it was pushed again since, and returns whether it did.
type Remove<'a> = &'a dyn Fn(&RepositoryName, &TagFacts) -> Result<bool, StoreError>;

fn judge(
    store: &Store,
    retention: &Retention,
    (remove, now): (Option<Remove<'_>>, SystemTime),
    each: &mut dyn FnMut(&Verdict) -> ControlFlow<()>,
) -> Result<(), StoreError> {
    let mut repositories = Vec::new();
    store.for_each_repository(&mut |name| {
        if !retention.rules(name.as_str()).is_empty() {
            repositories.push(name.clone());
        }
    })?;
    repositories.sort();
    let mut outcome = Ok(());
    for repository in repositories {
        let rules = retention.rules(repository.as_str());
        match judge_one(store, (&repository, &rules), (remove, now), each) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => break,
            // What is wrong with one repository keeps nothing in the others.
            Err(error) if outcome.is_err() => {
                tracing::error!(%repository, error = %chain(&error), "retention failed");
            }
            Err(error) => outcome = Err(error),
        }
    }
    outcome
}

fn judge_one(
    store: &Store,
    (repository, rules): (&RepositoryName, &[(usize, &RetentionRule)]),
    (remove, now): (Option<Remove<'_>>, SystemTime),
    each: &mut dyn FnMut(&Verdict) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, StoreError> {
    let signed = rules.iter().any(|(_, rule)| rule.signed);
    let tags = store.tag_facts(repository, signed)?;
    for (facts, fate) in tags.iter().zip(plan(rules, now, &tags)) {
        // What was pushed again meanwhile is judged the next time.
        let stays = match remove {
            Some(remove) if fate == Fate::Dropped => !remove(repository, facts)?,
            _ => false,
        };
        if !stays {
            let (tag, digest) = (facts.tag.clone(), facts.digest.clone());
            if each(&Verdict { repository: repository.clone(), tag, digest, fate }).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Whether anything is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// What no rule keeps is removed.
    Remove,
    /// Nothing is.
    DryRun,
}

/// Removes what no rule keeps, every so often, and notes pulls, until `cancel`.
pub(crate) async fn keep(app: AppState, cancel: CancellationToken) {
    if app.config.retention.rule.is_empty() {
        return;
    }
    let mut ticks = tokio::time::interval(app.config.retention.interval.0);
    let mut notes = tokio::time::interval(NOTE_EVERY);
    loop {
        let due = tokio::select! {
            _tick = ticks.tick() => true,
            _tick = notes.tick() => false,
            () = cancel.cancelled() => {
                note_pulls(&app).await;
                return;
            }
        };
        note_pulls(&app).await;
        if due {
            let (at, stop) = (Arc::clone(&app), cancel.clone());
            let running = tokio::task::spawn_blocking(move || remove(&at, &|| stop.is_cancelled()));
            match running.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::error!(error = %chain(&error), "failed to apply the retention rules");
                }
                Err(error) => tracing::error!(%error, "the retention rules were not applied"),
            }
        }
    }
}

fn remove(app: &AppState, stop: &dyn Fn() -> bool) -> Result<(), StoreError> {
    let mut dropped = 0u64;
    let mut each = |verdict: &Verdict| {
        if verdict.fate == Fate::Dropped {
            dropped += 1;
            let Verdict { repository, tag, digest, .. } = verdict;
            tracing::info!(%repository, %tag, %digest, "removed a tag that no retention rule keeps");
            app.store.metrics().retention_removed.inc();
        }
        if stop() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let retention = &app.config.retention;
    let expire = |name: &RepositoryName, facts: &TagFacts| {
        let (action, subject, tag) = (NotifyAction::Delete, Subject::Tag, Some(facts.tag.clone()));
        let news = [Happening { action, repository: name.clone(), subject, tag }];
        app.notices.telling(news, None, || app.store.expire_tag(name, facts), |gone| *gone)
    };
    judge(&app.store, retention, (Some(&expire), SystemTime::now()), &mut each)?;
    tracing::debug!(dropped, "the retention rules are applied");
    Ok(())
}

async fn note_pulls(app: &AppState) {
    let pulled = app.pulls.take();
    if pulled.is_empty() {
        return;
    }
    let noted = crate::app::blocking(&app.store, move |store| {
        let now = SystemTime::now();
        // One that cannot be noted does not make the others forgotten.
        let notes = pulled.iter().map(|(name, digest)| store.note_pull(name, digest, now));
        notes.fold(Ok(()), Result::and)
    });
    if let Err(error) = noted.await {
        tracing::warn!(error = %chain(&error), "failed to note pulls");
    }
}

#[cfg(test)]
mod tests;
