//! Files that CRIU links to a name, opens by it and removes it again, since they were held by a name that
//! was deleted. It does so as root, wherever the images say: a dump could have it remove any file that the
//! new container sees, also on a mount for reading only, which it makes writable for that. What CRIU
//! itself has written, and we let through, is a link of its own making in a directory above the file:
//! `link_remap.NUMBER`, of the number that the images give it. Nobody else has files of such names.
//!
//! Files without any name it makes anew, beside the name that the first of the images has for each, from
//! a mount namespace of its own, in which the node's files are, too: `..` in such a path would lead out
//! of the container, and is none of a path that the kernel writes; and so would a symbolic link in a
//! directory's place, which may be among the dump's own files and is not in its images. So these files
//! are made at the top of their mount, whose path has no directory of a dump's: [`amend`](mod@super::amend).
//! What they are, their own images say: a link would lead to whatever it says when CRIU opens the name that
//! it gives it, and a device is whatever its number says.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::common::is_plain;
use super::images::{GHOST_FILE, GhostFile, RegularFile, Remap};
use super::mounts::MountFact;
use super::records::{Failure, first};
use super::summary::SummaryError;
use crate::links;

/// `FD_TYPES__REG`.
pub(super) const REGULAR: i32 = 1;

/// In images of a CRIU that names no kind, the bit that tells a copy from a link (`criu/files-reg.c`).
const COPIED: u32 = 1 << 31;

/// Kinds, as CRIU numbers them.
const LINKED: i32 = 0;
pub(super) const GHOST: i32 = 1;
const KINDS: std::ops::RangeInclusive<i32> = 0..=2;

/// How the names of images begin that have a file without a name each.
pub(super) const GHOSTS: &str = "ghost-file-";

/// What a mode says of a file's kind (inode(7)), and the kinds that a program may hold without a name.
const KIND_OF_MODE: u32 = 0o170_000;
const REGULAR_FILE: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const FIFO: u32 = 0o010_000;

/// Returns the number of a file without a name by its image's name, as CRIU writes it.
pub(super) fn ghost(name: &str) -> Option<u32> {
    let number = name.strip_prefix(GHOSTS)?.strip_suffix(".img")?;
    let number = u32::from_str_radix(number, 16).ok()?;
    (name == format!("{GHOSTS}{number:x}.img")).then_some(number)
}

/// Makes sure that the file of such an image is none that leads elsewhere.
pub(super) fn judge_ghost(name: &str, content: impl Read) -> Result<(), Failure> {
    let GhostFile { mode, .. } = first(content, GHOST_FILE)?;
    if matches!(mode & KIND_OF_MODE, REGULAR_FILE | DIRECTORY | FIFO) {
        return Ok(());
    }
    let told = format!("{name:?} is neither a file, a directory nor a pipe: its mode is {mode:o}");
    Err(SummaryError::Contradiction(told).into())
}

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

/// A file without a name that CRIU would make in some directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CopyFact {
    /// Its number among these.
    pub(crate) number: u32,
    /// The mount it is on, and where that is.
    pub(crate) mount: i32,
    pub(crate) top: String,
    /// The name it had first.
    pub(crate) name: String,
    /// A number that no file has.
    pub(crate) spare: u32,
}

/// Regular files, and what is not where its name says.
#[derive(Debug, Default)]
pub(super) struct Remaps {
    /// Names and mounts of files, by number. One of two with the same number has none.
    files: BTreeMap<u32, (String, Option<i32>)>,
    /// The largest number of an open file of any kind.
    largest: u32,
    all: Vec<Remap>,
}

impl Remaps {
    /// Takes the number of an open file of any kind.
    pub(super) fn number(&mut self, number: u32) {
        self.largest = self.largest.max(number);
    }

    /// Takes an open file.
    pub(super) fn file(&mut self, kind: i32, file: &RegularFile) {
        self.number(file.id);
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
        let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
        for remap in &self.all {
            if !KINDS.contains(&remap.way()) {
                let kind = remap.way();
                return Err(format!("a file without its name is of the unknown kind {kind}"));
            }
            // CRIU would take the last for what the others say.
            if !seen.insert(remap.file) {
                return Err(format!("file {} is twice without its name", remap.file));
            }
            if remap.way() != LINKED {
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

    /// Makes sure that what is linked is on mounts that a container may write to.
    pub(super) fn links_on(&self, mounts: &[MountFact]) -> Result<Vec<LinkFact>, String> {
        let links = self.links()?;
        let on = |link: &LinkFact| on(&link.name, mounts).map_or(Ok(()), |on| on.takes(&link.name));
        links.iter().try_for_each(on)?;
        Ok(links)
    }

    /// Returns the numbers of files without a name.
    pub(super) fn copied(&self) -> BTreeSet<u32> {
        self.all.iter().filter(|remap| remap.way() == GHOST).map(|remap| remap.file).collect()
    }

    /// Returns the files without a name that CRIU would not make at the top of a mount. All must be on
    /// mounts that hold a container's files.
    pub(super) fn copies(&self, mounts: &[MountFact]) -> Result<Vec<CopyFact>, String> {
        // CRIU gives the next ones to what it makes itself.
        let mut spare = (self.largest..=u32::MAX).skip(1);
        let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
        for remap in self.all.iter().filter(|remap| remap.way() == GHOST) {
            let id = remap.file;
            let known = self.files.get(&id);
            let (name, on) = known.ok_or_else(|| format!("file {id} is copied and is none"))?;
            if !is_plain(name) {
                return Err(format!("file {id} is copied to no plain path"));
            }
            let mount = self::on(name, mounts)
                .filter(|mount| on.is_some_and(|on| i64::from(on) == i64::from(mount.id)));
            let Some(mount) = mount.filter(|mount| mount.holds_files()) else {
                return Err(format!("file {id} is copied to {name:?}, which is on no such mount"));
            };
            mount.takes(name)?;
            let top = mount.path.trim_end_matches('/');
            let is_at_the_top = name.rfind('/') == Some(top.len());
            // Others are linked to the first.
            if seen.insert(remap.copy()) && !is_at_the_top {
                found.push(CopyFact {
                    number: remap.copy(),
                    mount: on.unwrap_or_default(),
                    top: top.to_owned(),
                    name: name.clone(),
                    spare: spare.next().ok_or("its files have the largest numbers there are")?,
                });
            }
        }
        Ok(found)
    }
}

/// Returns the mount that a file is on, for all that paths tell.
pub(super) fn on<'a>(name: &str, mounts: &'a [MountFact]) -> Option<&'a MountFact> {
    mounts.iter().filter(|mount| mount.has(name)).max_by_key(|mount| mount.path.len())
}

impl Remap {
    fn way(&self) -> i32 {
        self.kind.unwrap_or(if self.of & COPIED == 0 { LINKED } else { GHOST })
    }

    /// Returns the number of what is copied.
    fn copy(&self) -> u32 {
        if self.kind.is_some() { self.of } else { self.of & !COPIED }
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
