//! The file systems in memory that the agent mounts.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use fs_err as fs;
use rustix::mount::MountFlags;

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
    let mounts = fs::read("/proc/self/mountinfo")?;
    Ok(last_at(&mounts, directory) == Some(("tmpfs".to_owned(), SOURCE.to_owned())))
}

/// Returns how many bytes it may hold.
pub(super) fn total(directory: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(found.f_blocks.saturating_mul(found.f_frsize))
}

/// Returns how many bytes it holds.
pub(super) fn used(directory: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(found.f_blocks.saturating_sub(found.f_bfree).saturating_mul(found.f_frsize))
}

/// Finds the last mount at a place, which hides those before it: its type and source
/// (`proc_pid_mountinfo(5)`).
fn last_at(mountinfo: &[u8], place: &Path) -> Option<(String, String)> {
    let text = |word: Option<&[u8]>| Some(String::from_utf8_lossy(word?).into_owned());
    let lines = mountinfo.split(|byte| *byte == b'\n');
    let mut found = lines.filter_map(|line| {
        let mut words = line.split(|byte| *byte == b' ');
        let point = words.nth(4)?;
        if unescape(point) != place.as_os_str().as_bytes() {
            return None;
        }
        let mut words = words.skip_while(|word| *word != b"-").skip(1);
        Some((text(words.next())?, text(words.next())?))
    });
    found.next_back()
}

/// Reads `\040` and the like.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = word;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| *first == b'\\');
        let byte = octal.and_then(|octal| u8::from_str_radix(str::from_utf8(octal).ok()?, 8).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { after.get(3..).unwrap_or_default() } else { after };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_on_top_says_whose_it_is() {
        let text = b"22 1 0:20 / /run rw,nosuid shared:2 - tmpfs tmpfs rw\n\
            40 22 0:41 / /run/kybernate/ram rw - tmpfs kybernate rw,size=1k\n\
            41 22 0:42 / /run/a\\040b\\134 rw master:1 - tmpfs kybernate rw\n\
            42 40 0:43 / /run/kybernate/ram rw - ext4 /dev/sda rw\n";
        let at = |place: &str| last_at(text, Path::new(place));
        let pair = |kind: &str, source: &str| Some((kind.to_owned(), source.to_owned()));
        assert_eq!(at("/run"), pair("tmpfs", "tmpfs"));
        assert_eq!(at("/run/kybernate/ram"), pair("ext4", "/dev/sda"));
        assert_eq!(at("/run/a b\\"), pair("tmpfs", "kybernate"));
        assert_eq!(at("/run/kybernate"), None);
        assert_eq!(last_at(b"", Path::new("/")), None);
        assert!(!is_ours(Path::new("/proc")).unwrap());
    }
}
