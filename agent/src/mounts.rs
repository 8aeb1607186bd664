//! The mounts that a process sees, as the kernel lists them (`proc_pid_mountinfo(5)`).

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use fs_err as fs;

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) id: u64,
    /// The mount it stands on.
    pub(crate) parent: u64,
    /// As the kernel encodes it: 12 bits of major above 20 of minor.
    pub(crate) device: u64,
    /// Which directory of the file system is mounted.
    pub(crate) root: PathBuf,
    pub(crate) point: PathBuf,
    /// Whether this mount of the file system is for reading only.
    pub(crate) read_only: bool,
    /// The type of the file system.
    pub(crate) kind: String,
    pub(crate) source: String,
    /// Options of the file system, not of the mount.
    pub(crate) options: String,
}

/// Returns those of this process, in the order they were mounted in.
pub(crate) fn own() -> io::Result<Vec<Mount>> {
    Ok(read(&fs::read("/proc/self/mountinfo")?).collect())
}

/// Reads a list; a line that is none of the kernel's is passed over.
pub(crate) fn read(mountinfo: &[u8]) -> impl Iterator<Item = Mount> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(read_line)
}

fn read_line(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|byte| *byte == b' ');
    let mut word = || words.next().map(unescape);
    let number = |word: Option<Vec<u8>>| str::from_utf8(&word?).ok()?.parse().ok();
    let (id, parent) = (number(word())?, number(word())?);
    let device = word()?;
    let (major, minor) = str::from_utf8(&device).ok()?.split_once(':')?;
    let device = major.parse::<u64>().ok()? << 20 | minor.parse::<u64>().ok()?;
    let path = |word: Vec<u8>| PathBuf::from(OsString::from_vec(word));
    let (root, point) = (path(word()?), path(word()?));
    let read_only = word()?.split(|byte| *byte == b',').any(|option| option == b"ro");
    // As many fields as the kernel likes.
    while word()? != b"-" {}
    let mut text = || Some(String::from_utf8_lossy(&word()?).into_owned());
    let (kind, source, options) = (text()?, text()?, text()?);
    Some(Mount { id, parent, device, root, point, read_only, kind, source, options })
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
    fn every_field_is_read() {
        let line =
            b"36 35 98:2 /a\\134b /mnt/my\\040disk\\011 rw,noatime master:1 propagate_from:2 \
            - ext4 /dev/root rw,errors=continue\n";
        let mount = Mount {
            id: 36,
            parent: 35,
            device: 98 << 20 | 2,
            root: "/a\\b".into(),
            point: "/mnt/my disk\t".into(),
            read_only: false,
            kind: "ext4".to_owned(),
            source: "/dev/root".to_owned(),
            options: "rw,errors=continue".to_owned(),
        };
        assert_eq!(read(line).collect::<Vec<_>>(), [mount]);
        for (options, read_only) in [("nosuid,ro", true), ("ro", true), ("rw,root,relatime", false)]
        {
            let line = format!("1 0 0:1 / /a {options} - tmpfs  ro");
            let found: Vec<bool> = read(line.as_bytes()).map(|mount| mount.read_only).collect();
            assert_eq!(found, [read_only], "{options}");
        }
    }

    #[test]
    fn a_mount_may_have_no_source_no_text_for_a_name_and_no_octal_after_a_backslash() {
        let read = |line| read(line).map(|mount| (mount.point, mount.source)).next();
        let point = PathBuf::from(OsString::from_vec(b"/\xff\\9\\04".to_vec()));
        assert_eq!(read(b"1 0 0:1 / /\xff\\9\\04 rw - tmpfs  rw"), Some((point, String::new())));
    }

    #[test]
    fn what_the_kernel_does_not_write_is_passed_over() {
        let whole = "2 1 0:20 / /run rw shared:2 - tmpfs tmpfs rw";
        for cut in (0..whole.len()).filter(|cut| whole[*cut..].contains(' ')) {
            assert_eq!(read(&whole.as_bytes()[..cut]).count(), 0, "{:?}", &whole[..cut]);
        }
        assert_eq!(read(format!("x\n\n{whole}\n").as_bytes()).count(), 1);
    }

    #[test]
    fn our_own_begin_at_the_root() {
        assert!(own().unwrap().iter().any(|mount| mount.point == *"/"));
    }
}
