//! `kyb preflight`

use clap::{Args, ValueEnum};
use kybernate_packager::agent_api::{Finding, LockPolicy, PreflightRequest, Severity, TcpPolicy};
use serde_json::{Value, json};

use super::agent::{AgentSocket, refused};
use super::identifier::identifier;
use super::{Failure, Rule};
use crate::terminal::Terminal;

/// Say what stands in the way of a checkpoint, without touching the container.
///
/// `kyb checkpoint` begins with the same look. What is refused is listed with what can be done about
/// it, and the exit code is 2.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb preflight job --tcp keep")]
pub(super) struct Preflight {
    /// containerd's id of the container.
    #[arg(value_parser = identifier)]
    container: String,
    /// containerd's namespace.
    #[arg(long, default_value = "default", value_parser = identifier)]
    namespace: String,
    #[command(flatten)]
    policy: Policy,
    #[command(flatten)]
    agent: AgentSocket,
}

/// What becomes of what cannot simply be taken along.
#[derive(Clone, Debug, Args)]
pub(super) struct Policy {
    /// What becomes of established TCP connections. Kept ones need the same addresses in a restore;
    /// closed ones are closed there, and the source keeps them.
    #[arg(long, value_name = "WHAT", default_value = "refuse")]
    tcp: Tcp,
    /// What becomes of file locks.
    #[arg(long, value_name = "WHAT", default_value = "keep")]
    file_locks: Locks,
    /// Copy memory before the pause, in rounds, so that it is shorter. The kernel has to track which
    /// pages are written to, and the container to have a CRIU configuration file of the agent's own;
    /// else the agent refuses, and says why.
    #[arg(long)]
    pub(super) pre_copy: bool,
    /// Take along what is mounted here from the node, PATH in the container. It is the container's own
    /// when it is restored. /dev/shm always goes along.
    #[arg(long = "capture-mount", value_name = "PATH")]
    pub(super) capture_mounts: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tcp {
    Refuse,
    Keep,
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Locks {
    Keep,
    Refuse,
}

impl Policy {
    pub(super) const fn tcp(&self) -> TcpPolicy {
        match self.tcp {
            Tcp::Refuse => TcpPolicy::Refuse,
            Tcp::Keep => TcpPolicy::Keep,
            Tcp::Close => TcpPolicy::Close,
        }
    }

    pub(super) const fn file_locks(&self) -> LockPolicy {
        match self.file_locks {
            Locks::Keep => LockPolicy::Keep,
            Locks::Refuse => LockPolicy::Refuse,
        }
    }
}

/// Why a container cannot be checkpointed.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct Obstacles {
    pub(super) text: String,
    pub(super) findings: Vec<Finding>,
}

impl Obstacles {
    /// Returns what was found as JSON has it.
    pub(super) fn facts(&self) -> Vec<Value> {
        self.findings.iter().map(fact).collect()
    }
}

impl Preflight {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let mut client = self.agent.connect().await?;
        let request = PreflightRequest {
            container: self.container.clone(),
            containerd_namespace: self.namespace,
            tcp: self.policy.tcp().into(),
            file_locks: self.policy.file_locks().into(),
            pre_copy: self.policy.pre_copy,
            capture_mounts: self.policy.capture_mounts,
        };
        let found = client.preflight(request).await.map_err(refused)?.into_inner().findings;
        let refuses = |finding: &&Finding| finding.severity() == Severity::Refuse;
        let reasons: Vec<&Finding> = found.iter().filter(refuses).collect();
        if !reasons.is_empty() && terminal.is_json() {
            let text = reasons.iter().map(|finding| line(finding)).collect::<Vec<_>>().join("; ");
            let obstacles = Obstacles { text, findings: found };
            return Err(Failure::Refused(Rule::Compatibility, obstacles.into()));
        }
        let facts = json!({
            "container": self.container,
            "findings": found.iter().map(fact).collect::<Vec<_>>(),
        });
        let mut text: String = found.iter().map(|finding| line(finding) + "\n").collect();
        if reasons.is_empty() {
            text.extend([&*self.container, " can be checkpointed\n"]);
        }
        terminal.print(&facts, &text).map_err(Failure::failed)?;
        if reasons.is_empty() {
            return Ok(());
        }
        let text = format!("{} cannot be checkpointed", self.container);
        Err(Failure::Refused(Rule::Compatibility, text.into()))
    }
}

fn word(finding: &Finding) -> &'static str {
    if finding.severity() == Severity::Refuse { "refuse" } else { "warn" }
}

fn line(finding: &Finding) -> String {
    let Finding { id, subject, reason, remedy, .. } = finding;
    format!("{} {id}: {reason} ({subject}); {remedy}", word(finding))
}

fn fact(finding: &Finding) -> Value {
    json!({
        "id": finding.id,
        "severity": word(finding),
        "subject": finding.subject,
        "reason": finding.reason,
        "remedy": finding.remedy,
    })
}
