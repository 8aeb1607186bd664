//! Each finding, over a made tree that looks like proc(5).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;

use fs_err as fs;
use tempfile::TempDir;

mod linked;
mod processes;

use super::check::Words;
use super::gpu::Unsaved;
use super::*;

/// Mounts of a container, as mountinfo has them.
const MOUNTS: &str = "\
100 90 0:50 / / rw - overlay overlay rw
101 100 0:51 / /proc rw - proc proc rw
102 100 0:52 / /dev rw - tmpfs tmpfs rw
103 102 0:53 / /dev/shm rw - tmpfs shm rw
104 100 254:1 /x /etc/hosts rw - ext4 /dev/vda rw
";

/// A directory like /proc with one container in it, whose first process is 10.
struct Tree {
    directory: TempDir,
    subject: Context,
}

impl Tree {
    fn new() -> Self {
        let subject = Context {
            user_namespace: Some("user:[1]".to_owned()),
            bound: ["/etc/hosts", "/srv", "/a b"].map(str::to_owned).to_vec(),
            ..Context::default()
        };
        let tree = Self { directory: tempfile::tempdir().unwrap(), subject };
        tree.process(10, 5, "");
        tree
    }

    /// Adds a process; lines of `more` in its status come first.
    fn process(&self, pid: u32, parent: u32, more: &str) {
        let directory = self.directory.path().join(pid.to_string());
        for name in ["ns", "fd", "fdinfo", "net"] {
            fs::create_dir_all(directory.join(name)).unwrap();
        }
        let status =
            format!("{more}Name:\tjob\nPPid:\t{parent}\nTracerPid:\t0\nNSpid:\t{pid}\t1\n");
        fs::write(directory.join("status"), status).unwrap();
        fs::write(directory.join("mountinfo"), MOUNTS).unwrap();
        fs::write(directory.join("maps"), "400000-401000 r-xp 0 00:32 1 /job\n").unwrap();
        let whole = ["user", "net", "mnt", "ipc", "uts", "time", "pid"];
        for kind in whole.into_iter().chain(["time_for_children", "pid_for_children"]) {
            self.namespace(pid, kind, 1);
        }
        for number in 0..3 {
            self.open(pid, number, &format!("pipe:[{number}]"), "mnt_id:\t15\n");
        }
    }

    fn namespace(&self, pid: u32, kind: &str, number: u32) {
        let link = self.directory.path().join(format!("{pid}/ns/{kind}"));
        fs::remove_file(&link).unwrap_or_default();
        let kind = kind.trim_end_matches("_for_children");
        symlink(format!("{kind}:[{number}]"), link).unwrap();
    }

    fn open(&self, pid: u32, number: u32, target: &str, info: &str) {
        let directory = self.directory.path().join(pid.to_string());
        let link = directory.join(format!("fd/{number}"));
        fs::remove_file(&link).unwrap_or_default();
        symlink(target, link).unwrap();
        fs::write(directory.join(format!("fdinfo/{number}")), info).unwrap();
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.directory.path().join("10").join(name), text).unwrap();
    }

    /// Lists TCP sockets, as `LOCAL REMOTE STATE NUMBER`.
    fn tcp(&self, sockets: &[&str]) {
        let mut text = "  sl  local_address rem_address   st\n".to_owned();
        for (line, socket) in sockets.iter().enumerate() {
            let [local, remote, state, number] =
                <[&str; 4]>::try_from(socket.split(' ').collect::<Vec<_>>()).unwrap();
            let socket = format!("{line}: {local} {remote} {state} 0:0 00:0 0 0 0 {number} 1\n");
            text.push_str(&socket);
        }
        self.write("net/tcp", &text);
    }

    /// Returns what is found, as `ID: SUBJECT`.
    fn found(&self) -> Vec<String> {
        let pids: Vec<u32> = fs::read_dir(self.directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
            .collect();
        let view = View::of(self.directory.path(), 10, &pids);
        let told = |finding: &Finding| format!("{}: {}", finding.check.words().id, finding.subject);
        judge(&view, &self.subject).iter().map(told).collect()
    }

    /// Expects exactly one finding.
    #[track_caller]
    fn finds(&self, expected: &str) {
        assert_eq!(self.found(), [expected]);
    }
}

