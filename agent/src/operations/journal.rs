//! Operations on disk: a file each, so that a restarted agent knows what ran and what to undo.
//!
//! ```text
//! <root>/operations       0700
//!   ID.log                0600  lines, each a whole record: the last whole one counts
//!   ID.new                0600  one that was being made anew when an agent died; removed when opened
//!   ID.json               0600  what earlier agents wrote: one record; gone with the first line
//! ```
//!
//! ```text
//! line: SHA-256 of the JSON, as "sha256:" and hexadecimal digits; a space; JSON; a line feed
//! file: { line }* { line feed }*
//! ```
//!
//! A file is made with room: line feeds, over which later lines are written (`spec/decisions/0058`).
//! Such a line needs one sync of its bytes, since neither the file's size nor its place changes, and no
//! room on a full disk. One that a power cut tears does not match its digest, and the one before it
//! counts. Nothing is written behind a line that may be torn: after a failure, in a file that another
//! process wrote, and when there is no more room, the file is made anew.
//!
//! Agents before this form see `ID.json` only. They leave the rest alone, and do not undo it: that is
//! done when an agent that knows it is back.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::Permissions;
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_spec::Digest;

use super::Record;
use crate::stage;

/// Finished operations that are remembered, in [`ROOM`] bytes each; so many in place, too: where a GPU
/// goes from one container to the next, they must not push out what the next checkpoint builds on.
pub(super) const FINISHED_MAX: usize = 200;

/// How long they are.
pub(super) const FINISHED_AGE_MAX: Duration = Duration::from_hours(30 * 24);

/// Least bytes of a file: some ten records, as many as an operation writes.
const ROOM: usize = 16 << 10;

/// A file that is made anew has room for so many lines as long as its first.
const LINES: usize = 8;

/// Largest record read back.
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// Largest file read back.
const FILE_BYTES_MAX: u64 = RECORD_BYTES_MAX << 3;

/// Only for root: records name containers, images and registries.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// Where the records of operations are.
#[derive(Clone, Debug)]
pub(super) struct Journal {
    directory: PathBuf,
}

/// The file of one operation, as this process has made it.
#[derive(Debug)]
pub(super) struct Lines {
    file: fs::File,
    /// Where the next line goes.
    end: u64,
    room: u64,
}

impl Journal {
    /// Reads what an earlier agent kept. What was not written to its end is removed; a file that
    /// cannot be read is passed over with a warning, and removed when it is old.
    pub(super) fn open(directory: &Path) -> io::Result<(Self, Vec<Record>)> {
        stage::make(directory)?;
        fs::set_permissions(directory, Permissions::from_mode(DIRECTORY_MODE))?;
        let (mut records, mut earlier) = (BTreeMap::new(), Vec::new());
        for file in fs::read_dir(directory)? {
            let path = file?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("new") => fs::remove_file(&path)?,
                Some("log") => note(&path, read(&path, FILE_BYTES_MAX, last), &mut records)?,
                Some("json") => earlier.push(path),
                _ => {}
            }
        }
        // An agent that died while it wrote the first line has left both.
        for path in earlier {
            let parse = |content: &[u8]| Ok(serde_json::from_slice(content)?);
            note(&path, read(&path, RECORD_BYTES_MAX, parse), &mut records)?;
        }
        Ok((Self { directory: directory.to_owned() }, records.into_values().collect()))
    }

    /// Returns how many operations have a file, whether or not that can be read.
    pub(super) fn count(&self) -> io::Result<usize> {
        let mut ids = BTreeSet::new();
        for file in fs::read_dir(&self.directory)? {
            let path = file?.path();
            let is_one = path.extension().is_some_and(|end| end == "log" || end == "json");
            ids.extend(path.file_stem().filter(|_| is_one).map(OsStr::to_owned));
        }
        Ok(ids.len())
    }

    /// Returns where it is.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Writes a record so that it is there whole or not at all, also after a power cut. `lines` is what
    /// was written of it before, if this process did that and it went well.
    pub(super) fn write(&self, lines: &mut Option<Lines>, record: &Record) -> io::Result<()> {
        let line = line_of(record)?;
        // After a failure nobody knows what the disk has of it.
        if let Some(mut earlier) = lines.take()
            && earlier.has_room(&line)
        {
            earlier.append(&line)?;
            *lines = Some(earlier);
            return Ok(());
        }
        let path = self.file_of(&record.id);
        let made = match Lines::make(&path, &line) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let beside = path.with_extension("new");
                gone(fs::remove_file(&beside))?;
                let made = Lines::make(&beside, &line)?;
                fs::rename(beside, &path)?;
                made
            }
            made => made?,
        };
        fs::File::open(&self.directory)?.sync_all()?;
        gone(fs::remove_file(path.with_extension("json")))?;
        *lines = Some(made);
        Ok(())
    }

    /// Makes sure that a record could be written just now, as one that is not there yet.
    pub(super) fn probe(&self) -> io::Result<()> {
        // What has this ending counts for nobody, and is removed when an agent starts.
        let path = self.directory.join("probe.new");
        let mut options = fs::OpenOptions::new();
        let mut file =
            options.create(true).write(true).truncate(true).mode(FILE_MODE).open(&path)?;
        let written = file.write_all(&vec![b'\n'; ROOM]);
        gone(fs::remove_file(path))?;
        written
    }

    /// Removes a record, if it is there.
    pub(super) fn remove(&self, id: &str) -> io::Result<()> {
        let path = self.file_of(id);
        gone(fs::remove_file(path.with_extension("json")))?;
        gone(fs::remove_file(path))
    }

    fn file_of(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.log"))
    }
}

