//! Quarantine: links that nothing needs are first moved aside, within their repository.
//!
//! ```text
//!            condemn                       purge, after the quarantine
//! _blobs/… ───────────▶ _condemned/blob-… ───────────▶ (gone) ───▶ content without any link goes
//!    ▲                        │
//!    └────────────────────────┘ revive: a push, a mount, or a manifest that names it
//! ```
//!
//! A condemned link is a 404 to everybody who asks. Each arrow is one rename or unlink, so a
//! process killed between any two leaves a state that the next collection goes on from.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fs_err as fs;
use kybernate_spec::{Digest, RepositoryName};

use super::house::refresh;
use super::layout::{file_name, parse_file_name};
use super::manifest::ManifestRecord;
use super::{Store, StoreError, absent, is_there, read_record};
use crate::gc::LinkKind;
use crate::manifest::References;

/// How deep indexes within indexes are revived; what is nested deeper is to be pushed again.
const NESTING_MAX: u32 = 16;

/// What is tried while something comes back from quarantine.
#[derive(Debug, Default)]
pub(super) struct Revival {
    /// How many manifests are being revived around this one.
    depth: u32,
    /// Manifests that cannot come back. Many may name the same one, and each of these be named by
    /// many: without this it would be tried as often as there are ways that lead to it.
    given_up: HashSet<Digest>,
}

/// A link in quarantine.
#[derive(Debug, Clone)]
pub(crate) struct Condemned {
    pub(crate) kind: LinkKind,
    pub(crate) digest: Digest,
    pub(crate) since: SystemTime,
}

impl Store {
    fn live_link(&self, repository: &RepositoryName, kind: LinkKind, digest: &Digest) -> PathBuf {
        match kind {
            LinkKind::Blob => self.layout.blob_link(repository, digest),
            LinkKind::Manifest => self.layout.manifest_link(repository, digest),
        }
    }

    /// Whether the repository has such a thing, in quarantine too.
    pub(super) fn is_known(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
    ) -> io::Result<bool> {
        // In this order: what is revived meanwhile is seen in one of the places.
        Ok(is_there(&self.condemned_link(repository, kind, digest))?
            || is_there(&self.live_link(repository, kind, digest))?)
    }

    pub(super) fn condemned_link(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
    ) -> PathBuf {
        let name = format!("{}-{}", kind.name(), file_name(digest));
        self.layout.condemned(repository).join(name)
    }

    /// Makes the place of condemned links.
    pub(crate) fn prepare_condemning(&self, repository: &RepositoryName) -> io::Result<()> {
        self.directories.ensure(&self.layout.condemned(repository))
    }

    /// Moves a link to quarantine unless it is `young`, held or gone. Returns whether it did. The
    /// caller has the repository's lock for itself, and syncs.
    pub(crate) fn condemn(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
        young: impl Fn(SystemTime) -> bool,
    ) -> io::Result<bool> {
        let live = self.live_link(repository, kind, digest);
        let aside = self.condemned_link(repository, kind, digest);
        let condemn = || -> io::Result<bool> {
            let Some(link) = absent(fs::metadata(&live))? else { return Ok(false) };
            if young(link.modified()?) {
                return Ok(false);
            }
            // Between two names of one file, rename does nothing.
            absent(fs::remove_file(&aside))?;
            let lock = self.link_lock(repository, digest);
            let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
            fs::rename(&live, &aside)?;
            self.link_condemned(repository, kind, digest, &aside)?;
            Ok(true)
        };
        self.house.pins.unless_held(digest, condemn).unwrap_or(Ok(false))
    }

    /// Makes what was condemned and purged durable: no power failure may bring a manifest back
    /// once the content it needs has gone.
    pub(crate) fn sync_condemned(&self, repository: &RepositoryName) -> io::Result<()> {
        use kybernate_spec::Algorithm::{Sha256, Sha512};
        let layout = &self.layout;
        let links = [
            layout.manifest_links(repository, Sha256),
            layout.manifest_links(repository, Sha512),
            layout.blob_links(repository, Sha256),
            layout.blob_links(repository, Sha512),
            layout.condemned(repository),
        ];
        for dir in links {
            absent(self.directories.sync(&dir))?;
        }
        Ok(())
    }

