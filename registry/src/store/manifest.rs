//! Manifests: content like any other, and per repository a record of how it was pushed.

use std::io;
use std::sync::PoisonError;

use bytes::Bytes;
use fs_err as fs;
use kybernate_spec::{Descriptor, Digest, Hasher, MANIFEST_BYTES_MAX, RepositoryName, Tag};
use serde::{Deserialize, Serialize};

use super::condemned::Revival;
use super::record::Record;
use super::{Store, StoreError, StoreErrorKind, absent, glance, is_there, read_record};
use crate::gc::LinkKind;
use crate::index::Change;
use crate::manifest::References;
use crate::trace;

/// A manifest of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredManifest {
    /// Its digest.
    pub digest: Digest,
    /// The media type it was pushed with.
    pub media_type: String,
    /// Its length in bytes.
    pub size: u64,
}

/// A manifest and its bytes, when those were wanted.
pub(crate) type ReadManifest = (StoredManifest, Option<Bytes>);

/// A manifest to store.
#[derive(Debug)]
pub struct NewManifest {
    /// Its digest, already proven.
    pub digest: Digest,
    /// The media type it is pushed with.
    pub media_type: String,
    /// Its bytes.
    pub content: Bytes,
    /// What it refers to.
    pub references: References,
    /// Tags to point at it.
    pub tags: Vec<Tag>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ManifestRecord {
    pub(super) media_type: String,
    size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) subject: Option<Digest>,
}

impl Record for ManifestRecord {
    const KIND: &'static str = "manifest";
}

impl Store {
    /// Stores a manifest, enters it with its subject, and points its tags at it. When this returns
    /// nothing, all of it survives power loss; otherwise it returns the references that the
    /// repository does not have, and nothing has changed. Blocks.
    pub fn put_manifest(
        &self,
        repository: &RepositoryName,
        new: &NewManifest,
    ) -> Result<Vec<Digest>, StoreError> {
        self.put_manifest_within(repository, new, || Ok(()))
    }

    /// Does what [`Self::put_manifest`] does, within the `room` that is made first, while nothing of
    /// the repository can be deleted: what takes none since it is there stays there. Blocks.
    pub(crate) fn put_manifest_within<R>(
        &self,
        repository: &RepositoryName,
        new: &NewManifest,
        room: impl FnOnce() -> Result<R, StoreError>,
    ) -> Result<Vec<Digest>, StoreError> {
        // Many may write at once, since each file is replaced whole; none while one deletes.
        let lock = self.repository_lock(repository);
        let _held = lock.read().unwrap_or_else(PoisonError::into_inner);
        let _room = room()?;
        self.put_held(repository, new)
    }

    /// Does what [`Self::put_manifest_within`] does, when `goes` agrees with what each tag names now, or,
    /// without tags, with the manifest that is there. Returns nothing when it does not agree.
    pub(crate) fn put_manifest_if<R>(
        &self,
        repository: &RepositoryName,
        new: &NewManifest,
        goes: impl Fn(Option<&Digest>) -> bool,
        room: impl FnOnce() -> Result<R, StoreError>,
    ) -> Result<Option<Vec<Digest>>, StoreError> {
        let lock = self.repository_lock(repository);
        let _held = lock.write().unwrap_or_else(PoisonError::into_inner);
        if new.tags.is_empty() {
            let there = self.manifest(repository, &new.digest)?.map(|manifest| manifest.digest);
            if !goes(there.as_ref()) {
                return Ok(None);
            }
        }
        for tag in &new.tags {
            if !goes(self.tag(repository, tag)?.as_ref()) {
                return Ok(None);
            }
        }
        let _room = room()?;
        self.put_held(repository, new).map(Some)
    }

    fn put_held(
        &self,
        repository: &RepositoryName,
        new: &NewManifest,
    ) -> Result<Vec<Digest>, StoreError> {
        self.refuse_another_type(repository, new)?;
        let _settled = self.settle(repository, &new.tags, &new.digest)?;
        self.house.pushing(repository, &new.digest);
        let missing = self.missing(repository, &new.references, &mut Revival::default())?;
        if missing.is_empty() {
            let write = || {
                self.vouch_for(repository, &new.references)?;
                self.write_manifest(repository, new)
            };
            let written = trace::part("store.put_manifest", write);
            written.map_err(StoreError::during("store a manifest"))?;
        }
        Ok(missing)
    }

