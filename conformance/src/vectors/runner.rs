//! Shows vectors to a reader and looks at what it does.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use fs_err as fs;
use serde::Deserialize;

use super::report::{Finding, Report};
use super::{Content, Pool, Tree, Vector};
use crate::command::wait_until;

/// How long a reader may take for one vector.
const LIMIT: Duration = Duration::from_mins(1);

/// What a reader has to say when it refuses.
#[derive(Deserialize)]
struct Refusal {
    error: RefusalError,
}

#[derive(Deserialize)]
struct RefusalError {
    reason: String,
}

/// Runs a reader on every vector of the pool.
pub fn run(pool: &Pool, reader: &[String]) -> anyhow::Result<Report> {
    let began = Instant::now();
    let scratch = tempfile::tempdir().context("failed to make a directory for the vectors")?;
    let layout = scratch.path().join("layout");
    pool.write(&layout)?;
    let findings = pool.vectors.iter().map(|vector| {
        let began = Instant::now();
        let place = scratch.path().join(vector.name);
        fs::create_dir(&place)?;
        let fault = show(vector, reader, &layout, &place)?;
        fs::remove_dir_all(&place)?;
        Ok::<_, anyhow::Error>(Finding { vector: vector.clone(), fault, time: began.elapsed() })
    });
    let findings = findings.collect::<Result<_, _>>()?;
    Ok(Report { reader: reader.join(" "), findings, time: began.elapsed() })
}

/// Runs the reader once; returns what was wrong with what it did.
fn show(
    vector: &Vector,
    reader: &[String],
    layout: &Path,
    place: &Path,
) -> anyhow::Result<Option<String>> {
    let (work, told) = (place.join("work"), place.join("told"));
    fs::create_dir(&work)?;
    let out = work.join("out");
    let mut command = command(reader, layout, vector.name, &out)?;
    let files = (fs::File::create(&told)?, fs::File::create(place.join("complaints"))?);
    let (told_file, complaints) = (files.0.into_file(), files.1.into_file());
    let child = command.stdin(Stdio::null()).stdout(told_file).stderr(complaints).spawn();
    let child = child.with_context(|| format!("failed to start {:?}", reader.first()))?;
    let Some(status) = end(child)? else {
        return Ok(Some(format!("it did not end within {} s", LIMIT.as_secs())));
    };
    let fault = if status.success() {
        accepted(vector, &out)?
    } else {
        refused(vector, &work, &fs::read_to_string(&told)?, status)?
    };
    let Some(fault) = fault else { return Ok(None) };
    let complaints = fs::read(place.join("complaints"))?;
    let complaints = String::from_utf8_lossy(&complaints);
    Ok(Some(format!("{fault}\n{}", complaints.trim()).trim_end().to_owned()))
}

fn command(reader: &[String], layout: &Path, name: &str, out: &Path) -> anyhow::Result<Command> {
    let (layout, out) = (layout.display().to_string(), out.display().to_string());
    let places = [("{layout}", &*layout), ("{name}", name), ("{out}", &*out)];
    let mut words: Vec<String> = reader
        .iter()
        .map(|word| places.iter().fold(word.clone(), |word, (key, is)| word.replace(key, is)))
        .collect();
    if words == reader {
        words.extend(places.map(|(_, is)| is.to_owned()));
    }
    let (program, arguments) = words.split_first().context("there is no reader")?;
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}

/// Waits for the reader; kills it when it takes too long.
fn end(mut child: Child) -> anyhow::Result<Option<ExitStatus>> {
    let mut status = None;
    let ended = wait_until(LIMIT, || {
        status = child.try_wait().transpose();
        status.is_some()
    });
    if !ended {
        child.kill().context("failed to end the reader")?;
        child.wait().context("failed to wait for the reader")?;
    }
    Ok(status.transpose()?)
}

fn accepted(vector: &Vector, out: &Path) -> anyhow::Result<Option<String>> {
    let Some(expected) = &vector.files else {
        return Ok(Some("it was read".to_owned()));
    };
    let mut found = Tree::new();
    for entry in fs::read_dir(out)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let metadata = fs::symlink_metadata(entry.path())?;
        if !metadata.is_file() || metadata.permissions().mode() & 0o077 != 0 {
            return Ok(Some(format!("{name:?} is no file that only its owner can read")));
        }
        found.insert(name, Content::of(&fs::read(entry.path())?));
    }
    if found == *expected {
        return Ok(None);
    }
    let differ = |name: &&String| found.get(*name) != expected.get(*name);
    let mut names: Vec<&String> = found.keys().chain(expected.keys()).filter(differ).collect();
    names.dedup();
    Ok(Some(format!("it was read, but these files are missing, too many or different: {names:?}")))
}

fn refused(
    vector: &Vector,
    work: &Path,
    told: &str,
    status: ExitStatus,
) -> anyhow::Result<Option<String>> {
    let Ok(refusal) = serde_json::from_str::<Refusal>(told) else {
        return Ok(Some(format!("it ended with {status} and without a reason")));
    };
    let reason = refusal.error.reason;
    if vector.reason.is_none_or(|expected| expected.as_str() != reason) {
        return Ok(Some(format!("it was refused for {reason:?}")));
    }
    for entry in fs::read_dir(work)? {
        let path = entry?.path();
        let empty = path.is_dir() && fs::read_dir(&path)?.next().is_none();
        if !path.ends_with("out") || !empty {
            return Ok(Some(format!("it was refused, but left {:?}", path.file_name())));
        }
    }
    Ok(None)
}
