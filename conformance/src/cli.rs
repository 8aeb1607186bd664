//! The command line.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail, ensure};

use crate::demo;
use crate::node::{Lifetime, command_in};
use crate::process::{children, started};
use crate::testbed::{State, Testbed, preflight, testbeds};

/// Runs the other crates' programs on two real nodes of this machine.
#[derive(Debug, clap::Parser)]
#[command(
    version,
    after_help = "Example:\n  kybernate-conformance node up\n  \
    kybernate-conformance node exec a -- ctr version\n  kybernate-conformance node down"
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Moves a running container from one node to another, and shows what is refused.
    #[command(after_help = "Example: kybernate-conformance demo --mib 300")]
    Demo {
        /// Memory of the container, in MiB.
        #[arg(long, default_value_t = 300)]
        mib: u32,
    },
    /// Starts, enters and ends two real nodes.
    #[command(subcommand)]
    Node(NodeCommand),
}

#[derive(Debug, clap::Subcommand)]
enum NodeCommand {
    /// Starts node a (Debian 13, containerd 1.7) and node b (Debian 14, containerd 2.1).
    #[command(after_help = "Example: kybernate-conformance node up --json")]
    Up {
        /// Print the testbed as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Runs a program on a node; its exit code becomes ours.
    #[command(after_help = "Example: kybernate-conformance node exec b -- ctr containers list")]
    Exec {
        /// a or b.
        node: String,
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        words: Vec<String>,
    },
    /// Ends nodes that `up` started; nothing of them is left.
    #[command(after_help = "Example: kybernate-conformance node down")]
    Down {
        /// a, b or all.
        #[arg(default_value = "all", value_parser = ["a", "b", "all"])]
        node: String,
    },
}

/// Does what the command line says.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Demo { mib } => {
            if let Err(reason) = preflight() {
                bail!(reason);
            }
            demo::run(&programs()?, mib)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Node(NodeCommand::Up { json }) => up(json),
        Command::Node(NodeCommand::Exec { node, words }) => exec(&node, &words),
        Command::Node(NodeCommand::Down { node }) => down(&node),
    }
}

/// Says what takes long, on standard error.
#[expect(clippy::print_stderr, reason = "progress of a command")]
pub(crate) fn say(text: &str) {
    eprintln!("{text}");
}

/// Returns the directory of this program: where the others are built to.
pub(crate) fn programs() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("failed to find this program")?;
    Ok(own.parent().context("this program has no directory")?.to_owned())
}

fn kept() -> Option<State> {
    State::all().into_iter().find(|state| state.directory == testbeds().join("up"))
}

#[expect(clippy::print_stdout, reason = "the command's result")]
fn up(json: bool) -> anyhow::Result<ExitCode> {
    if let Err(reason) = preflight() {
        bail!(reason);
    }
    ensure!(kept().is_none(), "nodes are up already; `node down` ends them");
    let directory = testbeds().join("up");
    let testbed = Testbed::start_in(&directory, &programs()?, Lifetime::Kept, &say)?;
    let state = kept().context("the testbed was not recorded")?;
    if json {
        println!("{}", serde_json::to_string_pretty(&state)?);
    } else {
        for node in [&testbed.a, &testbed.b] {
            let versions = node.run(&[
                "sh",
                "-c",
                "criu --version | head -n 1; runc --version | head -n 1; containerd --version",
            ])?;
            println!("{}: {}", node.name(), versions.trim().replace('\n', ", "));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn exec(node: &str, words: &[String]) -> anyhow::Result<ExitCode> {
    let state = kept().context("no nodes are up; `node up` starts them")?;
    let found = state.nodes.iter().find(|(name, ..)| name == node);
    let (_, outer, birth) = found.with_context(|| format!("there is no node {node:?}"))?;
    ensure!(started(*outer) == Some(*birth), "node {node} has ended; `node down` cleans up");
    let init = *children(*outer).first().context("the node's first process is gone")?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let status = command_in(init, &words).status().context("failed to enter the node")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

fn down(node: &str) -> anyhow::Result<ExitCode> {
    let only = (node != "all").then_some(node);
    if let Some(state) = kept() {
        state.end(only)?;
    }
    Ok(ExitCode::SUCCESS)
}
