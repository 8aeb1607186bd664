//! About how much memory a dump of processes holds.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use fs_err as fs;

use super::mapped::{DELETED, place_of};
use crate::links::unpadded;
use crate::process::{kibibytes, read};

/// How memory without a name is called where it is open (`memfd_create(2)`).
const MEMFD: &[u8] = b"/memfd:";

/// How the kernel counts what a file has (stat(2), `st_blocks`).
const BLOCK_BYTES: u64 = 512;

/// How such memory is called that has a name of its own (`PR_SET_VMA_ANON_NAME`).
const NAMED: &[u8] = b"[anon_shmem:";

/// How segments of System V are called. Their inodes are numbers of their own, also those of other files
/// on the same file system.
const SEGMENT: &[u8] = b"/SYSV";

/// Files without a name: whether each is a segment, by device and inode, and the bytes that it has.
type Shared = HashMap<(bool, u64, u64), u64>;

/// Returns about how many bytes a dump of these processes has: what is theirs alone, swapped out or
/// not, and once each file without a name that they have mapped, or open as memory. Other mapped files
/// are not dumped, or counted by whoever looks at their file systems, which also count those in a
/// container's own tmpfs: these are there twice. A segment of System V that nobody has attached, and a
/// deleted file that is open and not mapped, is not seen.
pub(super) fn memory_bytes(pids: &[u32]) -> u64 {
    let (mut shared, mut seen) = (Shared::new(), HashSet::new());
    let mut own = 0_u64;
    for pid in pids {
        // One that ended meanwhile has none.
        let Ok(Some(process)) = place_of(*pid) else { continue };
        own = own.saturating_add(own_bytes(&process));
        if let Err(error) = note_shared(&process, &mut shared, &mut seen) {
            tracing::debug!(%error, pid, "what a process shares is not known");
        }
    }
    shared.into_values().fold(own, u64::saturating_add)
}

/// Returns how much a process has that is its own.
fn own_bytes(process: &Path) -> u64 {
    let status = read(process.join("status")).unwrap_or_default();
    let sum = |text: &str, keys: &[&str]| {
        keys.iter().filter_map(|key| kibibytes(text, key)).fold(0, u64::saturating_add)
    };
    let own = sum(&status, &["RssAnon:", "VmSwap:"]);
    if sum(&status, &["HugetlbPages:"]) == 0 {
        return own;
    }
    // Huge pages are none of these.
    own.saturating_add(huge_bytes(&read(process.join("smaps")).unwrap_or_default()))
}

/// Returns how much there is in huge pages in mappings that are not shared (`proc_pid_smaps(5)`), whoever
/// else has the same pages after a fork(2).
fn huge_bytes(smaps: &str) -> u64 {
    let (mut bytes, mut is_private) = (0_u64, false);
    for line in smaps.lines() {
        let mut fields = line.split(' ');
        if fields.next().is_some_and(|range| unpadded(range.as_bytes()).is_some()) {
            is_private = fields.next().is_some_and(|modes| modes.ends_with('p'));
        } else if is_private {
            let huge = ["Private_Hugetlb:", "Shared_Hugetlb:"];
            let here = huge.iter().filter_map(|key| kibibytes(line, key));
            bytes = here.fold(bytes, u64::saturating_add);
        }
    }
    bytes
}

/// Notes what a process shares: what is mapped was `seen` when somebody else has it mapped, too.
fn note_shared(process: &Path, shared: &mut Shared, seen: &mut HashSet<Vec<u8>>) -> io::Result<()> {
    for (range, file) in nameless(&fs::read(process.join("maps"))?) {
        let is_segment = name(file).starts_with(SEGMENT);
        if !seen.contains(file) && note(&process.join("map_files").join(range), is_segment, shared)
        {
            seen.insert(file.to_vec());
        }
    }
    for opened in fs::read_dir(process.join("fd"))?.flatten() {
        let path = opened.path();
        if fs::read_link(&path).is_ok_and(|to| to.as_os_str().as_bytes().starts_with(MEMFD)) {
            note(&path, false, shared);
        }
    }
    Ok(())
}