    /// Lists the links in quarantine.
    pub(crate) fn condemned(&self, repository: &RepositoryName) -> io::Result<Vec<Condemned>> {
        let mut condemned = Vec::new();
        let entries = absent(fs::read_dir(self.layout.condemned(repository)))?;
        for entry in entries.into_iter().flatten() {
            let entry = entry?;
            let name = entry.file_name();
            let parsed = name.to_str().and_then(|name| name.split_once('-'));
            let Some((kind, name)) = parsed else { continue };
            let (kind, digest) = (LinkKind::parse(kind), parse_file_name(name));
            let (Some(kind), Some(digest)) = (kind, digest) else { continue };
            let Some(found) = absent(entry.metadata())? else { continue };
            // Moving it here set its change time.
            let seconds = u64::try_from(found.ctime()).unwrap_or(0);
            let nanoseconds = u32::try_from(found.ctime_nsec()).unwrap_or(0);
            let since = UNIX_EPOCH + Duration::new(seconds, nanoseconds);
            condemned.push(Condemned { kind, digest, since });
        }
        condemned.sort_unstable_by(|a, b| (a.kind, &a.digest).cmp(&(b.kind, &b.digest)));
        Ok(condemned)
    }

    /// Removes a link from quarantine for good. The caller has the repository's lock for itself.
    pub(crate) fn purge(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
    ) -> io::Result<bool> {
        let aside = self.condemned_link(repository, kind, digest);
        if kind == LinkKind::Manifest && !is_there(&self.live_link(repository, kind, digest))? {
            let record = read_record::<ManifestRecord>(&aside)?;
            if let Some(subject) = record.and_then(|record| record.subject) {
                self.remove_referrer(repository, &subject, digest)?;
                self.remove_referrers_if_empty(repository, &subject)?;
            }
        }
        // Killed after this, the content is still known to have lost a link.
        self.house.notes.content(digest);
        Ok(absent(fs::remove_file(&aside))?.is_some())
    }

    /// Removes what is in quarantine of a link that was made anew since and is deleted now. The
    /// caller has the repository's lock for itself.
    pub(super) fn remove_aside(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
    ) -> io::Result<()> {
        if absent(fs::remove_file(self.condemned_link(repository, kind, digest)))?.is_some() {
            self.directories.sync(&self.layout.condemned(repository))?;
        }
        Ok(())
    }

