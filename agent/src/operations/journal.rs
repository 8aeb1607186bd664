//! Operations on disk: a file each, so that a restarted agent knows what ran and what to undo.
//!
//! ```text
//! <root>/operations       0700
//!   ID.json               0600  a whole record: written beside it, synced, renamed
//!   ID.new                0600  one that was being written when an agent died; removed when opened
//! ```

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;

use super::Record;
use crate::stage;

/// Finished operations that are remembered. A few KB each.
pub(super) const FINISHED_MAX: usize = 200;

/// How long they are.
pub(super) const FINISHED_AGE_MAX: Duration = Duration::from_hours(30 * 24);

/// Largest file read back.
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// Only for root: records name containers, images and registries.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// Where the records of operations are.
#[derive(Clone, Debug)]
pub(super) struct Journal {
    directory: PathBuf,
}

impl Journal {
    /// Reads what an earlier agent kept. What was not written to its end is removed; a file that
    /// cannot be read is passed over with a warning, and removed when it is old.
    pub(super) fn open(directory: &Path) -> io::Result<(Self, Vec<Record>)> {
        stage::make(directory)?;
        fs::set_permissions(directory, Permissions::from_mode(DIRECTORY_MODE))?;
        let mut records = Vec::new();
        for file in fs::read_dir(directory)? {
            let path = file?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("new") => fs::remove_file(&path)?,
                Some("json") => match read(&path) {
                    Ok(record) => records.push(record),
                    Err(error) => pass_over(&path, &error)?,
                },
                _ => {}
            }
        }
        Ok((Self { directory: directory.to_owned() }, records))
    }

    /// Returns where it is.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Writes a record so that it is there whole or not at all, also after a power cut.
    pub(super) fn write(&self, record: &Record) -> io::Result<()> {
        let path = self.file_of(&record.id);
        let temporary = path.with_extension("new");
        let mut options = fs::OpenOptions::new();
        options.create(true).write(true).truncate(true).mode(FILE_MODE);
        let mut file = options.open(&temporary)?;
        file.write_all(&serde_json::to_vec_pretty(record)?)?;
        file.sync_all()?;
        fs::rename(temporary, path)?;
        fs::File::open(&self.directory)?.sync_all()
    }

    /// Removes a record, if it is there.
    pub(super) fn remove(&self, id: &str) -> io::Result<()> {
        match fs::remove_file(self.file_of(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn file_of(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.json"))
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
    let too_many = finished.len().saturating_sub(FINISHED_MAX);
    let is_old = |record: &Record| {
        let ended = record.finished_at.unwrap_or(record.started_at);
        now.duration_since(ended).unsigned_abs() > FINISHED_AGE_MAX && now > ended
    };
    let forgotten = finished.into_iter().enumerate();
    forgotten
        .filter(|(position, (_, record))| *position < too_many || is_old(record))
        .map(|(_, (id, _))| id.to_owned())
        .collect()
}

fn read(path: &Path) -> io::Result<Record> {
    if fs::metadata(path)?.len() > RECORD_BYTES_MAX {
        return Err(io::Error::other("the file is too large"));
    }
    let record: Record = serde_json::from_slice(&fs::read(path)?)?;
    if path.file_stem().and_then(|stem| stem.to_str()) != Some(&*record.id) {
        return Err(io::Error::other("the file is named after another operation"));
    }
    Ok(record)
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
mod tests {
    use super::*;
    use crate::operations::{Kind, State};

    fn record(id: &str, state: State, finished_at: Option<&str>) -> Record {
        let finished_at = finished_at.map(|time| time.parse().unwrap());
        let started_at = "2026-01-01T00:00:00Z".parse().unwrap();
        Record { state, finished_at, ..Record::new(id.to_owned(), Kind::Restore, started_at) }
    }

    #[test]
    fn a_torn_record_is_passed_over_and_what_was_being_written_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("operations");
        let (journal, _) = Journal::open(&place).unwrap();
        journal.write(&record("a", State::Running, None)).unwrap();
        journal.write(&record("b", State::Running, None)).unwrap();
        let whole = fs::read(place.join("b.json")).unwrap();
        for length in 0..whole.len() {
            fs::write(place.join("b.json"), &whole[..length]).unwrap();
            fs::write(place.join("c.new"), &whole[..length]).unwrap();
            let (_, found) = Journal::open(&place).unwrap();
            assert_eq!(found.iter().map(|record| &*record.id).collect::<Vec<_>>(), ["a"]);
            assert!(!place.join("c.new").exists());
        }
        fs::write(place.join("c.json"), &whole).unwrap();
        assert_eq!(Journal::open(&place).unwrap().1.len(), 1, "a record under another name");
    }

    #[test]
    fn only_root_can_read_it() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("operations");
        fs::create_dir(&place).unwrap();
        fs::set_permissions(&place, Permissions::from_mode(0o755)).unwrap();
        let (journal, _) = Journal::open(&place).unwrap();
        journal.write(&record("a", State::Running, None)).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&place), mode(&place.join("a.json"))), (0o700, 0o600));
    }

    #[test]
    fn what_is_old_or_too_much_is_forgotten_unless_it_runs() {
        let now = "2026-06-01T00:00:00Z".parse().unwrap();
        let records = [
            record("a", State::Running, None),
            record("b", State::Done, Some("2026-03-01T00:00:00Z")),
            record("c", State::Failed, Some("2026-05-31T00:00:00Z")),
            // A clock that was wrong.
            record("d", State::Done, Some("2027-01-01T00:00:00Z")),
        ];
        assert_eq!(surplus(records.iter(), now), ["b"]);
        let many: Vec<Record> = (0..FINISHED_MAX + 2)
            .map(|n| record(&format!("{n:04}"), State::Done, Some("2026-05-31T00:00:00Z")))
            .collect();
        assert_eq!(surplus(many.iter(), now), ["0000", "0001"]);
    }
}
