//! The root directory of a new container.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;

use fs_err as fs;

use crate::runtime::Mount;

/// Gives a root file system that is not mounted yet the permissions of the one that was dumped:
/// CRIU opens no directory that has others. containerd takes them from no layer, so the root of
/// every image has 0755 here, and another one under Podman (0555), CRI-O, and after a `chmod`.
pub(super) fn permit(rootfs: &[Mount], mode: u32) -> io::Result<()> {
    for mount in rootfs {
        let bound = Some(&*mount.source).filter(|_| mount.kind == "bind");
        if let Some(directory) = mount.option("upperdir").or(bound) {
            fs::set_permissions(directory, Permissions::from_mode(mode))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_to_gets_the_permissions() {
        let [upper, lower, bound] = [0; 3].map(|_| tempfile::tempdir().unwrap());
        let text = |directory: &tempfile::TempDir| directory.path().display().to_string();
        let overlay = Mount {
            kind: "overlay".to_owned(),
            source: "overlay".to_owned(),
            target: String::new(),
            options: vec![
                format!("upperdir={}", text(&upper)),
                format!("lowerdir={}", text(&lower)),
            ],
        };
        let bind = Mount {
            kind: "bind".to_owned(),
            source: text(&bound),
            options: Vec::new(),
            ..overlay.clone()
        };
        fs::set_permissions(lower.path(), Permissions::from_mode(0o750)).unwrap();
        permit(&[overlay, bind], 0o1555).unwrap();
        let modes = [&upper, &lower, &bound].map(|directory| {
            let found = fs::metadata(directory.path()).unwrap();
            found.permissions().mode() & 0o7777
        });
        assert_eq!(modes, [0o1555, 0o750, 0o1555]);
    }
}
