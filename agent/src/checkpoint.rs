//! Takes a checkpoint: what is asked for, and what must be known before anything is touched.
//!
//! [`take`] has the steps themselves.

use std::str::FromStr as _;
use std::time::Duration;

use kybernate_packager::agent_api as api;
use kybernate_packager::pack::Runnable;
use kybernate_spec::{Location, Tag};

mod ahead;
mod away;
mod base;
mod capture;
mod error;
mod facts;
pub(crate) mod gpu;
mod maker;
mod mapped;
mod meter;
mod mounts;
mod origin;
mod size;
mod source;
mod tagged;
mod take;

#[cfg(test)]
pub(crate) use self::capture::{Tree, capture};
pub(crate) use self::source::{Source, Wanted, examine};
pub(crate) use self::tagged::finish_tag;
pub(crate) use self::take::{STORED, run};
use crate::app::Rejection;
use crate::config::{Config, NamedKey, PAUSE_DEADLINE_MAX};
use crate::container::{named, namespace_or_default};
use crate::hooks::Hooks;
use crate::operations::{Kind, Subject};
use crate::preflight::{Policy, TcpPolicy};
/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) container: String,
    pub(crate) namespace: String,
    location: Location,
    after: After,
    naming: Naming,
    runnable: Runnable,
    subject: bool,
    plain_http: bool,
    deadline: Duration,
    base: Wish,
    page_hashes: bool,
    time_out: Option<Duration>,
    /// How long it may be restored.
    valid: Option<Duration>,
    policy: Policy,
    capture_mounts: Vec<String>,
    memory: Memory,
    hooks: Hooks,
}

/// What happens to the source when the artifact is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    LeaveRunning,
    Stop,
}

impl After {
    const fn of(asked: api::AfterCheckpoint) -> Self {
        match asked {
            api::AfterCheckpoint::Stop => Self::Stop,
            api::AfterCheckpoint::Unspecified | api::AfterCheckpoint::LeaveRunning => {
                Self::LeaveRunning
            }
        }
    }
}

/// When memory is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// In the pause.
    Paused,
    /// In rounds before it, and the rest in it.
    Ahead,
}

/// What it is to be an increment of.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wish {
    /// Of this one, or it is not taken.
    This(Location),
    /// Of the last one, where that can be.
    Last,
    /// Of none.
    None,
}

/// How the artifact gets its name.
#[derive(Clone, Debug)]
enum Naming {
    /// Signed with this key, then tagged.
    Signed(NamedKey, Tag),
    /// Tagged without a signature.
    Unsigned(Tag),
    /// Whoever asked signs and tags. A source that is stopped meanwhile is not to be lost with
    /// whoever asked, so that its checkpoint gets this tag first.
    ByClient(Tag),
}

impl Order {
    /// Understands a request.
    pub(crate) fn parse(
        request: api::CheckpointRequest,
        config: &Config,
    ) -> Result<Self, Rejection> {
        let invalid = |text: &str| Rejection::Invalid(text.to_owned());
        let (after, runnable) = (request.after(), request.runnable());
        let policy = policy(request.tcp(), request.file_locks());
        let container = named(request.container)?;
        let memory = if request.pre_copy { Memory::Ahead } else { Memory::Paused };
        let location = Location::from_str(&request.reference)?;
        if location.digest().is_some() {
            return Err(invalid("a checkpoint cannot be given a digest: it gets one"));
        }
        let tag = match location.tag() {
            Some(tag) => tag.clone(),
            None => "latest".parse()?,
        };
        let naming = match (&*request.sign_key, request.unsigned) {
            ("", false) => Naming::ByClient(tag),
            ("", true) => Naming::Unsigned(tag),
            (_, true) => return Err(invalid("either a key signs it, or it stays unsigned")),
            (name, false) => {
                let key = config.sign_key(name).ok_or_else(|| no_key(config, name))?;
                Naming::Signed(key.clone(), tag)
            }
        };
        let base = match (&*request.base, request.full) {
            ("", true) => Wish::None,
            ("", false) => Wish::Last,
            (_, true) => return Err(invalid("either it has a base, or everything is stored")),
            (base, false) => Wish::This(Location::from_str(base)?),
        };
        if matches!(base, Wish::This(Location::Layout { .. })) {
            return Err(invalid("a base is in a registry, not in a layout"));
        }
        let deadline = match request.pause_deadline_seconds {
            0 => config.pause_deadline,
            seconds => Duration::from_secs(seconds.into()),
        };
        if deadline > PAUSE_DEADLINE_MAX {
            return Err(invalid("a pause may last an hour at most"));
        }
        let namespace = namespace_or_default(request.containerd_namespace)?;
        let hooks = Hooks::choose(&config.hooks, &request.hooks, &namespace, &container);
        Ok(Self {
            hooks: hooks.map_err(|error| Rejection::Invalid(error.to_string()))?,
            container,
            namespace,
            location,
            after: After::of(after),
            naming,
            runnable: match runnable {
                api::Runnable::Unspecified | api::Runnable::Auto => Runnable::Auto,
                api::Runnable::Always => Runnable::Always,
                api::Runnable::Never => Runnable::Never,
            },
            subject: !request.no_subject,
            plain_http: request.plain_http,
            deadline,
            base,
            page_hashes: request.page_hashes || config.page_hashes,
            time_out: time_out(request.timeout_seconds),
            valid: time_out(request.valid_seconds),
            policy,
            capture_mounts: request.capture_mounts,
            memory,
        })
    }

