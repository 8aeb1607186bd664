//! Which files the processes of a container have mapped as shared, asked while all of them stand still.
//!
//! What is written through such a mapping need not change a time of the file, and nobody can tell which
//! file of an overlay's upper directory is mapped but by its name. So that has to be the right one.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use fs_err as fs;

use crate::links::unpadded;
use crate::mounts::{self, Mount};

/// What the kernel adds to the name of a file that was deleted under it.
pub(super) const DELETED: &[u8] = b" (deleted)";

/// What is mapped.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Mapped {
    /// Files of these names.
    Names(HashSet<OsString>),
    /// Files can change whose names nobody knows.
    Unseen,
    /// There was no time to ask all of them.
    Late,
}

/// Returns the names of all files that are mapped as shared by one of several processes. No other
/// process is asked when it is `until`.
pub(super) fn by_all(pids: &[u32], until: Instant) -> io::Result<Mapped> {
    let (mut names, mut seen) = (HashSet::new(), HashSet::new());
    for pid in pids {
        if Instant::now() >= until {
            return Ok(Mapped::Late);
        }
        let Some(process) = place_of(*pid)? else { continue };
        let is_known = of_process(&process, &mut names)?;
        if !is_known
            || seen.insert(fs::read_link(process.join("ns/mnt"))?)
                && is_mounted_twice(&fs::read(process.join("mountinfo"))?)
        {
            return Ok(Mapped::Unseen);
        }
    }
    Ok(Mapped::Names(names))
}

/// Returns where the kernel tells of a process: in the place of its first thread or, when that one has
/// ended and tells nothing any more, of another one. `None` when all have.
pub(super) fn place_of(pid: u32) -> io::Result<Option<PathBuf>> {
    let first = PathBuf::from(format!("/proc/{pid}"));
    if has_memory(&first)? {
        return Ok(Some(first));
    }
    for thread in fs::read_dir(first.join("task"))? {
        let place = Path::new("/proc").join(thread?.file_name());
        if has_memory(&place)? {
            return Ok(Some(place));
        }
    }
    Ok(None)
}

fn has_memory(process: &Path) -> io::Result<bool> {
    let mut maps = fs::File::open(process.join("maps"))?;
    Ok(maps.read(&mut [0])? > 0)
}

/// Adds the names of the files that a process has mapped; false when not all of them are known.
fn of_process(process: &Path, names: &mut HashSet<OsString>) -> io::Result<bool> {
    let Some(deleted) = mapped(&fs::read(process.join("maps"))?, names) else { return Ok(false) };
    for range in deleted {
        // It has another name. Memory that processes share has none at all.
        if fs::metadata(process.join("map_files").join(range))?.nlink() > 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Adds the names of files with shared mappings (`proc_pid_maps(5)`), which may be written to without a
/// system call, now or after an mprotect(2). Returns the ranges of those that were deleted: they may
/// have other names. `None` when there are asynchronous writes (`io_setup(2)`), which may be under way
/// when nobody is, or when a mapping is of a mount rather than of a file in one.
fn mapped(maps: &[u8], names: &mut HashSet<OsString>) -> Option<Vec<String>> {
    let mut deleted = Vec::new();
    for line in maps.split(|byte| *byte == b'\n') {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let range = fields.next().unwrap_or_default();
        let modes = fields.next().unwrap_or_default();
        let path = fields.nth(3).unwrap_or_default().trim_ascii_start();
        if path.starts_with(b"/[aio]") {
            return None;
        }
        if modes.last() != Some(&b's') {
            continue;
        }
        let kept = path.strip_suffix(DELETED);
        if kept.is_some() {
            deleted.push(unpadded(range)?);
        }
        // A file may be called as one that is deleted; and line breaks are written in octal.
        for path in [Some(path), kept].into_iter().flatten() {
            let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            if name.is_empty() && !path.is_empty() {
                return None;
            }
            names.insert(OsStr::from_bytes(name).to_owned());
            if let Ok(text) = std::str::from_utf8(name) {
                names.insert(text.replace("\\012", "\n").into());
            }
        }
    }
    Some(deleted)
}

/// Whether a part of what is at "/" was mounted somewhere else (`proc_pid_mountinfo(5)`), where its
/// files may have other names.
fn is_mounted_twice(mountinfo: &[u8]) -> bool {
    let all: Vec<Mount> = mounts::read(mountinfo).collect();
    let top = all.iter().rfind(|mount| mount.point == Path::new("/"));
    top.is_some_and(|top| {
        all.iter().any(|mount| mount.device == top.device && mount.root != top.root)
    })
}

#[cfg(test)]
mod tests;
