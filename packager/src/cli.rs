//! The command line of `kyb`.

mod agent;
mod aside;
mod bring;
mod cancel;
mod checkpoint;
mod compat;
mod connection;
mod copy;
mod diff;
mod export;
mod facts;
mod failure;
mod help;
mod identifier;
mod import;
mod inspect;
mod keygen;
mod keys;
mod login;
mod ls;
mod node;
mod offer;
mod pack;
mod page;
mod preflight;
mod provide;
mod ps;
mod restore;
mod rm;
mod shell;
mod sign;
mod stage;
mod suspend;
mod trust;
mod unpack;
mod verify;
mod watch;

use clap::{Parser, Subcommand};
use kybernate_spec::{Location, Tag};

use self::connection::Connection;
pub(crate) use self::failure::{Failure, Rule};
pub(crate) use self::help::better;
pub(crate) use self::page::{Page, Sheet};
use crate::terminal::Terminal;

const ABOUT: &str = "\
Takes, moves, inspects and restores checkpoints of containers.

A reference is host[:port]/name[:tag][@digest], or oci:DIR[:tag] for an image layout on disk. \
Credentials come from Docker's config.json and its helpers.

Exit codes: 0 done, 1 failed, 2 refused by a rule (signature, integrity, compatibility, \
identity, policy), 64 wrong usage. `kyb compat` also ends with 3: not known.

With --json, stdout holds one JSON document, also when a command fails: \
{\"error\": {\"kind\", \"rule\", \"reason\", \"message\"}, \"exit\": CODE}.";

/// Takes, moves, inspects and restores checkpoints of containers.
#[derive(Debug, Parser)]
#[command(name = "kyb", version, max_term_width = 100, arg_required_else_help = true)]
#[command(long_about = ABOUT, disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// Print facts as JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Checkpoint(checkpoint::Checkpoint),
    Restore(restore::Restore),
    Ps(ps::Ps),
    Watch(watch::Watch),
    Cancel(cancel::Cancel),
    Preflight(preflight::Preflight),
    Stage(stage::Stage),
    Evict(stage::Evict),
    Provide(provide::Provide),
    Node(node::Node),
    Suspend(suspend::Suspend),
    Resume(suspend::Resume),
    Pack(pack::Pack),
    Unpack(unpack::Unpack),
    Copy(copy::Copy),
    Export(export::Export),
    Import(import::Import),
    Inspect(inspect::Inspect),
    Diff(diff::Diff),
    Tree(ls::Tree),
    Ls(ls::Ls),
    Rm(rm::Rm),
    Sign(sign::Sign),
    Verify(verify::Verify),
    Facts(facts::Facts),
    Compat(compat::Compat),
    Keygen(keygen::Keygen),
    Login(login::Login),
    Logout(login::Logout),
    Completion(shell::Completion),
    Man(shell::Man),
    Help(help::Help),
}

impl Cli {
    /// Whether results are printed as JSON.
    pub(crate) const fn json(&self) -> bool {
        self.json
    }

    /// Returns the page that was asked for, when that is what was asked for.
    pub(crate) fn help(&self) -> Option<clap::Error> {
        match &self.command {
            Command::Help(help) => Some(help.page()),
            _ => None,
        }
    }

    /// Runs the command.
    pub(crate) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        match self.command {
            Command::Checkpoint(command) => command.run(terminal).await,
            Command::Restore(command) => command.run(terminal).await,
            Command::Ps(command) => command.run(terminal).await,
            Command::Watch(command) => command.run(terminal).await,
            Command::Cancel(command) => command.run(terminal).await,
            Command::Preflight(command) => command.run(terminal).await,
            Command::Stage(command) => command.run(terminal).await,
            Command::Evict(command) => command.run(terminal).await,
            Command::Provide(command) => command.run(terminal).await,
            Command::Node(command) => command.run(terminal).await,
            Command::Suspend(command) => command.run(terminal).await,
            Command::Resume(command) => command.run(terminal).await,
            Command::Pack(command) => Box::pin(command.run(terminal)).await,
            Command::Unpack(command) => Box::pin(command.run(terminal)).await,
            Command::Copy(command) => command.run(terminal).await,
            Command::Export(command) => Box::pin(command.run(terminal)).await,
            Command::Import(command) => Box::pin(command.run(terminal)).await,
            Command::Inspect(command) => Box::pin(command.run(terminal)).await,
            Command::Diff(command) => Box::pin(command.run(terminal)).await,
            Command::Tree(command) => Box::pin(command.run(terminal)).await,
            Command::Ls(command) => Box::pin(command.run(terminal)).await,
            Command::Rm(command) => command.run(terminal).await,
            Command::Sign(command) => command.run(terminal).await,
            Command::Verify(command) => command.run(terminal).await,
            Command::Facts(command) => Box::pin(command.run(terminal)).await,
            Command::Compat(command) => Box::pin(command.run(terminal)).await,
            Command::Keygen(command) => command.run(terminal).await,
            Command::Login(command) => Box::pin(command.run(terminal)).await,
            Command::Logout(command) => command.run(terminal).await,
            Command::Completion(command) => command.run(terminal),
            Command::Man(command) => command.run(terminal),
            Command::Help(command) => Err(Failure::usage(command.page())),
        }
    }
}

/// Returns the tag that something new gets: the one written, or `latest`, as for images.
fn tag_for(location: &Location) -> Result<Tag, Failure> {
    if location.digest().is_some() {
        return Err(Failure::usage(format!(
            "{location} names a digest: say a tag, the digest follows from the content"
        )));
    }
    match location.tag() {
        Some(tag) => Ok(tag.clone()),
        None => "latest".parse().map_err(Failure::failed),
    }
}