#[test]
fn an_ordinary_container_has_nothing() {
    let tree = Tree::new();
    tree.process(11, 10, "");
    for (number, target) in [
        "/dev/null",
        "/dev/ptmx",
        "/dev/pts/0",
        "anon_inode:[eventfd]",
        "anon_inode:[eventpoll]",
        "anon_inode:[signalfd]",
        "anon_inode:[timerfd]",
        "anon_inode:[pidfd]",
        "socket:[7]",
        "/memfd:x (deleted)",
        "/var/log/job",
        "/dev/shm/x",
    ]
    .iter()
    .enumerate()
    {
        tree.open(11, 3 + u32::try_from(number).unwrap(), target, "pos:\t0\nmnt_id:\t100\n");
    }
    tree.tcp(&["00000000:0050 00000000:0000 0A 7", "0100007F:1F90 0100007F:C350 01 99"]);
    assert_eq!(tree.found(), [""; 0]);
}

#[test]
fn what_goes_away_meanwhile_is_passed_over() {
    let tree = Tree::new();
    let gone = tree.directory.path().join("12");
    fs::create_dir(&gone).unwrap();
    fs::remove_dir_all(tree.directory.path().join("10/fdinfo")).unwrap();
    fs::remove_file(tree.directory.path().join("10/maps")).unwrap();
    assert_eq!(tree.found(), [""; 0]);
}

#[test]
fn exec_sessions_are_named_and_their_processes_not_looked_at() {
    let mut tree = Tree::new();
    tree.process(20, 5, "TracerPid:\t77\n");
    tree.subject.execs = vec!["shell".to_owned()];
    tree.finds("exec-session: exec \"shell\"");
}

#[test]
fn namespaces_of_their_own_are_found() {
    let tree = Tree::new();
    tree.namespace(10, "user", 2);
    tree.finds("user-namespace: process 10 \"job\"");

    let tree = Tree::new();
    tree.process(11, 10, "NSpid:\t11\t2\t1\n");
    tree.finds("nested-pid-namespace: process 11 \"job\"");

    let tree = Tree::new();
    tree.namespace(10, "pid_for_children", 2);
    tree.finds("nested-pid-namespace: process 10 \"job\"");

    let tree = Tree::new();
    tree.namespace(10, "time_for_children", 2);
    tree.finds("time-namespace: process 10 \"job\"");

    for kind in ["mnt", "net", "ipc", "uts"] {
        let tree = Tree::new();
        tree.process(11, 10, "");
        tree.namespace(11, kind, 2);
        tree.finds(&format!("nested-namespace: process 11 \"job\": {kind}"));
        // Its links go before it does.
        fs::remove_file(tree.directory.path().join(format!("11/ns/{kind}"))).unwrap();
        assert_eq!(tree.found(), [""; 0]);
    }
}

#[test]
fn a_terminal_whose_other_end_is_outside_is_found() {
    let tree = Tree::new();
    tree.open(10, 0, "/dev/pts/0", "mnt_id:\t15\n");
    tree.finds("terminal: descriptor 0 of process 10 \"job\": /dev/pts/0");
}

#[test]
fn established_connections_need_a_choice() {
    let mut tree = Tree::new();
    tree.open(10, 3, "socket:[7]", "");
    tree.tcp(&["0100007F:0FA0 0100007F:C350 01 7"]);
    tree.finds("tcp-established: 127.0.0.1:4000 to 127.0.0.1:50000");
    tree.subject.policy.tcp = TcpPolicy::Close;
    tree.finds("tcp-close: 127.0.0.1:4000 to 127.0.0.1:50000");
    tree.subject.own_options = true;
    assert_eq!(tree.found(), [""; 0]);
}

