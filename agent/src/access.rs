//! Who may ask this agent for what: root over the socket for everything, everybody else for what a
//! `[[caller]]` of the configuration says, and nobody for more.

mod callers;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use globset::{GlobBuilder, GlobMatcher};
use kybernate_packager::agent_api as api;
use kybernate_spec::Location;
use schemars::JsonSchema;
use serde::Deserialize;
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo, UdsConnectInfo};
use tonic::{Extensions, Status};

pub use self::callers::Callers;
pub(crate) use self::callers::Look;
use crate::app::{App, bounded};
use crate::config::Config;
use crate::container::DEFAULT_NAMESPACE;
use crate::door;
use crate::metrics::Metrics;
use crate::process::Known;

/// What a rule allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// See the node, and containers and operations of the rule's namespaces.
    Read,
    /// Look at containers, take checkpoints of them, and end that early.
    Checkpoint,
    /// Restore checkpoints, provide them to containerd, and end that early.
    Restore,
    /// Suspend and resume containers.
    Suspend,
    /// Stage checkpoints. To evict them takes a rule for the namespace `*`: others may use them.
    Stage,
    /// Let what is restored have mounts, devices, capabilities or namespaces of the host, and name
    /// directories of this node (`oci:`). That is as good as root on this node.
    Allow,
}

/// One rule.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Whom it is about.
    pub who: Who,
    /// What they may do.
    pub may: Vec<Right>,
    /// In which of containerd's namespaces.
    pub namespaces: Vec<GlobMatcher>,
}

/// Whom a rule is about: `uid:NUMBER` or `certificate:NAME`. NAME is a glob, in which `*` also stands
/// for `/`; it means client certificates with such a common name, URI or DNS name.
#[derive(Clone, Debug)]
pub enum Who {
    /// A user of this machine, over the socket.
    User(u32),
    /// Whoever has such a client certificate, over the network.
    Certificate(GlobMatcher),
}

/// Why a text is not [`Who`].
#[derive(Debug, thiserror::Error)]
#[error("it must be uid:NUMBER or certificate:NAME")]
pub struct WhoError;

/// All rules.
#[derive(Clone, Debug, Default)]
pub struct Rules(Vec<Rule>);

/// Whoever sends a request, as far as that is proven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// A process of this machine.
    User(u32),
    /// The names in a certificate.
    Certificate(Vec<String>),
    Nobody,
}

/// Where something is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place<'a> {
    /// In a namespace of containerd's; empty is the default one.
    Namespace(&'a str),
    /// In all there are and will be.
    Everywhere,
    /// Wherever; it is about the node.
    Anywhere,
}

/// A caller, what it calls and what it may do: at each moment what the rules say then, so that a long
/// call ends to see what they no longer allow.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    caller: Caller,
    method: &'static str,
    callers: Arc<Callers>,
    metrics: Metrics,
}

impl Rules {
    /// Puts rules together.
    pub const fn new(rules: Vec<Rule>) -> Self {
        Self(rules)
    }

    /// Whether a user of this machine other than root may do anything.
    pub(crate) fn has_users(&self) -> bool {
        self.0.iter().any(|rule| matches!(rule.who, Who::User(_)))
    }

    /// Whether a rule is about a user of this machine.
    pub(crate) fn names(&self, uid: u32) -> bool {
        self.0.iter().any(|rule| matches!(rule.who, Who::User(user) if user == uid))
    }

    /// Whether a rule says that a caller may.
    fn say(&self, caller: &Caller, right: Right, place: Place<'_>) -> bool {
        let mut rules = self.0.iter().filter(|rule| rule.is_about(caller));
        rules.any(|rule| rule.may.contains(&right) && rule.is_for(place))
    }
}

impl Rule {
    fn is_about(&self, caller: &Caller) -> bool {
        match (&self.who, caller) {
            (Who::User(uid), Caller::User(asks)) => uid == asks,
            (Who::Certificate(glob), Caller::Certificate(names)) => {
                names.iter().any(|name| glob.is_match(name))
            }
            (Who::User(_) | Who::Certificate(_), _) => false,
        }
    }

    fn is_for(&self, place: Place<'_>) -> bool {
        match place {
            Place::Namespace(name) => {
                let name = if name.is_empty() { DEFAULT_NAMESPACE } else { name };
                self.namespaces.iter().any(|glob| glob.is_match(name))
            }
            Place::Everywhere => self.namespaces.iter().any(|glob| glob.glob().glob() == "*"),
            Place::Anywhere => true,
        }
    }
}

/// Returns the process that calls, when it is on this node and in no process namespace of its own.
pub(crate) fn process(extensions: &Extensions) -> Option<Known> {
    let local = extensions.get::<UdsConnectInfo>().and_then(|info| info.peer_cred)?;
    Known::of(u32::try_from(local.pid()?).ok()?)
}

impl Asker {
    /// Finds out who calls `method`, by what its connection has proven.
    pub(crate) fn of(extensions: &Extensions, method: &'static str, app: &App) -> Self {
        let local = extensions.get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
        let remote = extensions.get::<TlsConnectInfo<TcpConnectInfo>>();
        let caller = match (local, remote.and_then(TlsConnectInfo::peer_certs)) {
            (Some(process), None) => Caller::User(process.uid()),
            (None, Some(chain)) => {
                Caller::Certificate(chain.first().map(door::names).unwrap_or_default())
            }
            _ => Caller::Nobody,
        };
        let callers = Arc::clone(&app.config.callers);
        Self { caller, method, callers, metrics: app.operations.metrics.clone() }
    }

