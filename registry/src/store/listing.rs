//! Lists in pages, from the index or else from directories, in memory that does not grow with them.

use std::collections::BinaryHeap;
use std::io;
use std::path::Path;

use fs_err as fs;
use kybernate_spec::{RepositoryName, Tag};

use super::layout::{BLOBS, MANIFESTS, TAGS};
use super::{Store, StoreError, absent};
use crate::trace;

/// Which part of a list is wanted, in byte order of the names.
#[derive(Debug, Clone)]
pub struct Window {
    /// The name before the first wanted one.
    pub after: Option<String>,
    /// How many names are wanted at most.
    pub limit: usize,
}

/// A part of a list.
#[derive(Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// The names or things, in order.
    pub items: Vec<T>,
    /// The name to ask after for the next part, when there is more.
    pub next: Option<String>,
}

/// Keeps the first names of a window while they come in any order.
#[derive(Debug)]
pub(super) struct Collector {
    window: Window,
    smallest: BinaryHeap<String>,
    more: bool,
}

impl Collector {
    pub(super) fn new(window: Window) -> Self {
        Self { window, smallest: BinaryHeap::new(), more: false }
    }

    pub(super) fn push(&mut self, name: &str) {
        if self.window.after.as_deref().is_some_and(|after| name <= after) {
            return;
        }
        if self.smallest.len() >= self.window.limit {
            self.more = true;
            if self.smallest.peek().is_none_or(|largest| name >= largest.as_str()) {
                return;
            }
            self.smallest.pop();
        }
        self.smallest.push(name.to_owned());
    }

    pub(super) fn finish(self) -> Page<String> {
        let items = self.smallest.into_sorted_vec();
        let next = if self.more { items.last().cloned() } else { None };
        Page { items, next }
    }
}

impl Store {
    /// Lists the tags of a repository, or nothing when there is no such repository.
    pub fn tags(
        &self,
        repository: &RepositoryName,
        window: Window,
    ) -> Result<Option<Page<String>>, StoreError> {
        let indexed = || self.index().tags(repository, &window).map(Some);
        let list = || -> io::Result<_> {
            if !is_repository(&self.layout.repository(repository))? {
                return Ok(None);
            }
            let mut tags = Collector::new(window.clone());
            if let Some(entries) = absent(fs::read_dir(self.layout.tags(repository)))? {
                for entry in entries {
                    let name = entry?.file_name();
                    if let Some(name) = name.to_str().filter(|name| name.parse::<Tag>().is_ok()) {
                        tags.push(name);
                    }
                }
            }
            Ok(Some(tags.finish()))
        };
        from_index_or(indexed, || list().map_err(StoreError::during("list tags")))
    }

    /// Lists the repositories.
    pub fn repositories(&self, window: Window) -> Result<Page<String>, StoreError> {
        let indexed = || self.index().repositories(&window);
        from_index_or(indexed, || {
            let mut names = Collector::new(window.clone());
            let listed: io::Result<()> = self.each_repository(&mut |name| {
                names.push(name.as_str());
                Ok(())
            });
            listed.map_err(StoreError::during("list repositories"))?;
            Ok(names.finish())
        })
    }
}

/// Asks the index, and the objects where it does not answer: a part of the request's trace.
pub(super) fn from_index_or<T>(
    indexed: impl FnOnce() -> Option<T>,
    read: impl FnOnce() -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    trace::part("store.list", || {
        let found = indexed();
        trace::note("kybernate.list.indexed", u64::from(found.is_some()));
        found.map_or_else(read, Ok)
    })
}

/// Whether a directory is a repository's.
pub(super) fn is_repository(dir: &Path) -> io::Result<bool> {
    for kind in [BLOBS, MANIFESTS, TAGS] {
        if absent(fs::metadata(dir.join(kind)))?.is_some_and(|found| found.is_dir()) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests;
