//! Links that could give CRIU another name than the one that the runtime means, or lead what that makes
//! elsewhere. Where the agent restores, it looks each name up (`crate::rootfs`); who restores what is
//! provided does that alone. So no layer may have a link on the way to a place where something is to be.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::path::{Component, Path, PathBuf};

use fs_err as fs;
use kybernate_packager::interchange::containerd::{LayerLink, find_link};

use crate::operations::RefusedBy;
use crate::restore::rules::Refusal;
use crate::restore::spec;
use crate::rootfs::{Bind, NAME_END, Names, Others};
use crate::runtime::Mount;

/// Layers with more links are not provided with allowed mounts: each is kept in mind.
const LINKS_MAX: usize = 200_000;

/// What is looked for.
struct Look<'a> {
    /// The directories of the image's layers.
    directories: Vec<&'a Path>,
    /// Where something is to be.
    places: Vec<String>,
    /// The places of links of the layer that is a file, so that little is kept of each.
    links: HashSet<u64>,
    hasher: RandomState,
}

/// Makes sure that no link of a root file system ends a name early or is on the way to where `binds` are
/// to be: of no layer, mounted or not, and not of the one that is in a `layer` file. Blocks.
pub(super) fn lead_nowhere(
    rootfs: &[Mount],
    layer: &Path,
    binds: &[Bind],
) -> io::Result<Result<(), Refusal>> {
    let mut look = Look {
        directories: rootfs.iter().flat_map(Mount::directories).map(Path::new).collect(),
        places: binds.iter().map(|bind| bind.place.clone()).collect(),
        links: HashSet::new(),
        hasher: RandomState::new(),
    };
    // What is only made may be anywhere but there.
    if binds.iter().any(|bind| bind.read_only) {
        look.places.extend(spec::mounted_always());
    }
    if let Some(reason) = look.in_layer(layer, !binds.is_empty())? {
        return Ok(Err(Refusal::one(RefusedBy::Identity, reason)));
    }
    for directory in &look.directories {
        if let Some(reason) = look.in_directory(directory)? {
            return Ok(Err(Refusal::one(RefusedBy::Identity, reason)));
        }
    }
    // No link is on the way: an empty root file system has the same names. What is in the binds counts.
    let nothing = layer.with_extension("none");
    let others = Others { mounts: spec::mounted_always(), ..Others::default() };
    let clashes = Names::look_up(&nothing, binds, &others)?.clashes();
    if clashes.is_empty() {
        return Ok(Ok(()));
    }
    Ok(Err(Refusal { by: RefusedBy::Identity, reasons: clashes.into_iter().collect() }))
}

impl Look<'_> {
    /// Looks through a layer's file; `further` at what links make of each other, too.
    fn in_layer(&mut self, layer: &Path, further: bool) -> io::Result<Option<String>> {
        let mut links = HashSet::new();
        let found = find_link(layer, |link| {
            if further {
                links.extend(link.places.iter().map(|place| self.hasher.hash_one(plain(place))));
            }
            if links.len() > LINKS_MAX {
                return Some(format!("its container has made more than {LINKS_MAX} links"));
            }
            // Another name of a file ends no name itself.
            let targets = if link.is_hard { &[][..] } else { &link.targets };
            link.places.iter().find_map(|place| self.wrong(&plain(place), targets))
        })?;
        if found.is_some() || !further {
            return Ok(found);
        }
        self.links = links;
        find_link(layer, |link| self.passes(link))
    }

    /// Looks through a directory of a layer.
    fn in_directory(&self, top: &Path) -> io::Result<Option<String>> {
        let mut left = vec![top.to_owned()];
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(directory)? {
                let entry = entry?;
                let kind = entry.file_type()?;
                if kind.is_dir() {
                    left.push(entry.path());
                } else if kind.is_symlink() {
                    let path = entry.path();
                    let place = path.strip_prefix(top).unwrap_or(&path);
                    let wrong = self.wrong(place, &[fs::read_link(&path)?]);
                    if wrong.is_some() {
                        return Ok(wrong);
                    }
                }
            }
        }
        Ok(None)
    }

    /// Returns what is wrong with a link.
    fn wrong(&self, place: &Path, targets: &[PathBuf]) -> Option<String> {
        if targets.iter().any(|target| target.to_string_lossy().contains(NAME_END)) {
            return Some(format!(
                "its link {:?} leads to a name with {NAME_END:?}, of which CRIU takes a part for what \
                 is mounted",
                place.display()
            ));
        }
        let led = self.places.iter().find(|led| plain(Path::new(led)).starts_with(place))?;
        Some(format!(
            "its link {:?} is on the way to {led:?}: only a place without links is the same for who \
             restores it",
            place.display()
        ))
    }

    /// Returns why a link of the layer would be elsewhere than it says.
    fn passes(&self, link: &LayerLink) -> Option<String> {
        let is_link = |way: &Path| {
            self.links.contains(&self.hasher.hash_one(way))
                || self.directories.iter().any(|directory| directory.join(way).is_symlink())
        };
        let place = link.places.iter().map(|place| plain(place)).find(|place| {
            let above = place.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
            above.into_iter().any(is_link)
        })?;
        Some(format!("its link {:?} is made by way of another link", place.display()))
    }
}