    /// Returns whom to look at before anything is touched, and how.
    pub(crate) fn wanted(&self) -> Wanted {
        Wanted {
            container: self.container.clone(),
            namespace: self.namespace.clone(),
            policy: self.policy,
            capture_mounts: self.capture_mounts.clone(),
            pre_copy: self.memory == Memory::Ahead,
        }
    }

    /// Returns what the operation is about.
    pub(crate) fn subject(&self) -> Subject {
        Subject {
            kind: Kind::Checkpoint,
            container: self.container.clone(),
            namespace: self.namespace.clone(),
            reference: self.location.to_string(),
            time_out: self.time_out,
        }
    }
}

/// Returns what a request chose.
fn policy(tcp: api::TcpPolicy, locks: api::LockPolicy) -> Policy {
    Policy {
        tcp: match tcp {
            api::TcpPolicy::Keep => TcpPolicy::Keep,
            api::TcpPolicy::Close => TcpPolicy::Close,
            api::TcpPolicy::Unspecified | api::TcpPolicy::Refuse => TcpPolicy::Refuse,
        },
        refuse_locks: locks == api::LockPolicy::Refuse,
    }
}

/// Returns how long an operation may take, when a request says so.
pub(crate) fn time_out(seconds: u32) -> Option<Duration> {
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}

fn no_key(config: &Config, name: &str) -> Rejection {
    let names: Vec<&str> = config.sign_keys.iter().map(|key| &*key.name).collect();
    let has = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Rejection::Invalid(format!(
        "this agent has no key {name:?} to sign with: [[sign_keys]] of its configuration has {has}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServeArgs;

    #[expect(clippy::unwrap_in_result, reason = "a failed preparation is a failed test")]
    fn check(change: impl FnOnce(&mut api::CheckpointRequest)) -> Result<Order, String> {
        let mut request = api::CheckpointRequest {
            container: "web".to_owned(),
            reference: "localhost:5000/web:1".to_owned(),
            ..api::CheckpointRequest::default()
        };
        change(&mut request);
        let config = ServeArgs::default().validate().unwrap();
        Order::parse(request, &config).map_err(|rejection| rejection.to_string())
    }

    #[test]
    fn defaults_are_filled_in() {
        let order = check(|_| {}).unwrap();
        assert_eq!(order.namespace, "default");
        assert_eq!(order.after, After::LeaveRunning);
        assert_eq!(order.deadline, Duration::from_mins(1));
        assert!(matches!(order.naming, Naming::ByClient(_)) && order.subject);
        assert!(order.base == Wish::Last && order.page_hashes);
    }

    #[test]
    fn what_makes_no_sense_is_told() {
        assert!(check(|r| r.container.clear()).unwrap_err().contains("no container"));
        assert!(check(|r| r.container = "../x".to_owned()).unwrap_err().contains("no name"));
        assert!(check(|r| r.containerd_namespace = "a\n".to_owned()).is_err());
        assert!(check(|r| r.reference = "web".to_owned()).unwrap_err().contains("reference"));
        assert!(check(|r| r.sign_key = "x".to_owned()).unwrap_err().contains("no key \"x\""));
        let both = check(|r| {
            r.sign_key = "x".to_owned();
            r.unsigned = true;
        });
        assert!(both.unwrap_err().contains("unsigned"));
        let both = check(|r| {
            r.base = "localhost:5000/web:0".to_owned();
            r.full = true;
        });
        assert!(both.unwrap_err().contains("everything is stored"));
        assert!(check(|r| r.pause_deadline_seconds = 4000).unwrap_err().contains("hour"));
    }
}
