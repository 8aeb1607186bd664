//! Tags: one small file each.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{MutexGuard, PoisonError};

use fs_err as fs;
use kybernate_spec::{Digest, RepositoryName, Tag};
use serde::{Deserialize, Serialize};

use super::house::refresh;
use super::record::Record;
use super::{Store, StoreError, StoreErrorKind, absent, pick, read_record};
use crate::gc::names;
use crate::index::Change;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TagRecord {
    pub(super) digest: Digest,
}

impl Record for TagRecord {
    const KIND: &'static str = "tag";
}

/// The right to set immutable tags of a repository, kept until they are set.
#[derive(Debug)]
pub(super) struct Settling<'a> {
    settled: &'a AtomicU64,
    _held: MutexGuard<'a, ()>,
}

/// How many immutable tags had been set when somebody looked for them.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub(super) struct Looked(u64);

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        // Only now: whoever looked before may not have seen them.
        self.settled.fetch_add(1, Ordering::SeqCst);
    }
}

impl Store {
    /// Returns the manifest a tag names.
    pub fn tag(&self, name: &RepositoryName, tag: &Tag) -> Result<Option<Digest>, StoreError> {
        let record = read_record::<TagRecord>(&self.layout.tag(name, tag));
        Ok(record.map_err(StoreError::during("read a tag"))?.map(|record| record.digest))
    }

    /// Points tags at a manifest, each of them atomically, durably at the end.
    pub(super) fn put_tags(
        &self,
        name: &RepositoryName,
        tags: &[Tag],
        digest: &Digest,
    ) -> io::Result<()> {
        if tags.is_empty() {
            return Ok(());
        }
        let dir = self.layout.tags(name);
        self.directories.ensure(&dir)?;
        let record = TagRecord { digest: digest.clone() };
        for tag in tags {
            let path = dir.join(tag.as_str());
            self.untagging(name, &path, Some(digest))?;
            self.place_record(&record, &path)?;
            self.changed(Change::tag(name, tag))?;
        }
        self.directories.sync(&dir)
    }

    /// Says that the tag at `path` will no longer name what it names, which so becomes as young as
    /// an untagged manifest can be.
    pub(super) fn untagging(
        &self,
        name: &RepositoryName,
        path: &Path,
        next: Option<&Digest>,
    ) -> io::Result<()> {
        let before = read_record::<TagRecord>(path)?.map(|tag| tag.digest);
        if let Some(before) = before.filter(|before| Some(before) != next) {
            refresh(&self.layout.manifest_link(name, &before))?;
            self.house.untagged(name);
        }
        Ok(())
    }

    fn is_immutable(&self, name: &RepositoryName, tag: &Tag) -> bool {
        self.rules.tags.is_immutable(name.as_str(), tag.as_str())
    }

