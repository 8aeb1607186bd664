//! Files of unfinished uploads.
//!
//! Their names hold the upload's secret, so this module uses `std::fs`, whose errors do not name
//! the path: nothing that is logged may contain an upload's id.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kybernate_spec::{Digest, RepositoryName};
use rustix::fs::OFlags;

use super::{Store, StoreError, absent};

/// How long an upload may be left alone, counted from what was written to it last.
pub(crate) const UPLOAD_IDLE_MAX: Duration = Duration::from_hours(24);

/// How long after it began requests may go on with an upload: its id is a secret that suffices for
/// that. A request that has begun goes on all the same.
pub(crate) const UPLOAD_LIFE: Duration = Duration::from_hours(7 * 24);

/// Names an upload: the second it began, and 128 random bits that suffice to go on with it.
///
/// ```text
/// 66f0a1b2 0123456789abcdef0123456789abcdef       8 + 32 hexadecimal digits, without the space
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct UploadId(Box<str>);

/// The text is not an upload's name.
#[derive(Debug, thiserror::Error)]
#[error("not an upload id")]
pub struct UploadIdError;

/// The file of one upload; it need not exist.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct UploadFile {
    path: PathBuf,
}

impl UploadId {
    const LENGTH: usize = 40;

    /// Makes a new one.
    pub(crate) fn random(now: SystemTime) -> io::Result<Self> {
        let mut secret = [0; 16];
        getrandom::fill(&mut secret)?;
        let began = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() & 0xffff_ffff;
        Ok(Self(format!("{began:08x}{:032x}", u128::from_be_bytes(secret)).into()))
    }

    /// Returns the text. It is a secret: never logged.
    pub fn secret(&self) -> &str {
        &self.0
    }

    /// Whether no request may go on with the upload any more.
    pub(crate) fn is_expired(&self, now: SystemTime) -> bool {
        self.age(now).is_some_and(|age| age > UPLOAD_LIFE)
    }

    /// Returns how long ago it began; nothing when the clock went back since.
    pub(crate) fn age(&self, now: SystemTime) -> Option<Duration> {
        let began = self.0.get(..8).and_then(|text| u64::from_str_radix(text, 16).ok());
        let began = UNIX_EPOCH + Duration::from_secs(began.unwrap_or(0));
        now.duration_since(began).ok()
    }
}

impl FromStr for UploadId {
    type Err = UploadIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good = text.len() == Self::LENGTH
            && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if good { Ok(Self(text.into())) } else { Err(UploadIdError) }
    }
}

impl fmt::Debug for UploadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UploadId(secret)")
    }
}

impl fmt::Debug for UploadFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UploadFile(secret)")
    }
}

impl Store {
    /// Names the file of an upload. The repository is part of the name, so an upload begun in one
    /// cannot be finished in another.
    pub(crate) fn upload_file(&self, repository: &RepositoryName, id: &UploadId) -> UploadFile {
        let name = format!("{}-{}", id.secret(), UploadFile::mark(repository));
        UploadFile { path: self.layout.uploads().join(name) }
    }

    /// Returns all uploads that have begun, and how many bytes each has. Blocks.
    pub(crate) fn uploads_begun(&self) -> Result<HashMap<UploadFile, u64>, StoreError> {
        let list = || -> io::Result<_> {
            let mut begun = HashMap::new();
            for entry in std::fs::read_dir(self.layout.uploads())? {
                let path = entry?.path();
                let upload = UploadFile { path };
                // What is beside it are its checksums.
                if upload.id().is_some()
                    && upload.path.extension().is_none()
                    && let Some(found) = absent(std::fs::metadata(&upload.path))?
                {
                    begun.insert(upload, found.len());
                }
            }
            Ok(begun)
        };
        list().map_err(StoreError::during("list uploads"))
    }

    /// Removes what has the name `name` among the uploads when it was left alone for too long, unless
    /// `busy` says that somebody sends to it. Blocks.
    pub(super) fn expire_upload(
        &self,
        name: &str,
        now: SystemTime,
        busy: &dyn Fn(&UploadFile) -> bool,
    ) -> bool {
        let path = self.layout.uploads().join(name);
        let upload = UploadFile { path: path.with_extension("") };
        if upload.id().is_some() {
            // Checksums go with what they are beside, which is written more often.
            let beside = path != upload.path && upload.exists();
            if beside || busy(&upload) || !left_alone(&path, now) {
                return false;
            }
        }
        UploadFile { path }.remove()
    }
}

