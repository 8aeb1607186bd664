//! Whose checkpoints this node restores, from where to where: `[[trust]]` of the configuration, and
//! the policy file, which is read again when it changes.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kybernate_packager::policy::{Mistake, Policy, Rule};

use crate::metrics::Metrics;
use crate::tasks::Tasks;

/// How often the files are compared with what was read.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The node's trust policy, as the last good files say it.
#[derive(Debug)]
pub struct Trust {
    file: Option<PathBuf>,
    /// Rules of the configuration itself.
    own: Vec<Rule>,
    // Held while files are read, on threads that may block, so that they are read once at a time.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    policy: Arc<Policy>,
    /// What is wrong with the files now, told already.
    wrong: Vec<Mistake>,
}

impl Trust {
    /// Reads the policy file, if there is one, and adds rules to what it says.
    pub(crate) fn open(file: Option<PathBuf>, own: Vec<Rule>) -> Result<Self, Vec<Mistake>> {
        let policy = match &file {
            Some(file) => Policy::read(file)?,
            None => Policy::default(),
        };
        Ok(Self::with(file, own, policy))
    }

    fn with(file: Option<PathBuf>, own: Vec<Rule>, mut policy: Policy) -> Self {
        policy.extend(own.iter().cloned());
        let state = State { policy: Arc::new(policy), wrong: Vec::new() };
        Self { file, own, state: Mutex::new(state) }
    }

    /// Only the rules of the configuration itself.
    pub(crate) fn of(own: Vec<Rule>) -> Self {
        Self::with(None, own, Policy::default())
    }

    /// Returns what the files say. What is wrong with them is told once, and what they said before
    /// stays in force.
    pub(crate) fn current(&self, metrics: &Metrics) -> Arc<Policy> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &self.file
            && !(state.wrong.is_empty() && state.policy.is_current())
        {
            self.read(file, &mut state, metrics);
        }
        Arc::clone(&state.policy)
    }

    fn read(&self, file: &Path, state: &mut State, metrics: &Metrics) {
        match Policy::read(file) {
            Ok(mut policy) => {
                policy.extend(self.own.iter().cloned());
                let rules = policy.rules().len();
                tracing::info!(?file, rules, "the trust policy was read again");
                *state = State { policy: Arc::new(policy), wrong: Vec::new() };
                metrics.policy_read(true);
            }
            Err(wrong) if wrong == state.wrong => {}
            Err(wrong) => {
                for mistake in &wrong {
                    tracing::error!(
                        %mistake,
                        "the trust policy was not read again: what it said before stays in force"
                    );
                }
                state.wrong = wrong;
                metrics.policy_read(false);
            }
        }
    }

    /// Looks at the files for as long as tasks run, so that whoever changes one is told.
    pub(crate) fn follow(self: &Arc<Self>, tasks: &Tasks, metrics: &Metrics) {
        if self.file.is_none() {
            return;
        }
        let (trust, metrics) = (Arc::clone(self), metrics.clone());
        tasks.spawn(|cancel| async move {
            let mut ticks = tokio::time::interval(LOOK_EVERY);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    _tick = ticks.tick() => {}
                    () = cancel.cancelled() => return,
                }
                let (trust, metrics) = (Arc::clone(&trust), metrics.clone());
                let looked = tokio::task::spawn_blocking(move || drop(trust.current(&metrics)));
                if let Err(error) = looked.await {
                    tracing::error!(%error, "the trust policy is not followed any more");
                    return;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use fs_err as fs;
    use jiff::Timestamp;
    use kybernate_packager::key::SigningKey;
    use kybernate_packager::policy::Question;

    use super::*;

    fn covers(trust: &Trust, repository: &str, target_namespace: &str) -> bool {
        let question = Question { repository, source_namespace: "shop", target_namespace };
        trust.current(&Metrics::default()).ask(question, Timestamp::now()).is_ok()
    }

    #[test]
    fn without_a_target_only_the_same_namespace_will_do() {
        let key = SigningKey::generate().unwrap().public().clone();
        let rule = |target| Rule::of_key("web".to_owned(), key.clone(), "host/*", "*", target);
        let same = Trust::of(vec![rule(None)]);
        assert!(covers(&same, "host/a/b", "shop") && !covers(&same, "host/a/b", "bank"));
        let other = Trust::of(vec![rule(Some("ba*"))]);
        assert!(covers(&other, "host/web", "bank") && !covers(&other, "host/web", "shop"));
    }

    #[test]
    fn a_changed_file_counts_at_once_and_a_broken_one_never() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("policy.toml");
        let rule = |name: &str| format!("[[rule]]\nrepositories = ['r/{name}']\nmode = 'off'\n");
        fs::write(&file, rule("a")).unwrap();
        let key = SigningKey::generate().unwrap().public().clone();
        let own = Rule::of_key("own".to_owned(), key, "r/own", "*", None);
        let trust = Trust::open(Some(file.clone()), vec![own]).unwrap();
        assert!(covers(&trust, "r/a", "shop") && covers(&trust, "r/own", "shop"));
        fs::write(&file, rule("b")).unwrap();
        assert!(covers(&trust, "r/b", "shop") && !covers(&trust, "r/a", "shop"));
        for broken in ["", "[[rule]]\nrepositories = 3\n"] {
            fs::write(&file, broken).unwrap();
            assert!(covers(&trust, "r/b", "shop") && covers(&trust, "r/own", "shop"));
        }
        fs::remove_file(&file).unwrap();
        assert!(covers(&trust, "r/b", "shop"));
        // Also when it is good again without ever having changed in between.
        fs::write(&file, rule("c")).unwrap();
        assert!(covers(&trust, "r/c", "shop") && covers(&trust, "r/own", "shop"));
        Trust::open(Some(directory.path().join("none")), Vec::new()).unwrap_err();
    }
}
