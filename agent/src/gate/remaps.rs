//! Files that CRIU links to a name, opens by it and removes it again, since they were held by a name that
//! was deleted. It does so as root, wherever the images say: a dump could have it remove any file that the
//! new container sees, also on a mount for reading only, which it makes writable for that. What CRIU
//! itself has written, and we let through, is a link of its own making in a directory above the file:
//! `link_remap.NUMBER`, of the number that the images give it. Nobody else has files of such names.
//!
//! CRIU makes copies of files without any name, and takes links away, from a mount namespace of its own, in
//! which the node's files are, too: `..` in such a path would lead out of the container, and is none of a
//! path that the kernel writes. An absolute symbolic link in a directory's place does, and is not seen
//! here: what a dump's own files have is not in its images (`spec/decisions/0067`).

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::images::{RegularFile, Remap};
use crate::links;

/// `FD_TYPES__REG`.
const REGULAR: i32 = 1;

/// In images of a CRIU that names no kind, the bit that tells a copy from a link (`criu/files-reg.c`).
const COPIED: u32 = 1 << 31;

/// Kinds, as CRIU numbers them.
const LINKED: i32 = 0;
const KINDS: std::ops::RangeInclusive<i32> = 0..=2;

/// A file that is linked for a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LinkFact {
    /// Where it was held.
    pub(crate) name: String,
    /// What it is linked from.
    pub(crate) link: String,
    /// The number of that.
    pub(crate) number: u32,
    /// The mount it is on.
    pub(crate) mount: Option<i32>,
}

/// Regular files, and what is not where its name says.
#[derive(Debug, Default)]
pub(super) struct Remaps {
    /// Names and mounts of files, by number. One of two with the same number has none.
    files: BTreeMap<u32, (String, Option<i32>)>,
    all: Vec<Remap>,
}

impl Remaps {
    /// Takes an open file.
    pub(super) fn file(&mut self, kind: i32, file: &RegularFile) {
        let known = (file.name.clone(), file.mount);
        if kind == REGULAR && self.files.insert(file.id, known).is_some() {
            // CRIU takes either of them.
            self.files.insert(file.id, Default::default());
        }
    }

    /// Takes what is not where its name says, and returns how many there are.
    pub(super) fn add(&mut self, remap: Remap) -> usize {
        self.all.push(remap);
        self.all.len()
    }

    /// Returns what is linked.
    pub(super) fn links(&self) -> Result<Vec<LinkFact>, String> {
        let mut found = Vec::new();
        for remap in &self.all {
            let kind = remap.kind.unwrap_or(if remap.of & COPIED == 0 { LINKED } else { 1 });
            if !KINDS.contains(&kind) {
                return Err(format!("a file without its name is of the unknown kind {kind}"));
            }
            if kind != LINKED {
                // CRIU makes a copy by the name, from outside of the container.
                if self.files.get(&remap.file).is_some_and(|(name, _)| !is_plain(name)) {
                    return Err(format!("file {} is copied to no plain path", remap.file));
                }
                continue;
            }
            let file = |id: u32| {
                self.files.get(&id).ok_or_else(|| format!("file {id} is linked and is none"))
            };
            let ((name, mount), (link, _)) = (file(remap.file)?, file(remap.of)?);
            found.push(LinkFact {
                name: name.clone(),
                link: link.clone(),
                number: remap.of,
                mount: *mount,
            });
        }
        Ok(found)
    }
}

impl LinkFact {
    /// Whether CRIU writes such a link.
    pub(super) fn is_criu_s(&self) -> bool {
        let (name, link) = (Path::new(&self.name), Path::new(&self.link));
        let above = link.parent().filter(|above| *above != name && name.starts_with(above));
        let file = link.file_name().and_then(|file| file.to_str());
        is_plain(&self.name)
            && is_plain(&self.link)
            && above.is_some()
            && file.and_then(links::number) == Some(self.number)
    }
}

/// Whether a path is written as the kernel does.
fn is_plain(path: &str) -> bool {
    let parts = path.strip_prefix('/').map(|path| path.split('/'));
    parts.is_some_and(|mut parts| parts.all(|part| !matches!(part, "" | "." | "..")))
}
