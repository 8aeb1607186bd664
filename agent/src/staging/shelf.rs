//! The files of one tier. Everything here blocks.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_spec::{Digest, chain};

use super::record::{Record, own};
use super::{Tier, is_fault};
use crate::config::TierConfig;
use crate::operations::is_id;
use crate::{private, process, stage};

/// Name of the directory with CRIU's images in a checkpoint's.
pub(super) const IMAGES: &str = "images";

/// Name of the directory with captured mounts.
pub(super) const VOLUMES: &str = "volumes";

/// How the names of what is not finished begin: being made, and being removed.
const NEW: &str = "new-";
const OLD: &str = "old-";

/// Where the checkpoints of one tier are.
#[derive(Debug)]
pub(super) struct Shelf {
    tier: Tier,
    config: TierConfig,
}

impl Shelf {
    pub(super) const fn new(tier: Tier, config: TierConfig) -> Self {
        Self { tier, config }
    }

    pub(super) const fn budget(&self) -> u64 {
        self.config.budget
    }

    /// Whether what is in the files is proven before each use.
    pub(super) const fn proves(&self) -> bool {
        self.config.verify
    }

    pub(super) fn directory(&self) -> &Path {
        &self.config.directory
    }

    /// Makes the directory when it is not there, removes what is not whole and returns the rest.
    pub(super) fn open(&self) -> io::Result<Vec<Record>> {
        let directory = &self.config.directory;
        private::claim_own(directory, is_ours)?;
        self.prepare()?;
        fs::set_permissions(directory, Permissions::from_mode(0o700))?;
        let mut found = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            if !entry.file_name().to_str().is_some_and(is_ours) {
                continue;
            }
            match find(&entry).and_then(|record| self.provable(record)) {
                Ok(record) => found.push(record),
                // What is there may be whole.
                Err(error) if is_fault(&error) => return Err(error),
                Err(error) => {
                    tracing::warn!(error = %chain(&error), tier = self.tier.name(),
                        "removing what is no whole checkpoint");
                    discard(&entry.path())?;
                }
            }
        }
        let found = self.trim(found)?;
        // What went may have been in the way of a smaller size.
        self.prepare()?;
        Ok(found)
    }

    /// Refuses what nobody could prove before a use, where that is to be done.
    fn provable(&self, record: Record) -> io::Result<Record> {
        if self.proves() && !record.has_content() {
            let directory = self.path(&record.digest);
            let told = "was staged without hashes of what is in it, and cannot be proven";
            return Err(io::Error::other(format!("{} {told}", directory.display())));
        }
        Ok(record)
    }

    /// Removes what was used least recently, and more than the budget of now allows.
    fn trim(&self, mut found: Vec<Record>) -> io::Result<Vec<Record>> {
        found.sort_by_key(|record| record.used_at);
        let mut bytes = found.iter().fold(0, |sum: u64, record| sum.saturating_add(record.bytes));
        let mut kept = Vec::new();
        for record in found {
            if bytes <= self.config.budget {
                kept.push(record);
                continue;
            }
            match self.remove(&record.digest) {
                Ok(()) => {
                    bytes = bytes.saturating_sub(record.bytes);
                    tracing::info!(digest = %record.digest, tier = self.tier.name(),
                        "a staged checkpoint was removed: the budget is smaller now");
                }
                // A CRIU that outlived its agent reads it.
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => kept.push(record),
                Err(error) => return Err(error),
            }
        }
        Ok(kept)
    }

    /// Makes sure that the directory is ours alone, and in memory when it is to be.
    pub(super) fn prepare(&self) -> io::Result<()> {
        let directory = &self.config.directory;
        private::claim(directory)?;
        if self.tier == Tier::Ram {
            stage::mount_memory(directory, self.config.budget)?;
        }
        Ok(())
    }

    /// Returns the directory of a checkpoint.
    pub(super) fn path(&self, digest: &Digest) -> PathBuf {
        self.config.directory.join(name(digest))
    }

    /// Whether a checkpoint, or its images, are known not to be there.
    pub(super) fn is_gone(&self, digest: &Digest) -> bool {
        let images = fs::symlink_metadata(self.path(digest).join(IMAGES));
        images.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// Returns where an operation makes one.
    pub(super) fn temporary(&self, operation: &str) -> PathBuf {
        self.config.directory.join(format!("{NEW}{operation}"))
    }

    /// Makes sure that the files of a checkpoint are as they were staged, and notes that it is used.
    pub(super) fn check(&self, digest: &Digest) -> io::Result<()> {
        self.compare(digest)?;
        Record::touch(&self.path(digest))
    }

    /// Returns what is written beside a checkpoint.
    pub(super) fn record(&self, digest: &Digest) -> io::Result<Record> {
        Record::read(&self.path(digest))
    }

    /// Makes sure that the files of a checkpoint are as they were staged, as far as that shows without
    /// reading them.
    pub(super) fn compare(&self, digest: &Digest) -> io::Result<()> {
        let directory = self.path(digest);
        Record::read(&directory)?.check(&directory)
    }

    /// Adds the names of a checkpoint to its record.
    pub(super) fn refer(&self, digest: &Digest, references: Vec<String>) -> io::Result<()> {
        let directory = self.path(digest);
        Record::read(&directory)?.named(references).write(&directory)
    }

    /// Writes the record of what was made in `temporary` and brings all of it to the disk.
    pub(super) fn seal(temporary: &Path, record: &Record) -> io::Result<()> {
        record.write(temporary)?;
        // One call for all files: a tmpfs has nothing to do.
        rustix::fs::syncfs(fs::File::open(temporary)?.file())?;
        Ok(())
    }

    /// Gives what was made its place. What is left there of an earlier one, as when somebody removed
    /// half of it, goes first.
    pub(super) fn publish(&self, temporary: &Path, digest: &Digest) -> io::Result<()> {
        if self.path(digest).exists() {
            self.remove(digest)?;
        }
        fs::rename(temporary, self.path(digest))?;
        fs::File::open(&self.config.directory)?.sync_all()
    }

    /// Removes a checkpoint. From the first moment on it is none, should we die.
    pub(super) fn remove(&self, digest: &Digest) -> io::Result<()> {
        let directory = self.path(digest);
        if let Some(pid) = process::writer(&directory) {
            let text = format!("process {pid}, a CRIU, has files of {} open", directory.display());
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
        let old = self.config.directory.join(format!("{OLD}{}", digest.hex()));
        match fs::rename(&directory, &old) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            moved => moved?,
        }
        stage::remove(&old)
    }
}

/// Reads a directory entry as a staged checkpoint.
fn find(entry: &fs::DirEntry) -> io::Result<Record> {
    let path = entry.path();
    let wrong = |text: &str| io::Error::other(format!("{} {text}", path.display()));
    if !own(&path)?.is_dir() {
        return Err(wrong("is no directory"));
    }
    let record = Record::read(&path)?;
    if entry.file_name().to_str() != Some(&*name(&record.digest)) {
        return Err(wrong("has the record of something else"));
    }
    record.check(&path)?;
    Ok(record)
}

/// Whether something in the directory has a name as we give them.
fn is_ours(name: &str) -> bool {
    // Of SHA-256 at least.
    let is_hex = |name: &str| name.len() >= 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_digest = |name: &str| name.replacen('-', ":", 1).parse::<Digest>().is_ok();
    is_digest(name)
        || name.strip_prefix(NEW).is_some_and(is_id)
        || name.strip_prefix(OLD).is_some_and(is_hex)
}

/// Removes what should not be there: a link, not what it leads to.
fn discard(path: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    if found.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

fn name(digest: &Digest) -> String {
    digest.to_string().replace(':', "-")
}

#[cfg(test)]
mod tests;
