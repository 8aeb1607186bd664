//! Links in what a container had written.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::io::{self, BufReader};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use fs_err as fs;

/// A link in a layer, symbolic or hard. Where readers of a tar differ, it has each of what they read.
#[derive(Clone, Debug)]
pub struct LayerLink {
    /// Where it is, as it is written there.
    pub places: Vec<PathBuf>,
    /// Where it leads.
    pub targets: Vec<PathBuf>,
    /// Whether it is another name of a file; that may be a symbolic link.
    pub is_hard: bool,
}

/// Shows `wanted` each link in a layer's file (gzip), and returns what it makes of the first one of
/// which it makes something. Blocks.
pub fn find_link<T>(
    layer: &Path,
    mut wanted: impl FnMut(&LayerLink) -> Option<T>,
) -> io::Result<Option<T>> {
    let file = BufReader::new(fs::File::open(layer)?);
    let mut archive = tar::Archive::new(MultiGzDecoder::new(file));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        if !kind.is_symlink() && !kind.is_hard_link() {
            continue;
        }
        let owned = |bytes: Cow<'_, [u8]>| PathBuf::from(OsStr::from_bytes(&bytes));
        let mut places = vec![owned(entry.path_bytes()), owned(entry.header().path_bytes())];
        let targets = [entry.link_name_bytes(), entry.header().link_name_bytes()];
        let mut targets: Vec<_> = targets.into_iter().flatten().map(owned).collect();
        // Others take another one where there are two, and the header's where it is empty.
        for extension in entry.pax_extensions()?.into_iter().flatten() {
            let extension = extension?;
            match extension.key_bytes() {
                b"linkpath" => targets.push(owned(extension.value_bytes().into())),
                b"path" => places.push(owned(extension.value_bytes().into())),
                _ => {}
            }
        }
        let found = wanted(&LayerLink { places, targets, is_hard: kind.is_hard_link() });
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    #[test]
    fn a_link_is_found_by_its_target() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("layer");
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        for (kind, name, target) in [
            (tar::EntryType::Symlink, "a", "/b"),
            (tar::EntryType::Link, "c", "x]"),
            (tar::EntryType::Symlink, "d/e", "/x]:/y"),
        ] {
            header.set_entry_type(kind);
            header.set_size(0);
            tar.append_link(&mut header, name, target).unwrap();
        }
        let pax = |value: &'static str| ("linkpath", value.as_bytes());
        tar.append_pax_extensions([pax("plain"), pax("/odd")]).unwrap();
        tar.append_link(&mut header, "f", "h").unwrap();
        tar.append_pax_extensions([("path", &b"other/g"[..])]).unwrap();
        tar.append_link(&mut header, "g", "h").unwrap();
        let mut gzip = GzEncoder::new(fs::File::create(&path).unwrap(), Compression::fast());
        gzip.write_all(&tar.into_inner().unwrap()).unwrap();
        gzip.finish().unwrap();
        let found = |wanted: &str| {
            let is_it = |target: &PathBuf| target.to_string_lossy().contains(wanted);
            let place = |link: &LayerLink| (link.is_hard, link.places[0].clone());
            find_link(&path, |link| link.targets.iter().any(is_it).then(|| place(link))).unwrap()
        };
        assert_eq!(found("x]"), Some((true, "c".into())));
        assert_eq!(found("x]:"), Some((false, "d/e".into())));
        assert_eq!(found("/b"), Some((false, "a".into())));
        assert_eq!(found("/odd"), Some((false, "f".into())));
        assert_eq!(found("none"), None);
        let at = |place: &str| {
            let place = Path::new(place);
            let is_it = |link: &LayerLink| link.places.iter().any(|one| one == place);
            find_link(&path, |link| is_it(link).then_some(())).unwrap()
        };
        // Whichever of its names a reader takes.
        for place in ["f", "g", "other/g"] {
            assert_eq!(at(place), Some(()), "{place}");
        }
        find_link(&directory.path().join("none"), |_| Some(())).unwrap_err();
    }
}
