//! Links that could give CRIU another name than the one that the runtime means. Where the agent restores,
//! it looks each name up (`crate::rootfs`); who restores what is provided does that alone.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_packager::interchange::containerd::link_to;

use crate::operations::RefusedBy;
use crate::restore::rules::Refusal;
use crate::rootfs::NAME_END;
use crate::runtime::Mount;

/// Makes sure that no link of a root file system ends a name early: of no layer, mounted or not, and not
/// of the one that is in a `layer` file. Blocks.
pub(super) fn end_no_name(rootfs: &[Mount], layer: &Path) -> io::Result<Result<(), Refusal>> {
    let mut found = link_to(layer, ends_a_name)?;
    for directory in rootfs.iter().flat_map(Mount::directories) {
        if found.is_none() {
            found = search(Path::new(directory))?;
        }
    }
    let Some(place) = found else { return Ok(Ok(())) };
    let reason = format!(
        "its link {:?} leads to a name with {NAME_END:?}, of which CRIU takes a part for what is mounted",
        place.display()
    );
    Ok(Err(Refusal::one(RefusedBy::Identity, reason)))
}

fn ends_a_name(target: &Path) -> bool {
    target.to_string_lossy().contains(NAME_END)
}

/// Looks through a directory of a layer.
fn search(top: &Path) -> io::Result<Option<PathBuf>> {
    let mut left = vec![top.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                left.push(entry.path());
            } else if kind.is_symlink() && ends_a_name(&fs::read_link(entry.path())?) {
                let path = entry.path();
                return Ok(Some(path.strip_prefix(top).unwrap_or(&path).to_owned()));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_is_found_in_any_layer() {
        let layers = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [upper, lower] = layers.each_ref().map(tempfile::TempDir::path);
        fs::create_dir_all(lower.join("a/b")).unwrap();
        symlink("/x", lower.join("a/plain")).unwrap();
        let options = [("upperdir", upper), ("lowerdir", lower)];
        let options = options.map(|(name, path)| format!("{name}={}", path.display())).to_vec();
        let rootfs = [Mount { options, ..Mount::default() }];
        // An empty tar.
        let layer = upper.join("layer");
        fs::write(&layer, [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0])
            .unwrap();
        assert_eq!(end_no_name(&rootfs, &layer).unwrap(), Ok(()));
        symlink("/x]:/y", lower.join("a/b/zero")).unwrap();
        let refused = end_no_name(&rootfs, &layer).unwrap().unwrap_err();
        assert!(refused.to_string().contains("its link \"a/b/zero\" leads"), "{refused}");
    }
}