/// Whether nothing was written to a file for too long, or it is not there. Blocks.
fn left_alone(path: &Path, now: SystemTime) -> bool {
    match std::fs::metadata(path).and_then(|found| found.modified()) {
        Ok(written) => now.duration_since(written).is_ok_and(|idle| idle > UPLOAD_IDLE_MAX),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

impl UploadFile {
    /// Returns what stands for a repository in the names of its uploads' files.
    pub(crate) fn mark(repository: &RepositoryName) -> String {
        let digest = Digest::of(repository.as_str().as_bytes());
        digest.hex().get(..16).unwrap_or_default().to_owned()
    }

    /// Whether it is an upload of the repository with that mark.
    pub(crate) fn has_mark(&self, mark: &str) -> bool {
        let name = self.path.file_name().and_then(OsStr::to_str);
        name.and_then(|name| name.get(UploadId::LENGTH + 1..)) == Some(mark)
    }

    fn id(&self) -> Option<UploadId> {
        let name = self.path.file_name().and_then(OsStr::to_str)?;
        name.get(..UploadId::LENGTH)?.parse().ok()
    }

    /// Whether it is there, or may be. Blocks.
    pub(crate) fn exists(&self) -> bool {
        self.path.try_exists().unwrap_or(true)
    }

    /// Whether nothing was written to it for longer than an upload is kept, or it is not there. Blocks.
    pub(crate) fn is_left_alone(&self, now: SystemTime) -> bool {
        left_alone(&self.path, now)
    }

    /// Returns how long nothing was written to it, when it has any bytes. Blocks.
    pub(crate) fn idle(&self, now: SystemTime) -> Option<Duration> {
        let found = std::fs::metadata(&self.path).ok().filter(|found| found.len() > 0)?;
        now.duration_since(found.modified().ok()?).ok()
    }

    /// Makes the file; an upload exists from then on, also across restarts.
    pub(crate) fn create(&self) -> Result<File, StoreError> {
        let made = OpenOptions::new().read(true).write(true).create_new(true).open(&self.path);
        made.map_err(StoreError::during("begin an upload"))
    }

    /// Opens the file when the upload exists.
    pub(crate) fn open(&self) -> Result<Option<File>, StoreError> {
        let opened = absent(OpenOptions::new().read(true).write(true).open(&self.path));
        opened.map_err(StoreError::during("open an upload"))
    }

    /// Opens the file for writes past the page cache, where the file system has them.
    pub(super) fn open_direct(&self) -> Option<File> {
        let flags = i32::try_from(OFlags::DIRECT.bits()).ok()?;
        OpenOptions::new().write(true).custom_flags(flags).open(&self.path).ok()
    }

    /// Returns how many bytes it has when the upload exists.
    pub(crate) fn length(&self) -> Result<Option<u64>, StoreError> {
        let found = absent(std::fs::metadata(&self.path));
        Ok(found.map_err(StoreError::during("look at an upload"))?.map(|found| found.len()))
    }

    /// Opens the file of checksums beside it, made when it is missing.
    pub(crate) fn checksums(&self) -> io::Result<File> {
        let path = self.checksums_path();
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
    }

    /// Removes the upload. Returns whether it was there.
    pub(crate) fn remove(&self) -> bool {
        super::remove_quietly(&self.checksums_path());
        match std::fs::remove_file(&self.path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => {
                tracing::warn!(%error, "the file of an upload stays behind");
                true
            }
        }
    }

    /// Puts the upload's bytes at `to`.
    pub(super) fn rename(&self, to: PathBuf) -> io::Result<()> {
        std::fs::rename(&self.path, to)
    }

    /// Puts the upload's checksums at `to`.
    pub(super) fn rename_checksums(&self, to: PathBuf) -> io::Result<()> {
        std::fs::rename(self.checksums_path(), to)
    }

    fn checksums_path(&self) -> PathBuf {
        self.path.with_extension("crc")
    }
}

#[cfg(test)]
mod tests;
