//! `kyb cancel`

use clap::Args;
use kybernate_packager::agent_api::{CancelRequest, OperationState};
use serde_json::json;

use super::Failure;
use super::agent::{AgentSocket, unknown};
use super::identifier::identifier;
use crate::terminal::Terminal;

/// End an operation of this node's agent early.
///
/// What the operation made is taken away, and a source that is paused runs on. Safe to repeat. It
/// fails when the operation has ended otherwise, or can no longer be undone: a checkpoint that is
/// being tagged, a restored container that runs.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb cancel 019aa6e3c0de5f3759df   # as kyb ps lists it")]
pub(super) struct Cancel {
    /// The operation's id.
    #[arg(value_name = "OPERATION", value_parser = identifier)]
    operation: String,
    /// Do not wait until everything is taken away.
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    agent: AgentSocket,
}

impl Cancel {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let mut client = self.agent.connect().await?;
        let request = CancelRequest { operation_id: self.operation.clone() };
        let asked = client.cancel(request).await.map_err(unknown)?.into_inner();
        let operation =
            if self.no_wait { asked } else { self.agent.end_of(terminal, asked, None).await? };
        let ended = operation.state() == OperationState::Cancelled;
        let facts = json!({
            "operation": operation.id,
            "container": operation.container,
            "reference": operation.reference,
            "state": if ended { "cancelled" } else { "running" },
            "error": operation.error,
            "undone": operation.undone,
        });
        let text = if ended {
            let lines = operation.undone.iter().map(|undone| format!("\n  {undone}"));
            format!("cancelled {}{}", operation.id, lines.collect::<String>())
        } else {
            format!("cancelling {}", operation.id)
        };
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}