impl Lines {
    /// Makes a file that is not there yet. Its name is not on the disk by that.
    fn make(path: &Path, line: &[u8]) -> io::Result<Self> {
        let mut options = fs::OpenOptions::new();
        let mut file = options.create_new(true).write(true).mode(FILE_MODE).open(path)?;
        let mut content = line.to_vec();
        content.resize(ROOM.max(line.len().saturating_mul(LINES)), b'\n');
        if let Err(error) = file.write_all(&content).and_then(|()| file.sync_all()) {
            // Without a line it would be in the way for nothing.
            fs::remove_file(path).unwrap_or_default();
            return Err(error);
        }
        Ok(Self { file, end: length(line), room: length(&content) })
    }

    fn has_room(&self, line: &[u8]) -> bool {
        self.end.saturating_add(length(line)) <= self.room
    }

    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.end))?;
        let written = self.file.write_all(line).and_then(|()| self.file.sync_data());
        if written.is_err() {
            self.take_back();
        }
        self.end = self.end.saturating_add(length(line));
        written
    }

    /// Takes away what lies behind the last line that was synced: one that is whole would count, while
    /// whoever wanted it is told that it is not there.
    fn take_back(&self) {
        // Where that fails too, the next write has to do.
        self.file.set_len(self.end).unwrap_or_default();
    }
}

fn length(content: &[u8]) -> u64 {
    u64::try_from(content.len()).unwrap_or(u64::MAX)
}

fn line_of(record: &Record) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec(record)?;
    let mut line = Digest::of(&json).to_string().into_bytes();
    line.push(b' ');
    line.extend(json);
    line.push(b'\n');
    Ok(line)
}

/// Returns the last whole record of a file's lines. One that is whole and not understood hides those
/// before it: they are not what was done last.
fn last(content: &[u8]) -> io::Result<Record> {
    let lines = content.split(|byte| *byte == b'\n').rev();
    let whole = lines.filter(|line| !line.is_empty()).find_map(json_of);
    let none = || io::Error::other("it has no whole line");
    Ok(serde_json::from_slice(whole.ok_or_else(none)?)?)
}

/// Returns a line's JSON, if it is that which was written.
fn json_of(line: &[u8]) -> Option<&[u8]> {
    let space = line.iter().position(|byte| *byte == b' ')?;
    let (digest, json) = line.split_at_checked(space)?;
    let json = json.strip_prefix(b" ")?;
    (digest == Digest::of(json).to_string().as_bytes()).then_some(json)
}

fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Returns the finished operations that are too many or too old, by id.
pub(super) fn surplus<'a>(
    records: impl Iterator<Item = &'a Record>,
    now: jiff::Timestamp,
) -> Vec<String> {
    // Ids sort by time.
    let finished: BTreeMap<&str, &Record> =
        records.filter(|record| record.is_finished()).map(|record| (&*record.id, record)).collect();
    let is_old = |record: &Record| {
        let ended = record.finished_at.unwrap_or(record.started_at);
        now.duration_since(ended).unsigned_abs() > FINISHED_AGE_MAX && now > ended
    };
    let (in_place, others): (Vec<_>, Vec<_>) =
        finished.into_values().partition(|record| record.kind.is_in_place());
    let forgotten = [in_place, others].into_iter().flat_map(|records| {
        let too_many = records.len().saturating_sub(FINISHED_MAX);
        let surplus =
            move |(position, record): &(usize, &Record)| *position < too_many || is_old(record);
        records.into_iter().enumerate().filter(surplus).collect::<Vec<_>>()
    });
    forgotten.map(|(_, record)| record.id.clone()).collect()
}

fn read(
    path: &Path,
    bytes_max: u64,
    parse: impl FnOnce(&[u8]) -> io::Result<Record>,
) -> io::Result<Record> {
    if fs::metadata(path)?.len() > bytes_max {
        return Err(io::Error::other("the file is too large"));
    }
    let record = parse(&fs::read(path)?)?;
    if path.file_stem().and_then(|stem| stem.to_str()) != Some(&*record.id) {
        return Err(io::Error::other("the file is named after another operation"));
    }
    Ok(record)
}

/// Takes what was read of a file, unless it is known already.
fn note(
    path: &Path,
    read: io::Result<Record>,
    records: &mut BTreeMap<String, Record>,
) -> io::Result<()> {
    match read {
        Ok(record) => {
            records.entry(record.id.clone()).or_insert(record);
            Ok(())
        }
        Err(error) => pass_over(path, &error),
    }
}

fn pass_over(path: &Path, error: &io::Error) -> io::Result<()> {
    tracing::warn!(%error, ?path, "passing over an unreadable operation");
    let age = SystemTime::now().duration_since(fs::metadata(path)?.modified()?);
    if age.is_ok_and(|age| age > FINISHED_AGE_MAX) {
        fs::remove_file(path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
