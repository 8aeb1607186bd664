//! Findings about processes and what they have open.

use super::*;

#[test]
fn a_tracer_is_found() {
    let tree = Tree::new();
    tree.process(11, 10, "TracerPid:\t77\n");
    tree.finds("traced: process 11 \"job\"");
}

#[test]
fn code_of_a_killed_criu_and_secret_memory_are_found() {
    let tree = Tree::new();
    tree.write("maps", "7000-8000 r-xs 0 00:01 5 /memfd:CRIUMFD (deleted)\n");
    tree.finds("criu-code: process 10 \"job\"");
    tree.write("maps", "7000-8000 rw-s 0 00:01 5 /secretmem (deleted)\n");
    tree.finds("secret-memory: process 10 \"job\"");
}

#[test]
fn a_process_without_its_first_thread_is_found() {
    let tree = Tree::new();
    tree.process(11, 10, "State:\tZ (zombie)\nThreads:\t1\n");
    assert_eq!(tree.found(), [""; 0]);
    tree.process(11, 10, "State:\tZ (zombie)\nThreads:\t2\n");
    tree.finds("first-thread: process 11 \"job\"");
}

#[test]
fn a_pipe_that_keeps_packets_apart_is_found() {
    let tree = Tree::new();
    let direct = rustix::fs::OFlags::DIRECT.bits();
    tree.open(10, 5, "pipe:[7]", "pos:\t0\nflags:\t02000001\n");
    assert_eq!(tree.found(), [""; 0]);
    tree.open(10, 5, "pipe:[7]", &format!("pos:\t0\nflags:\t0{direct:o}\n"));
    tree.finds("descriptor: descriptor 5 of process 10 \"job\": pipe:[7]");
}

#[test]
fn a_stopped_process_is_found_where_criu_waits_for_it() {
    let mut tree = Tree::new();
    tree.process(11, 10, "State:\tT (stopped)\n");
    assert_eq!(tree.found(), [""; 0]);
    tree.subject.waits_for_stopped = true;
    tree.finds("stopped-process: process 11 \"job\"");
    tree.process(11, 10, "State:\tt (tracing stop)\n");
    assert_eq!(tree.found(), [""; 0]);
}

#[test]
fn a_process_without_room_for_what_criu_opens_is_found() {
    let tree = Tree::new();
    let limit = |files: &str| tree.write("limits", &format!("Max open files  {files}  9  files\n"));
    // It has 0, 1 and 2.
    for enough in ["7", "unlimited"] {
        limit(enough);
        assert_eq!(tree.found(), [""; 0]);
    }
    limit("6");
    tree.finds("descriptor-limit: process 10 \"job\"");
    limit("7");
    tree.open(10, 7, "pipe:[7]", "mnt_id:\t15\n");
    assert_eq!(tree.found(), [""; 0]);
    tree.open(10, 5, "pipe:[7]", "mnt_id:\t15\n");
    tree.finds("descriptor-limit: process 10 \"job\"");
}

#[test]
fn names_that_no_gate_reads_are_found() {
    let odd = OsStr::from_bytes(b"/tmp/\xe9t\xe9");
    let in_words = "\"/tmp/\\xe9t\\xe9\" of process 10 \"job\"";
    let tree = Tree::new();
    // A process may call itself what it wants.
    let status = tree.directory.path().join("10/status");
    let text = fs::read_to_string(&status).unwrap();
    fs::write(&status, [b"Name:\tjob\xff\n", text.as_bytes()].concat()).unwrap();
    assert_eq!(tree.found(), [""; 0]);
    fs::write(&status, text).unwrap();
    for link in ["cwd", "exe", "fd/7"] {
        let link = tree.directory.path().join("10").join(link);
        symlink(odd, &link).unwrap();
        tree.finds(&format!("file-name: {in_words}"));
        fs::remove_file(&link).unwrap();
    }
    let maps = tree.directory.path().join("10/maps");
    let line = [b"7000-8000 r--p 0 00:32 1 ", odd.as_bytes()].concat();
    fs::write(&maps, [&line[..], b"\n"].concat()).unwrap();
    tree.finds(&format!("file-name: {in_words}"));
    fs::write(&maps, line).unwrap();
    assert_eq!(tree.found(), [""; 0], "a line that was cut off");
}

#[test]
fn another_users_process_is_found_where_its_limits_cannot_be_read() {
    for ids in ["Uid:\t0\t1000\t0\t0\n", "Gid:\t0\t0\t7\t0\n"] {
        let mut tree = Tree::new();
        tree.process(11, 10, ids);
        assert_eq!(tree.found(), [""; 0]);
        tree.subject.no_limits = true;
        tree.finds("other-user: process 11 \"job\"");
    }
    let mut tree = Tree::new();
    tree.process(11, 10, "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t5\n");
    tree.subject.no_limits = true;
    assert_eq!(tree.found(), [""; 0]);
}

#[test]
fn only_a_process_that_can_be_looked_at_lacks_a_capability() {
    let directory = tempfile::tempdir().unwrap();
    let lacks = |pid| lacks(directory.path(), pid, CAP_SYS_RESOURCE);
    for (pid, mask) in [(1, "000001fffeffffff"), (2, "000001ffffffffff")] {
        let process = directory.path().join(pid.to_string());
        fs::create_dir(&process).unwrap();
        fs::write(process.join("status"), format!("CapEff:\t{mask}\n")).unwrap();
    }
    assert!(lacks(1) && !lacks(2) && !lacks(3));
}
