//! Links in what a container had written.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::io::{self, BufReader};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use fs_err as fs;

/// Returns the place of a link in a layer's file (gzip) whose target is such, if there is one. Blocks.
pub fn link_to(layer: &Path, is_such: impl Fn(&Path) -> bool) -> io::Result<Option<PathBuf>> {
    let file = BufReader::new(fs::File::open(layer)?);
    let mut archive = tar::Archive::new(MultiGzDecoder::new(file));
    for entry in archive.entries()? {
        let mut entry = entry?;
        if !entry.header().entry_type().is_symlink() {
            continue;
        }
        let targets = [entry.link_name_bytes(), entry.header().link_name_bytes()];
        let mut targets: Vec<_> = targets.into_iter().flatten().map(Cow::into_owned).collect();
        // Others take another one where there are two, and the header's where it is empty.
        for extension in entry.pax_extensions()?.into_iter().flatten() {
            let extension = extension?;
            if extension.key_bytes() == b"linkpath" {
                targets.push(extension.value_bytes().to_owned());
            }
        }
        if targets.iter().any(|target| is_such(Path::new(OsStr::from_bytes(target)))) {
            return Ok(Some(entry.path()?.into_owned()));
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
        let mut gzip = GzEncoder::new(fs::File::create(&path).unwrap(), Compression::fast());
        gzip.write_all(&tar.into_inner().unwrap()).unwrap();
        gzip.finish().unwrap();
        let found = |wanted: &str| {
            link_to(&path, |target| target.to_string_lossy().contains(wanted)).unwrap()
        };
        assert_eq!(found("]"), Some("d/e".into()));
        assert_eq!(found("/b"), Some("a".into()));
        assert_eq!(found("/odd"), Some("f".into()));
        assert_eq!(found("none"), None);
        link_to(&directory.path().join("none"), |_| true).unwrap_err();
    }
}
