//! `kyb completion` and `kyb man`: what shells and manuals know of the command line.

use std::path::PathBuf;

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;
use serde_json::json;

use super::{Cli, Failure};
use crate::terminal::Terminal;

/// Print a script that completes kyb's command line in a shell.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb completion bash > /etc/bash_completion.d/kyb")]
pub(super) struct Completion {
    /// Which shell.
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Write the manual pages, one for each command.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb man /usr/local/share/man/man1")]
pub(super) struct Man {
    /// Where to; made when it is not there.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

impl Completion {
    pub(super) fn run(&self, terminal: &Terminal) -> Result<(), Failure> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "kyb", &mut script);
        let script = String::from_utf8(script).map_err(Failure::failed)?;
        let facts = json!({ "shell": self.shell.to_string(), "script": script });
        terminal.print_script(&facts, &script).map_err(Failure::failed)
    }
}

impl Man {
    pub(super) fn run(&self, terminal: &Terminal) -> Result<(), Failure> {
        fs_err::create_dir_all(&self.directory).map_err(Failure::failed)?;
        // The pages of subcommands refer to each other by their full names.
        clap_mangen::generate_to(Cli::command(), &self.directory).map_err(Failure::failed)?;
        let text = format!("the manual is in {}", self.directory.display());
        terminal.print(&json!({ "directory": self.directory }), &text).map_err(Failure::failed)
    }
}
