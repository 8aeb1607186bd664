//! What is wrong with a configuration, and where.

use std::fmt;
use std::path::{Path, PathBuf};

/// One thing wrong with the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Mistake {
    /// Where it was written.
    pub place: Place,
    /// Which setting it is about, such as `log.format`; empty when it is about none.
    pub setting: String,
    /// What is wrong and what to do, one clause.
    pub told: String,
}

/// Where something was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// What holds it.
    pub origin: Origin,
    /// Line and column in a file, both from 1.
    pub at: Option<(usize, usize)>,
}

/// What holds a setting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// A file.
    File(PathBuf),
    /// A name in the environment.
    Environment(String),
    /// An option.
    Option(String),
    /// Nothing: the default, which contradicts what is set elsewhere.
    Default,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place: Place { origin, at }, setting, told } = self;
        match origin {
            Origin::File(path) => write!(f, "{}", path.display())?,
            Origin::Environment(name) => write!(f, "{name}")?,
            Origin::Option(name) => write!(f, "--{name}")?,
            Origin::Default => write!(f, "not set")?,
        }
        if let Some((line, column)) = at {
            write!(f, ":{line}:{column}")?;
        }
        let named = matches!(origin, Origin::Environment(_) | Origin::Option(_));
        if setting.is_empty() || named {
            write!(f, ": {told}")
        } else {
            write!(f, ": {setting}: {told}")
        }
    }
}

impl Mistake {
    pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> Self {
        let told = format!("the file cannot be read ({error})");
        let place = Place { origin: Origin::File(path.to_owned()), at: None };
        Self { place, setting: String::new(), told }
    }
}

/// Where a section notes what is wrong with it.
#[derive(Debug)]
pub struct Mistakes<'a> {
    found: &'a mut Vec<Found>,
    at: Vec<Step>,
}

/// A mistake whose place is not looked up yet.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) at: Vec<Step>,
    pub(super) told: String,
}

/// One step on the way from the root of a configuration to a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// A key of a table.
    Key(String),
    /// An element of an array, from 0.
    Item(usize),
}

impl<'a> Mistakes<'a> {
    pub(super) fn new(found: &'a mut Vec<Found>) -> Self {
        Self { found, at: Vec::new() }
    }

    /// Notes that the value under `key` is wrong. `told` is one clause: what is wrong with it, and
    /// after a semicolon what to write instead. It never holds a secret.
    pub fn add(&mut self, key: &str, told: impl Into<String>) {
        let at = self.deeper(Step::Key(key.to_owned()));
        self.found.push(Found { at, told: told.into() });
    }

    /// Notes that the value that this is, is wrong itself; `told` as in [`Mistakes::add`].
    pub fn here(&mut self, told: impl Into<String>) {
        self.found.push(Found { at: self.at.clone(), told: told.into() });
    }

    /// Returns where the table under `key` notes its mistakes.
    pub fn within(&mut self, key: &str) -> Mistakes<'_> {
        let at = self.deeper(Step::Key(key.to_owned()));
        Mistakes { found: self.found, at }
    }

    /// Returns where element `number`, from 0, of the array that this is notes its mistakes.
    pub fn item(&mut self, number: usize) -> Mistakes<'_> {
        let at = self.deeper(Step::Item(number));
        Mistakes { found: self.found, at }
    }

    fn deeper(&self, step: Step) -> Vec<Step> {
        self.at.iter().cloned().chain([step]).collect()
    }
}

/// Writes a path as TOML does, elements of arrays from 0.
pub(super) fn written(path: &[Step]) -> String {
    let step = |step: &Step| match step {
        Step::Key(key) => format!(".{key}"),
        Step::Item(number) => format!("[{number}]"),
    };
    let text: String = path.iter().map(step).collect();
    text.trim_start_matches('.').to_owned()
}
