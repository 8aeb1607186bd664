//! What retention and quotas ask of the objects.

use std::io;
use std::sync::PoisonError;
use std::time::{Duration, SystemTime};

use fs_err as fs;
use kybernate_spec::{Algorithm, Digest, RepositoryName, Tag};

use super::layout::parse_file_name;
use super::tag::TagRecord;
use super::{Store, StoreError, Window, absent, is_there, read_record};
use crate::index::Change;
use crate::quota::Quotas;
use crate::retention::TagFacts;

/// How exactly pulls are noted: once in that time at most.
const PULL_RESOLUTION: Duration = Duration::from_hours(1);
/// Types of manifests that are signatures: of cosign 3, of cosign before, of notation.
const SIGNATURES: [&str; 3] = [
    "application/vnd.dev.sigstore.bundle.v0.3+json",
    "application/vnd.dev.cosign.artifact.sig.v1+json",
    "application/vnd.cncf.notary.signature",
];

impl Store {
    pub(crate) fn quotas(&self) -> &Quotas {
        &self.rules.quotas
    }

    /// Returns how many bytes of blobs and manifests a repository shows, from the index or from
    /// its objects. Blocks.
    pub fn bytes(&self, repository: &RepositoryName) -> Result<u64, StoreError> {
        if let Some(bytes) = self.index().bytes(repository) {
            return Ok(bytes);
        }
        let count = || -> io::Result<u64> {
            let mut bytes = 0;
            for algorithm in [Algorithm::Sha256, Algorithm::Sha512] {
                let blobs = self.layout.blob_links(repository, algorithm);
                let manifests = self.layout.manifest_links(repository, algorithm);
                for dir in [blobs, manifests] {
                    for entry in absent(fs::read_dir(dir))?.into_iter().flatten() {
                        let name = entry?.file_name();
                        let digest = format!("{algorithm}:{}", name.to_string_lossy()).parse();
                        let Ok(digest) = digest else { continue };
                        let content = absent(fs::metadata(self.layout.blob(&digest)))?;
                        bytes += content.map_or(0, |content| content.len());
                    }
                }
            }
            Ok(bytes)
        };
        count().map_err(StoreError::during("count what a repository holds"))
    }

    /// Returns how long content is, or 0 when it is not here.
    pub(crate) fn length(&self, digest: &Digest) -> Result<u64, StoreError> {
        let found = absent(fs::metadata(self.layout.blob(digest)));
        let found = found.map_err(StoreError::during("look at content"))?;
        Ok(found.map_or(0, |content| content.len()))
    }

    /// Shows `each` every repository, in no order. Blocks.
    pub(crate) fn for_each_repository(
        &self,
        each: &mut dyn FnMut(&RepositoryName),
    ) -> Result<(), StoreError> {
        let shown: io::Result<()> = self.each_repository(&mut |name| {
            each(name);
            Ok(())
        });
        shown.map_err(StoreError::during("list repositories"))
    }

    /// Returns what is known of each tag of a repository, in the order of their names. Whether a
    /// manifest is signed is looked up only when it is asked for. Blocks.
    pub(crate) fn tag_facts(
        &self,
        repository: &RepositoryName,
        ask_signed: bool,
    ) -> Result<Vec<TagFacts>, StoreError> {
        let dir = self.layout.tags(repository);
        let read = || -> io::Result<Vec<TagFacts>> {
            let mut tags = Vec::new();
            for entry in absent(fs::read_dir(&dir))?.into_iter().flatten() {
                let name = entry?.file_name();
                if let Some(Ok(tag)) = name.to_str().map(str::parse) {
                    tags.extend(self.facts(repository, tag)?);
                }
            }
            tags.sort_by(|one, other| one.tag.as_str().cmp(other.tag.as_str()));
            Ok(tags)
        };
        let mut tags = read().map_err(StoreError::during("read tags"))?;
        if ask_signed {
            for facts in &mut tags {
                facts.signed = self.is_signed(repository, &facts.digest)?;
            }
        }
        Ok(tags)
    }

    fn facts(&self, repository: &RepositoryName, tag: Tag) -> io::Result<Option<TagFacts>> {
        let path = self.layout.tag(repository, &tag);
        let Some(pushed) = absent(fs::metadata(&path))? else { return Ok(None) };
        let Some(TagRecord { digest }) = read_record(&path)? else { return Ok(None) };
        let pushed = pushed.modified()?;
        let used = absent(fs::metadata(self.layout.manifest_link(repository, &digest)))?;
        let used = used.map(|link| link.modified()).transpose()?;
        let attached_to = match attached_to(&tag) {
            Some(subject) if is_there(&self.layout.manifest_link(repository, &subject))? => {
                Some(subject)
            }
            _ => None,
        };
        let used = used.map_or(pushed, |used| used.max(pushed));
        Ok(Some(TagFacts { tag, digest, pushed, used, signed: false, attached_to }))
    }

    fn is_signed(&self, repository: &RepositoryName, digest: &Digest) -> Result<bool, StoreError> {
        let cosign = format!("{}-{}.sig", digest.algorithm(), digest.hex()).parse();
        if let Ok(tag) = cosign
            && self.tag(repository, &tag)?.is_some()
        {
            return Ok(true);
        }
        for artifact_type in SIGNATURES {
            let window = Window { after: None, limit: usize::MAX };
            let found = self.referrers(repository, digest, Some(artifact_type), window)?;
            if !found.items.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes a tag unless it was pushed again since `facts` were read. Returns whether it did.
    pub(crate) fn expire_tag(
        &self,
        repository: &RepositoryName,
        facts: &TagFacts,
    ) -> Result<bool, StoreError> {
        let lock = self.repository_lock(repository);
        let _held = lock.write().unwrap_or_else(PoisonError::into_inner);
        let remove = || -> io::Result<bool> {
            let now = self.facts(repository, facts.tag.clone())?;
            let same =
                now.is_some_and(|now| now.digest == facts.digest && now.pushed == facts.pushed);
            if same {
                let path = self.layout.tag(repository, &facts.tag);
                self.untagging(repository, &path, None)?;
                fs::remove_file(path)?;
                self.changed(Change::no_tag(repository, &facts.tag))?;
                self.directories.sync(&self.layout.tags(repository))?;
            }
            Ok(same)
        };
        remove().map_err(StoreError::during("remove a tag"))
    }

    /// Notes that a manifest was pulled, as the time of its record's last change: to the hour, and
    /// not synced. A crash forgets minutes of pulls, which decide over days.
    pub(crate) fn note_pull(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
        now: SystemTime,
    ) -> Result<(), StoreError> {
        let note = || -> io::Result<()> {
            let path = self.layout.manifest_link(repository, digest);
            let Some(link) = absent(fs::File::open(path))? else { return Ok(()) };
            let noted = link.metadata()?.modified()?;
            if now.duration_since(noted).is_ok_and(|age| age >= PULL_RESOLUTION) {
                link.file().set_modified(now)?;
            }
            Ok(())
        };
        note().map_err(StoreError::during("note a pull"))
    }
}

/// Returns the manifest that a tag's name says it is an attachment of: `sha256-<hex>`, as clients
/// write where there are no referrers, and cosign's `sha256-<hex>.sig`, `.att`, `.sbom`.
fn attached_to(tag: &Tag) -> Option<Digest> {
    let name = tag.as_str();
    parse_file_name(name.split_once('.').map_or(name, |(digest, _)| digest))
}
