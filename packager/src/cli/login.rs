//! `kyb login` and `kyb logout`

use std::io::{self, BufRead as _, IsTerminal as _, Read as _, Write as _};

use clap::Args;
use kybernate_packager::docker_config::{DockerConfig, Kept};
use kybernate_packager::remote::login::{Accepted, check_credentials};
use kybernate_packager::store::ConnectOptions;
use kybernate_spec::{Reference, without_credentials};
use serde_json::json;

use super::aside::aside;
use super::{Connection, Failure};
use crate::terminal::Terminal;

/// Longest password read. Tokens of clouds have a few KiB.
const PASSWORD_BYTES_MAX: u64 = 64 << 10;

/// Keep credentials for a registry, once it has taken them.
///
/// They go where Docker and other tools find them: into Docker's config.json
/// (`$DOCKER_CONFIG/config.json`, else `~/.docker/config.json`), or to the credential helper that it
/// names. The password is asked for in a terminal, or read from standard input; it is never an
/// argument, which every user of the machine can read.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb login registry.example.com --username me\n  \
    kyb login registry.example.com --username me --password-stdin < token")]
pub(super) struct Login {
    /// The registry: its host, with its port if it has one.
    #[arg(value_name = "REGISTRY", value_parser = registry)]
    registry: Reference,
    /// The user's name; asked for in a terminal.
    #[arg(long, short, value_name = "NAME")]
    username: Option<String>,
    /// Read the password from standard input, to its end. One line break at the end is dropped.
    #[arg(long)]
    password_stdin: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Remove the credentials for a registry.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb logout registry.example.com")]
pub(super) struct Logout {
    /// The registry: its host, with its port if it has one.
    #[arg(value_name = "REGISTRY", value_parser = registry)]
    registry: Reference,
}

impl Login {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let config = config()?;
        let (username, stdin) = (self.username, self.password_stdin);
        let asked = aside(move || ask(username, stdin));
        let (user, password) = asked.await.map_err(Failure::failed)??;
        let registry = self.registry.registry.to_string();
        let plain_http = self.connection.is_plain(&self.registry);
        let options = ConnectOptions { plain_http, notes: None };
        let accepted = check_credentials(&self.registry, &user, &password, &options).await?;
        let kept = config.keep(&registry, &user, &password).await.map_err(Failure::failed)?;
        let path = config.path().display().to_string();
        let (place, helper) = match &kept {
            Kept::File => (format!("{path}, not encrypted"), None),
            Kept::Helper(name) => (format!("docker-credential-{name}"), Some(name)),
        };
        let facts = json!({
            "registry": registry,
            "username": user,
            "proven": accepted == Accepted::Proven,
            "config": path,
            "helper": helper,
        });
        let mut text = format!("logged in  {registry} as {user}\nkept in    {place}");
        if accepted == Accepted::Unasked {
            text += "\nnote       the registry lets anybody in so far, the password is not proven";
        }
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}

impl Logout {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let registry = self.registry.registry.to_string();
        let removed = config()?.forget(&registry).await.map_err(Failure::failed)?;
        let text = if removed { "logged out " } else { "not logged in to" };
        let facts = json!({ "registry": registry, "removed": removed });
        terminal.print(&facts, &format!("{text} {registry}")).map_err(Failure::failed)
    }
}

/// Finds Docker's configuration, where its reader looks for it.
fn config() -> Result<DockerConfig, Failure> {
    DockerConfig::of_environment().ok_or_else(|| {
        Failure::usage("there is no place for credentials: set DOCKER_CONFIG or HOME")
    })
}

/// Asks for what is not said.
fn ask(username: Option<String>, stdin: bool) -> Result<(String, String), Failure> {
    let terminal = io::stdin().is_terminal();
    let user = match username {
        Some(user) => user,
        None if terminal && !stdin => line("Username: ").map_err(Failure::failed)?,
        None => return Err(Failure::usage("say who with --username")),
    };
    if user.is_empty() || user.contains(':') {
        return Err(Failure::usage("a user's name is not empty, and has no colon"));
    }
    let password = if stdin {
        piped()?
    } else if terminal {
        rpassword::prompt_password("Password: ").map_err(Failure::failed)?
    } else {
        let text = "the password is read from a terminal, or with --password-stdin";
        return Err(Failure::usage(text));
    };
    if password.is_empty() {
        return Err(Failure::usage("the password is empty"));
    }
    Ok((user, password))
}

fn line(prompt: &str) -> io::Result<String> {
    // Not locked while somebody types: who presses Ctrl-C is told so there.
    io::stderr().write_all(prompt.as_bytes())?;
    let mut text = String::new();
    io::stdin().lock().take(PASSWORD_BYTES_MAX).read_line(&mut text)?;
    Ok(text.trim().to_owned())
}

fn piped() -> Result<String, Failure> {
    let mut text = String::new();
    let input = io::stdin().lock().take(PASSWORD_BYTES_MAX + 1).read_to_string(&mut text);
    input.map_err(Failure::failed)?;
    if u64::try_from(text.len()).map_or(true, |length| length > PASSWORD_BYTES_MAX) {
        return Err(Failure::usage("the password has more than 64 KiB"));
    }
    let line = text.strip_suffix('\n').map(|line| line.strip_suffix('\r').unwrap_or(line));
    Ok(line.unwrap_or(&text).to_owned())
}

fn registry(text: &str) -> Result<Reference, String> {
    let shown = without_credentials(text);
    let wrong = || format!("{shown:?} is no host of a registry, as registry.example.com:5000");
    if text.contains('/') || text.contains('@') {
        return Err(wrong());
    }
    format!("{text}/x").parse().map_err(|_wrong: kybernate_spec::ReferenceError| wrong())
}