    /// Refuses to make a manifest something else than it is: whoever pulls it, also by a tag that
    /// does not move, would be served another thing, and what it refers to would lose its place.
    fn refuse_another_type(
        &self,
        repository: &RepositoryName,
        new: &NewManifest,
    ) -> Result<(), StoreError> {
        let operation = "store a manifest";
        let link = self.layout.manifest_link(repository, &new.digest);
        let record = read_record::<ManifestRecord>(&link).map_err(StoreError::during(operation))?;
        match record.map(|record| record.media_type).filter(|there| *there != new.media_type) {
            Some(there) => {
                let pushed = new.media_type.clone();
                Err(StoreError { operation, kind: StoreErrorKind::MediaType { there, pushed } })
            }
            None => Ok(()),
        }
    }

    /// Returns blobs and manifests that a manifest refers to. What is said to be no manifest is what the
    /// repository has, as the dump that containerd's index of a checkpoint lists is a blob; what it does
    /// not have counts as a manifest.
    pub(super) fn parts(
        &self,
        repository: &RepositoryName,
        references: &References,
    ) -> io::Result<(Vec<Digest>, Vec<Digest>)> {
        let (mut blobs, mut manifests) = (references.blobs.clone(), references.manifests.clone());
        for part in &references.others {
            let is = |kind| self.is_known(repository, kind, part);
            if !is(LinkKind::Manifest)? && is(LinkKind::Blob)? {
                blobs.push(part.clone());
            } else {
                manifests.push(part.clone());
            }
        }
        Ok((blobs, manifests))
    }

    /// Returns the references that the repository does not have. What is in quarantine is revived:
    /// the client may have been shown it before it was condemned.
    pub(super) fn missing(
        &self,
        repository: &RepositoryName,
        references: &References,
        revival: &mut Revival,
    ) -> Result<Vec<Digest>, StoreError> {
        let mut missing = Vec::new();
        let parts = self.parts(repository, references);
        let (blobs, manifests) = parts.map_err(StoreError::during("look for what is named"))?;
        for blob in &blobs {
            let revive = || self.revive_blob(repository, blob);
            if self.blob(repository, blob)?.is_none()
                && !revive().map_err(StoreError::during("revive a blob"))?
            {
                missing.push(blob.clone());
            }
        }
        for manifest in &manifests {
            let mut revive = || self.revive_manifest(repository, manifest, revival);
            if self.manifest(repository, manifest)?.is_none()
                && !revive().map_err(StoreError::during("revive a manifest"))?
            {
                missing.push(manifest.clone());
            }
        }
        Ok(missing)
    }

    fn write_manifest(&self, repository: &RepositoryName, new: &NewManifest) -> io::Result<()> {
        let NewManifest { digest, media_type, content, references, tags } = new;
        let size = u64::try_from(content.len()).unwrap_or(u64::MAX);
        let _held = self.hold(digest);
        self.put_content(digest, content)?;
        let referrer = references.subject.as_ref().map(|subject| {
            let mut referrer = Descriptor::new(media_type, digest.clone(), size);
            referrer.artifact_type.clone_from(&references.artifact_type);
            referrer.annotations.clone_from(&references.annotations);
            (subject, referrer)
        });
        if let Some((subject, referrer)) = &referrer {
            self.put_referrer(repository, subject, referrer)?;
        }
        let links = self.layout.manifest_links(repository, digest.algorithm());
        self.directories.ensure(&links)?;
        let record = ManifestRecord {
            media_type: media_type.clone(),
            size,
            subject: references.subject.clone(),
        };
        self.place_record(&record, &links.join(digest.hex()))?;
        self.link_there(repository, LinkKind::Manifest, digest)?;
        if let Some((subject, referrer)) = &referrer {
            self.changed(Change::referrer(repository, subject, referrer)?)?;
        }
        self.directories.sync(&self.layout.shelf(digest))?;
        self.directories.sync(&links)?;
        if tags.is_empty() {
            self.house.untagged(repository);
        }
        self.revive_attached(repository, digest, &mut Revival::default())?;
        // Only now: after power loss a tag must not name a manifest that was lost.
        self.put_tags(repository, tags, digest)
    }

