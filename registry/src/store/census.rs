//! Who links what: the walks that garbage collection and scrubbing make.

use std::collections::HashSet;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use fs_err as fs;
use kybernate_spec::{Algorithm, Digest, RepositoryName, Tag};

use super::layout::parse_file_name;
use super::manifest::ManifestRecord;
use super::pins::Watch;
use super::record;
use super::tag::TagRecord;
use super::{Store, absent, is_there};
use crate::gc::{Key, LinkKind};

/// The hash functions content is stored under.
const ALGORITHMS: [Algorithm; 2] = [Algorithm::Sha256, Algorithm::Sha512];

/// A record that says nothing, because it is damaged.
#[derive(Debug, thiserror::Error)]
#[error("the record {0:?} is damaged: push it again or delete it")]
struct Damaged(PathBuf, #[source] record::RecordError);

impl Store {
    /// Lists all repositories, in order. ~60 bytes each are held at once.
    pub(crate) fn all_repositories(&self) -> io::Result<Vec<RepositoryName>> {
        let mut names = Vec::new();
        self.each_repository::<io::Error>(&mut |name| {
            names.push(name.clone());
            Ok(())
        })?;
        names.sort_unstable();
        Ok(names)
    }

    /// Hands every live link of a kind to `each`.
    pub(crate) fn each_link(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        mut each: impl FnMut(Digest) -> io::Result<()>,
    ) -> io::Result<()> {
        for algorithm in ALGORITHMS {
            let dir = match kind {
                LinkKind::Blob => self.layout.blob_links(repository, algorithm),
                LinkKind::Manifest => self.layout.manifest_links(repository, algorithm),
            };
            each_digest(&dir, algorithm, &mut each)?;
        }
        Ok(())
    }

    /// Returns what the tags of a repository name. A damaged tag is an error: what it names would
    /// look like garbage.
    pub(crate) fn tagged(&self, repository: &RepositoryName) -> io::Result<HashSet<Digest>> {
        let mut tagged = HashSet::new();
        let entries = absent(fs::read_dir(self.layout.tags(repository)))?;
        for entry in entries.into_iter().flatten() {
            let entry = entry?;
            if entry.file_name().to_str().is_none_or(|name| name.parse::<Tag>().is_err()) {
                continue;
            }
            // Deleted since it was listed: then it names nothing.
            let Some(bytes) = absent(fs::read(entry.path()))? else { continue };
            match record::decode::<TagRecord>(&bytes) {
                Ok(tag) => tagged.insert(tag.digest),
                Err(error) => return Err(io::Error::other(Damaged(entry.path(), error))),
            };
        }
        Ok(tagged)
    }

    /// Returns when a live link was made or made young again.
    pub(crate) fn link_time(
        &self,
        repository: &RepositoryName,
        kind: LinkKind,
        digest: &Digest,
    ) -> io::Result<Option<SystemTime>> {
        let link = match kind {
            LinkKind::Blob => self.layout.blob_link(repository, digest),
            LinkKind::Manifest => self.layout.manifest_link(repository, digest),
        };
        absent(fs::metadata(link))?.map(|link| link.modified()).transpose()
    }

    /// Returns the media type and the bytes of a manifest that a repository links. A media type
    /// that cannot be read is unknown; content that is not there or not right is `Ok(None)`.
    pub(crate) fn linked_manifest(
        &self,
        repository: &RepositoryName,
        digest: &Digest,
    ) -> io::Result<Option<(Option<String>, bytes::Bytes)>> {
        let record = fs::read(self.layout.manifest_link(repository, digest))?;
        let record = record::decode::<ManifestRecord>(&record).ok();
        let content = self.read_content(digest)?;
        Ok(content.map(|content| (record.map(|record| record.media_type), content)))
    }

    /// Returns what something is attached to.
    pub(crate) fn subjects(&self, repository: &RepositoryName) -> io::Result<HashSet<Key>> {
        let mut subjects = HashSet::new();
        for algorithm in ALGORITHMS {
            let dir = self.layout.subjects(repository, algorithm);
            each_digest(&dir, algorithm, &mut |digest| {
                subjects.insert(Key::of(&digest));
                Ok(())
            })?;
        }
        Ok(subjects)
    }

    /// Returns the digests that are attached to a subject.
    pub(crate) fn attached(
        &self,
        repository: &RepositoryName,
        subject: &Digest,
    ) -> io::Result<Vec<Digest>> {
        let mut attached = Vec::new();
        let entries = absent(fs::read_dir(self.layout.referrers(repository, subject)))?;
        for entry in entries.into_iter().flatten() {
            attached.extend(entry?.file_name().to_str().and_then(parse_file_name));
        }
        Ok(attached)
    }

    /// Hands every stored content to `each`, in order of algorithm and shelf, from the shelf that
    /// `from` is on; a shelf's contents come in order.
    pub(crate) fn each_content(
        &self,
        from: Option<&Digest>,
        mut each: impl FnMut(Digest) -> io::Result<ControlFlow<()>>,
    ) -> io::Result<()> {
        let first = from.map(|digest| self.layout.shelf(digest));
        for algorithm in ALGORITHMS {
            let shelves = (0..=255).map(|first: u8| {
                (algorithm, self.layout.algorithm(algorithm).join(format!("{first:02x}")))
            });
            for (algorithm, shelf) in shelves {
                // Paths of shelves are ordered as their contents are.
                if first.as_ref().is_some_and(|first| shelf < *first) {
                    continue;
                }
                let mut contents = Vec::new();
                each_digest(&shelf, algorithm, &mut |digest| {
                    contents.push(digest);
                    Ok(())
                })?;
                contents.sort_unstable();
                for digest in
                    contents.into_iter().filter(|digest| from.is_none_or(|from| digest > from))
                {
                    if each(digest)?.is_break() {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins to notice who links the digests.
    pub(crate) fn watch<'a>(&'a self, digests: &[Digest]) -> Vec<Watch<'a>> {
        digests.iter().map(|digest| self.house.pins.watch(digest)).collect()
    }

    /// Whether any of `repositories` has a link to the digest, in quarantine or not. The ones in
    /// `leaving` do not count.
    pub(crate) fn is_linked_anywhere(
        &self,
        repositories: &[RepositoryName],
        digest: &Digest,
        leaving: &HashSet<(RepositoryName, LinkKind, Key)>,
    ) -> io::Result<bool> {
        let key = Key::of(digest);
        for name in repositories {
            // A link moves from live to condemned; the other way round its mover holds it.
            if is_there(&self.layout.blob_link(name, digest))?
                || is_there(&self.layout.manifest_link(name, digest))?
            {
                return Ok(true);
            }
            for kind in [LinkKind::Blob, LinkKind::Manifest] {
                if is_there(&self.condemned_link(name, kind, digest))?
                    && !leaving.contains(&(name.clone(), kind, key))
                {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Removes content that no repository links, unless somebody links it at this moment. Returns
    /// its length when it did.
    pub(crate) fn remove_content(&self, watch: &Watch<'_>) -> io::Result<Option<u64>> {
        let digest = watch.digest();
        let remove = || -> io::Result<Option<u64>> {
            let path = self.layout.blob(digest);
            let Some(length) = absent(fs::metadata(&path))?.map(|found| found.len()) else {
                return Ok(None);
            };
            // In this order: content without its checksums would look corrupt.
            absent(fs::remove_file(path))?;
            absent(fs::remove_file(self.layout.checksums(digest)))?;
            Ok(Some(length))
        };
        watch.unless_used(remove).unwrap_or(Ok(None))
    }

    /// Returns how long stored content is, when it is there.
    pub(crate) fn content_length(&self, digest: &Digest) -> io::Result<Option<u64>> {
        Ok(absent(fs::metadata(self.layout.blob(digest)))?.map(|found| found.len()))
    }

    /// Removes checksums whose content is gone: a collection was killed between the two.
    pub(crate) fn remove_stray_checksums(&self) -> io::Result<()> {
        for algorithm in ALGORITHMS {
            for first in 0..=255u8 {
                let dir = self.layout.algorithm(algorithm).join(format!("{first:02x}"));
                for entry in absent(fs::read_dir(&dir))?.into_iter().flatten() {
                    let name = entry?.file_name();
                    let hex = name.to_str().and_then(|name| name.strip_suffix(".crc"));
                    let digest = hex.map(|hex| format!("{algorithm}:{hex}").parse());
                    if let Some(Ok(digest)) = digest {
                        self.remove_if_stray(&digest)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn remove_if_stray(&self, digest: &Digest) -> io::Result<()> {
        let stray = || is_there(&self.layout.blob(digest)).map(|there| !there);
        let remove = || {
            if stray()? {
                absent(fs::remove_file(self.layout.checksums(digest))).map(drop)
            } else {
                Ok(())
            }
        };
        // Whoever commits puts the checksums first, and holds the digest meanwhile.
        if stray()? {
            self.house.pins.unless_held(digest, remove).unwrap_or(Ok(()))
        } else {
            Ok(())
        }
    }
}

/// Hands the digests that are file names in `dir` to `each`.
fn each_digest(
    dir: &Path,
    algorithm: Algorithm,
    each: &mut impl FnMut(Digest) -> io::Result<()>,
) -> io::Result<()> {
    for entry in absent(fs::read_dir(dir))?.into_iter().flatten() {
        let name = entry?.file_name();
        let Some(hex) = name.to_str().filter(|name| name.len() == algorithm.hex_length()) else {
            continue;
        };
        if let Ok(digest) = format!("{algorithm}:{hex}").parse() {
            each(digest)?;
        }
    }
    Ok(())
}
