//! Links that could give CRIU another name than the one that the runtime means, or lead what that makes
//! elsewhere. Where the agent restores, it looks each name up (`crate::rootfs`); who restores what is
//! provided does that alone. So no layer may have a link on the way to a place where something is to be.

use std::collections::{BTreeSet, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use fs_err as fs;
use rustix::io::Errno;

use crate::gate::{Paths, leads_out};
use crate::layer::{self, LayerError, Link};
use crate::operations::RefusedBy;
use crate::restore::rules::Refusal;
use crate::rootfs::{Bind, DEVICES, NAME_END, Names, Others};
use crate::runtime::Mount;

/// Layers with more links are not provided with allowed mounts: each is kept in mind.
const LINKS_MAX: usize = 200_000;

/// By as many paths what CRIU makes is looked for.
const WAYS_MAX: usize = 4096;

/// By this attribute, overlayfs takes a directory of the layers below for another one of them.
const REDIRECT: &str = "trusted.overlay.redirect";

/// What is looked for.
struct Look<'a> {
    /// The directories of the image's layers.
    directories: Vec<&'a Path>,
    /// Where something is to be.
    places: Vec<PathBuf>,
    /// The places of links of the layer that is a file, so that little is kept of each.
    links: HashSet<u64>,
    hasher: RandomState,
}

/// Makes sure that no link of a root file system ends a name early or is on the way to where `binds` and
/// `others` are to be: of no layer, mounted or not, and not of the one that is in a `layer` file (gzip).
/// Blocks.
pub(super) fn lead_nowhere(
    rootfs: &[Mount],
    layer: &Path,
    binds: &[Bind],
    others: &Others,
) -> io::Result<Result<(), Refusal>> {
    let mut look = Look {
        directories: rootfs.iter().flat_map(Mount::directories).map(Path::new).collect(),
        places: places(binds, others),
        links: HashSet::new(),
        hasher: RandomState::new(),
    };
    let mut found = look.in_layer(layer)?;
    for directory in &look.directories {
        if found.is_none() {
            found = look.in_directory(directory)?;
        }
    }
    let mut ways = Ways::of(others);
    if found.is_none() {
        found = ways.follow(&look, layer)?;
    }
    if let Some(reason) = found {
        return Ok(Err(Refusal::one(RefusedBy::Identity, reason)));
    }
    let paths = Paths { made: ways.all.into_iter().collect(), ..others.paths.clone() };
    let others = &Others { paths, ..others.clone() };
    if binds.is_empty() && others.paths.opened.is_empty() && others.paths.made.is_empty() {
        return Ok(Ok(()));
    }
    // No link is on the way to any of them, so an empty root file system has the same names. What is in
    // the binds counts.
    let clashes = Names::look_up(&layer.with_extension("none"), binds, others)?.clashes();
    Ok(Refusal::unless_none(RefusedBy::Identity, clashes))
}

/// Paths of what CRIU makes, and those that links may lead them by: through links of any layer, seen or
/// hidden.
struct Ways {
    all: BTreeSet<String>,
    /// What is in memory there, and comes from the dump.
    memory: Vec<Link>,
}

impl Ways {
    fn of(others: &Others) -> Self {
        let Paths { made, memory, .. } = &others.paths;
        let link = |(place, target): (&String, &String)| Link {
            place: place.trim_start_matches('/').into(),
            target: target.into(),
            is_hard: false,
        };
        Self {
            all: made.iter().cloned().collect(),
            memory: memory.links.iter().map(link).collect(),
        }
    }

