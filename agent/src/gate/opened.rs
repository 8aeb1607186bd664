//! By which paths CRIU opens files, and makes sockets: as root, in the new container's mount namespace, while
//! it has the node's own directories open. A path that leads through a process's descriptors leads to those.
//! The kernel writes none such: what it says of an open file has no link on the way, and no `..`.

use std::collections::{BTreeMap, BTreeSet};

use super::common::is_plain;
use super::images::{File, UnixSocket};
use super::mounts::MountFact;
use super::remaps::{self, Remaps};

/// As many are named of those that lead elsewhere.
const NAMED_MAX: usize = 16;

/// What a process has in `/proc` that leads to whatever it has open.
const OF_MANY: [&str; 3] = ["fd", "map_files", "ns"];
const OF_ONE: [&str; 3] = ["root", "cwd", "exe"];

/// A file's kind in its mode, and that of a symbolic link (`inode(7)`).
const KIND: u32 = 0o170_000;
const LINK: u32 = 0o120_000;

/// The paths by which CRIU goes in the new root file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Paths {
    /// Of open files, that are there.
    pub(crate) opened: Vec<String>,
    /// Of what it makes: sockets, and names for files that have none any more.
    pub(crate) made: Vec<String>,
    /// What is in memory there, and comes from the dump.
    pub(crate) memory: Memory,
}

/// File systems in memory that a dump fills, before CRIU goes there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Where they are mounted.
    pub(crate) places: Vec<String>,
    /// Their symbolic links, where they matter.
    pub(crate) links: BTreeMap<String, String>,
}

/// The paths of a dump's open files.
#[derive(Debug, Default)]
pub(super) struct Opened {
    files: BTreeSet<(String, u32)>,
    /// Paths that sockets are bound to.
    sockets: BTreeSet<String>,
    /// Those that lead elsewhere, the first few.
    elsewhere: BTreeSet<String>,
    /// Those of symbolic links that are open themselves, the first few.
    links: BTreeSet<String>,
}

impl Opened {
    /// Takes an open file, and returns how many paths there are.
    pub(super) fn add(&mut self, file: &File) -> usize {
        if let Some(regular) = &file.regular {
            if regular.mode.is_some_and(|mode| mode & KIND == LINK) && self.links.len() < NAMED_MAX
            {
                self.links.insert(regular.name.clone());
            }
            let is_top = matches!(&*regular.name, "" | "/" | ".");
            if !is_top && (!is_plain(&regular.name) || leads_out(&regular.name)) {
                self.leads_elsewhere(regular.name.clone());
            } else if !is_top {
                self.files.insert((regular.name.clone(), regular.id));
            }
        }
        for path in file.socket.iter().filter_map(UnixSocket::path) {
            // No link is found by what is no text.
            let is_text = !path.contains(char::REPLACEMENT_CHARACTER);
            if !is_text || path.contains('\0') || leads_out(&path) {
                self.leads_elsewhere(path);
            } else {
                self.sockets.insert(path);
            }
        }
        self.files.len().max(self.sockets.len())
    }

    fn leads_elsewhere(&mut self, path: String) {
        if self.elsewhere.len() < NAMED_MAX {
            self.elsewhere.insert(path);
        }
    }

    /// Returns by which paths CRIU goes where no link is, and whether it makes something.
    pub(super) fn ways(&self, remaps: &Remaps) -> (Vec<&str>, bool) {
        let copied = remaps.copied();
        let straight = self.files.iter().filter(|(_, id)| !copied.contains(id));
        let straight: Vec<&str> = straight.map(|(name, _)| &**name).collect();
        let makes = !self.sockets.is_empty() || straight.len() < self.files.len();
        (straight, makes)
    }

    /// Returns the files that are on what is no mount of the dump's own, what CRIU makes, what leads
    /// elsewhere, and which links are open themselves. A copied file has no name to be opened by: CRIU gives
    /// it one for a moment, which it can on no other mount, wherever a link leads that has come into the way
    /// meanwhile.
    pub(super) fn on(&self, mounts: &[MountFact], remaps: &Remaps) -> [BTreeSet<String>; 4] {
        let is_outer = |(name, _): &&(String, u32)| {
            let on = remaps::on(name, mounts);
            on.is_none_or(|on| on.path == "/" || on.external.is_some())
        };
        let copied = remaps.copied();
        let (mut files, mut made) = (BTreeSet::new(), self.sockets.clone());
        for (name, id) in self.files.iter().filter(is_outer) {
            let all = if copied.contains(id) { &mut made } else { &mut files };
            all.insert(name.clone());
        }
        [files, made, self.elsewhere.clone(), self.links.clone()]
    }
}

impl UnixSocket {
    /// Returns the path that it is bound to, if to any: from a directory, where it has one.
    fn path(&self) -> Option<String> {
        let name = self.name.strip_suffix(b"\0").unwrap_or(&self.name);
        if name.first().is_none_or(|first| *first == 0) {
            return None;
        }
        let name = String::from_utf8_lossy(name).into_owned();
        Some(match &self.directory {
            Some(directory) if !name.starts_with('/') => format!("{directory}/{name}"),
            _ => name,
        })
    }
}

/// Whether a path leads through what a process has open, by whatever name `/proc` is mounted.
pub(crate) fn leads_out(path: &str) -> bool {
    let mut parts = path.split('/').skip_while(|part| *part != "proc").skip(1);
    let is_process = |part: &str| {
        part.starts_with(|letter: char| letter.is_ascii_digit()) || part.contains("self")
    };
    if !parts.any(is_process) {
        return false;
    }
    let rest: Vec<&str> = parts.collect();
    let is_through = |(index, part): (usize, &&str)| {
        OF_ONE.contains(part) || OF_MANY.contains(part) && index + 1 < rest.len()
    };
    rest.iter().enumerate().any(is_through)
}
