//! The identity gate: CRIU gives restored processes whatever its images say, credentials and
//! mounts included, so the images are read before CRIU sees them.
//!
//! They are foreign bytes. A process of our own program without privileges, memory or files to
//! speak of decodes them ([`run`]) and sends back a summary; we compare the summary with what the
//! new container may be (`judge`).
//!
//! ```text
//! to the process:   { u8 kind (0 name only, 1 with content), u16 length, name,
//!                     [u64 length, content] }* end of file
//! from the process: JSON, { "ok": Summary } or { "refused": reason }
//! ```

use std::io::{self, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use fs_err as fs;
use kybernate_packager::criu::NO_LOCK;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt as _;

mod amend;
mod cgroups;
mod common;
mod images;
mod judge;
mod memory;
mod mounts;
mod opened;
mod pages;
mod records;
mod remaps;
mod seccomp;
mod sockets;
mod summary;
mod tarball;

use self::amend::{amend, unlock};
pub(crate) use self::common::{FILE_KINDS, FILE_SYSTEMS, Inside};
pub(crate) use self::judge::{
    APPARMOR, Expected, Fixed, HANDED_OVER, Names, SELINUX, judge, judge_alone,
};
pub(crate) use self::mounts::MountFact;
pub(crate) use self::opened::{Memory, Paths, leads_out};
pub(crate) use self::pages::lacking;
pub(crate) use self::remaps::LinkFact;
pub(crate) use self::seccomp::Refused;
use self::summary::{Builder, is_judged};
pub(crate) use self::summary::{Summary, URGENT_LIMITS};

/// Largest image that is judged: `files.img` with half a million open files. Pagemaps may have any
/// length, since they are read entry by entry.
const IMAGE_BYTES_MAX: u64 = 64 << 20;

/// As much is judged of a file without a name: behind its first record is its content.
const GHOST_HEAD_BYTES: u64 = 64 << 10;

/// Largest summary accepted. Usual ones have a few KiB.
const VERDICT_BYTES_MAX: u64 = 32 << 20;

/// Decoding the images of the largest processes takes a second or two.
const VERDICT_LIMIT: Duration = Duration::from_mins(1);

/// As much compressed content of file systems in memory is read in a second at least.
const MEMORY_BYTES_PER_SECOND: u64 = 8 << 20;

/// As long as the process without privileges ever works, should nobody wait for it.
const CPU_LIMIT: Duration = Duration::from_hours(1);

/// User and group `nobody`.
const NOBODY: u32 = 65534;

/// What the process without privileges answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok(Box<Summary>),
    Refused(String),
}

/// Why there is no summary.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The images are not such as CRIU writes: they are refused.
    #[error("the images cannot be judged: {0}")]
    Refused(String),
    /// The directory could not be read.
    #[error("failed to read the images")]
    Read(#[source] io::Error),
    /// The process that decodes them could not be run, or died.
    #[error("failed to run the identity gate")]
    Run(#[source] io::Error),
    /// The directory could not be written.
    #[error("failed to amend the images")]
    Amend(#[source] io::Error),
}

/// Does what [`inspect`] does for a dump that nobody else reads yet, and has CRIU make its files without
/// a name where no link leads it elsewhere.
pub(crate) async fn amended(directory: &Path) -> Result<Summary, GateError> {
    let summary = inspect(directory).await?;
    if summary.copies.is_empty() {
        return Ok(summary);
    }
    let (images, copies) = (directory.to_owned(), summary.copies);
    let written = tokio::task::spawn_blocking(move || amend(&images, &copies)).await;
    let written = written.map_err(io::Error::other).and_then(|written| written);
    written.map_err(GateError::Amend)?;
    inspect(directory).await
}

/// Does the same for a dump that is to be restored here, and has CRIU leave the network alone that it restores
/// into, where there is nothing that a lock would keep.
pub(crate) async fn readied(directory: &Path) -> Result<Summary, GateError> {
    let summary = amended(directory).await?;
    if !summary.locks_in_vain() {
        return Ok(summary);
    }
    let images = directory.to_owned();
    let written = tokio::task::spawn_blocking(move || unlock(&images)).await;
    written.map_err(io::Error::other).and_then(|written| written).map_err(GateError::Amend)?;
    Ok(Summary { network_lock: NO_LOCK, ..summary })
}

/// Has a dump directory summed up by a process without privileges.
pub(crate) async fn inspect(directory: &Path) -> Result<Summary, GateError> {
    let measured = directory.to_owned();
    let limit = tokio::task::spawn_blocking(move || limit(&measured)).await;
    let limit = limit.map_err(io::Error::other).and_then(|limit| limit).map_err(GateError::Read)?;
    let mut child = command().spawn().map_err(GateError::Run)?;
    let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(GateError::Run(io::ErrorKind::BrokenPipe.into()));
    };
    let stdin = stdin.into_owned_fd().map_err(GateError::Run)?;
    let directory = directory.to_owned();
    let sent = tokio::task::spawn_blocking(move || send(&directory, stdin.into()));
    let mut answer = Vec::new();
    let received = async {
        stdout.take(VERDICT_BYTES_MAX).read_to_end(&mut answer).await?;
        child.wait().await
    };
    let received = tokio::time::timeout(limit, received).await;
    let received = received
        .map_err(|_elapsed| GateError::Refused("decoding them takes too long".to_owned()))?;
    let status = received.map_err(GateError::Run)?;
    match sent.await.map_err(io::Error::other).and_then(|sent| sent) {
        // Whoever decodes has seen enough, and its answer says why.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        Err(error) => return Err(GateError::Read(error)),
        Ok(()) => {}
    }
    match serde_json::from_slice(&answer) {
        Ok(Verdict::Ok(summary)) if status.success() => Ok(*summary),
        Ok(Verdict::Refused(reason)) => Err(GateError::Refused(reason)),
        Ok(Verdict::Ok(_)) | Err(_) => {
            Err(GateError::Refused(format!("the process that decodes them ended with {status}")))
        }
    }
}

/// Runs the process without privileges: decodes what comes in and answers.
pub fn run() -> ExitCode {
    let verdict = match confine()
        .map_err(|error| error.to_string())
        .and_then(|()| decode(io::stdin().lock()))
    {
        Ok(summary) => Verdict::Ok(Box::new(summary)),
        Err(reason) => Verdict::Refused(reason),
    };
    let mut out = io::stdout().lock();
    let written = serde_json::to_vec(&verdict).map_err(io::Error::from);
    match written.and_then(|bytes| out.write_all(&bytes)).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn command() -> tokio::process::Command {
    // Through /proc, so that the path to us need not be open to everybody, and so that it is us
    // even when the program on disk was replaced.
    let mut command = std::process::Command::new("/proc/self/exe");
    command
        .arg0("kybernate-agent")
        .arg("gate")
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    if rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true);
    command
}

/// Gives up what an identity can still do: new privileges, memory, files, processes.
fn confine() -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    rustix::thread::set_no_new_privs(true)?;
    for (resource, limit) in [
        (Resource::As, 1 << 30),
        (Resource::Cpu, CPU_LIMIT.as_secs()),
        (Resource::Core, 0),
        (Resource::Fsize, 0),
        (Resource::Nproc, 0),
    ] {
        setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })?;
    }
    Ok(())
}