    /// Follows them until they lead nowhere else. Returns the first that leads out of a container, or on
    /// and on.
    fn follow(&mut self, look: &Look<'_>, layer: &Path) -> io::Result<Option<String>> {
        let mut known = 0;
        while known < self.all.len() {
            known = self.all.len();
            let mut led = BTreeSet::new();
            let mut wrong = None;
            let mut take = |link: &Link| {
                wrong = wrong.take().or_else(|| self.led_by(link, &mut led));
            };
            self.memory.iter().for_each(&mut take);
            if let Err(reason) = read_links(layer, &mut take)? {
                return Ok(Some(reason));
            }
            for directory in &look.directories {
                let take = |place: &Path, target: &Path| {
                    let (place, target) = (place.to_owned(), target.to_owned());
                    take(&Link { place, target, is_hard: false });
                    None::<()>
                };
                each_link(directory, |_| Ok(None), take)?;
            }
            if wrong.is_some() {
                return Ok(wrong);
            }
            self.all.extend(led);
            if self.all.len() > WAYS_MAX {
                return Ok(Some(format!(
                    "links lead what CRIU makes by more than {WAYS_MAX} ways"
                )));
            }
        }
        Ok(None)
    }

    /// Adds to `led` where a link leads. Returns why that is nowhere in a container.
    fn led_by(&self, link: &Link, led: &mut BTreeSet<String>) -> Option<String> {
        let (place, target) = (format!("/{}", link.place.display()), link.target.to_string_lossy());
        for way in &self.all {
            let Some(rest) =
                way.strip_prefix(&*place).filter(|rest| rest.is_empty() || rest.starts_with('/'))
            else {
                continue;
            };
            // Another name of a symbolic link is one, too, and of nothing else is anything below it.
            if link.is_hard && rest.is_empty() {
                continue;
            }
            let above = place.rsplit_once('/').map_or("", |(above, _)| above);
            let to = if target.starts_with('/') {
                format!("{target}{rest}")
            } else {
                format!("{above}/{target}{rest}")
            };
            let plain = lexical(&to);
            if link.is_hard || leads_out(&to) || leads_out(&plain) {
                return Some(format!(
                    "its link {place:?} leads {way:?}, which CRIU makes, elsewhere"
                ));
            }
            if led.len() <= WAYS_MAX {
                led.extend([to, plain]);
            }
        }
        None
    }
}

/// Returns a path without `..`, as it is where no link is on the way.
fn lexical(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

/// Returns where something is to be, when something of the node is, and where CRIU goes.
fn places(binds: &[Bind], others: &Others) -> Vec<PathBuf> {
    let below = |place: &str| PathBuf::from(place.trim_start_matches('/'));
    let opened = others.paths.opened.iter().map(|path| below(path));
    if binds.is_empty() {
        return opened.collect();
    }
    let mut places: Vec<&str> = binds.iter().map(|bind| &*bind.place).chain(DEVICES).collect();
    places.extend(others.devices.iter().chain(&others.external).map(String::as_str));
    // What is only made may be anywhere but in what is for reading only.
    if binds.iter().any(|bind| bind.read_only) {
        places.extend(others.mounts.iter().map(String::as_str));
    }
    places.into_iter().map(below).chain(opened).collect()
}

impl Look<'_> {
    /// Looks through a layer's file, and at what its links make of each other.
    fn in_layer(&mut self, layer: &Path) -> io::Result<Option<String>> {
        let (mut found, mut links) = (None, HashSet::new());
        let read = read_links(layer, |link| {
            if !self.places.is_empty() && links.len() <= LINKS_MAX {
                links.insert(self.hasher.hash_one(&*link.place));
            }
            // Another name of a file ends no name itself.
            let target = Some(&*link.target).filter(|_| !link.is_hard);
            found = found.take().or_else(|| self.wrong(&link.place, target));
        })?;
        if let Err(reason) = read {
            return Ok(Some(reason));
        }
        if links.len() > LINKS_MAX {
            return Ok(Some(format!("its container has made more than {LINKS_MAX} links")));
        }
        if found.is_some() || links.is_empty() {
            return Ok(found);
        }
        self.links = links;
        let read = read_links(layer, |link| found = found.take().or_else(|| self.passes(link)))?;
        Ok(read.err().or(found))
    }

    /// Looks through a directory of a layer.
    fn in_directory(&self, top: &Path) -> io::Result<Option<String>> {
        let within = |directory: &Path| {
            if !self.places.is_empty() && is_redirected(directory)? {
                let place = directory.strip_prefix(top).unwrap_or(directory);
                return Ok(Some(format!("its {:?} is another directory of it", place.display())));
            }
            Ok(None)
        };
        each_link(top, within, |place, target| self.wrong(place, Some(target)))
    }

    /// Returns what is wrong with a link.
    fn wrong(&self, place: &Path, target: Option<&Path>) -> Option<String> {
        if target.is_some_and(|target| target.to_string_lossy().contains(NAME_END)) {
            return Some(format!(
                "its link {:?} leads to a name with {NAME_END:?}, of which CRIU takes a part for what \
                 is mounted",
                place.display()
            ));
        }
        let led = self.places.iter().find(|led| led.starts_with(place))?;
        Some(format!(
            "its link {:?} is on the way to \"/{}\": only a place without links is the same for who \
             restores it",
            place.display(),
            led.display()
        ))
    }

    /// Returns why a link of the layer would be elsewhere than it says.
    fn passes(&self, link: &Link) -> Option<String> {
        let is_link = |way: &&Path| {
            self.links.contains(&self.hasher.hash_one(*way))
                || self.directories.iter().any(|directory| directory.join(way).is_symlink())
        };
        let above = link.place.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
        let way = above.into_iter().find(is_link)?;
        let (place, way) = (link.place.display(), way.display());
        Some(format!("its link {place:?} is made by way of another link, {way:?}"))
    }
}