/// Returns the ranges of mappings whose files have no name (`proc_pid_maps(5)`), and what tells these
/// apart: memory that is shared has none, and CRIU takes other such files along as well.
fn nameless(maps: &[u8]) -> impl Iterator<Item = (String, &[u8])> {
    let lines = maps.split(|byte| *byte == b'\n');
    lines.filter_map(|line| {
        let mut fields = line.splitn(4, |byte| *byte == b' ');
        let range = unpadded(fields.next()?)?;
        let file = fields.nth(2)?;
        (file.ends_with(DELETED) || name(file).starts_with(NAMED)).then_some((range, file))
    })
}

/// Returns the name behind device and inode.
fn name(file: &[u8]) -> &[u8] {
    file.splitn(3, |byte| *byte == b' ').nth(2).unwrap_or_default().trim_ascii_start()
}

/// Notes what a file has, if it has no other name. Returns whether it could be looked at.
fn note(link: &Path, is_segment: bool, shared: &mut Shared) -> bool {
    let Ok(found) = fs::metadata(link) else { return false };
    if found.nlink() == 0 {
        let bytes = found.blocks().saturating_mul(BLOCK_BYTES);
        shared.insert((is_segment, found.dev(), found.ino()), bytes);
    }
    true
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Child, Command, Stdio};

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    const BYTES: u64 = 8 << 20;

    /// A process that has this open as its input.
    fn with(file: &std::fs::File) -> Child {
        let input = Stdio::from(file.try_clone().unwrap());
        Command::new("tail").args(["-f", "/dev/null"]).stdin(input).spawn().unwrap()
    }

    #[test]
    fn what_is_shared_is_counted_once_and_what_is_only_open_too() {
        let mut file = std::fs::File::from(memfd_create("shared", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(&vec![1; usize::try_from(BYTES).unwrap()]).unwrap();
        // A hole takes no memory.
        file.set_len(BYTES * 100).unwrap();
        let mut children = [with(&file), with(&file)];
        let pids = children.each_ref().map(Child::id);
        let (one, both) = (memory_bytes(&pids[..1]), memory_bytes(&pids));
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!((BYTES..BYTES * 2).contains(&one), "{one}");
        assert!((BYTES..BYTES * 2).contains(&both) && both > one, "{both}");
        assert_eq!(memory_bytes(&pids), 0);
    }

    #[test]
    fn files_without_a_name_are_looked_for() {
        let maps = b"00400000-00401000 r-xp 00000000 00:1f 42 /job\n\
            7fb41a26a000-7fb41a26f000 rw-s 00000000 00:01 7            /dev/zero (deleted)\n\
            7fb41a3e7000-7fb41a3ef000 rw-p 00000000 00:00 0\n\
            7fb41a3f0000-7fb41a3f1000 rw-s 00000000 00:01 8            [anon_shmem:cache]\n\
            7fb41a3f2000-7fb41a3f3000 rw-p 00000000 00:00 0            [anon:cache]\n\
            07fb0000-07fb1000 rw-s 00000000 00:01 7            /SYSV00000000 (deleted)\n";
        let found: Vec<(String, &[u8])> = nameless(maps).collect();
        let ranges: Vec<&str> = found.iter().map(|(range, _)| &**range).collect();
        let expected =
            ["7fb41a26a000-7fb41a26f000", "7fb41a3f0000-7fb41a3f1000", "7fb0000-7fb1000"];
        assert_eq!(ranges, expected);
        let names: Vec<&[u8]> = found.iter().map(|(_, file)| name(file)).collect();
        assert!(names[0] == b"/dev/zero (deleted)" && names[2].starts_with(SEGMENT));
    }

    #[test]
    fn huge_pages_of_private_mappings_count() {
        let smaps = "7f0000000000-7f0000400000 rw-p 00000000 00:10 5   /anon_hugepage (deleted)\n\
            Size:               4096 kB\n\
            Shared_Hugetlb:     2048 kB\n\
            Private_Hugetlb:    2048 kB\n\
            7f0000400000-7f0000800000 rw-s 00000000 00:10 6   /SYSV00000000 (deleted)\n\
            Private_Hugetlb:    4096 kB\n\
            7f0000800000-7f0000801000 rw-p 00000000 00:00 0 \n\
            Private_Hugetlb:       0 kB\n";
        assert_eq!(huge_bytes(smaps), 4 << 20);
    }
}
