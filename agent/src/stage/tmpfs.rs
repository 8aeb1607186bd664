//! The file systems in memory that the agent mounts.

use std::ffi::CString;
use std::io;
use std::path::Path;

use rustix::mount::MountFlags;

use crate::mounts::{self, Mount};

/// How they are known: what was mounted.
const SOURCE: &str = "kybernate";

const FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Mounts one of huge pages where the kernel has them, and of small ones else.
pub(super) fn mount(directory: &Path, size: &str) -> io::Result<()> {
    let mount = |options: String| {
        let options = CString::new(options)?;
        Ok(rustix::mount::mount(SOURCE, directory, "tmpfs", FLAGS, &*options)?)
    };
    let small = format!("mode=0700,size={size}");
    // A kernel without huge pages refuses the first.
    mount(format!("{small},huge=within_size")).or_else(|_: io::Error| mount(small))
}

/// Gives one another size. An error when more lies in it.
pub(super) fn resize(directory: &Path, size: &str) -> io::Result<()> {
    let options = CString::new(format!("size={size}"))?;
    Ok(rustix::mount::mount_remount(directory, FLAGS, &*options)?)
}

/// Whether what is mounted there is the agent's.
pub(super) fn is_ours(directory: &Path) -> io::Result<bool> {
    Ok(is_on_top(mounts::own()?, directory))
}

/// Whether the last mount at a place, which hides those before it, is the agent's.
fn is_on_top(mounts: impl IntoIterator<Item = Mount>, place: &Path) -> bool {
    let last = mounts.into_iter().filter(|mount| mount.point == place).last();
    last.is_some_and(|mount| mount.kind == "tmpfs" && mount.source == SOURCE)
}

/// Returns how many bytes it may hold.
pub(super) fn total(directory: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(found.f_blocks.saturating_mul(found.f_frsize))
}

/// Returns how many bytes it holds.
pub(crate) fn used(directory: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(found.f_blocks.saturating_sub(found.f_bfree).saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_on_top_says_whose_it_is() {
        let text = b"22 1 0:20 / /run rw,nosuid shared:2 - tmpfs tmpfs rw\n\
            40 22 0:41 / /run/kybernate/ram rw - tmpfs kybernate rw,size=1k\n\
            41 22 0:42 / /run/a\\040b rw master:1 - ext4 /dev/sda rw\n\
            42 41 0:43 / /run/a\\040b rw - tmpfs kybernate rw\n";
        let hidden = b"43 40 0:44 / /run/kybernate/ram rw - ext4 /dev/sda rw\n";
        let ours = |text: &[u8], place: &str| is_on_top(mounts::read(text), Path::new(place));
        assert!(ours(text, "/run/kybernate/ram") && ours(text, "/run/a b"));
        assert!(!ours(&[&text[..], hidden].concat(), "/run/kybernate/ram"));
        assert!(!ours(text, "/run") && !ours(text, "/run/kybernate"));
        assert!(!is_ours(Path::new("/proc")).unwrap());
    }
}
