//! The command line.

mod cluster;

use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;

use crate::bench::{self, Plan};
use crate::command;
use crate::demo;
use crate::machine;
use crate::node::command_in;
use crate::node::containerd::Serves;
use crate::oci;
use crate::preflight::preflight;
use crate::root::cache;
use crate::testbed::state::{State, sweep};
use crate::testbed::{Testbed, keep};
use crate::vectors;

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
    /// Measures checkpoint → push and pull → restore beside containerd's own path, in one run.
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Example: kybernate-conformance bench --mib 1024 --rounds 3"
    )]
    Bench {
        #[command(subcommand)]
        only: Option<BenchCommand>,
        /// Memory of the process, in MiB.
        #[arg(long, default_value_t = 1024)]
        mib: u32,
        /// How often everything is measured.
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// Print every round's figures as JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Tests any OCI registry against the distribution specification.
    ///
    /// Every check works in a repository of its own and deletes what it has pushed. Exits with 0
    /// when every MUST is met, with 1 when not.
    #[command(
        after_help = "Example: kybernate-conformance oci http://127.0.0.1:5000 --report out.xml"
    )]
    Oci(oci::Args),
    /// Tests any reader of the artifact format with the specification's vectors.
    ///
    /// Exits with 0 when every vector is read or refused as it must be, with 1 when not.
    #[command(after_help = "Example: kybernate-conformance vectors -- \\\n  \
        kyb unpack oci:{layout}:{name} {out} --insecure-no-signature --json")]
    Vectors(vectors::Args),
    /// Starts, enters and ends two real nodes.
    #[command(subcommand)]
    Node(NodeCommand),
    /// Starts, asks and ends a Kubernetes cluster on the two nodes.
    #[command(subcommand)]
    Cluster(cluster::Command),
    /// Runs a program in an emulated machine; its exit code becomes ours.
    ///
    /// For what the kernel here lacks: there it is Debian 13's, which tracks written pages and has
    /// cgroups of version 2 alone, a security module and all capabilities. The machine has one
    /// processor, some twenty times slower than here, and no network. It sees the files of this
    /// machine; what it writes is gone with it. Node roots must have been made before (`node up`),
    /// and nothing may be built while it runs. Installs QEMU when it is missing, and fetches the
    /// kernel once, from the machine's own Debian mirror.
    #[command(after_help = "Example: kybernate-conformance machine -- uname -r")]
    Machine(machine::Args),
}

