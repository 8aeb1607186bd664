//! Programs of the node's configuration that run around a checkpoint: before the pause, during it,
//! after it, and when it failed. Nothing of them comes from an artifact, and a request can only name
//! one that the configuration offers.

use std::process::{ExitStatus, Stdio};
use std::str::FromStr;
use std::time::Duration;
use std::{fmt, io};

use globset::GlobMatcher;
use kybernate_spec::chain;
use rustix::process::{Pid, Signal, kill_process_group};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, ChildStderr, Command};

use crate::operations::{Driver, Made, OperationsError};

/// Bytes of what a hook says that are told on: some lines.
const SAID_BYTES_MAX: usize = 1024;

/// Where a hook finds what it calls by name.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How long what an ended hook has said may take to arrive.
const SAID_LIMIT: Duration = Duration::from_millis(100);

/// When a hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// Before the pause. When it fails, there is no checkpoint.
    Before,
    /// While the source is paused, after the dump. When it fails, there is no checkpoint.
    WhilePaused,
    /// As soon as the source runs again, or has been stopped. When it fails, that is told.
    After,
    /// After a checkpoint that came as far as the first hook and failed, or was cancelled, when the
    /// source runs again. When it fails, that is told.
    Failed,
}

/// A program to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// What requests and messages call it.
    pub name: String,
    /// When it runs.
    pub when: When,
    /// The program's path, and its arguments.
    pub command: Vec<String>,
    /// How long it may take.
    pub limit: Duration,
}

/// A hook of the configuration.
#[derive(Clone, Debug)]
pub struct HookConfig {
    /// What to run.
    pub hook: Hook,
    /// For the containers with such ids.
    pub containers: Vec<GlobMatcher>,
    /// In such namespaces of containerd's.
    pub namespaces: Vec<GlobMatcher>,
    /// Whether it runs only when a request names it.
    pub on_request: bool,
}

/// The hooks of one checkpoint, and what they are told.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hooks {
    chosen: Vec<Hook>,
    container: String,
    namespace: String,
}

/// Why a request's choice cannot be had.
#[derive(Debug, thiserror::Error)]
#[error(
    "this agent has no hook {0:?} that may be asked for, for this container: [[hooks]] of its \
     configuration says which there are"
)]
pub(crate) struct NoHook(String);