    /// Forgets the list of a subject's referrers when nothing is in it. The caller has the
    /// repository's lock for itself.
    pub(super) fn remove_referrers_if_empty(
        &self,
        repository: &RepositoryName,
        subject: &Digest,
    ) -> io::Result<()> {
        let dir = self.layout.referrers(repository, subject);
        self.directories.forget(&dir);
        match absent(fs::remove_dir(&dir)) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            other => other.map(drop),
        }
    }

    /// Makes a condemned link live again, durably. Returns whether there is a live one. The caller
    /// has the repository's lock, if only for reading.
    pub(crate) fn revive(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
    ) -> io::Result<bool> {
        let live = self.live_link(repository, kind, digest);
        let aside = self.condemned_link(repository, kind, digest);
        let _held = self.hold(digest);
        if is_there(&live)? {
            return Ok(true);
        }
        {
            let lock = self.link_lock(repository, digest);
            let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
            if absent(fs::rename(&aside, &live))?.is_none() {
                // Somebody else may have revived it at the same time.
                return is_there(&live);
            }
            self.link_revived(repository, kind, digest, &live)?;
        }
        refresh(&live)?;
        self.sync_condemned(repository)?;
        tracing::debug!(%repository, %digest, "revived what was condemned");
        Ok(true)
    }

    /// Returns how many bytes come back from quarantine when a manifest is pushed: what it names, and
    /// what is attached to it.
    pub(crate) fn revivable_bytes(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
        references: &References,
    ) -> Result<u64, StoreError> {
        let count = || -> io::Result<u64> {
            let mut seen = HashSet::from([(LinkKind::Manifest, digest.clone())]);
            let mut next: Vec<_> =
                self.attached(repository, digest)?.into_iter().map(|it| (it, 0)).collect();
            let mut bytes = 0u64;
            bytes = bytes.saturating_add(self.revivable(repository, references, &mut seen)?);
            let children = references.manifests.iter().chain(&references.others);
            next.extend(children.map(|it| (it.clone(), 0)));
            while let Some((manifest, depth)) = next.pop() {
                let aside = self.condemned_link(repository, LinkKind::Manifest, &manifest);
                if depth >= NESTING_MAX || !seen.insert((LinkKind::Manifest, manifest.clone())) {
                    continue;
                }
                if is_there(&self.live_link(repository, LinkKind::Manifest, &manifest))? {
                    continue;
                }
                let Some(record) = read_record::<ManifestRecord>(&aside)? else { continue };
                let Some(content) = self.read_content(&manifest)? else { continue };
                bytes = bytes.saturating_add(u64::try_from(content.len()).unwrap_or(u64::MAX));
                let parsed = References::parse(Some(&record.media_type), &content);
                let Ok((_, references)) = parsed else { continue };
                bytes = bytes.saturating_add(self.revivable(repository, &references, &mut seen)?);
                let children = references.manifests.into_iter().chain(references.others);
                let attached = self.attached(repository, &manifest)?.into_iter();
                next.extend(children.chain(attached).map(|it| (it, depth + 1)));
            }
            Ok(bytes)
        };
        count().map_err(StoreError::during("count what comes back"))
    }

    fn revivable(
        &self,
        repository: &RepositoryName,
        references: &References,
        seen: &mut HashSet<(LinkKind, Digest)>,
    ) -> io::Result<u64> {
        let mut bytes = 0u64;
        let (blobs, _) = self.parts(repository, references)?;
        for blob in &blobs {
            if seen.insert((LinkKind::Blob, blob.clone()))
                && !is_there(&self.live_link(repository, LinkKind::Blob, blob))?
                && is_there(&self.condemned_link(repository, LinkKind::Blob, blob))?
            {
                bytes = bytes.saturating_add(self.content_length(blob)?.unwrap_or(0));
            }
        }
        Ok(bytes)
    }

    /// Revives a blob when its content is still there.
    pub(super) fn revive_blob(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> io::Result<bool> {
        let aside = self.condemned_link(repository, LinkKind::Blob, digest);
        if !is_there(&aside)? {
            return Ok(false);
        }
        let revived = self.revive(repository, LinkKind::Blob, digest)?;
        Ok(revived && self.content(digest)?.is_some())
    }

    /// Revives a manifest, when all it needs is there or can be revived too.
    pub(super) fn revive_manifest(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
        revival: &mut Revival,
    ) -> io::Result<bool> {
        if revival.depth >= NESTING_MAX || revival.given_up.contains(digest) {
            return Ok(false);
        }
        revival.depth += 1;
        let revived = self.try_revive_manifest(repository, digest, revival);
        revival.depth -= 1;
        if matches!(revived, Ok(false)) {
            revival.given_up.insert(digest.clone());
        }
        revived
    }

    fn try_revive_manifest(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
        revival: &mut Revival,
    ) -> io::Result<bool> {
        let aside = self.condemned_link(repository, LinkKind::Manifest, digest);
        if !is_there(&aside)? {
            return Ok(false);
        }
        let Some(record) = read_record::<ManifestRecord>(&aside)? else { return Ok(false) };
        let Some(content) = self.read_content(digest)? else { return Ok(false) };
        let Ok((_, references)) = References::parse(Some(&record.media_type), &content) else {
            return Ok(false);
        };
        self.house.pushing(repository, digest);
        let missing = self.missing(repository, &references, revival);
        let missing = missing.map_err(io::Error::other)?;
        let revived = missing.is_empty() && self.revive(repository, LinkKind::Manifest, digest)?;
        if revived {
            self.revive_attached(repository, digest, revival)?;
        }
        Ok(revived)
    }

    /// Revives what is attached to a manifest that has come back: a signature is part of what it
    /// signs. What cannot be revived stays condemned.
    pub(super) fn revive_attached(
        &self,
        repository: &RepositoryName,
        subject: &Digest,
        revival: &mut Revival,
    ) -> io::Result<()> {
        for attached in self.attached(repository, subject)? {
            self.revive_manifest(repository, &attached, revival)?;
        }
        Ok(())
    }
}
