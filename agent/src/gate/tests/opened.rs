use super::super::images::{File, RegularFile, UnixSocket};
use super::super::opened::leads_out;
use super::*;

fn regular(name: &str) -> File {
    let regular = RegularFile { id: 7, name: name.to_owned(), ..RegularFile::default() };
    File { kind: 1, id: 7, regular: Some(regular), ..File::default() }
}

fn socket(name: &[u8], directory: Option<&str>) -> File {
    let socket = UnixSocket { name: name.to_vec(), directory: directory.map(str::to_owned) };
    File { kind: 5, id: 7, socket: Some(socket), ..File::default() }
}

fn refusals(file: File) -> Vec<String> {
    let mut dump = Dump::default();
    dump.files.push(file);
    match summarise(&dump.images(), &[]) {
        Ok(summary) => judge_alone(&summary),
        Err(error) => vec![error],
    }
}

#[test]
fn a_file_is_opened_by_a_path_of_the_kernels() {
    // While CRIU restores, its own directories of the node are open under such numbers.
    for name in [
        "/proc/self/fd/126/../../etc/shadow",
        "/proc/self/fd/126",
        "/proc/thread-self/root/etc/shadow",
        "/proc/1/cwd/etc/shadow",
        "/proc/1/exe",
        "/proc/1/task/1/root/etc",
        "/host/proc/1/root/etc/shadow",
        "/data/../etc/shadow",
        "relative",
        "/data//x",
        "/data/x\0y",
    ] {
        let told = refusals(regular(name));
        assert!(told.iter().any(|reason| reason.contains("by the path")), "{name:?}: {told:?}");
    }
    for name in [
        "/",
        "/proc",
        "/proc/1",
        "/proc/1/fd",
        "/proc/meminfo",
        "/proc/1/task/1/status",
        "/a/1/fd/x",
    ] {
        assert!(refusals(regular(name)).is_empty(), "{name:?}");
    }
}

/// Whoever restores it finds a link where a file is to be.
#[test]
fn a_link_that_is_open_itself_is_not_taken() {
    let told = |mode: Option<u32>| {
        let mut file = regular("/lnk");
        file.regular.as_mut().unwrap().mode = mode;
        refusals(file).join("; ")
    };
    assert!(told(Some(0o120_777)).contains("the symbolic link \"/lnk\" itself open"));
    for other in [None, Some(0o100_644), Some(0o140_777), Some(0o60_600)] {
        assert_eq!(told(other), "", "{other:?}");
    }
}

#[test]
fn who_can_become_nobody_else_comes_back_as_nobody_else() {
    let mut dump = Dump::default();
    let summary = summarise(&dump.images(), &[]).unwrap();
    let user = Fixed { uid: 1000, gids: [1000].into(), ..Fixed::default() };
    let expected = |user: &Fixed| Expected { user: Some(user.clone()), ..Expected::default() };
    let told = judge(&summary, &expected(&user)).join("; ");
    for part in ["have the user 0,", "have the group 0,", "hold CAP_AUDIT_WRITE"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let core = dump.cores.get_mut(&1).unwrap();
    let held = core.thread.as_mut().unwrap().credentials.as_mut().unwrap();
    (held.uid, held.euid, held.suid, held.fsuid) = (1000, 1000, 1000, 1000);
    (held.gid, held.egid, held.sgid, held.fsgid) = (1000, 1000, 1000, 1000);
    (held.permitted, held.effective) = (vec![0, 0], vec![0, 0]);
    let told = judge(&summarise(&dump.images(), &[]).unwrap(), &expected(&user)).join("; ");
    assert!(!told.contains("1000") && !told.contains(" hold "), "{told}");
}

#[test]
fn nobody_goes_before_the_node_who_may_not() {
    for (nice, policy, is_refused) in [
        (0, 0, false),
        (19, 5, false),
        (5, 3, false),
        (-1, 0, true),
        (0, 1, true),
        (0, 2, true),
        (0, 6, true),
    ] {
        let mut dump = Dump::default();
        let thread = dump.cores.get_mut(&1).unwrap().thread.as_mut().unwrap();
        (thread.nice, thread.policy) = (Some(nice), Some(policy));
        let summary = summarise(&dump.images(), &[]).unwrap();
        let told = |capabilities: &[&str]| {
            let capabilities = capabilities.iter().map(ToString::to_string).collect();
            judge(&summary, &Expected { capabilities, ..Expected::default() }).join("; ")
        };
        assert_eq!(told(&[]).contains("real time"), is_refused, "{nice} {policy}");
        assert!(!told(&["CAP_SYS_NICE"]).contains("real time"));
    }
}

/// Whoever has that limit goes before others as soon as it wants.
#[test]
fn no_limit_lets_it_go_before_the_node_later() {
    for (nice, real_time, is_refused) in
        [(0, 0, false), (20, 0, false), (21, 0, true), (0, 1, true), (u64::MAX, u64::MAX, true)]
    {
        assert_eq!(
            check(|dump, _| {
                let limit = |most| Limit { current: 0, most };
                let mut all = vec![limit(u64::MAX); 16];
                (all[13], all[14]) = (limit(nice), limit(real_time));
                let process = dump.cores.get_mut(&1).unwrap().process.as_mut().unwrap();
                process.limits = Some(Limits { all });
            })
            .contains("may go before"),
            is_refused,
            "{nice} {real_time}"
        );
    }
    let limited = |dump: &mut Dump| {
        let all = vec![Limit { current: 0, most: 99 }; 16];
        dump.cores.get_mut(&1).unwrap().process.as_mut().unwrap().limits = Some(Limits { all });
    };
    let may = |limits: &[&str]| {
        check(|dump, expected| {
            limited(dump);
            expected.limits = limits.iter().map(ToString::to_string).collect();
        })
    };
    assert!(may(&["RLIMIT_RTPRIO"]).contains("(RLIMIT_NICE)"));
    assert_eq!(may(&["RLIMIT_RTPRIO", "RLIMIT_NICE"]), "", "the new container has such limits");
}

#[test]
fn no_older_seccomp_mode_wins_over_a_threads_own() {
    let mut dump = Dump::default();
    dump.cores.get_mut(&1).unwrap().process.as_mut().unwrap().old_seccomp_mode = Some(0);
    assert!(summarise(&dump.images(), &[]).unwrap_err().contains("too old"));
    let mut dump = Dump::default();
    dump.cores.get_mut(&1).unwrap().process.as_mut().unwrap().old_seccomp_filter = Some(1);
    assert!(summarise(&dump.images(), &[]).unwrap_err().contains("too old"));
}

#[test]
fn a_socket_is_made_by_a_path_of_its_own() {
    for (name, directory) in [
        (&b"/proc/self/fd/126/../../run/x.sock\0"[..], None),
        (b"fd/126/../x.sock", Some("/proc/self")),
        (b"/run/x\0y", None),
    ] {
        let told = refusals(socket(name, directory));
        assert!(told.iter().any(|reason| reason.contains("by the path")), "{name:?}: {told:?}");
    }
    // An abstract name is no path, and one from a directory may lead above that.
    for (name, directory) in [
        (&b"\0/proc/self/fd/1/x"[..], None),
        (b"", None),
        (b"/var/run/x.sock\0", None),
        (b"../run/x.sock", Some("/app")),
    ] {
        assert!(refusals(socket(name, directory)).is_empty(), "{name:?}");
    }
    assert!(leads_out("/proc/x/../self/fd/3/y") && !leads_out("/srv/self/fd/3"));
}
