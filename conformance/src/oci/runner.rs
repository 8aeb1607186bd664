//! Runs a suite: every check in a repository of its own, some of them at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt as _, stream};

use super::check::{Check, Edition, Fault, Level, Stop};
use super::client::Client;
use super::repo::Repo;

/// How long one check may take. The largest sends some tens of MiB.
const CHECK_TIMEOUT: Duration = Duration::from_secs(90);

/// What to run, and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The text that is tested against.
    pub edition: Edition,
    /// Checks at a time.
    pub jobs: usize,
    /// Repositories are made below this name.
    pub namespace: String,
    /// Identifiers, or their beginnings up to a dot; empty means all.
    pub filters: Vec<String>,
}

/// What one check has found.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The check's identifier.
    pub id: String,
    /// The heading it stands under.
    pub section: &'static str,
    /// How strongly it is asked for.
    pub level: Level,
    /// The requirement in a few words.
    pub title: String,
    /// What came of it.
    pub outcome: Outcome,
    /// How long it took.
    pub time: Duration,
}

/// What came of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The registry does what is asked for.
    Passed,
    /// It does not do what it must.
    Failed(Fault),
    /// It does not do what it should or may.
    Warned(Fault),
    /// The requirement does not apply, for this reason.
    Skipped(String),
}

/// Returns the checks an edition knows and a filter lets through, each with its level.
pub fn chosen(checks: Vec<Check>, settings: &Settings) -> Vec<(Check, Level)> {
    let wanted = |id: &str| {
        settings.filters.is_empty() || settings.filters.iter().any(|filter| covers(filter, id))
    };
    let known = checks.into_iter().filter_map(|check| {
        let level = check.need.in_edition(settings.edition)?;
        Some((check, level))
    });
    known.filter(|(check, _)| wanted(&check.id)).collect()
}

/// Whether a filter names an identifier: all of it, or its beginning up to a dot.
fn covers(filter: &str, id: &str) -> bool {
    let filter = filter.trim_end_matches(['*', '.']);
    id.strip_prefix(filter).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Runs checks against a registry. The findings are in the order of the checks.
pub async fn run(
    client: Arc<Client>,
    checks: Vec<(Check, Level)>,
    settings: &Settings,
) -> Vec<Finding> {
    let running = checks.into_iter().enumerate().map(|(place, (check, level))| {
        let name = format!("{}/{}", settings.namespace, check.id);
        let repo = Repo::new(Arc::clone(&client), &name, settings.edition);
        async move { (place, one(check, level, repo).await) }
    });
    let running = stream::iter(running).buffer_unordered(settings.jobs.max(1));
    let mut findings: Vec<_> = running.collect().await;
    findings.sort_by_key(|(place, _)| *place);
    findings.into_iter().map(|(_, finding)| finding).collect()
}

async fn one(check: Check, level: Level, repo: Repo) -> Finding {
    let started = Instant::now();
    let verdict = tokio::time::timeout(CHECK_TIMEOUT, check.run(repo.clone())).await;
    let time = started.elapsed();
    repo.clean().await;
    let outcome = match verdict {
        Ok(Ok(())) => Outcome::Passed,
        Ok(Err(Stop::Skipped(reason))) => Outcome::Skipped(reason),
        Ok(Err(Stop::Failed(fault))) if level == Level::Must => Outcome::Failed(*fault),
        Ok(Err(Stop::Failed(fault))) => Outcome::Warned(*fault),
        Err(_elapsed) => Outcome::Failed(Fault {
            request: format!("several, in {}", repo.name()),
            expected: format!("an end within {} s", CHECK_TIMEOUT.as_secs()),
            got: "none".to_owned(),
        }),
    };
    let Check { id, section, title, .. } = check;
    Finding { id: id.into_owned(), section, level, title: title.into_owned(), outcome, time }
}

#[cfg(test)]
mod tests {
    use super::covers;

    #[test]
    fn a_filter_ends_at_a_dot() {
        assert!(covers("push.blob", "push.blob.mount.created"));
        assert!(covers("push.blob.*", "push.blob.mount.created"));
        assert!(covers("push.blob.mount.created", "push.blob.mount.created"));
        assert!(!covers("push.blo", "push.blob.mount.created"));
        assert!(!covers("pull", "push.blob"));
    }
}