#[test]
fn both_ends_of_a_connection_over_loopback_are_kept_or_none() {
    let mut tree = Tree::new();
    tree.subject.policy.tcp = TcpPolicy::Keep;
    tree.open(10, 3, "socket:[7]", "");
    let (one, other) = ("0100007F:0FA0 0100007F:C350 01 7", "0100007F:C350 0100007F:0FA0 01 8");
    // Another container's, in the same network namespace; or closed by its process long ago.
    for there in [&[one, other][..], &[one]] {
        tree.tcp(there);
        tree.finds("tcp-loopback: 127.0.0.1:4000 to 127.0.0.1:50000, whose other end is outside");
    }
    tree.open(10, 4, "socket:[8]", "");
    tree.tcp(&[one, other]);
    assert_eq!(tree.found(), [""; 0]);
    // Loopback of a network that is made anew is not up when CRIU needs it.
    tree.subject.own_network = true;
    let told = tree.found();
    assert!(told.len() == 2 && told[0].ends_with("50000, in a network of its own"), "{told:?}");
    // With an address of the network the request has said so.
    tree.tcp(&["0B004D0A:0FA0 0C004D0A:C350 01 7"]);
    assert_eq!(tree.found(), [""; 0]);
}

#[test]
fn a_connection_that_nobody_has_accepted_is_found() {
    let mut tree = Tree::new();
    tree.open(10, 3, "socket:[7]", "");
    let listener = "00000000:0FA0 00000000:0000 0A 7";
    tree.tcp(&[listener, "0100007F:0FA0 0100007F:C350 01 0", "0100007F:0FA1 0100007F:C351 01 0"]);
    tree.finds("tcp-in-flight: 127.0.0.1:50000 to 127.0.0.1:4000");
    // It ends with the others.
    tree.subject.policy.tcp = TcpPolicy::Close;
    tree.finds("tcp-in-flight: 127.0.0.1:50000 to 127.0.0.1:4000");
    tree.subject.own_options = true;
    assert_eq!(tree.found(), [""; 0]);
}

#[test]
fn a_listener_on_an_address_of_its_own_is_found() {
    let tree = Tree::new();
    tree.open(10, 3, "socket:[7]", "");
    tree.tcp(&["0B004D0A:0050 00000000:0000 0A 7"]);
    tree.finds("listener-address: 10.77.0.11:80");
    tree.tcp(&[]);
    let datagrams = |local: &str| {
        let line = format!("  sl\n 1: {local} 00000000:0000 07 0:0 00:0 0 0 0 7 2 0 0\n");
        tree.write("net/udp", &line);
    };
    datagrams("0B004D0A:0035");
    tree.finds("listener-address: 10.77.0.11:53");
    for anywhere in ["00000000:0035", "0100007F:0035", "FB0000E0:14E9"] {
        datagrams(anywhere);
        assert_eq!(tree.found(), [""; 0], "{anywhere}");
    }
}

#[test]
fn internet_sockets_are_found_where_criu_is_too_old() {
    let mut tree = Tree::new();
    tree.open(10, 3, "socket:[7]", "");
    tree.tcp(&["00000000:0050 00000000:0000 0A 7"]);
    tree.subject.no_internet = true;
    tree.finds("inet-socket: descriptor 3 of process 10 \"job\": socket");
}

#[test]
fn a_socket_of_an_unknown_family_is_found() {
    let mut view = View::of(Tree::new().directory.path(), 10, &[10]);
    view.processes = vec![view::Process {
        files: vec![view::OpenFile {
            target: "socket:[7]".to_owned(),
            protocol: Some("AF_VSOCK".to_owned()),
            ..view::OpenFile::default()
        }],
        ..view::Process::default()
    }];
    let found = judge(&view, &Context::default());
    assert_eq!(found[0].check, Check::SocketFamily);
    assert!(found[0].subject.ends_with("AF_VSOCK") && found.len() == 1);
}

