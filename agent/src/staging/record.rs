//! What is written beside a staged checkpoint, so that it is found again and known to be whole.
//!
//! ```text
//! <directory>                  0700, the agent's alone
//!   sha256-HEX                 a whole checkpoint: it was renamed when everything in it was synced
//!     record.json  0600        this; its modification time is the last use. On a disk, it has hashes
//!                              of what is in the files
//!     images/                  CRIU's images
//!     volumes/                 captured mounts, if there are any: 0.tar, 1.tar, as the checkpoint
//!                              lists them
//!   new-OPERATION              one that is being staged; removed when an agent starts
//!   old-HEX                    one that is being removed; removed when an agent starts
//! ```

use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::SystemTime;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_packager::progress::Progress;
use kybernate_spec::Digest;
use serde::{Deserialize, Serialize};

use super::content::Content;
use super::shelf::{IMAGES, VOLUMES};

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
    /// Earlier agents staged none.
    #[serde(default)]
    volumes: Vec<Image>,
    /// What is in the files, where that is proven before each use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    content: Option<Content>,
    #[serde(skip)]
    pub(super) used_at: jiff::Timestamp,
}

/// One file. CRIU, or a restore, reads it and nobody writes to it: another time or length means that somebody did.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Image {
    name: String,
    length: u64,
    modified_seconds: i64,
    modified_nanoseconds: i64,
}

impl Record {
    /// Describes a checkpoint that is there whole.
    pub(super) fn describe(
        directory: &Path,
        digest: Digest,
        reference: String,
    ) -> io::Result<Self> {
        let (images, image_bytes) = look(&directory.join(IMAGES))?;
        let (volumes, volume_bytes) = look_if_there(&directory.join(VOLUMES))?;
        let bytes = image_bytes.saturating_add(volume_bytes);
        let used_at = jiff::Timestamp::now();
        let (references, content) = (vec![reference], None);
        Ok(Self { digest, references, bytes, images, volumes, content, used_at })
    }

    /// Returns the same with what is in its files, which are read for that.
    pub(super) async fn with_content(
        self,
        directory: &Path,
        progress: &Progress,
    ) -> io::Result<Self> {
        progress.expect(self.file_bytes());
        let content = Content::read(directory, self.files(), progress).await?;
        Ok(Self { content: Some(content), ..self })
    }

    /// Whether it says what is in the files.
    pub(super) const fn has_content(&self) -> bool {
        self.content.is_some()
    }

    /// Makes sure that what is in the files is what was written to them: all of it is read.
    pub(super) async fn prove(&self, directory: &Path, progress: &Progress) -> io::Result<()> {
        let Some(noted) = &self.content else {
            let text =
                "nothing says what was in its files: they were staged when nobody was to look";
            return Err(io::Error::other(text));
        };
        progress.expect(self.file_bytes());
        let found = Content::read(directory, self.files(), progress).await?;
        match noted.difference(&found) {
            Some(path) => Err(changed(directory, path)),
            None => Ok(()),
        }
    }

    fn file_bytes(&self) -> u64 {
        let files = self.images.iter().chain(&self.volumes);
        files.fold(0, |sum, file| sum.saturating_add(file.length))
    }

    /// Lists its files: their paths in its directory, and their lengths.
    fn files(&self) -> Vec<(String, u64)> {
        let of = |directory: &'static str, images: &[Image]| {
            let files =
                images.iter().map(|image| (format!("{directory}/{}", image.name), image.length));
            files.collect::<Vec<_>>()
        };
        [of(IMAGES, &self.images), of(VOLUMES, &self.volumes)].concat()
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

    /// Makes sure that the files are as they were.
    pub(super) fn check(&self, directory: &Path) -> io::Result<()> {
        let (images, volumes) = (directory.join(IMAGES), directory.join(VOLUMES));
        same(&images, &self.images, &look(&images)?.0)?;
        same(&volumes, &self.volumes, &look_if_there(&volumes)?.0)
    }

    /// Notes a use, as the modification time of the record: no byte is written.
    pub(super) fn touch(directory: &Path) -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        options.write(true).open(directory.join(FILE))?.set_modified(SystemTime::now())
    }
}

/// Makes sure that two lists of one directory are the same.
fn same(directory: &Path, noted: &[Image], found: &[Image]) -> io::Result<()> {
    let differs = |one: &[Image], other: &[Image]| {
        one.iter().find(|image| other.binary_search(image).is_err()).cloned()
    };
    match differs(noted, found).or_else(|| differs(found, noted)) {
        Some(image) => Err(changed(directory, &image.name)),
        None => Ok(()),
    }
}

/// Does the same as [`look`] for a directory that need not be there.
fn look_if_there(directory: &Path) -> io::Result<(Vec<Image>, u64)> {
    match fs::symlink_metadata(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok((Vec::new(), 0)),
        _ => look(directory),
    }
}

/// Lists the files of a directory, sorted, with what they take on the disk.
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
