//! `kyb suspend` and `kyb resume`

use clap::Args;
use kybernate_packager::agent_api::{ResumeRequest, SuspendRequest, SuspendedPart};
use serde_json::json;

use super::Failure;
use super::agent::{AgentSocket, refused};
use super::identifier::identifier;
use crate::terminal::Terminal;

/// Freeze a container in place: nothing of it runs until `kyb resume`.
///
/// Its processes get no processor; its memory stays where it is. The agent remembers it, also when
/// it is started anew. Safe to repeat. A container that somebody else paused is left alone.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb suspend job")]
pub(super) struct Suspend {
    #[command(flatten)]
    whom: Whom,
}

/// Let a suspended container run again.
///
/// Safe to repeat. A container that somebody else paused is left alone.
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
        let request =
            SuspendRequest { container: container.clone(), containerd_namespace: namespace };
        let done = agent.connect().await?.suspend(request).await.map_err(refused)?.into_inner();
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
        let done = agent.connect().await?.resume(request).await.map_err(refused)?.into_inner();
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

const fn word(part: SuspendedPart) -> &'static str {
    match part {
        SuspendedPart::Unspecified => "other",
        SuspendedPart::Cpu => "cpu",
        SuspendedPart::Gpu => "gpu",
    }
}
