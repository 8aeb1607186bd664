//! Who may do what with which repository.
//!
//! ```toml
//! [[rule]]
//! repositories = ["team-a/**", "base/*"]
//! subjects = ["group:team-a", "token:ci:repo:acme/*"]
//! actions = ["pull", "push"]
//!
//! [groups]
//! team-a = ["user:alice", "certificate:node-*"]
//! ```
//!
//! What no rule allows is denied. Rules only ever add: who is meant by several may do what any of
//! them allows, and their order says nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use serde::Deserialize;

use super::action::{Action, Actions};
use super::follow::mistake;
use super::grant::Decider;
use super::subject::{Identity, Subject};
use crate::config::{Mistake, Mistakes, read_toml, stars_stand_alone};

/// Rules, ready to be asked.
#[derive(Debug)]
pub struct Policy {
    /// The patterns of all rules.
    repositories: GlobSet,
    /// Which rule a pattern belongs to.
    rule_of: Vec<usize>,
    rules: Vec<Rule>,
}

#[derive(Debug)]
struct Rule {
    subjects: Vec<Subject>,
    actions: Actions,
}

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default)]
    rule: Vec<WrittenRule>,
    #[serde(default)]
    groups: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenRule {
    repositories: Vec<String>,
    subjects: Vec<String>,
    actions: Vec<Action>,
}

impl Policy {
    /// Reads the text of a policy file and returns everything that is wrong at once; `name` is what
    /// mistakes call it, and `issuers` are those that subjects may speak of.
    pub fn read(name: &Path, text: &str, issuers: &[&str]) -> Result<Self, Vec<Mistake>> {
        let mut built = None;
        let written = read_toml(name, text, |written: &Written, mistakes: &mut Mistakes<'_>| {
            built = written.build(issuers, mistakes);
        });
        if written?.rule.is_empty() {
            // An emptied file must not open everything.
            return Err(vec![mistake(name, None, "there is no rule; write at least one [[rule]]")]);
        }
        Ok(built.unwrap_or_else(Self::closed))
    }

    /// Returns the policy for when there are credentials and no file: whoever has some may do
    /// everything, and nobody else anything.
    pub fn of_the_authenticated() -> Self {
        let rule = Rule { subjects: vec![Subject::Authenticated], actions: Actions::ALL };
        let everything = GlobBuilder::new("**").build();
        let repositories = everything.and_then(|glob| GlobSetBuilder::new().add(glob).build());
        let repositories = repositories.unwrap_or_else(|_never| GlobSet::empty());
        Self { repositories, rule_of: vec![0], rules: vec![rule] }
    }

    /// Allows nothing.
    fn closed() -> Self {
        Self { repositories: GlobSet::empty(), rule_of: Vec::new(), rules: Vec::new() }
    }

    /// Returns what rules allow an identity to do, whatever its token is limited to.
    pub fn allowed(&self, identity: &Identity, repository: &str) -> Actions {
        let mut actions = Actions::default();
        for pattern in self.repositories.matches(repository) {
            let rule = self.rule_of.get(pattern).and_then(|number| self.rules.get(*number));
            if let Some(rule) = rule
                && actions.common(rule.actions) != rule.actions
                && rule.means(identity)
            {
                actions = actions.and(rule.actions);
            }
        }
        actions
    }

    /// Whether an identity may do something, with its token's limits.
    pub fn allows(&self, identity: &Identity, action: Action, repository: &str) -> bool {
        match &identity.grants {
            None => self.allowed(identity, repository).has(action),
            Some(grants) => {
                grants.covers(action, repository)
                    && match grants.decided_by {
                        Decider::Issuer => true,
                        Decider::Policy => self.allowed(identity, repository).has(action),
                    }
            }
        }
    }

    /// Whether any rule speaks of an identity.
    pub fn speaks_of(&self, identity: &Identity) -> bool {
        self.rules.iter().any(|rule| rule.means(identity))
    }

    /// Returns how many rules there are.
    pub fn rules(&self) -> usize {
        self.rules.len()
    }
}