    /// Returns what is known of a manifest without reading it. One known to be corrupt is absent.
    pub fn manifest(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> Result<Option<StoredManifest>, StoreError> {
        let find = || -> io::Result<_> {
            let link = self.layout.manifest_link(repository, digest);
            let Some(record) = read_record::<ManifestRecord>(&link)? else { return Ok(None) };
            let content = absent(glance::metadata(&self.layout.blob(digest)))?;
            Ok(content.filter(|content| content.len() == record.size).map(|_| record))
        };
        let record = find().map_err(StoreError::during("look at a manifest"))?;
        if record.is_some() {
            self.house.seen.note(repository, digest);
        }
        Ok(record.map(|record| StoredManifest {
            digest: digest.clone(),
            media_type: record.media_type,
            size: record.size,
        }))
    }

    /// Reads a manifest and checks it against its digest. One that does not match is moved away
    /// and absent.
    pub fn read_manifest(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> Result<Option<(StoredManifest, Bytes)>, StoreError> {
        let found = self.read_manifest_of(repository, digest, u64::MAX)?;
        Ok(found.and_then(|(manifest, content)| Some((manifest, content?))))
    }

    /// Does what [`Self::read_manifest`] does, but does not read what is longer than `bytes_max`.
    pub(crate) fn read_manifest_of(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
        bytes_max: u64,
    ) -> Result<Option<ReadManifest>, StoreError> {
        let Some(manifest) = self.manifest(repository, digest)? else { return Ok(None) };
        if manifest.size > bytes_max {
            return Ok(Some((manifest, None)));
        }
        let content = self.read_content(digest).map_err(StoreError::during("read a manifest"))?;
        Ok(content.map(|content| (manifest, Some(content))))
    }

    pub(super) fn read_content(&self, digest: &Digest) -> io::Result<Option<Bytes>> {
        let path = self.layout.blob(digest);
        let Some(file) = super::open_if_there(&path)? else { return Ok(None) };
        let content = read_limited(&file)?;
        let mut hasher = Hasher::new(digest.algorithm());
        hasher.update(&content);
        if hasher.finish() != *digest {
            glance::blocks()?;
            self.quarantine(digest, &file, "a manifest does not match its digest");
            return Ok(None);
        }
        Ok(Some(content.into()))
    }

    /// Removes a manifest, the tags that name it, and its place among its subject's referrers.
    /// Returns whether it was there.
    pub fn delete_manifest(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> Result<bool, StoreError> {
        let removed = self.delete_manifest_if(repository, digest, |_there| true);
        removed.map(|removed| removed.unwrap_or(false))
    }

    /// Does what [`Self::delete_manifest`] does, when `goes` agrees with the manifest that is there.
    /// Returns nothing when it does not agree. Blocks.
    pub fn delete_manifest_if(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
        goes: impl FnOnce(&Digest) -> bool,
    ) -> Result<Option<bool>, StoreError> {
        let looked = self.refuse_to_remove(repository, digest)?;
        let lock = self.repository_lock(repository);
        let _held = lock.write().unwrap_or_else(PoisonError::into_inner);
        self.refuse_what_changed(looked, repository, digest)?;
        let delete = || -> io::Result<_> {
            let link = self.layout.manifest_link(repository, digest);
            if !is_there(&link)? {
                return Ok(Some(false));
            }
            if !goes(digest) {
                return Ok(None);
            }
            let subject = read_record::<ManifestRecord>(&link)?.and_then(|record| record.subject);
            self.house.deleted(repository, digest);
            // Tags first: killed in between, the manifest is there and can be deleted again.
            self.remove_tags_of(repository, digest)?;
            // And what finds it by its subject: without the manifest nobody would look for that.
            if let Some(subject) = subject {
                self.remove_referrer(repository, &subject, digest)?;
                self.remove_referrers_if_empty(repository, &subject)?;
            }
            absent(fs::remove_file(&link))?;
            // Deleted is deleted: nothing brings back what an earlier collection put aside.
            self.remove_aside(repository, LinkKind::Manifest, digest)?;
            self.link_gone(repository, LinkKind::Manifest, digest)?;
            self.directories.sync(&self.layout.manifest_links(repository, digest.algorithm()))?;
            Ok(Some(true))
        };
        delete().map_err(StoreError::during("delete a manifest"))
    }
}

/// Reads what may be a manifest, and of what is longer only so much that it cannot be one.
fn read_limited(file: &fs::File) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len().min(MANIFEST_BYTES_MAX + 1);
    let mut content = vec![0; usize::try_from(length).unwrap_or(0)];
    glance::read_exact_at(file.file(), &mut content, 0)?;
    Ok(content)
}