/// Reads what is sent to the process without privileges.
pub(crate) fn decode(input: impl io::Read) -> Result<Summary, String> {
    let mut input = BufReader::new(input);
    let mut builder = Builder::default();
    let cut = |error: io::Error| format!("the images end early: {error}");
    let told = |error: summary::SummaryError| kybernate_spec::chain(&error).to_string();
    let mut kind = [0];
    while input.read(&mut kind).map_err(cut)? != 0 {
        let mut length = [0; 2];
        input.read_exact(&mut length).map_err(cut)?;
        let mut name = vec![0; usize::from(u16::from_le_bytes(length))];
        input.read_exact(&mut name).map_err(cut)?;
        let name = String::from_utf8(name).map_err(|error| error.to_string())?;
        builder.name(&name).map_err(told)?;
        if kind == [1] {
            let mut length = [0; 8];
            input.read_exact(&mut length).map_err(cut)?;
            let mut content = (&mut input).take(u64::from_le_bytes(length));
            builder.image(&name, &mut content).map_err(told)?;
            // An image that was decoded was read to its end.
            if content.limit() != 0 {
                return Err(format!("{name:?} goes on after its end"));
            }
        }
    }
    builder.finish().map_err(told)
}

/// Sends the names of all files, and the content of those that are judged: last that of file systems in
/// memory, of which only that matters to which others lead.
fn send(directory: &Path, mut out: std::fs::File) -> io::Result<()> {
    let names = fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort_by_key(|name| name.to_str().is_some_and(is_last));
    for name in names {
        let Some(name) = name.to_str() else {
            return Err(io::Error::other("a file name is no text"));
        };
        let mut frame = Vec::new();
        let length = u16::try_from(name.len()).map_err(io::Error::other)?;
        if !is_judged(name) {
            frame.push(0);
            frame.extend_from_slice(&length.to_le_bytes());
            frame.extend_from_slice(name.as_bytes());
            out.write_all(&frame)?;
            continue;
        }
        let mut file = fs::File::open(directory.join(name))?;
        let size = file.metadata()?.len();
        let is_ghost = remaps::ghost(name).is_some();
        let size = if is_ghost { size.min(GHOST_HEAD_BYTES) } else { size };
        if size > IMAGE_BYTES_MAX && !pages::is_pagemap(name) && !is_last(name) {
            return Err(io::Error::other(format!("{name} is larger than {IMAGE_BYTES_MAX} bytes")));
        }
        frame.push(1);
        frame.extend_from_slice(&length.to_le_bytes());
        frame.extend_from_slice(name.as_bytes());
        frame.extend_from_slice(&size.to_le_bytes());
        out.write_all(&frame)?;
        io::copy(&mut (&mut file).take(size), &mut out)?;
    }
    Ok(())
}

/// Returns how long it may take to decode a dump.
fn limit(directory: &Path) -> io::Result<Duration> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(is_last) {
            bytes += entry.metadata()?.len();
        }
    }
    Ok(VERDICT_LIMIT + Duration::from_secs(bytes / MEMORY_BYTES_PER_SECOND))
}

/// Whether a file is the content of a file system in memory.
fn is_last(name: &str) -> bool {
    memory::is_content(name)
}

#[cfg(test)]
mod tests;
