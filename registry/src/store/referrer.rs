//! Referrers: one small file per subject and referrer, so a list costs what it shows.

use std::io;

use fs_err as fs;
use kybernate_spec::{Descriptor, Digest, RepositoryName};
use serde::{Deserialize, Serialize};

use super::layout::{file_name, parse_file_name};
use super::listing::{Collector, from_index_or};
use super::record::Record;
use super::{Page, Store, StoreError, Window, absent, is_there, read_record};
use crate::index::{Change, ReferrersWanted};

/// A page ends after this many bytes of annotations, artifact types and the like, so that
/// referrers with large annotations do not make a large reply.
const PAGE_BYTES_MAX: usize = 2 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReferrerRecord {
    pub(super) referrer: Descriptor,
}

impl Record for ReferrerRecord {
    const KIND: &'static str = "referrer";
}

impl Store {
    /// Enters a referrer; durable once the manifest's own entry is.
    pub(super) fn put_referrer(
        &self,
        repository: &RepositoryName,
        subject: &Digest,
        referrer: &Descriptor,
    ) -> io::Result<()> {
        let dir = self.layout.referrers(repository, subject);
        self.directories.ensure(&dir)?;
        let record = ReferrerRecord { referrer: referrer.clone() };
        self.place_record(&record, &dir.join(file_name(&referrer.digest)))?;
        self.directories.sync(&dir)
    }

    /// Takes a referrer out.
    pub(super) fn remove_referrer(
        &self,
        repository: &RepositoryName,
        subject: &Digest,
        referrer: &Digest,
    ) -> io::Result<()> {
        let dir = self.layout.referrers(repository, subject);
        if absent(fs::remove_file(dir.join(file_name(referrer))))?.is_some() {
            self.changed(Change::no_referrer(repository, subject, referrer))?;
            self.directories.sync(&dir)?;
        }
        Ok(())
    }

    /// Lists what refers to `subject`, which need not be here itself.
    pub fn referrers(
        &self,
        repository: &RepositoryName,
        subject: &Digest,
        artifact_type: Option<&str>,
        window: Window,
    ) -> Result<Page<Descriptor>, StoreError> {
        let wanted = ReferrersWanted { artifact_type, window: &window, bytes_max: PAGE_BYTES_MAX };
        let indexed = || self.index().referrers(repository, subject, &wanted);
        let list = || -> io::Result<_> {
            let dir = self.layout.referrers(repository, subject);
            let mut names = Collector::new(window.clone());
            for entry in absent(fs::read_dir(&dir))?.into_iter().flatten() {
                if let Some(name) = entry?.file_name().to_str() {
                    names.push(name);
                }
            }
            let Page { items: names, mut next } = names.finish();
            let mut items = Vec::new();
            let mut bytes = 0;
            for name in names {
                let Some(digest) = parse_file_name(&name) else { continue };
                // A referrer whose manifest was never acknowledged, or is deleted, is none.
                let link = self.layout.manifest_link(repository, &digest);
                let Some(record) = read_record::<ReferrerRecord>(&dir.join(&name))? else {
                    continue;
                };
                let wanted = artifact_type
                    .is_none_or(|wanted| record.referrer.artifact_type.as_deref() == Some(wanted));
                if wanted && is_there(&link)? {
                    bytes += size_of(&record.referrer);
                    items.push(record.referrer);
                }
                if bytes >= PAGE_BYTES_MAX {
                    next = Some(name);
                    break;
                }
            }
            Ok(Page { items, next })
        };
        from_index_or(indexed, || list().map_err(StoreError::during("list referrers")))
    }
}

fn size_of(descriptor: &Descriptor) -> usize {
    let Descriptor { annotations, media_type, artifact_type, .. } = descriptor;
    let types = media_type.len() + artifact_type.as_ref().map_or(0, String::len);
    512 + types + annotations.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
}
