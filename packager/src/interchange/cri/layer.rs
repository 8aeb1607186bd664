//! What a container had written, as archives have it and as layers have it. Everything here blocks.
//!
//! A layer says with whiteouts what was deleted, an archive of CRI-O or Podman with a list beside
//! the tar.

use std::io::{self, Read, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use tar::{Builder, EntryType, Header};

use crate::interchange::dump;
use crate::interchange::foreign::ForeignError;

/// How the name of a whiteout begins (image specification, "Whiteouts").
const WHITEOUT: &str = ".wh.";
/// The whiteout of everything a directory has below.
const OPAQUE: &str = ".wh..wh..opq";

/// Adds whiteouts, and empty files as mount points, to a tar, which is made when it does not exist.
pub(super) fn complete(
    path: &Path,
    deleted: &[String],
    mount_points: &[&str],
) -> Result<(), ForeignError> {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let mut file = options.open(path)?;
    let end = if file.metadata()?.len() > 0 { dump::check_layer(path)? } else { 0 };
    file.set_len(end)?;
    file.seek(SeekFrom::Start(end))?;
    let mut builder = Builder::new(file);
    let mount_points =
        mount_points.iter().map(|path| Ok(PathBuf::from(path.trim_start_matches('/'))));
    for name in deleted.iter().map(|path| whiteout(path)).chain(mount_points) {
        let name = name?;
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o600);
        header.set_size(0);
        header.set_mtime(0);
        builder.append_data(&mut header, name, io::empty())?;
    }
    builder.into_inner()?.flush()?;
    Ok(())
}

/// Returns the whiteout for a path of the container.
fn whiteout(path: &str) -> Result<PathBuf, ForeignError> {
    let hostile = path.chars().any(char::is_control)
        || path.split('/').any(|part| part == ".." || part.starts_with(WHITEOUT));
    let path: PathBuf = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(parent), Some(name)) if !hostile => Ok(parent.join(format!("{WHITEOUT}{name}"))),
        _ => Err(ForeignError::Content(format!("{:?} was deleted", path.display()))),
    }
}

/// Copies a layer without its whiteouts; returns what they delete. `None` when a directory is
/// opaque: a list cannot say that what lies below is gone and what is in the tar is not.
pub(super) fn without_whiteouts(
    layer: impl Read,
    out: &mut impl io::Write,
) -> io::Result<Option<Vec<String>>> {
    let mut deleted = Vec::new();
    let mut archive = tar::Archive::new(layer);
    let mut builder = Builder::new(out);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name == OPAQUE {
            return Ok(None);
        }
        if let Some(gone) = name.strip_prefix(WHITEOUT) {
            let gone = path.with_file_name(gone);
            deleted.push(format!("/{}", gone.display()));
            continue;
        }
        if let Some(records) = entry.pax_extensions()? {
            let mut kept = Vec::new();
            for record in records {
                let record = record?;
                if record.key_bytes().starts_with(b"SCHILY.xattr.") {
                    let key = record.key().map_err(io::Error::other)?;
                    kept.push((key.to_owned(), record.value_bytes().to_vec()));
                }
            }
            builder.append_pax_extensions(
                kept.iter().map(|(key, value)| (key.as_str(), value.as_slice())),
            )?;
        }
        let mut header = entry.header().clone();
        match (header.entry_type(), entry.link_name()?) {
            (EntryType::Link | EntryType::Symlink, Some(target)) => {
                let target = target.into_owned();
                builder.append_link(&mut header, &path, target)?;
            }
            _ => builder.append_data(&mut header, &path, &mut entry)?,
        }
    }
    builder.finish()?;
    Ok(Some(deleted))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(tar: &[u8]) -> Vec<String> {
        let mut archive = tar::Archive::new(tar);
        let entries = archive.entries().unwrap();
        entries.map(|entry| entry.unwrap().path().unwrap().display().to_string()).collect()
    }

    fn tar(files: &[&str]) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        for name in files {
            let mut header = Header::new_gnu();
            header.set_size(3);
            builder.append_data(&mut header, name, &b"abc"[..]).unwrap();
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn what_was_deleted_goes_there_and_back() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("layer");
        fs::write(&path, tar(&["etc/new"])).unwrap();
        let gone = ["/etc/old".to_owned(), "root".to_owned()];
        complete(&path, &gone, &["/run/.containerenv"]).unwrap();
        let layer = fs::read(&path).unwrap();
        let mark = "run/.containerenv";
        assert_eq!(names(&layer), ["etc/new", "etc/.wh.old", ".wh.root", mark]);
        let mut plain = Vec::new();
        let deleted = without_whiteouts(&*layer, &mut plain).unwrap().unwrap();
        assert_eq!(deleted, ["/etc/old", "/root"]);
        assert_eq!(names(&plain), ["etc/new", mark]);
        let opaque = tar(&["etc/.wh..wh..opq"]);
        assert_eq!(without_whiteouts(&*opaque, &mut Vec::new()).unwrap(), None);
    }

    #[test]
    fn what_leads_elsewhere_is_not_deleted() {
        let top = tempfile::tempdir().unwrap();
        for path in ["../x", "/a/../../x", "/", "", "a/.wh.b", "a\n"] {
            complete(&top.path().join("layer"), &[path.to_owned()], &[]).unwrap_err();
        }
    }
}
