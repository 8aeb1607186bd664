//! A conformance suite for OCI registries, written from the text of the distribution specification.
//!
//! Reading order: [`check`] says what a requirement is, [`suite`] lists them all; [`repo`] is what
//! a check works in, [`reply`] what it asks of an answer, [`content`] what it pushes; [`client`]
//! and [`auth`] speak HTTP; [`runner`] runs, [`report`] tells.

use std::io::Read as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;

use self::auth::Credentials;
use self::check::Edition;
use self::client::Client;
use self::report::Report;
use self::runner::Settings;

pub mod auth;
pub mod check;
pub mod client;
pub mod content;
pub mod reply;
pub mod repo;
pub mod report;
pub mod runner;
pub mod suite;

/// Checks at a time when nothing is said: enough to hide the time a durable push takes.
pub const JOBS: usize = 16;

/// `EX_USAGE` of sysexits(3).
const EXIT_USAGE: u8 = 64;

/// The options of `oci`.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub struct Args {
    /// The registry: `http://HOST:PORT`, `https://HOST`, or HOST:PORT for plain HTTP.
    #[arg(required_unless_present = "list")]
    url: Option<String>,
    /// Test against the main branch of the specification instead of version 1.1.1.
    #[arg(long)]
    dev: bool,
    /// Write a `JUnit` report.
    #[arg(long, value_name = "FILE.xml")]
    report: Option<PathBuf>,
    /// Print every finding as JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Who to be, for Basic and for a token service.
    #[arg(long, value_name = "NAME", requires = "password_stdin")]
    username: Option<String>,
    /// Read the password from standard input.
    #[arg(long, requires = "username")]
    password_stdin: bool,
    /// Run only checks whose identifier is this or begins with it up to a dot. May be repeated.
    #[arg(long, value_name = "ID")]
    filter: Vec<String>,
    /// Make repositories below this name instead of a random one.
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// Checks at a time.
    #[arg(long, default_value_t = JOBS, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=256))]
    jobs: usize,
    /// Only list the checks, with level and section.
    #[arg(long)]
    list: bool,
}

/// Runs the suite as the command line says.
#[expect(clippy::print_stdout, reason = "the command's result")]
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let edition = if args.dev { Edition::Dev } else { Edition::Stable };
    let namespace = match args.namespace {
        Some(name) => name,
        None => random_namespace()?,
    };
    let settings = Settings { edition, jobs: args.jobs, namespace, filters: args.filter };
    let checks = runner::chosen(suite::all(), &settings);
    if checks.is_empty() {
        return Ok(usage(&format!("no check matches {:?}; --list shows them", settings.filters)));
    }
    if args.list {
        for (check, level) in checks {
            println!("{level:<6} {}  {} ({:?})", check.id, check.title, check.section);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let credentials = match args.username {
        Some(username) => Some(Credentials { username, password: password()? }),
        None => None,
    };
    let url = args.url.unwrap_or_default();
    let client = match Client::new(&url, credentials) {
        Ok(client) => client,
        Err(error @ client::ClientError::Url(_)) => return Ok(usage(&error.to_string())),
        Err(error) => return Err(error.into()),
    };
    let report = block_on(against(client, &settings))?;
    if let Some(path) = &args.report {
        fs_err::write(path, report.junit().context("failed to write JUnit")?)?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report.json())?);
    } else {
        print!("{}", report.text());
    }
    Ok(if report.counts().failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the chosen checks against one registry.
pub async fn against(client: Client, settings: &Settings) -> Report {
    let started = Instant::now();
    let url = client.base().to_string();
    let checks = runner::chosen(suite::all(), settings);
    let findings = runner::run(Arc::new(client), checks, settings).await;
    Report { url, edition: settings.edition, time: started.elapsed(), findings }
}

/// Runs to the end what needs a runtime.
pub fn block_on<T>(work: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("failed to start the runtime")?;
    Ok(runtime.block_on(work))
}

/// Returns a name that no other run has.
pub fn random_namespace() -> anyhow::Result<String> {
    let number = getrandom::u32().context("failed to get a random number")?;
    Ok(format!("conformance-{number:08x}"))
}

fn password() -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("failed to read the password")?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

#[expect(clippy::print_stderr, reason = "this is where a wrong option is told")]
fn usage(text: &str) -> ExitCode {
    eprintln!("kybernate-conformance: {text}");
    ExitCode::from(EXIT_USAGE)
}