impl Rule {
    fn means(&self, identity: &Identity) -> bool {
        self.subjects.iter().any(|subject| subject.matches(identity))
    }
}

impl Written {
    fn build(&self, issuers: &[&str], mistakes: &mut Mistakes<'_>) -> Option<Policy> {
        let groups = self.groups(issuers, &mut mistakes.within("groups"));
        let mut mistakes = mistakes.within("rule");
        let (mut globs, mut rule_of, mut rules) = (GlobSetBuilder::new(), Vec::new(), Vec::new());
        for (number, written) in self.rule.iter().enumerate() {
            let mut mistakes = mistakes.item(number);
            for (key, empty) in [
                ("repositories", written.repositories.is_empty()),
                ("subjects", written.subjects.is_empty()),
                ("actions", written.actions.is_empty()),
            ] {
                if empty {
                    mistakes.add(key, "is empty, so the rule says nothing; name at least one");
                }
            }
            let mut patterns = mistakes.within("repositories");
            for (at, pattern) in written.repositories.iter().enumerate() {
                let mut glob = GlobBuilder::new(pattern);
                match glob.literal_separator(true).backslash_escape(true).build() {
                    Ok(_) if !stars_stand_alone(pattern) => {
                        let told = "has `**` beside letters; write it alone between slashes, as in \
                                    \"team/**\" or \"team-*/**\"";
                        patterns.item(at).here(told.to_owned());
                    }
                    Ok(glob) => {
                        globs.add(glob);
                        rule_of.push(number);
                    }
                    Err(error) => {
                        patterns
                            .item(at)
                            .here(format!("{error}; write a glob such as \"team/**\""));
                    }
                }
            }
            let subjects =
                subjects(&written.subjects, issuers, &groups, &mut mistakes.within("subjects"));
            rules.push(Rule { subjects, actions: written.actions.iter().copied().collect() });
        }
        match globs.build() {
            Ok(repositories) => Some(Policy { repositories, rule_of, rules }),
            Err(error) => {
                mistakes.here(format!("the patterns are too much together ({error})"));
                None
            }
        }
    }

    /// Reads groups; one cannot be in another.
    fn groups(
        &self,
        issuers: &[&str],
        mistakes: &mut Mistakes<'_>,
    ) -> BTreeMap<&str, Vec<Subject>> {
        let none = BTreeMap::new();
        let read = self.groups.iter().map(|(name, members)| {
            (&**name, subjects(members, issuers, &none, &mut mistakes.within(name)))
        });
        read.collect()
    }
}

fn subjects(
    written: &[String],
    issuers: &[&str],
    groups: &BTreeMap<&str, Vec<Subject>>,
    mistakes: &mut Mistakes<'_>,
) -> Vec<Subject> {
    let mut subjects = Vec::new();
    for (at, text) in written.iter().enumerate() {
        match text.parse::<Subject>() {
            Ok(Subject::Group(name)) => match groups.get(&*name) {
                Some(members) => subjects.extend(members.iter().cloned()),
                None => mistakes.item(at).here(unknown("group", &name, groups.keys().copied())),
            },
            Ok(subject) => match subject.issuer().filter(|issuer| !issuers.contains(issuer)) {
                Some(issuer) => {
                    mistakes.item(at).here(unknown("issuer", issuer, issuers.iter().copied()));
                }
                None => subjects.push(subject),
            },
            Err(error) => mistakes.item(at).here(error.to_string()),
        }
    }
    subjects
}

fn unknown<'a>(kind: &str, name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let known: BTreeSet<_> = known.collect();
    match known.len() {
        0 => format!("there is no {kind} {name:?}, nor any other"),
        _ => format!("there is no {kind} {name:?}; there are {known:?}"),
    }
}

#[cfg(test)]
mod tests;