/// Why a hook did not do what it should.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error("hook {0:?} could not be started")]
    Start(String, #[source] io::Error),
    #[error("hook {0:?} did not end within {time}", time = humantime::format_duration(*.1))]
    Late(String, Duration),
    #[error("hook {name:?} ended with {status}{said}")]
    Failed { name: String, status: ExitStatus, said: Said },
    #[error(transparent)]
    Operations(#[from] OperationsError),
}

/// The beginning of what a hook wrote to its standard error.
#[derive(Debug)]
pub(crate) struct Said(String);

/// Kills a hook with all it has started, unless it has ended.
struct Group(Option<Pid>);

impl Hooks {
    /// Finds those for a container; `asked` names some that only run when they are asked for.
    pub(crate) fn choose(
        all: &[HookConfig],
        asked: &[String],
        namespace: &str,
        container: &str,
    ) -> Result<Self, NoHook> {
        let has = |globs: &[GlobMatcher], text| globs.iter().any(|glob| glob.is_match(text));
        let fits =
            |one: &&HookConfig| has(&one.containers, container) && has(&one.namespaces, namespace);
        let fitting: Vec<&HookConfig> = all.iter().filter(fits).collect();
        for name in asked {
            if !fitting.iter().any(|one| one.on_request && one.hook.name == *name) {
                return Err(NoHook(name.clone()));
            }
        }
        let runs = |one: &&HookConfig| !one.on_request || asked.contains(&one.hook.name);
        let chosen = fitting.into_iter().filter(runs).map(|one| one.hook.clone()).collect();
        let (container, namespace) = (container.to_owned(), namespace.to_owned());
        Ok(Self { chosen, container, namespace })
    }

    /// Puts those of an operation together again that has to be undone.
    pub(crate) fn again(chosen: Vec<Hook>, namespace: &str, container: &str) -> Self {
        Self { chosen, container: container.to_owned(), namespace: namespace.to_owned() }
    }

    /// Runs what comes before the pause, and notes first what is to run behind it, or should it all fail.
    pub(crate) async fn before(&self, driver: &Driver, pid: u32) -> Result<(), HookError> {
        if self.chosen.is_empty() {
            return Ok(());
        }
        let noted: Vec<Hook> = self.of(When::Failed).chain(self.of(When::After)).cloned().collect();
        if !noted.is_empty() {
            driver.will_make(Made::Hooked(noted)).await?;
        }
        self.each(When::Before, driver.id(), Some(pid)).await
    }

    /// Runs what is to run while the source is paused.
    pub(crate) async fn while_paused(&self, driver: &Driver, pid: u32) -> Result<(), HookError> {
        self.each(When::WhilePaused, driver.id(), Some(pid)).await
    }

    /// Runs all of what is to run after the pause; what fails is told in the operation.
    pub(crate) async fn after(&self, driver: &Driver) {
        for hook in self.of(When::After) {
            self.run_and_tell(hook, driver).await;
            if let Err(error) = driver.update(|record| record.ran(hook)).await {
                tracing::error!(error = %chain(&error), "failed to keep an operation");
            }
        }
    }

    /// Runs all of what is to run after a failure; what fails is told in the operation.
    pub(crate) async fn after_failure(&self, driver: &Driver) {
        for hook in self.of(When::Failed) {
            self.run_and_tell(hook, driver).await;
        }
    }

    /// Runs one after the other, up to the first that fails.
    async fn each(&self, when: When, operation: &str, pid: Option<u32>) -> Result<(), HookError> {
        for hook in self.of(when) {
            self.run(hook, operation, pid).await?;
        }
        Ok(())
    }

    async fn run_and_tell(&self, hook: &Hook, driver: &Driver) {
        if let Err(error) = self.run(hook, driver.id(), None).await {
            let told = chain(&error).to_string();
            tracing::warn!(operation.id = driver.id(), error = told, "a hook failed");
            let kept = driver.update(|record| record.warnings.push(told)).await;
            if let Err(error) = kept {
                tracing::error!(error = %chain(&error), "failed to keep an operation");
            }
        }
    }

    fn of(&self, when: When) -> impl Iterator<Item = &Hook> {
        self.chosen.iter().filter(move |hook| hook.when == when)
    }

    async fn run(&self, hook: &Hook, operation: &str, pid: Option<u32>) -> Result<(), HookError> {
        let (program, arguments) =
            hook.command.split_first().map_or(("", &[][..]), |(a, b)| (a, b));
        tracing::info!(operation.id = operation, hook = hook.name, phase = %hook.when, "a hook runs");
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .env("PATH", PATH)
            .env("KYBERNATE_OPERATION", operation)
            .env("KYBERNATE_CONTAINER", &self.container)
            .env("KYBERNATE_NAMESPACE", &self.namespace)
            .env("KYBERNATE_PHASE", hook.when.to_string())
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if let Some(pid) = pid {
            command.env("KYBERNATE_PID", pid.to_string());
        }
        let name = || hook.name.clone();
        let mut child = command.spawn().map_err(|error| HookError::Start(name(), error))?;
        let mut group = Group(child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)));
        let ended = tokio::time::timeout(hook.limit, listened(&mut child)).await;
        let ended = ended.map_err(|_elapsed| HookError::Late(name(), hook.limit))?;
        let (status, said) = ended.map_err(|error| HookError::Start(name(), error))?;
        // Its number may be somebody else's from now on.
        group.0 = None;
        if status.success() {
            Ok(())
        } else {
            Err(HookError::Failed { name: name(), status, said })
        }
    }
}

impl Said {
    fn of(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let plain = text.trim().chars().map(|one| if one.is_control() { ' ' } else { one });
        Self(plain.collect())
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Before => "before",
            Self::WhilePaused => "while_paused",
            Self::After => "after",
            Self::Failed => "failed",
        })
    }
}

impl FromStr for When {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let all = [Self::Before, Self::WhilePaused, Self::After, Self::Failed];
        all.into_iter().find(|when| when.to_string() == text).ok_or(())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // All may have ended by themselves.
            kill_process_group(group, Signal::KILL).unwrap_or_default();
        }
    }
}

/// Waits for a hook, and hears what it says meanwhile. What it has started may go on, and hold its
/// standard error open.
async fn listened(child: &mut Child) -> io::Result<(ExitStatus, Said)> {
    let mut said = Vec::new();
    let stderr = child.stderr.take();
    let status = {
        let mut listening = std::pin::pin!(listen(stderr, &mut said));
        let ended = tokio::select! {
            ended = child.wait() => Some(ended?),
            () = &mut listening => None,
        };
        if let Some(status) = ended {
            tokio::time::timeout(SAID_LIMIT, listening).await.unwrap_or_default();
            status
        } else {
            child.wait().await?
        }
    };
    Ok((status, Said::of(&said)))
}

/// Reads to the end, and keeps the beginning.
async fn listen(stderr: Option<ChildStderr>, said: &mut Vec<u8>) {
    let Some(mut stderr) = stderr else { return };
    let mut part = [0; 4096];
    while let Ok(length @ 1..) = stderr.read(&mut part).await {
        let room = SAID_BYTES_MAX.saturating_sub(said.len()).min(length);
        said.extend(part.iter().take(room));
    }
}

#[cfg(test)]
mod tests;