#[test]
fn a_unix_socket_to_the_outside_is_found() {
    let mut tree = Tree::new();
    tree.open(10, 3, "socket:[7]", "");
    tree.open(10, 4, "socket:[8]", "");
    tree.open(10, 5, "socket:[9]", "");
    tree.write("net/unix", "Num\n0: 2 0 0 1 3 7 /run/x.sock\n0: 2 0 0 1 3 8\n0: 2 0 0 1 3 9\n");
    tree.subject.peers = [(7, 1000), (8, 9), (9, 8)].into();
    tree.finds("external-unix-socket: descriptor 3 of process 10 \"job\": /run/x.sock");
}

#[test]
fn files_of_the_outside_are_found() {
    let tree = Tree::new();
    tree.open(10, 1, "/var/log/out", "mnt_id:\t30\n");
    tree.finds("stdio-file: descriptor 1 of process 10 \"job\": /var/log/out");
    let tree = Tree::new();
    tree.open(10, 9, "/root/x", "mnt_id:\t30\n");
    tree.finds("external-file: descriptor 9 of process 10 \"job\": /root/x");
}

#[test]
fn a_large_deleted_file_is_found() {
    let mut tree = Tree::new();
    let name = tree.directory.path().join("10/big (deleted)");
    fs::write(&name, vec![1; (1 << 20) + 1]).unwrap();
    tree.open(10, 3, name.to_str().unwrap(), "mnt_id:\t100\n");
    let found = tree.found();
    assert!(found[0].starts_with("deleted-file: descriptor 3"), "{found:?}");
    assert!(found[0].ends_with("1048577 bytes"), "{found:?}");
    let limit = tree.directory.path().join("10/limit");
    fs::write(&limit, "ghost-limit 4M\n").unwrap();
    tree.subject.options = CriuOptions::of(&limit);
    // It has a name still, on the root file system, which was not looked for.
    assert!(tree.found()[0].starts_with("link-remap: descriptor 3"), "{:?}", tree.found());
    fs::write(&limit, "ghost-limit 4M\nlink-remap\n").unwrap();
    tree.subject.options = CriuOptions::of(&limit);
    assert_eq!(tree.found(), [""; 0]);
}

#[test]
fn inotify_is_found_unless_on_a_tmpfs() {
    let tree = Tree::new();
    // 0:53 is the tmpfs of /dev/shm, 0:50 the overlay.
    tree.open(10, 3, "anon_inode:inotify", "inotify wd:1 ino:2 sdev:35 mask:100\n");
    assert_eq!(tree.found(), [""; 0]);
    tree.open(10, 4, "anon_inode:inotify", "inotify wd:1 ino:2 sdev:32 mask:100\n");
    tree.finds("inotify: descriptor 4 of process 10 \"job\": anon_inode:inotify");
}

#[test]
fn anonymous_files_are_told_apart() {
    for (target, id) in [
        ("anon_inode:[io_uring]", "io-uring"),
        ("anon_inode:[fanotify]", "fanotify"),
        ("anon_inode:[userfaultfd]", "descriptor"),
        ("anon_inode:bpf-map", "descriptor"),
        ("mnt:[4026531841]", "namespace-file"),
        ("user:[4026531837]", "namespace-file"),
        ("anon_inode:[perf_event]", "descriptor"),
    ] {
        let tree = Tree::new();
        tree.open(10, 3, target, "");
        tree.finds(&format!("{id}: descriptor 3 of process 10 \"job\": {target}"));
    }
}

