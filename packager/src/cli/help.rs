//! `kyb help`, and what is said of a command line that cannot be understood.

use std::error::Error;
use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, CommandFactory as _};
use kybernate_spec::{chain, without_credentials};

use super::Cli;

/// Other tools' words for what a command does here.
const WORDS: &[(&str, &str)] = &[
    ("cp", "copy"),
    ("delete", "rm"),
    ("list", "ls"),
    ("load", "import"),
    ("pull", "unpack"),
    ("push", "pack"),
    ("remove", "rm"),
    ("save", "export"),
    ("show", "inspect"),
];

/// Show what kyb does, or a command.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb help pack   # as kyb pack --help")]
pub(super) struct Help {
    /// The command; all of them when absent.
    #[arg(value_name = "COMMAND")]
    command: Option<String>,
}

impl Help {
    /// Returns the page, as an error of clap's: what prints that prints help too.
    pub(super) fn page(&self) -> clap::Error {
        let command = self.command.iter().map(OsString::from);
        let line = std::iter::once("kyb".into()).chain(command).chain(["--help".into()]);
        let told = Cli::command().try_get_matches_from(line);
        told.err().map_or_else(|| clap::Error::new(clap::error::ErrorKind::DisplayHelp), better)
    }
}

/// Takes credentials out of what is told of a command line, tells why a value is wrong, and knows
/// other tools' words.
pub(crate) fn better(mut told: clap::Error) -> clap::Error {
    let clean = |text: &String| without_credentials(text).into_owned();
    let cleaned: Vec<_> = told
        .context()
        .filter_map(|(kind, value)| match value {
            ContextValue::String(text) => Some((kind, ContextValue::String(clean(text)))),
            ContextValue::Strings(texts) => {
                Some((kind, ContextValue::Strings(texts.iter().map(clean).collect())))
            }
            _ => None,
        })
        .collect();
    for (kind, value) in cleaned {
        told.insert(kind, value);
    }
    // Of what is wrong with a value clap tells the first clause alone.
    if let Some(why) = told.source().and_then(Error::source) {
        let tip = ContextValue::StyledStrs(vec![chain(why).to_string().into()]);
        told.insert(ContextKind::Suggested, tip);
    }
    let word = match told.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(word)) => word.clone(),
        _ => return told,
    };
    if word == "version" {
        let tip = ContextValue::StyledStrs(vec!["the version is told by 'kyb --version'".into()]);
        told.insert(ContextKind::Suggested, tip);
    } else if let Some((_, ours)) = WORDS.iter().find(|(other, _)| *other == word) {
        told.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![(*ours).into()]));
    }
    told
}