#[derive(Debug, clap::Subcommand)]
enum BenchCommand {
    /// Measures our registry beside others.
    #[command(after_help = "Example: kybernate-conformance bench registry --only push,pull")]
    Registry(bench::registry::Plan),
    /// Measures packing and unpacking beside what no program can beat, and beside tar and oras.
    #[command(after_help = "Example: kybernate-conformance bench pack --mib 1024 --rounds 3")]
    Pack(bench::pack::Plan),
    /// Measures how long a container is frozen and how it comes back, beside runc alone.
    #[command(after_help = "Example: kybernate-conformance bench node --upper 0,200")]
    Node(bench::node::Plan),
    /// Measures what kybernate-runc adds to runc's calls.
    #[command(after_help = "Example: kybernate-conformance bench runc --calls 50")]
    Runc(bench::runc::Plan),
    /// Tests our registry and others against the distribution specification.
    #[command(after_help = "Example: kybernate-conformance bench oci --json")]
    Oci {
        /// Print the counts as JSON instead of a table.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, clap::Subcommand)]
enum NodeCommand {
    /// Starts node a (Debian 13, containerd 1.7) and node b (Debian 14, containerd 2.1).
    ///
    /// They run until `node down`. The programs beside this one are theirs at /srv/bin, a directory
    /// that both see is at /srv/share.
    #[command(after_help = "Example: kybernate-conformance node up both --json")]
    Up {
        /// Which of the two.
        #[arg(default_value = "both")]
        which: Which,
        /// Print the testbed as JSON.
        #[arg(long)]
        json: bool,
        /// Keep both only until standard input ends or this command is killed. Beside other nodes.
        #[arg(long)]
        hold: bool,
    },
    /// Runs a program on a node; its exit code becomes ours.
    #[command(after_help = "Example: kybernate-conformance node exec b -- ctr containers list")]
    Exec {
        /// The node.
        node: Name,
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        words: Vec<String>,
    },
    /// Ends nodes that `up` started, and what killed testbeds have left; nothing of them stays.
    #[command(after_help = "Example: kybernate-conformance node down")]
    Down {
        /// Which of the two; `all` is another word for both.
        #[arg(default_value = "both")]
        which: Which,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Which {
    A,
    B,
    #[value(alias = "all")]
    Both,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Name {
    A,
    B,
}

impl Which {
    const fn names(self) -> &'static [&'static str] {
        match self {
            Self::A => &["a"],
            Self::B => &["b"],
            Self::Both => &["a", "b"],
        }
    }
}

impl Name {
    const fn as_str(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::B => "b",
        }
    }
}

/// Does what the command line says.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Demo { mib } => {
            preflight()?;
            demo::run(&programs()?, mib)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench { only: Some(BenchCommand::Registry(plan)), .. } => {
            bench::registry::run(&programs()?, &cache(), &plan)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench { only: Some(BenchCommand::Pack(plan)), .. } => {
            bench::pack::run(&programs()?, &cache(), &plan)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench { only: Some(BenchCommand::Node(plan)), .. } => {
            preflight()?;
            bench::node::run(&programs()?, &plan)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench { only: Some(BenchCommand::Runc(plan)), .. } => {
            bench::runc::run(&programs()?, plan)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench { only: Some(BenchCommand::Oci { json }), .. } => {
            bench::oci::run(&programs()?, &cache(), json)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench { only: None, mib, rounds, json } => {
            preflight()?;
            bench::run(&programs()?, Plan { mib, rounds }, json)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Oci(args) => oci::run(args),
        Command::Vectors(args) => vectors::run(args),
        Command::Node(NodeCommand::Up { hold: true, json, .. }) => hold(json),
        Command::Node(NodeCommand::Up { which, json, hold: false }) => up(which, json),
        Command::Node(NodeCommand::Exec { node, words }) => exec(node.as_str(), &words),
        Command::Node(NodeCommand::Down { which }) => down(which),
        Command::Cluster(command) => cluster::run(command),
        Command::Machine(args) => Ok(machine::run(&args, &say)?),
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

fn up(which: Which, json: bool) -> anyhow::Result<ExitCode> {
    preflight()?;
    let state = keep(Serves::Clients, which.names(), &programs()?, &say)?;
    show(&state, json)?;
    Ok(ExitCode::SUCCESS)
}

fn hold(json: bool) -> anyhow::Result<ExitCode> {
    preflight()?;
    let testbed = Testbed::start(&programs()?, &say)?;
    show(&testbed.state(), json)?;
    std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())
        .context("failed to wait for the end of standard input")?;
    testbed.end()?;
    Ok(ExitCode::SUCCESS)
}

#[expect(clippy::print_stdout, reason = "the command's result")]
fn show(state: &State, json: bool) -> anyhow::Result<()> {
    if json {
        // One line, so that whoever reads it knows when it is whole.
        println!("{}", serde_json::to_string(state)?);
        return Ok(());
    }
    for node in &state.nodes {
        let script = "containerd --version | cut -d' ' -f3; runc --version | head -n 1; \
            criu --version | head -n 1";
        let versions = command::run(&mut command_in(node.init, &["sh", "-c", script]))?;
        let versions: Vec<&str> = versions.split_whitespace().collect();
        println!("{} {}: containerd {}", node.name, node.address, versions.join(" "));
    }
    Ok(())
}

fn exec(node: &str, words: &[String]) -> anyhow::Result<ExitCode> {
    let state = State::kept().context("no nodes are up; `node up` starts them")?;
    let node = state.node(node).with_context(|| format!("node {node} is not up"))?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let status = command_in(node.init, &words).status().context("failed to enter the node")?;
    // A program that was killed has no code; shells say 128 and the signal.
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

fn down(which: Which) -> anyhow::Result<ExitCode> {
    let only = match which {
        Which::Both => None,
        Which::A | Which::B => which.names().first().copied(),
    };
    if let Some(state) = State::kept() {
        state.end(only)?;
    }
    sweep()?;
    Ok(ExitCode::SUCCESS)
}
