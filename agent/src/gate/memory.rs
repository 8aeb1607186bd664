//! What a dump brings in a file system in memory: CRIU has GNU tar unpack it (`tmpfs-dev-NUMBER.tar.gz.img`,
//! `criu/filesystems.c`) before it opens files there by their paths, as root. A link among that would lead
//! it to wherever the dump says, and no root file system tells of it.
//!
//! Read is what GNU tar writes, and nothing that others could read in two ways ([`tarball`]): each name once,
//! and none through a link that was before it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, BufReader, Read};

use flate2::bufread::MultiGzDecoder;

use super::mounts::MountFact;
use super::remaps;
use super::tarball::{self, Kind, Wrong};

/// As many links and bytes of them are kept, of all that the dump brings.
const LINKS_MAX: usize = 1 << 16;
const LINK_BYTES_MAX: usize = 4 << 20;

/// As many are named of what links lead elsewhere.
const NAMED_MAX: usize = 16;

/// How the names of such images begin, also those of a CRIU before it went by devices; and what CRIU 4 has
/// before and behind a device's number.
const ANY: &str = "tmpfs-";
const BEFORE: &str = "tmpfs-dev-";
const BEHIND: &str = ".tar.gz.img";

/// What is open, and where links among the dump's own files lead.
#[derive(Debug, Default)]
pub(super) struct Ways {
    /// Files that are opened and places where something is mounted, with every directory above them: none
    /// of them is a link.
    pub(super) straight: HashSet<String>,
    /// Whether CRIU makes something by a path that may have links.
    pub(super) makes: bool,
}

/// Links of what is in memory, by the paths that they have in the container.
#[derive(Debug, Default)]
pub(super) struct Links {
    pub(super) all: BTreeMap<String, String>,
    /// Those that are in the way, the first few.
    pub(super) led: BTreeSet<String>,
    bytes: usize,
}

/// Whether an image is called as one with the content of a file system in memory.
pub(super) fn is_content(name: &str) -> bool {
    name.starts_with(ANY)
}

/// Returns which device the content is for, where the image has the name that CRIU gives it.
pub(super) fn device(name: &str) -> Option<u32> {
    let number = name.strip_prefix(BEFORE)?.strip_suffix(BEHIND)?.parse().ok()?;
    (name == format!("{BEFORE}{number}{BEHIND}")).then_some(number)
}

impl Ways {
    pub(super) fn of<'a>(straight: impl Iterator<Item = &'a str>, makes: bool) -> Self {
        let above =
            |path: &'a str| path.match_indices('/').map(move |(end, _)| path.split_at(end).0);
        let all = straight.flat_map(|path| above(path).chain([path]));
        Self { straight: all.filter(|way| !way.is_empty()).map(str::to_owned).collect(), makes }
    }
}

/// What one content is for.
struct Look<'a> {
    mounts: &'a [MountFact],
    /// Those of the file system.
    places: Vec<&'a MountFact>,
    ways: &'a Ways,
    hasher: RandomState,
    /// Everything, and what of it is a link.
    seen: HashSet<u64>,
    links: HashSet<u64>,
}

impl Links {
    /// Takes what is to be in the file system in memory of a device. An inner error says why it is not known
    /// what comes of it.
    pub(super) fn take(
        &mut self,
        mut content: impl Read,
        device: u32,
        mounts: &[MountFact],
        ways: &Ways,
    ) -> io::Result<Result<(), String>> {
        let places = mounts.iter().filter(|mount| mount.device == device && mount.is_filled());
        let mut look = Look {
            mounts,
            places: places.collect(),
            ways,
            hasher: RandomState::new(),
            seen: HashSet::new(),
            links: HashSet::new(),
        };
        let mut found = Ok(());
        if look.matters() {
            let mut tar = MultiGzDecoder::new(BufReader::new(&mut content));
            found =
                tarball::each(&mut tar, |entry| self.entry(&entry, &mut look)).map_err(|wrong| {
                    match wrong {
                        Wrong::Has(what) => format!("the content of its tmpfs has {what}"),
                        Wrong::Torn(error) => {
                            format!("the content of its tmpfs cannot be read: {error}")
                        }
                    }
                });
        }
        io::copy(&mut content, &mut io::sink())?;
        Ok(found)
    }

    fn entry(&mut self, entry: &tarball::Entry, look: &mut Look<'_>) -> Result<(), Wrong> {
        let path = &*entry.path;
        if !look.seen.insert(look.hasher.hash_one(path)) {
            return Err(Wrong::Has("the same name twice"));
        }
        if look.is_behind_a_link(path) {
            return Err(Wrong::Has("something behind a link"));
        }
        match entry.kind {
            Kind::Symlink => {
                look.links.insert(look.hasher.hash_one(path));
                self.keep(path, &entry.target, look)
            }
            Kind::Link => {
                let target = tarball::below(&entry.target, false)?;
                if look.is_behind_a_link(&target) || look.is_link(&target) {
                    return Err(Wrong::Has("another name for a symbolic link"));
                }
                Ok(())
            }
            Kind::Other => Ok(()),
        }
    }

    /// Keeps a link at all places that it is seen at, as far as it matters.
    fn keep(&mut self, path: &[u8], target: &[u8], look: &Look<'_>) -> Result<(), Wrong> {
        let (path, target) = (str::from_utf8(path), str::from_utf8(target));
        if look.ways.makes && (path.is_err() || target.is_err()) {
            return Err(Wrong::Has("a link from or to what is no text"));
        }
        // What is opened or mounted has a text for a path, wherever a link on the way leads.
        let Ok(path) = path else { return Ok(()) };
        for place in &look.places {
            // A part of it is bound by its path.
            let is_root = place.root == path || place.root.starts_with(&format!("{path}/"));
            if is_root {
                self.leads(place.path.clone());
            }
            let Some(path) = place.shows(path) else { continue };
            if remaps::on(&path, look.mounts).is_none_or(|on| on.id != place.id) {
                // Something else hides it.
                continue;
            }
            if look.ways.straight.contains(&path) {
                self.leads(path);
            } else if look.ways.makes {
                let target = target.unwrap_or_default();
                self.bytes += path.len() + target.len();
                self.all.insert(path, target.to_owned());
                if self.all.len() > LINKS_MAX || self.bytes > LINK_BYTES_MAX {
                    return Err(Wrong::Has(
                        "more links than are followed to where its sockets are",
                    ));
                }
            }
        }
        Ok(())
    }

    fn leads(&mut self, path: String) {
        if self.led.len() < NAMED_MAX {
            self.led.insert(path);
        }
    }
}

impl Look<'_> {
    /// Whether CRIU goes there in any way.
    fn matters(&self) -> bool {
        let is_touched = |place: &&MountFact| {
            place.root != "/" || self.ways.straight.iter().any(|way| place.has(way))
        };
        !self.places.is_empty() && (self.ways.makes || self.places.iter().any(is_touched))
    }

    fn is_link(&self, path: &[u8]) -> bool {
        self.links.contains(&self.hasher.hash_one(path))
    }

    fn is_behind_a_link(&self, path: &[u8]) -> bool {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        let mut above = ends.filter_map(|(end, _)| path.get(..end));
        above.any(|above| self.is_link(above))
    }
}
