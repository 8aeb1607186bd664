//! What is written beside a staged checkpoint, so that it is found again and known to be whole.
//!
//! ```text
//! <directory>                  0700, the agent's alone
//!   sha256-HEX                 a whole checkpoint: it was renamed when everything in it was synced
//!     record.json  0600        this; its modification time is the last use
//!     images/                  CRIU's images
//!   new-OPERATION              one that is being staged; removed when an agent starts
//!   old-HEX                    one that is being removed; removed when an agent starts
//! ```

use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::SystemTime;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_spec::Digest;
use serde::{Deserialize, Serialize};

/// Name of the record's file.
const FILE: &str = "record.json";

/// Largest record read back: the names of a hundred thousand images.
const RECORD_BYTES_MAX: u64 = 16 << 20;

/// A staged checkpoint, as it was when it was staged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) digest: Digest,
    /// By which it was asked for, the latest first.
    pub(super) references: Vec<String>,
    /// What its files take.
    pub(super) bytes: u64,
    images: Vec<Image>,
    #[serde(skip)]
    pub(super) used_at: jiff::Timestamp,
}

/// One file. CRIU reads it and nobody writes to it: another time or length means that somebody did.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Image {
    name: String,
    length: u64,
    modified_seconds: i64,
    modified_nanoseconds: i64,
}

impl Record {
    /// Describes a dump that is there whole.
    pub(super) fn describe(images: &Path, digest: Digest, reference: String) -> io::Result<Self> {
        let (images, bytes) = look(images)?;
        let used_at = jiff::Timestamp::now();
        Ok(Self { digest, references: vec![reference], bytes, images, used_at })
    }

    /// Returns the same under these names.
    pub(super) fn named(self, references: Vec<String>) -> Self {
        Self { references, ..self }
    }

    /// Writes it into the checkpoint's directory, whole or not at all.
    pub(super) fn write(&self, directory: &Path) -> io::Result<()> {
        let (path, temporary) = (directory.join(FILE), directory.join("record.new"));
        let mut options = fs::OpenOptions::new();
        options.create(true).write(true).truncate(true).mode(0o600);
        let mut file = options.open(&temporary)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(temporary, path)?;
        fs::File::open(directory)?.sync_all()
    }

    /// Reads it from a checkpoint's directory.
    pub(super) fn read(directory: &Path) -> io::Result<Self> {
        let path = directory.join(FILE);
        let found = own(&path)?;
        if !found.is_file() || found.len() > RECORD_BYTES_MAX {
            return Err(io::Error::other(format!("{} is no record", path.display())));
        }
        let mut record: Self = serde_json::from_slice(&fs::read(&path)?)?;
        record.used_at = jiff::Timestamp::try_from(found.modified()?).map_err(io::Error::other)?;
        Ok(record)
    }

    /// Makes sure that the images are as they were.
    pub(super) fn check(&self, images: &Path) -> io::Result<()> {
        let (found, _) = look(images)?;
        let differs = |image: &&Image| found.binary_search(image).is_err();
        if let Some(image) = self.images.iter().find(differs) {
            return Err(changed(images, &image.name));
        }
        match found.iter().find(|image| self.images.binary_search(image).is_err()) {
            Some(image) => Err(changed(images, &image.name)),
            None => Ok(()),
        }
    }

    /// Notes a use, as the modification time of the record: no byte is written.
    pub(super) fn touch(directory: &Path) -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        options.write(true).open(directory.join(FILE))?.set_modified(SystemTime::now())
    }
}

/// Lists the files of a dump, sorted, with what they take on the disk.
fn look(images: &Path) -> io::Result<(Vec<Image>, u64)> {
    if !own(images)?.is_dir() {
        return Err(io::Error::other(format!("{} is no directory", images.display())));
    }
    let (mut listed, mut bytes) = (Vec::new(), 0_u64);
    for entry in fs::read_dir(images)? {
        let entry = entry?;
        let found = own(&entry.path())?;
        let name = entry.file_name().into_string();
        let name = name.ok().filter(|_| found.is_file());
        let name = name.ok_or_else(|| changed(images, &entry.file_name().to_string_lossy()))?;
        // Of 512 bytes each (stat(2)).
        bytes = bytes.saturating_add(found.blocks().saturating_mul(512));
        listed.push(Image {
            name,
            length: found.len(),
            modified_seconds: found.mtime(),
            modified_nanoseconds: found.mtime_nsec(),
        });
    }
    listed.sort();
    Ok((listed, bytes))
}

/// Returns what is at a path, which must belong to us; a link is itself.
pub(super) fn own(path: &Path) -> io::Result<std::fs::Metadata> {
    let found = fs::symlink_metadata(path)?;
    if found.uid() == rustix::process::geteuid().as_raw() {
        return Ok(found);
    }
    Err(io::Error::other(format!("{} belongs to user {}", path.display(), found.uid())))
}

fn changed(images: &Path, name: &str) -> io::Error {
    io::Error::other(format!("{name:?} in {} is not as it was written", images.display()))
}