/// Looks at each directory of a layer's, and at the links there, by the paths that they have in it, until
/// one of the two returns something.
fn each_link<T>(
    top: &Path,
    mut within: impl FnMut(&Path) -> io::Result<Option<T>>,
    mut link: impl FnMut(&Path, &Path) -> Option<T>,
) -> io::Result<Option<T>> {
    let mut left = vec![top.to_owned()];
    while let Some(directory) = left.pop() {
        let mut found = within(&directory)?;
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                left.push(entry.path());
            } else if kind.is_symlink() {
                let path = entry.path();
                let place = path.strip_prefix(top).unwrap_or(&path);
                let target = fs::read_link(&path)?;
                found = found.or_else(|| link(place, &target));
            }
            if found.is_some() {
                return Ok(found);
            }
        }
    }
    Ok(None)
}

/// Reads the links of a layer's file. An inner error says why others could read it in another way.
fn read_links(layer: &Path, each: impl FnMut(&Link)) -> io::Result<Result<(), String>> {
    let tar = MultiGzDecoder::new(BufReader::new(fs::File::open(layer)?));
    match layer::read_links(tar, each) {
        Ok(()) => Ok(Ok(())),
        Err(LayerError::Unknown(what)) => Ok(Err(format!(
            "the layer of what its container had written is not as the agent writes it, and could be \
             read in two ways: it has {what}"
        ))),
        Err(LayerError::Read(error)) => Err(error),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Whether overlayfs takes a directory for another one.
fn is_redirected(directory: &Path) -> io::Result<bool> {
    match rustix::fs::lgetxattr(directory, REDIRECT, &mut [0_u8; 0]) {
        Ok(_) => Ok(true),
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::symlink;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;
    use crate::gate::Memory;
    use crate::restore::spec;

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
                let mut header = tar::Header::new_ustar();
                header.set_entry_type(*kind);
                header.set_size(0);
                header.set_mode(0o777);
                header.set_uid(0);
                header.set_gid(0);
                header.set_mtime(0);
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
            let others = Others {
                devices: vec!["/dev/own".to_owned()],
                mounts: spec::mounted_always(),
                ..Others::default()
            };
            let looked = lead_nowhere(&rootfs, self.layer.path(), &binds, &others).unwrap();
            looked.err().map_or_else(String::new, |refusal| refusal.reasons.join("; "))
        }
    }

    #[test]
    fn what_is_made_is_followed_through_all_layers() {
        let made = |case: &Case, made: &[&str], memory: &[(&str, &str)]| {
            let options = vec![format!("lowerdir={}", case.lower.path().display())];
            let rootfs = [Mount { options, ..Mount::default() }];
            let owned = |(place, to): &(&str, &str)| ((*place).to_owned(), (*to).to_owned());
            let memory = Memory { links: memory.iter().map(owned).collect(), ..Memory::default() };
            let made = made.iter().map(ToString::to_string).collect();
            let others =
                Others { paths: Paths { made, memory, ..Paths::default() }, ..Others::default() };
            let looked = lead_nowhere(&rootfs, case.layer.path(), &[], &others).unwrap();
            looked.err().map_or_else(String::new, |refusal| refusal.reasons.join("; "))
        };
        let out = "/proc/self/fd/126/../..";
        let case = Case::new(
            &[("var/run", "../run"), ("run/deep/led", out), ("all/processes", "/proc")],
            &[
                (SYMLINK, "run/x", "deep"),
                (SYMLINK, "a", "b/../b"),
                (SYMLINK, "b", "a/c"),
                (SYMLINK, "through", "/all/processes/self/root/etc"),
                (HARD, "another", "a"),
            ],
        );
        for path in ["/var/run/x.sock", "/run/deep/x.sock", "/other/led/x.sock", "/another"] {
            assert_eq!(made(&case, &[path], &[]), "", "{path}");
        }
        for path in
            ["/run/deep/led/x.sock", "/var/run/x/led/x.sock", "/through/x.sock", "/another/x.sock"]
        {
            let told = made(&case, &["/fine.sock", path], &[]);
            assert!(told.contains("which CRIU makes, elsewhere"), "{path}: {told}");
        }
        // In memory, to a layer's and back.
        let memory = [("/own/to", "/var/run/x/led")];
        assert!(made(&case, &["/own/to/x.sock"], &memory).contains("elsewhere"));
        assert_eq!(made(&case, &["/own/x.sock"], &memory), "");
        let told = made(&case, &["/a/x.sock"], &[]);
        assert!(told.contains("ways"), "{told}");
    }

    const SYMLINK: tar::EntryType = tar::EntryType::Symlink;
    const HARD: tar::EntryType = tar::EntryType::Link;

    #[test]
    fn a_link_that_ends_a_name_is_found_in_any_layer() {
        assert_eq!(Case::new(&[("a/plain", "/x")], &[(SYMLINK, "b", "/y")]).told(&[]), "");
        let told = Case::new(&[("a/b/zero", "/x]:/y")], &[]).told(&[]);
        assert!(told.contains("its link \"a/b/zero\" leads"), "{told}");
        let told = Case::new(&[], &[(SYMLINK, "./d", "/x]:/y")]).told(&[]);
        assert!(told.contains("its link \"d\" leads"), "{told}");
    }

    #[test]
    fn no_link_is_on_the_way_to_a_place() {
        let usual = Case::new(&[("var/run", "/run"), ("data/x", "y")], &[(SYMLINK, "log", "/l")]);
        assert_eq!(usual.told(&["/data", "/run/token", "/logs"]), "");
        for (lower, layer, place) in [
            (&[("var/run", "/run")][..], &[][..], "/var/run/token"),
            (&[], &[(SYMLINK, "data", "/ro")], "/data"),
            (&[], &[(SYMLINK, "././data", "/ro")], "/data/x/y"),
            // A device may have no volume's name.
            (&[("dev/zero", "/data")], &[], "/data"),
            (&[], &[(SYMLINK, "dev/own", "/data")], "/data"),
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
    fn what_could_be_read_in_two_ways_is_refused() {
        for place in ["/data", "x/../data"] {
            let told = Case::new(&[], &[(SYMLINK, place, "/ro")]).told(&[]);
            assert!(told.contains("read in two ways: it has a path that leads"), "{told}");
        }
        let told = Case::new(&[], &[(tar::EntryType::GNULongName, "x", "y")]).told(&[]);
        assert!(told.contains("read in two ways: it has a header of another form"), "{told}");
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
