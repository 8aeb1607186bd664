//! `kyb suspend` and `kyb resume`

use clap::Args;
use kybernate_packager::agent_api::{
    Operation, ResumeRequest, SuspendRequest, SuspendedPart, Suspension,
};
use serde_json::json;

use super::Failure;
use super::agent::{AgentSocket, refused, time_out};
use super::identifier::identifier;
use crate::terminal::Terminal;

/// Freeze a container in place: nothing of it runs until `kyb resume`.
///
/// Its processes get no processor; its memory stays where it is. The agent remembers it, also when
/// it is started anew. Safe to repeat. A container that somebody else paused is left alone. Ctrl-C
/// cancels, and the container runs; a second Ctrl-C leaves it to the agent.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb suspend job")]
pub(super) struct Suspend {
    #[command(flatten)]
    whom: Whom,
    /// Cancel it when it takes longer than this: the container runs on then.
    #[arg(long, value_name = "TIME", value_parser = time_out)]
    timeout: Option<u32>,
}

/// Let a suspended container run again.
///
/// Safe to repeat. A container that somebody else paused is left alone. What has begun goes on at the
/// agent, also after Ctrl-C.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb resume job")]
pub(super) struct Resume {
    #[command(flatten)]
    whom: Whom,
}

#[derive(Debug, Args)]
struct Whom {
    /// containerd's id of the container.
    #[arg(value_parser = identifier)]
    container: String,
    /// containerd's namespace.
    #[arg(long, default_value = "default", value_parser = identifier)]
    namespace: String,
    #[command(flatten)]
    agent: AgentSocket,
}

impl Suspend {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let Whom { container, namespace, agent } = self.whom;
        let request = SuspendRequest {
            container: container.clone(),
            containerd_namespace: namespace,
            timeout_seconds: self.timeout.unwrap_or_default(),
        };
        let begun = agent.connect().await?.suspend(request).await.map_err(refused)?.into_inner();
        let done = done(agent.follow(terminal, begun).await?);
        let parts: Vec<&str> = done.parts().map(word).collect();
        let facts = json!({
            "container": container,
            "suspended": parts,
            "since": done.since,
            "already": done.already,
        });
        let was = if done.already { "was suspended" } else { "suspended" };
        let text = format!("{was} {container} ({}), since {}", parts.join(", "), done.since);
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}

impl Resume {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let Whom { container, namespace, agent } = self.whom;
        let request =
            ResumeRequest { container: container.clone(), containerd_namespace: namespace };
        let begun = agent.connect().await?.resume(request).await.map_err(refused)?.into_inner();
        let done = done(agent.follow(terminal, begun).await?);
        let parts: Vec<&str> = done.parts().map(word).collect();
        let facts = json!({
            "container": container,
            "resumed": parts,
            "since": Some(&done.since).filter(|since| !since.is_empty()),
            "already": done.already,
        });
        let text = if done.already {
            format!("{container} runs already")
        } else {
            format!("resumed {container} ({}), suspended since {}", parts.join(", "), done.since)
        };
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}

/// Returns what a finished operation has done.
fn done(operation: Operation) -> Suspension {
    operation.suspension.unwrap_or_default()
}

const fn word(part: SuspendedPart) -> &'static str {
    match part {
        SuspendedPart::Unspecified => "other",
        SuspendedPart::Cpu => "cpu",
        SuspendedPart::Gpu => "gpu",
    }
}
