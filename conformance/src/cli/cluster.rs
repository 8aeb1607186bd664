//! `cluster`: Kubernetes on the two nodes.

use std::process::ExitCode;

use anyhow::Context as _;

use super::{programs, say};
use crate::cluster::{Cluster, platform};
use crate::node::containerd::Serves;
use crate::preflight::preflight;
use crate::testbed::keep;
use crate::testbed::state::{State, sweep};

/// What is done with the cluster.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Starts the nodes with kubelets, a control plane, a registry and agents.
    ///
    /// The runtime class is `kybernate`; the registry is 10.77.0.1:5000 and has the workload's image,
    /// `demo/counter:base`. All of it runs until `cluster down`.
    #[command(after_help = "Example: kybernate-conformance cluster up")]
    Up,
    /// Runs kubectl as administrator; its exit code becomes ours.
    #[command(after_help = "Example: kybernate-conformance cluster kubectl -- get pods -o wide")]
    Kubectl {
        /// kubectl's arguments.
        #[arg(last = true, required = true)]
        words: Vec<String>,
    },
    /// Ends the cluster and its nodes; nothing of them stays.
    #[command(after_help = "Example: kybernate-conformance cluster down")]
    Down,
}

pub(super) fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Up => up(),
        Command::Kubectl { words } => kubectl(&words),
        Command::Down => down(),
    }
}

fn up() -> anyhow::Result<ExitCode> {
    preflight()?;
    Cluster::look()?;
    let bin = programs()?;
    let state = keep(Serves::Kubelet, &["a", "b"], &bin, &say)?;
    if Cluster::of(&state).is_ok() {
        say("the cluster is up already");
        return Ok(ExitCode::SUCCESS);
    }
    let cluster = Cluster::start(&state, &say)?;
    platform::start(&state, &cluster, &bin)?;
    for (name, mib) in cluster.memory()? {
        say(&format!("{name}: {mib} MiB"));
    }
    Ok(ExitCode::SUCCESS)
}

fn kubectl(words: &[String]) -> anyhow::Result<ExitCode> {
    let state = State::kept().context("no cluster is up; `cluster up` starts one")?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let status = Cluster::of(&state)?.command(&words).status();
    let code = status.context("failed to enter the node")?.code();
    Ok(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

fn down() -> anyhow::Result<ExitCode> {
    if let Some(state) = State::kept() {
        state.end(None)?;
    }
    sweep()?;
    Ok(ExitCode::SUCCESS)
}
