//! Test vectors of the artifact format, for any reader (`spec/vectors.md`).
//!
//! Reading order: `page_index` and `artifact` put bytes together, right and wrong; `good` and `bad`
//! list the vectors; [`runner`] shows them to a reader, [`report`] tells.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use fs_err as fs;
use kybernate_spec::{Digest, Reason};
use serde::Serialize;
use serde_json::json;

mod artifact;
mod bad;
mod good;
mod page_index;
pub mod report;
pub mod runner;

pub use self::artifact::Pool;

/// `EX_USAGE` of sysexits(3).
const EXIT_USAGE: u8 = 64;

/// The options of `vectors`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The reader and its arguments. In them {layout}, {name} and {out} stand for the layout's
    /// directory, the vector's tag and the directory to unpack into; without any of them the three
    /// are added at the end.
    #[arg(value_name = "READER", last = true, required_unless_present_any = ["list", "write"])]
    reader: Vec<String>,
    /// Run only vectors whose name contains this. May be repeated.
    #[arg(long, value_name = "TEXT")]
    filter: Vec<String>,
    /// Write a `JUnit` report.
    #[arg(long, value_name = "FILE.xml")]
    report: Option<PathBuf>,
    /// Print every finding as JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Only list the vectors, with section and what is expected.
    #[arg(long)]
    list: bool,
    /// Only write layout and list into this directory, as they are in spec/testdata.
    #[arg(long, value_name = "DIR")]
    write: Option<PathBuf>,
}

/// Files by name.
pub type Tree = BTreeMap<String, Content>;

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Content {
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal digits.
    pub sha256: String,
}

/// One vector. With both files and a reason, either is right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Vector {
    /// Its tag in the layout.
    pub name: &'static str,
    /// The section of the specification.
    pub section: &'static str,
    /// What is special about it.
    pub what: &'static str,
    /// The dump, when it may be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<Tree>,
    /// Why it is refused, when it may be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
}

impl Content {
    /// Describes a file.
    pub fn of(content: &[u8]) -> Self {
        let bytes = u64::try_from(content.len()).unwrap_or(u64::MAX);
        Self { bytes, sha256: Digest::of(content).hex().to_owned() }
    }
}

fn insert(tree: &mut Tree, name: &str, content: &[u8]) {
    tree.insert(name.to_owned(), Content::of(content));
}

/// Makes every vector; the same bytes each time.
pub fn all() -> anyhow::Result<Pool> {
    let mut pool = Pool::default();
    good::add(&mut pool)?;
    bad::add(&mut pool)?;
    Ok(pool.finish())
}

/// Writes `layout/` and `vectors.json` into a directory.
pub fn write(pool: &Pool, directory: &Path) -> anyhow::Result<()> {
    pool.write(&directory.join("layout"))?;
    Ok(fs::write(directory.join("vectors.json"), list(pool)?)?)
}

/// Returns the list of vectors as it is in spec/testdata.
pub fn list(pool: &Pool) -> anyhow::Result<String> {
    let list = json!({ "format": "1.0", "vectors": pool.vectors });
    Ok(serde_json::to_string_pretty(&list).context("failed to write the list")? + "\n")
}

/// Runs the vectors as the command line says.
#[expect(clippy::print_stdout, reason = "the command's result")]
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut pool = all()?;
    if let Some(directory) = &args.write {
        write(&pool, directory)?;
        return Ok(ExitCode::SUCCESS);
    }
    let wanted = |vector: &Vector| {
        args.filter.is_empty() || args.filter.iter().any(|text| vector.name.contains(&**text))
    };
    pool.vectors.retain(wanted);
    if pool.vectors.is_empty() {
        return Ok(usage(&format!("no vector matches {:?}; --list shows them", args.filter)));
    }
    if args.list {
        for vector in &pool.vectors {
            let expected = report::expected(vector);
            println!("{:<24} §{:<4} {expected}: {}", vector.name, vector.section, vector.what);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let report = runner::run(&pool, &args.reader)?;
    if let Some(path) = &args.report {
        fs::write(path, report.junit().context("failed to write JUnit")?)?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report.json())?);
    } else {
        print!("{}", report.text());
    }
    Ok(if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[expect(clippy::print_stderr, reason = "this is where a wrong option is told")]
fn usage(text: &str) -> ExitCode {
    eprintln!("kybernate-conformance: {text}");
    ExitCode::from(EXIT_USAGE)
}