#[test]
fn devices_are_told_apart() {
    let mut tree = Tree::new();
    tree.open(10, 3, "/dev/fuse-of-a-test", "mnt_id:\t102\n");
    tree.finds("device: descriptor 3 of process 10 \"job\": /dev/fuse-of-a-test");
    tree.open(10, 3, "/dev/net/tun", "mnt_id:\t102\n");
    tree.finds("device: descriptor 3 of process 10 \"job\": /dev/net/tun");
    tree.open(10, 3, "/dev/nvidia-of-a-test", "mnt_id:\t102\n");
    let lack = |check, lack: &str| Unsaved { prefix: "/dev/nvidia", check, lack: lack.to_owned() };
    tree.subject.unsaved = vec![lack(Check::Gpu, "none is loaded")];
    tree.finds("gpu: descriptor 3 of process 10 \"job\": /dev/nvidia-of-a-test; none is loaded");
    tree.subject.unsaved = vec![lack(Check::GpuDriver, "550 is loaded, 570 is needed")];
    tree.finds(
        "gpu-driver: descriptor 3 of process 10 \"job\": /dev/nvidia-of-a-test; 550 is loaded, 570 \
         is needed",
    );
    tree.subject.unsaved = Vec::new();
    assert_eq!(tree.found(), [""; 0]);
}

#[test]
fn file_locks_are_found_when_they_are_not_wanted() {
    let mut tree = Tree::new();
    let info = "pos:\t0\nmnt_id:\t100\nlock:\t1: POSIX  ADVISORY  WRITE 10 00:32:5 0 EOF\n";
    tree.open(10, 3, "/job.lock", info);
    assert_eq!(tree.found(), [""; 0]);
    tree.subject.policy.refuse_locks = true;
    tree.finds("file-lock: descriptor 3 of process 10 \"job\": /job.lock");
}

#[test]
fn mounts_that_do_not_come_back_are_found() {
    let tree = Tree::new();
    let of = |line: &str| {
        tree.write("mountinfo", &format!("{MOUNTS}105 100 0:60 {line}\n"));
        tree.found()
    };
    for (line, found) in [
        ("/ /w rw - ramfs x rw", "mount: ramfs on /w"),
        // CRIU takes these; the gate does not.
        ("/ /w rw - debugfs x rw", "mount: debugfs on /w"),
        ("/ /w rw - btrfs x rw", "mount: btrfs on /w"),
        ("/ /w ro - proc x rw", "mount: proc on /w"),
        ("/ /w ro - sysfs x rw", "mount: sysfs on /w"),
        ("/bus /proc/bus rw - proc x rw", "mount: proc on /proc/bus"),
        // Only the place itself comes from outside.
        ("/ /srv/deep rw - ext4 x rw", "mount: ext4 on /srv/deep"),
        ("/null /dev/x rw - devtmpfs x rw", "mount: devtmpfs on /dev/x"),
    ] {
        // Below /proc and /dev there is another one above it.
        let parent = ["/proc/", "/dev/"].iter().position(|top| line.contains(top));
        let parent = parent.map_or(100, |number| 101 + number);
        let more = format!("{MOUNTS}105 {parent} 0:60 {line}\n");
        tree.write("mountinfo", &more);
        assert_eq!(tree.found(), [found], "{line}");
    }
    for line in [
        "/ /srv rw - ext4 x rw",
        "/ /a\\040b rw - ext4 x rw",
        "/ /ok rw - tmpfs x rw",
        // As a privileged container has it, and as others do.
        "/ /sys rw - sysfs x rw",
        "/ /sys ro - sysfs x ro",
        "/ /sys/fs/cgroup ro - cgroup2 x rw",
        "/job /sys/fs/cgroup/cpu rw - cgroup x rw",
    ] {
        assert_eq!(of(line), [""; 0], "{line}");
    }
    for line in ["/bus /proc/bus ro - proc x rw", "/null /proc/keys rw - devtmpfs x rw"] {
        tree.write("mountinfo", &format!("{MOUNTS}105 101 0:60 {line}\n"));
        assert_eq!(tree.found(), [""; 0], "{line}");
    }
}

