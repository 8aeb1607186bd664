//! `kyb node`

use std::fmt::Write as _;

use clap::Args;
use kybernate_packager::agent_api::{GetNodeRequest, Node as Described, NodeTier};
use kybernate_spec::checkpoint::NodeFacts;
use serde_json::{Value, json};

use super::agent::{AgentSocket, refused};
use super::stage::{fact, word};
use super::{Failure, facts};
use crate::terminal::{Terminal, bytes};

/// Show this node: its agent, its facts, and what is staged in memory and on disk.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb node --json")]
pub(super) struct Node {
    #[command(flatten)]
    agent: AgentSocket,
}

impl Node {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let mut client = self.agent.connect().await?;
        let node = client.get_node(GetNodeRequest {}).await.map_err(refused)?.into_inner();
        let known: NodeFacts = serde_json::from_str(&node.facts_json).map_err(|error| {
            Failure::failed(format!("the agent's facts cannot be read: {error}"))
        })?;
        let json = json!({
            "name": node.name,
            "agentVersion": node.agent_version,
            "signKeys": node.sign_keys,
            "problems": node.problems,
            "facts": known,
            "tiers": node.tiers.iter().map(tier).collect::<Vec<_>>(),
        });
        terminal.print(&json, &text(&node, &known)).map_err(Failure::failed)
    }
}

/// Tells of one tier.
pub(super) fn tier(one: &NodeTier) -> Value {
    json!({
        "tier": word(one.tier()),
        "directory": one.directory,
        "budgetBytes": one.budget_bytes,
        "usedBytes": one.used_bytes,
        "staged": one.staged.iter().map(fact).collect::<Vec<_>>(),
    })
}

fn text(node: &Described, known: &NodeFacts) -> String {
    let mut text = format!("{:<14}{}\n{:<14}{}\n", "node", node.name, "agent", node.agent_version);
    // Writing to a string does not fail.
    for problem in &node.problems {
        let _written = writeln!(text, "{:<14}{problem}", "problem");
    }
    text.push_str(&facts::text(known));
    for one in &node.tiers {
        let (used, budget) = (bytes(one.used_bytes), bytes(one.budget_bytes));
        let name = word(one.tier()).unwrap_or("other");
        let _written = writeln!(text, "\n{name:<14}{used} of {budget} used, in {}", one.directory);
        for staged in &one.staged {
            let pinned = if staged.pinned { ", in use" } else { "" };
            let size = bytes(staged.bytes);
            let _written =
                writeln!(text, "  {}  {size}, used {}{pinned}", staged.digest, staged.used_at);
            for reference in &staged.references {
                let _written = writeln!(text, "    {reference}");
            }
        }
    }
    text
}
