//! `kyb facts`

use std::fmt::Write as _;

use clap::Args;
use kybernate_packager::agent_api::GetNodeRequest;
use kybernate_packager::node::{NodeReport, containerd_version, look};
use kybernate_spec::checkpoint::NodeFacts;

use super::Failure;
use super::agent::{AgentSocket, refused};
use crate::terminal::{Terminal, bytes, say};

/// Show what this node is: the facts that decide whether a checkpoint restores here.
///
/// With an agent it is the agent that looks; without one, the same is looked at here. What --json
/// prints is what `kyb compat --facts` reads.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb facts --json > worker-7.json")]
pub(super) struct Facts {
    #[command(flatten)]
    source: FactsSource,
}

/// Who says what this node is.
#[derive(Debug, Args)]
pub(super) struct FactsSource {
    /// Do not ask the agent, look at the node here.
    #[arg(long)]
    no_agent: bool,
    #[command(flatten)]
    agent: AgentSocket,
}

impl Facts {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let report = self.source.report().await?;
        // The document on stdout is facts alone.
        for problem in &report.problems {
            say(&format!("problem: {problem}"));
        }
        terminal.print(&report.facts, &text(&report.facts)).map_err(Failure::failed)
    }
}

impl FactsSource {
    /// Asks the agent when there is one, else looks.
    pub(super) async fn report(&self) -> Result<NodeReport, Failure> {
        if self.no_agent || !self.agent.is_there() {
            return Ok(look(containerd_version().await).await);
        }
        let mut client = self.agent.connect().await?;
        let node = client.get_node(GetNodeRequest {}).await.map_err(refused)?.into_inner();
        let facts = serde_json::from_str(&node.facts_json).map_err(|error| {
            Failure::failed(format!("the agent's facts cannot be read: {error}"))
        })?;
        Ok(NodeReport { facts, problems: node.problems })
    }
}

/// Writes facts for people, one a line.
pub(super) fn text(facts: &NodeFacts) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        let value = if value.is_empty() { "not known" } else { value };
        // Writing to a string does not fail.
        let _written = writeln!(text, "{name:<14}{value}");
    };
    let list = |words: &mut dyn Iterator<Item = &str>| words.collect::<Vec<_>>().join(" ");
    line("architecture", &facts.architecture);
    line("cpu", &format!("{} {}", facts.cpu.vendor, facts.cpu.model));
    line("features", &list(&mut facts.cpu.features.iter().map(String::as_str)));
    if let Some(xsave) = facts.cpu.xsave {
        let (now, most) = (xsave.bytes, xsave.bytes_max);
        line("xsave", &format!("components {:#x}, {now} of {most} bytes", xsave.features));
    }
    line("kernel", &facts.kernel);
    line("page size", &facts.page_bytes.to_string());
    line("cgroup", &facts.cgroup);
    line("lsm", &facts.lsm);
    line(
        "seccomp",
        match facts.seccomp {
            Some(true) => "filters",
            Some(false) => "none",
            None => "",
        },
    );
    line("criu", &facts.criu);
    line("runtime", &facts.runtime);
    line("containerd", &facts.containerd);
    line("os", &facts.os);
    if let Some(devices) = &facts.devices {
        line("devices", &list(&mut devices.iter().map(String::as_str)));
    }
    match &facts.gpu {
        None => line("gpu", ""),
        Some(gpu) if gpu.devices.is_empty() => line("gpu", "none"),
        Some(gpu) => {
            line("gpu driver", &format!("{}, CUDA {}", gpu.driver, gpu.cuda));
            for one in &gpu.devices {
                let memory = bytes(one.memory_bytes);
                let capability = &one.compute_capability;
                let what = format!("{} {}, {memory}, {capability}", one.uuid, one.model);
                line("gpu", &what);
            }
        }
    }
    text
}