#[test]
fn mounts_that_are_covered_are_found() {
    let tree = Tree::new();
    // As `ctr run --mount` makes it, on top of the default one.
    tree.write("mountinfo", &format!("{MOUNTS}105 103 0:60 / /dev/shm rw - tmpfs pod rw\n"));
    tree.finds("hidden-mount: tmpfs on /dev/shm");
    // One above, mounted later; a name that begins like another is not below it.
    let more = "\
105 100 0:60 / /data/a rw - tmpfs x rw
106 100 0:61 / /data rw - tmpfs x rw
107 100 0:62 / /database rw - tmpfs x rw
";
    tree.write("mountinfo", &format!("{MOUNTS}{more}"));
    tree.finds("hidden-mount: tmpfs on /data/a");
}

#[test]
fn a_mount_namespace_is_looked_at_once() {
    let tree = Tree::new();
    for pid in 10..40 {
        if pid > 10 {
            tree.process(pid, 10, "");
        }
        tree.namespace(pid, "mnt", 1);
    }
    let view = View::of(tree.directory.path(), 10, &(10..40).collect::<Vec<_>>());
    let mounts: usize = view.processes.iter().map(|process| process.mounts.len()).sum();
    assert_eq!((view.processes.len(), mounts), (30, 5));
}

#[test]
fn the_first_few_are_told_and_the_rest_is_counted() {
    let tree = Tree::new();
    for number in 10..30 {
        tree.open(10, number, "anon_inode:[io_uring]", "");
    }
    let found = tree.found();
    assert_eq!(found.len(), 8);
    assert!(found[7].ends_with("; and 12 more"), "{found:?}");
}

/// What a client takes of a reply is bounded.
#[test]
fn a_refusal_with_many_reasons_is_cut() {
    use kybernate_packager::agent_api::PreflightResponse;
    use prost::Message as _;

    let found: Vec<Finding> =
        Check::ALL.iter().map(|check| Finding::new(*check, "é".repeat(400))).collect();
    let all = Findings::new(found.clone());
    let told = PreflightResponse::decode(&*all.details()).unwrap().findings;
    assert!((5..found.len()).contains(&told.len()), "{}", told.len());
    assert_eq!(told[0], found[0].to_api());
    let text = all.to_string();
    assert!(text.len() < 4096 && text.ends_with("more, which `kyb preflight` tells"), "{text}");
    assert_eq!(Findings::new(found[..1].to_vec()).to_string(), found[0].to_string());
    let status = tonic::Status::from(crate::app::Rejection::Preflight {
        container: "web".to_owned(),
        findings: all,
    });
    let headers: usize = status
        .into_http::<()>()
        .headers()
        .iter()
        .map(|(k, v)| k.as_str().len() + v.len() + 32)
        .sum();
    assert!(headers < 16 << 10, "{headers}");
}

#[test]
fn every_finding_has_a_name_of_its_own_and_words() {
    let mut names: Vec<&str> = Check::ALL.iter().map(|check| check.words().id).collect();
    assert!(Check::ALL.is_sorted());
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Check::ALL.len());
}

/// The table in the README is made of the code: `UPDATE=1 cargo test` writes it.
#[test]
fn the_readme_lists_every_finding() {
    const BEGIN: &str = "<!-- findings -->\n";
    const END: &str = "<!-- end of findings -->\n";
    let mut table = "| finding | severity | because | then |\n|---|---|---|---|\n".to_owned();
    for check in Check::ALL {
        let Words { id, severity, reason, remedy } = check.words();
        let line = format!("| `{id}` | {} | {reason} | {remedy} |\n", severity.name());
        table.push_str(&line);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let expected = format!("{before}{BEGIN}{table}{END}{after}");
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &expected).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap();
    assert_eq!(written, expected, "run `UPDATE=1 cargo test` and commit {}", path.display());
}