/// Returns a path as those who unpack a layer read it, from the top.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => drop(plain.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::symlink;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    /// A layer with a directory and a tar.
    struct Case {
        lower: tempfile::TempDir,
        layer: tempfile::NamedTempFile,
    }

    impl Case {
        fn new(lower: &[(&str, &str)], layer: &[(tar::EntryType, &str, &str)]) -> Self {
            let directory = tempfile::tempdir().unwrap();
            for (place, target) in lower {
                let place = directory.path().join(place);
                fs::create_dir_all(place.parent().unwrap()).unwrap();
                symlink(target, place).unwrap();
            }
            let mut tar = tar::Builder::new(Vec::new());
            for (kind, place, target) in layer {
                let mut header = tar::Header::new_gnu();
                header.set_entry_type(*kind);
                header.set_size(0);
                // Not only what a builder would write.
                header.as_old_mut().name[..place.len()].copy_from_slice(place.as_bytes());
                header.set_link_name_literal(target).unwrap();
                header.set_cksum();
                tar.append(&header, io::empty()).unwrap();
            }
            let file = tempfile::NamedTempFile::new().unwrap();
            let mut gzip = GzEncoder::new(file.as_file(), Compression::fast());
            gzip.write_all(&tar.into_inner().unwrap()).unwrap();
            gzip.finish().unwrap();
            Self { lower: directory, layer: file }
        }

        /// Returns the reasons against binds on these places, the last one of which is for reading only.
        fn told(&self, places: &[&str]) -> String {
            let options = vec![format!("lowerdir={}", self.lower.path().display())];
            let rootfs = [Mount { options, ..Mount::default() }];
            let bind = |(number, place): (usize, &&str)| Bind {
                place: (*place).to_owned(),
                source: format!("/none-{number}").into(),
                read_only: number + 1 == places.len(),
            };
            let binds: Vec<Bind> = places.iter().enumerate().map(bind).collect();
            let looked = lead_nowhere(&rootfs, self.layer.path(), &binds).unwrap();
            looked.err().map_or_else(String::new, |refusal| refusal.reasons.join("; "))
        }
    }

    const SYMLINK: tar::EntryType = tar::EntryType::Symlink;
    const HARD: tar::EntryType = tar::EntryType::Link;

    #[test]
    fn a_link_that_ends_a_name_is_found_in_any_layer() {
        assert_eq!(Case::new(&[("a/plain", "/x")], &[(SYMLINK, "b", "/y")]).told(&[]), "");
        let told = Case::new(&[("a/b/zero", "/x]:/y")], &[]).told(&[]);
        assert!(told.contains("its link \"a/b/zero\" leads"), "{told}");
        let told = Case::new(&[], &[(SYMLINK, "./c/../d", "/x]:/y")]).told(&[]);
        assert!(told.contains("its link \"d\" leads"), "{told}");
    }

    #[test]
    fn no_link_is_on_the_way_to_a_place() {
        let usual = Case::new(&[("var/run", "/run"), ("data/x", "y")], &[(SYMLINK, "log", "/l")]);
        assert_eq!(usual.told(&["/data", "/run/token", "/logs"]), "");
        for (lower, layer, place) in [
            (&[("var/run", "/run")][..], &[][..], "/var/run/token"),
            (&[], &[(SYMLINK, "/data", "/ro")], "/data"),
            (&[], &[(SYMLINK, "x/.././data", "/ro")], "/data/x/y"),
            (&[], &[(HARD, "data", "var/run")], "/data"),
            // The runtime makes its own places, too.
            (&[("dev", "/ro/x")], &[], "/ro"),
        ] {
            let told = Case::new(lower, layer).told(&[place]);
            assert!(told.contains("is on the way to"), "{place}: {told}");
        }
        // With nothing that is for reading only, those are nobody's.
        assert_eq!(Case::new(&[("dev", "/ro/x")], &[]).told(&[]), "");
    }

    #[test]
    fn no_link_is_made_by_way_of_another() {
        let by_way = |lower: &[(&str, &str)], layer: &[(tar::EntryType, &str, &str)]| {
            let told = Case::new(lower, layer).told(&["/data"]);
            assert!(told.contains("is made by way of another link"), "{told}");
        };
        by_way(&[("top", "/")], &[(SYMLINK, "top/data", "/ro")]);
        by_way(&[], &[(SYMLINK, "a/top", "/"), (SYMLINK, "a/top/data", "/ro")]);
        by_way(&[], &[(SYMLINK, "top/data", "/ro"), (HARD, "top", "x")]);
        let plain = [(SYMLINK, "a/b", "/"), (SYMLINK, "a/c", "b/data")];
        assert_eq!(Case::new(&[("d", "/")], &plain).told(&["/data"]), "");
        // Without a mount, links may be where they like.
        assert_eq!(Case::new(&[("top", "/")], &[(SYMLINK, "top/data", "/ro")]).told(&[]), "");
    }

    #[test]
    fn a_place_in_a_volume_is_there_already() {
        let case = Case::new(&[], &[]);
        let told = case.told(&["/ro/x", "/ro"]);
        assert!(
            told.contains("\"/ro/x\" is missing in what is mounted for reading only"),
            "{told}"
        );
        assert_eq!(case.told(&["/rw", "/rw/x"]), "");
    }
}
