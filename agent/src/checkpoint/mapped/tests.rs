use std::process::{Child, Command, Stdio};

use super::*;

#[test]
fn what_is_mapped_by_several_is_known_by_name() {
    let maps = b"\
55d0-55d1 r-xp 00000000 fe:01 12 /bin/private\n\
7f00-7f01 rw-s 00000000 fe:01 13 /data/base.db\n\
7f01-7f02 r--s 00000000 fe:01 14 /data/read only\n\
007f02-007f03 rw-s 00000000 fe:01 15 /data/gone (deleted)\n\
7f03-7f04 rw-s 00000000 fe:01 16 /data/a\\012b\n\
7f04-7f05 rw-p 00000000 00:00 0 [heap]\n";
    let mut names = HashSet::new();
    assert_eq!(mapped(maps, &mut names).unwrap(), ["7f02-7f03"]);
    for name in ["base.db", "read only", "gone", "gone (deleted)", "a\nb"] {
        assert!(names.contains(OsStr::new(name)), "{name} of {names:?}");
    }
    assert!(!names.contains(OsStr::new("private")) && !names.contains(OsStr::new("[heap]")));
}

#[test]
fn who_writes_in_the_background_is_not_believed() {
    let maps = b"7f00-7f01 rw-s 00000000 00:0e 13 /[aio] (deleted)\n";
    assert_eq!(mapped(maps, &mut HashSet::new()), None);
    assert_eq!(mapped(b"", &mut HashSet::new()), Some(Vec::new()));
}

#[test]
fn a_mount_without_a_name_is_not_believed() {
    let maps = b"7f00-7f01 rw-s 00000000 00:32 13 /\n";
    assert_eq!(mapped(maps, &mut HashSet::new()), None);
}

#[test]
fn a_part_of_the_root_that_is_mounted_elsewhere_is_known() {
    let usual = "\
100 90 0:50 / / rw - overlay overlay rw\n\
101 100 0:51 / /proc rw - proc proc rw\n\
104 100 254:1 /x/hosts /etc/hosts rw - ext4 /dev/vda rw\n";
    assert!(!is_mounted_twice(usual.as_bytes()));
    let bound = format!("{usual}105 100 0:50 /data/base.db /srv/other rw - overlay overlay rw\n");
    assert!(is_mounted_twice(bound.as_bytes()));
    let whole = format!("{usual}105 100 0:50 / /host rw - overlay overlay rw\n");
    assert!(!is_mounted_twice(whole.as_bytes()));
}

/// A Python that maps `file` as shared, does something, and goes on until its input ends.
struct Python(Child);

impl Python {
    /// `None` where there is no Python.
    #[expect(clippy::unwrap_in_result, reason = "a failed preparation is a failed test")]
    fn run(directory: &Path, then: &str) -> Option<Self> {
        let script = format!(
            "import ctypes, mmap, os, sys, threading\n\
             file = os.open('file', os.O_RDWR | os.O_CREAT)\n\
             os.ftruncate(file, 4096)\n\
             pages = mmap.mmap(file, 4096)\n\
             {then}\n\
             print('ready', flush=True)\n\
             sys.stdin.read()\n"
        );
        let child = Command::new("python3")
            .args(["-c", &script])
            .current_dir(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut python = Self(child.inspect_err(|_| println!("skipped: no Python")).ok()?);
        let mut said = io::BufReader::new(python.0.stdout.take().unwrap());
        let mut line = String::new();
        io::BufRead::read_line(&mut said, &mut line).unwrap();
        assert_eq!(line, "ready\n");
        Some(python)
    }

    /// Whether `file` is among the names; `None` when those are not known.
    #[expect(clippy::unwrap_in_result, reason = "a failed preparation is a failed test")]
    fn has_file(&self) -> Option<bool> {
        let mut names = HashSet::new();
        let place = place_of(self.0.id()).unwrap().unwrap();
        of_process(&place, &mut names).unwrap().then(|| names.contains(OsStr::new("file")))
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

#[test]
fn a_file_that_has_another_name_by_now_is_not_known() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(python) = Python::run(scratch.path(), "") else { return };
    assert_eq!(python.has_file(), Some(true));
    fs::hard_link(scratch.path().join("file"), scratch.path().join("other")).unwrap();
    assert_eq!(python.has_file(), Some(true));
    fs::remove_file(scratch.path().join("file")).unwrap();
    assert_eq!(python.has_file(), None);
    fs::remove_file(scratch.path().join("other")).unwrap();
    assert_eq!(python.has_file(), Some(true));
}

#[test]
fn memory_that_has_no_file_is_in_nobodys_way() {
    let scratch = tempfile::tempdir().unwrap();
    let more = "shared = mmap.mmap(-1, 4096)";
    let Some(python) = Python::run(scratch.path(), more) else { return };
    assert_eq!(python.has_file(), Some(true));
}

#[test]
fn a_process_whose_first_thread_has_ended_is_asked_all_the_same() {
    let scratch = tempfile::tempdir().unwrap();
    let number = libc::SYS_exit;
    let more = format!(
        "def rest():\n\
         \x20   stat = f'/proc/{{os.getpid()}}/stat'\n\
         \x20   while ') Z ' not in open(stat).read(): pass\n\
         \x20   print('ready', flush=True)\n\
         \x20   sys.stdin.read()\n\
         \x20   os._exit(0)\n\
         threading.Thread(target=rest).start()\n\
         ctypes.CDLL(None).syscall({number}, 0)"
    );
    let Some(python) = Python::run(scratch.path(), &more) else { return };
    assert_eq!(python.has_file(), Some(true));
}