    /// Whether it may.
    pub(crate) fn has(&self, right: Right, place: Place<'_>) -> bool {
        self.is_root() || self.callers.current().say(&self.caller, right, place)
    }

    /// Refuses what it may not.
    pub(crate) fn may(&self, right: Right, place: Place<'_>) -> Result<(), Status> {
        if self.has(right, place) {
            return Ok(());
        }
        Err(self.refuse(&bounded(format!("may not {right} {place}"))))
    }

    /// Refuses who may not restore, or not with these allowances.
    pub(crate) fn may_restore(
        &self,
        allow: Option<&api::Allowances>,
        place: Place<'_>,
    ) -> Result<(), Status> {
        self.may(Right::Restore, place)?;
        match allow {
            Some(allow) if *allow != api::Allowances::default() => self.may(Right::Allow, place),
            _ => Ok(()),
        }
    }

    /// Refuses who may not name a directory of this node: the agent reads and makes it as root, wherever it
    /// is. What is no reference is refused elsewhere.
    pub(crate) fn may_name(&self, reference: &str, place: Place<'_>) -> Result<(), Status> {
        match reference.parse() {
            Ok(Location::Layout(_)) => self.may(Right::Allow, place),
            Ok(Location::Registry(_)) | Err(_) => Ok(()),
        }
    }

    /// The same, and refuses who may not have a registry reached by plain HTTP, unless it is this machine's
    /// or the configuration says so: whoever is on the way would read this node's password for it.
    pub(crate) fn may_reach(
        &self,
        (reference, plain_http): (&str, bool),
        config: &Config,
        place: Place<'_>,
    ) -> Result<(), Status> {
        self.may_name(reference, place)?;
        let Ok(Location::Registry(named)) = reference.parse() else { return Ok(()) };
        let is_own = named.is_loopback() || config.is_plain_http(&Location::Registry(named));
        if !plain_http || is_own || self.has(Right::Allow, place) {
            return Ok(());
        }
        Err(self.refuse(&bounded(format!(
            "may not have {reference} reached by plain HTTP, which shows this node's password: name its \
             host in [[registry]] with plain_http = true"
        ))))
    }

    /// Refuses all but root of this machine.
    pub(crate) fn must_be_root(&self) -> Result<(), Status> {
        if self.is_root() { Ok(()) } else { Err(self.refuse("is not root of this machine")) }
    }

    /// Whether it may see an operation: who may begin such a one may follow it.
    pub(crate) fn sees(&self, operation: &api::Operation) -> bool {
        let place = Place::Namespace(&operation.containerd_namespace);
        self.has(Right::Read, place) || self.has(right_of(operation.kind()), place)
    }

    /// Refuses to change an operation of a kind that it may not begin.
    pub(crate) fn may_change(&self, operation: &api::Operation) -> Result<(), Status> {
        let place = Place::Namespace(&operation.containerd_namespace);
        self.may(right_of(operation.kind()), place)
    }

    fn is_root(&self) -> bool {
        self.caller == Caller::User(0)
    }

    fn refuse(&self, told: &str) -> Status {
        tracing::warn!(caller = %self.caller, method = self.method, "refused: it {told}");
        self.metrics.denied(self.caller.to_string(), self.method);
        Status::permission_denied(format!(
            "{} {told}: no [[caller]] of this node's configuration says so",
            self.caller
        ))
    }
}

fn right_of(kind: api::OperationKind) -> Right {
    match kind {
        api::OperationKind::Restore | api::OperationKind::Provide => Right::Restore,
        api::OperationKind::Stage => Right::Stage,
        api::OperationKind::Suspend | api::OperationKind::Resume => Right::Suspend,
        api::OperationKind::Checkpoint | api::OperationKind::Unspecified => Right::Checkpoint,
    }
}

/// Makes a pattern in which `*` also stands for `/`.
pub(crate) fn glob(pattern: &str) -> Option<GlobMatcher> {
    let built = GlobBuilder::new(pattern).backslash_escape(true).build();
    built.ok().filter(|_| !pattern.is_empty()).map(|glob| glob.compile_matcher())
}

impl FromStr for Who {
    type Err = WhoError;

    fn from_str(text: &str) -> Result<Self, WhoError> {
        let parsed = match text.split_once(':') {
            Some(("uid", uid)) => uid.parse().ok().map(Self::User),
            Some(("certificate", name)) => glob(name).map(Self::Certificate),
            _ => None,
        };
        parsed.ok_or(WhoError)
    }
}

impl FromStr for Right {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let all =
            [Self::Read, Self::Checkpoint, Self::Restore, Self::Suspend, Self::Stage, Self::Allow];
        all.into_iter().find(|right| right.to_string() == text).ok_or(())
    }
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Suspend => "suspend",
            Self::Stage => "stage",
            Self::Allow => "allow",
        })
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(uid) => write!(f, "uid:{uid}"),
            Self::Certificate(names) => {
                write!(f, "certificate:{}", names.first().map_or("", String::as_str))
            }
            Self::Nobody => f.write_str("nobody"),
        }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Namespace("") => write!(f, "in namespace {DEFAULT_NAMESPACE:?}"),
            Self::Namespace(name) => write!(f, "in namespace {name:?}"),
            Self::Everywhere => f.write_str("in every namespace"),
            Self::Anywhere => f.write_str("on this node"),
        }
    }
}

#[cfg(test)]
mod tests;
