//! What a check is, and how a suite is put together from data and small functions.
//!
//! ```text
//! Checks ── add(need, id, title, run)             one requirement, one function
//!        └─ on(act) ── look(need, id, title, see)  many requirements on one act: every check acts
//!                                                  anew, in a repository of its own
//! ```

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::repo::Repo;

/// How strongly the specification asks for something (RFC 2119).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Level {
    /// A failure is a failure of the registry.
    Must,
    /// A failure is a warning.
    Should,
    /// A failure is a warning; what is optional and absent is skipped.
    May,
}

/// Which text is tested against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edition {
    /// Version 1.1.1.
    Stable,
    /// The main branch.
    Dev,
}

/// The level in either edition; nothing where an edition does not know the requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    stable: Option<Level>,
    dev: Option<Level>,
}

/// Required.
pub const MUST: Need = Need::both(Level::Must);
/// Recommended.
pub const SHOULD: Need = Need::both(Level::Should);
/// Optional.
pub const MAY: Need = Need::both(Level::May);
/// Recommended in 1.1.1, required by the main branch.
pub const SHOULD_THEN_MUST: Need = Need { stable: Some(Level::Should), dev: Some(Level::Must) };
/// Required by the main branch alone.
pub const DEV_MUST: Need = Need { stable: None, dev: Some(Level::Must) };
/// Recommended by the main branch alone.
pub const DEV_SHOULD: Need = Need { stable: None, dev: Some(Level::Should) };
/// Optional in the main branch alone.
pub const DEV_MAY: Need = Need { stable: None, dev: Some(Level::May) };

/// What a check found.
pub type Verdict = Result<(), Stop>;

/// Why a check ended before its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The registry does not do what is asked for.
    Failed(Box<Fault>),
    /// The requirement does not apply to this registry, for this reason.
    Skipped(String),
}

/// What was asked, what should have come, what came.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Fault {
    /// Method, URL and the headers that matter.
    pub request: String,
    /// What the specification wants.
    pub expected: String,
    /// What the registry did.
    pub got: String,
}

/// One requirement.
#[derive(Clone)]
pub struct Check {
    /// Stable, unique, dotted.
    pub id: Cow<'static, str>,
    /// The heading of the specification it stands under.
    pub section: &'static str,
    /// How strongly it is asked for.
    pub need: Need,
    /// The requirement in a few words.
    pub title: Cow<'static, str>,
    run: Run,
}

type Run = Arc<dyn Fn(Repo) -> BoxFuture<'static, Verdict> + Send + Sync>;

/// A suite while it is put together.
#[derive(Debug, Default)]
pub struct Checks {
    list: Vec<Check>,
    section: &'static str,
}

/// Requirements on what one act brings about.
pub struct Group<'a, T> {
    checks: &'a mut Checks,
    prefix: String,
    act: Act<T>,
}

type Act<T> = Arc<dyn Fn(Repo) -> BoxFuture<'static, Result<T, Stop>> + Send + Sync>;

impl Need {
    const fn both(level: Level) -> Self {
        Self { stable: Some(level), dev: Some(level) }
    }

    /// Returns the level in an edition, if the edition knows the requirement.
    pub const fn in_edition(self, edition: Edition) -> Option<Level> {
        match edition {
            Edition::Stable => self.stable,
            Edition::Dev => self.dev,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Must => "MUST",
            Self::Should => "SHOULD",
            Self::May => "MAY",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request:  {}\nexpected: {}\ngot:      {}", self.request, self.expected, self.got)
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Check")
            .field("id", &self.id)
            .field("need", &self.need)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Group<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl Check {
    /// Runs the check in a repository that nobody else uses.
    pub async fn run(&self, repo: Repo) -> Verdict {
        (self.run)(repo).await
    }
}

impl Checks {
    /// What follows stands under this heading.
    pub fn section(&mut self, heading: &'static str) -> &mut Self {
        self.section = heading;
        self
    }

    /// Adds one requirement.
    pub fn add<F, R>(
        &mut self,
        need: Need,
        id: impl Into<Cow<'static, str>>,
        title: impl Into<Cow<'static, str>>,
        run: F,
    ) -> &mut Self
    where
        F: Fn(Repo) -> R + Send + Sync + 'static,
        R: Future<Output = Verdict> + Send + 'static,
    {
        let run: Run = Arc::new(move |repo| run(repo).boxed());
        let (id, title) = (id.into(), title.into());
        self.list.push(Check { id, section: self.section, need, title, run });
        self
    }

    /// Begins requirements on one act; their identifiers begin with `prefix`.
    pub fn on<F, R, T>(&mut self, prefix: impl Into<String>, act: F) -> Group<'_, T>
    where
        F: Fn(Repo) -> R + Send + Sync + 'static,
        R: Future<Output = Result<T, Stop>> + Send + 'static,
    {
        Group { checks: self, prefix: prefix.into(), act: Arc::new(move |repo| act(repo).boxed()) }
    }

    /// Returns the suite.
    pub fn finish(self) -> Vec<Check> {
        self.list
    }
}

impl<T: Send + 'static> Group<'_, T> {
    /// Adds one requirement on what the act brings about.
    pub fn look(
        &mut self,
        need: Need,
        id: &str,
        title: impl Into<Cow<'static, str>>,
        see: impl Fn(&T) -> Verdict + Send + Sync + 'static,
    ) -> &mut Self {
        let act = Arc::clone(&self.act);
        let see = Arc::new(see);
        let id = format!("{}.{id}", self.prefix);
        self.checks.add(need, id, title, move |repo| {
            let (acting, see) = (act(repo), Arc::clone(&see));
            async move { see(&acting.await?) }
        });
        self
    }
}

/// Ends a check that does not apply.
pub fn skip<T>(reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Skipped(reason.into()))
}

/// Ends a check with a failure.
pub fn fail<T>(
    request: impl Into<String>,
    expected: impl Into<String>,
    got: impl Into<String>,
) -> Result<T, Stop> {
    let fault = Fault { request: request.into(), expected: expected.into(), got: got.into() };
    Err(Stop::Failed(Box::new(fault)))
}