    /// Makes sure that those of `tags` that are immutable are free or name `digest`, and that this
    /// stays so while the value lives.
    pub(super) fn settle(
        &self,
        name: &RepositoryName,
        tags: &[Tag],
        digest: &Digest,
    ) -> Result<Option<Settling<'_>>, StoreError> {
        let mut immutable_tags = tags.iter().filter(|tag| self.is_immutable(name, tag)).peekable();
        if immutable_tags.peek().is_none() {
            return Ok(None);
        }
        let lock = pick(&self.settling, name.as_str().as_bytes());
        let held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        for tag in immutable_tags {
            if let Some(other) = self.tag(name, tag)?.filter(|other| other != digest) {
                return Err(immutable("move a tag", tag, other));
            }
        }
        Ok(Some(Settling { settled: &self.settled, _held: held }))
    }

    /// Refuses to remove what an immutable tag names, or what that needs. It reads all manifests of
    /// such tags, so whoever removes looks before taking the repository's lock, and then makes sure
    /// that it is [still so](Self::refuse_what_changed).
    pub(super) fn refuse_to_remove(
        &self,
        name: &RepositoryName,
        digest: &Digest,
    ) -> Result<Looked, StoreError> {
        let looked = Looked(self.settled.load(Ordering::SeqCst));
        if self.rules.tags.immutable.is_empty() {
            return Ok(looked);
        }
        let failed = || StoreError::during("look for immutable tags");
        let mut seen = HashSet::new();
        let entries = absent(fs::read_dir(self.layout.tags(name))).map_err(failed())?;
        for entry in entries.into_iter().flatten() {
            let file = entry.map_err(failed())?.file_name();
            let Some(Ok(tag)) = file.to_str().map(str::parse::<Tag>) else { continue };
            if !self.is_immutable(name, &tag) {
                continue;
            }
            if let Some(top) = self.tag(name, &tag)?
                && self.needs(name, top.clone(), digest, &mut seen)?
            {
                return Err(immutable("delete content", &tag, top));
            }
        }
        Ok(looked)
    }

    /// Looks again when immutable tags were set since. The caller has the repository's lock for
    /// itself, so that no more of them are.
    pub(super) fn refuse_what_changed(
        &self,
        Looked(before): Looked,
        name: &RepositoryName,
        digest: &Digest,
    ) -> Result<(), StoreError> {
        if self.settled.load(Ordering::SeqCst) == before {
            return Ok(());
        }
        self.refuse_to_remove(name, digest).map(drop)
    }

    /// Whether the manifest `top` is `wanted`, or names it, or something it names does. `seen` are
    /// manifests that do not.
    fn needs(
        &self,
        name: &RepositoryName,
        top: Digest,
        wanted: &Digest,
        seen: &mut HashSet<Digest>,
    ) -> Result<bool, StoreError> {
        let mut next = vec![top];
        while let Some(digest) = next.pop() {
            if digest == *wanted {
                return Ok(true);
            }
            if !seen.insert(digest.clone()) {
                continue;
            }
            // A blob, or what is not here.
            let Some((manifest, content)) = self.read_manifest(name, &digest)? else { continue };
            // As garbage collection sees it: of an unknown type, all that looks like a digest.
            next.extend(names(Some(&manifest.media_type), &content));
        }
        Ok(false)
    }

    /// Removes a tag. Returns whether it was there.
    pub fn delete_tag(&self, name: &RepositoryName, tag: &Tag) -> Result<bool, StoreError> {
        self.delete_tag_if(name, tag, |_there| true).map(|removed| removed.unwrap_or(false))
    }

    /// Does what [`Self::delete_tag`] does, when `goes` agrees with what the tag names now. Returns
    /// nothing when it does not agree. Blocks.
    pub fn delete_tag_if(
        &self,
        name: &RepositoryName,
        tag: &Tag,
        goes: impl FnOnce(&Digest) -> bool,
    ) -> Result<Option<bool>, StoreError> {
        let lock = self.repository_lock(name);
        let _held = lock.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(digest) = self.tag(name, tag)? {
            if self.is_immutable(name, tag) {
                return Err(immutable("delete a tag", tag, digest));
            }
            if !goes(&digest) {
                return Ok(None);
            }
        }
        let delete = || {
            let path = self.layout.tag(name, tag);
            self.untagging(name, &path, None)?;
            let removed = absent(fs::remove_file(path))?.is_some();
            if removed {
                self.changed(Change::no_tag(name, tag))?;
                self.directories.sync(&self.layout.tags(name))?;
            }
            Ok(Some(removed))
        };
        delete().map_err(StoreError::during("delete a tag"))
    }

    /// Removes every tag that names `digest`. It reads all tags of the repository: deleting a
    /// manifest is rare, and an index kept for it would be one more thing that can be wrong.
    pub(super) fn remove_tags_of(&self, name: &RepositoryName, digest: &Digest) -> io::Result<()> {
        let dir = self.layout.tags(name);
        let Some(entries) = absent(fs::read_dir(&dir))? else { return Ok(()) };
        for entry in entries {
            let path = entry?.path();
            let record = read_record::<TagRecord>(&path)?;
            if record.is_some_and(|record| record.digest == *digest) {
                absent(fs::remove_file(&path))?;
                let tag = path.file_name().and_then(OsStr::to_str).map(str::parse);
                if let Some(Ok(tag)) = tag {
                    self.changed(Change::no_tag(name, &tag))?;
                }
            }
        }
        self.directories.sync(&dir)
    }
}

fn immutable(operation: &'static str, tag: &Tag, digest: Digest) -> StoreError {
    StoreError { operation, kind: StoreErrorKind::Immutable { tag: tag.clone(), digest } }
}
