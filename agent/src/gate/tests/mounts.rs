//! Mounts: those of a new container, in the same places, and nothing through them.

use std::path::Path;

use kybernate_spec::checkpoint::NodeFacts;

use super::*;
use crate::gate::Names;

#[test]
fn mounts_are_those_of_a_new_container() {
    assert_refused("nothing hides \"/proc/keys\"", |dump, _| {
        dump.mounts.pop();
    });
    assert_refused("\"/proc/sys\" is writable", |dump, _| dump.mounts[4].flags = 0);
    assert_refused("\"/sys\" is writable", |dump, _| dump.mounts[2].flags = 0);
    assert_refused("\"/disk\" (kind 16)", |dump, _| {
        dump.mounts.push(mount(20, 1, 16, "/disk"));
    });
    assert_refused("\"/proc2\" (kind 1)", |dump, _| dump.mounts.push(mount(20, 1, 1, "/proc2")));
    assert_refused("\"/sys2\" (kind 2)", |dump, _| {
        dump.mounts.push(locked(20, 1, 2, "/sys2", "/"));
    });
    assert_refused("\"/x\" (kind 23)", |dump, _| dump.mounts.push(mount(20, 1, 23, "/x")));
    assert_refused("something from the node on \"/data\"", |dump, _| {
        let external_key = Some("/data".to_owned());
        dump.mounts.push(Mount { external_key, ..mount(20, 1, 5, "/data") });
    });
    assert_refused("needs a plugin", |dump, _| {
        dump.mounts.push(Mount { with_plugin: Some(true), ..mount(20, 1, 5, "/x") });
    });
    let allowed = check(|dump, expected| {
        dump.mounts[2].flags = 0;
        expected.read_only.remove("/sys");
        expected.writable.insert("/sys".to_owned());
    });
    assert_eq!(allowed, "", "a privileged container has it so");
    assert_refused("\"/sys/fs/cgroup\" is writable", |dump, _| {
        dump.mounts.push(mount(20, 3, 23, "/sys/fs/cgroup"));
    });
    assert_refused("\"/sys/fs/cgroup/x\" (kind 23)", |dump, expected| {
        dump.mounts.push(mount(20, 3, 23, "/sys/fs/cgroup/x"));
        expected.writable.insert("/sys/fs/cgroup/x".to_owned());
    });
    assert_refused("\"/sys\" is writable", |dump, expected| {
        dump.mounts[2].flags = 0;
        expected.read_only.remove("/sys");
    });
    let allowed = check(|dump, expected| {
        let external_key = Some("/data".to_owned());
        dump.mounts.push(Mount { external_key, ..mount(20, 1, 0, "/data") });
        expected.external_mounts.insert("/data".to_owned());
    });
    assert_eq!(allowed, "");
}

#[test]
fn a_containers_own_cgroups_are_mounted_by_the_runtime() {
    let place = "/sys/fs/cgroup/cpu";
    let add = |dump: &mut Dump, cgroup: Mount| {
        dump.mounts.push(Mount { external_key: Some(place.to_owned()), ..cgroup });
    };
    let allowed = check(|dump, expected| {
        add(dump, locked(20, 3, 0, place, "/job"));
        expected.cgroups.insert(place.to_owned());
    });
    assert_eq!(allowed, "");
    // Writable, elsewhere, or where this node has none.
    assert_refused("something from the node on \"/sys/fs/cgroup/cpu\"", |dump, expected| {
        add(dump, mount(20, 3, 0, place));
        expected.cgroups.insert(place.to_owned());
    });
    assert_refused("something from the node on \"/cpu\"", |dump, expected| {
        add(dump, locked(20, 1, 0, "/cpu", "/job"));
        expected.cgroups.insert(place.to_owned());
    });
    assert_refused("something from the node on \"/sys/fs/cgroup/cpu\"", |dump, _| {
        add(dump, locked(20, 3, 0, place, "/job"));
    });
}

#[test]
fn mounts_that_hide_each_other_are_refused() {
    assert_refused("stacked on \"/proc\"", |dump, _| dump.mounts.push(mount(20, 2, 1, "/proc")));
    // On the root below /proc, where nobody sees it.
    assert_refused("on \"/proc/keys\" is hidden", |dump, _| dump.mounts[5].parent = 1);
    assert_refused("no place for a mount", |dump, _| {
        dump.mounts.push(mount(20, 1, 5, "/a/../proc"));
    });
    assert_refused("no root file system", |dump, _| dump.mounts.clear());
}

/// Adds a mount from outside, as a volume.
fn given(dump: &mut Dump, mount: Mount) {
    let external_key = mount.external_key.clone().or_else(|| Some(mount.path.clone()));
    dump.mounts.push(Mount { external_key, ..mount });
}

fn volumes(expected: &mut Expected, places: &[&str], read_only: &[&str]) {
    expected.external_mounts.extend(places.iter().map(ToString::to_string));
    expected.read_only.extend(read_only.iter().map(ToString::to_string));
}

#[test]
fn a_mount_is_read_only_by_its_own_flags() {
    // CRIU gives those of the file system to no mount that is bound, as volumes and /proc/sys are.
    for (index, place) in [(4, "/proc/sys"), (2, "/sys")] {
        for (flags, super_flags) in [(0, Some(1)), (1, None), (0, None)] {
            let reason = format!("{place:?} is writable");
            assert_refused(&reason, |dump, _| {
                let mount = &mut dump.mounts[index];
                (mount.flags, mount.super_flags) = (flags, super_flags);
            });
        }
    }
    let volume = |flags, super_flags| {
        check(|dump, expected| {
            given(dump, Mount { flags, super_flags, ..mount(20, 1, 0, "/data") });
            volumes(expected, &["/data"], &["/data"]);
        })
    };
    assert_eq!(volume(1, Some(0)), "");
    assert_eq!(volume(1, Some(1)), "");
    assert!(volume(0, Some(1)).contains("\"/data\" is writable"));
    assert!(volume(1, None).contains("\"/data\" is writable"));
}

#[test]
fn the_root_is_read_only_where_it_has_to_be() {
    let root = |flags, criu: &[u64], is_wanted: bool| {
        check(|dump, expected| {
            (dump.mounts[0].flags, dump.mounts[0].super_flags) = (flags, Some(0));
            expected.criu = criu.to_vec();
            if is_wanted {
                expected.read_only.insert("/".to_owned());
            }
        })
    };
    assert_eq!(root(1, &[4, 2], true), "");
    assert!(root(0, &[4, 2, 1], true).contains("\"/\" is writable"));
    // Earlier ones take no notice of it.
    for (criu, is_wanted) in [(&[4, 1, 1][..], true), (&[4, 1, 1], false), (&[], true)] {
        let found = root(1, criu, is_wanted);
        assert!(found.contains("which CRIU before 4.2 does not give back"), "{found}");
    }
    assert_eq!(root(0, &[4, 1, 1], false), "");
}

#[test]
fn a_volume_is_read_only_wherever_it_is_seen() {
    let secret = || Some("/secret".to_owned());
    assert_refused("\"/secret\" is writable", |dump, expected| {
        given(dump, locked(20, 1, 0, "/secret", "/pods/1/secret"));
        given(dump, Mount { external_key: secret(), ..mount(21, 1, 0, "/data") });
        volumes(expected, &["/secret", "/data"], &["/secret"]);
    });
    assert_refused("\"/secret\" is writable", |dump, expected| {
        given(dump, Mount { external_key: secret(), ..mount(21, 1, 0, "/other") });
        volumes(expected, &["/secret"], &["/secret"]);
    });
}

/// CRIU sets no flags where those of what it believes to bind from are the same.
#[test]
fn a_volume_is_read_only_beside_another_of_its_file_system() {
    let two = |other_root: &str, other_flags, is_locked: bool| {
        let other_root = other_root.to_owned();
        check(move |dump, expected| {
            given(dump, Mount { device: 99, ..locked(20, 1, 0, "/secret", "/v/secret") });
            let other = mount(21, 1, 0, "/data");
            let (flags, super_flags) = (other_flags, Some(0));
            given(dump, Mount { device: 99, root: other_root, flags, super_flags, ..other });
            let locked: &[&str] = if is_locked { &["/secret"] } else { &[] };
            volumes(expected, &["/secret", "/data"], locked);
        })
    };
    for root in ["/v", "/", "/v/secret", "/v/../v", "", "/v//", "/."] {
        assert!(two(root, 1, true).contains("\"/secret\" is writable"), "{root}");
        assert!(two(root, 1 | 1 << 18, true).contains("\"/secret\" is writable"), "{root}");
        assert_eq!(two(root, 0, true), "", "{root}");
        assert_eq!(two(root, 1, false), "", "{root}");
    }
    for root in ["/w", "/v/secret2", "/v/secret/within"] {
        assert_eq!(two(root, 1, true), "", "{root}");
    }
}

#[test]
fn nothing_of_the_node_is_bound_in_the_guise_of_memory() {
    let part = |kind, root: &str, path: &str, flags| {
        let root = root.to_owned();
        let (path, super_flags) = (path.to_owned(), Some(0));
        check(move |dump, _| {
            let parent = if path.starts_with("/proc") { 2 } else { 1 };
            dump.mounts.push(Mount { root, flags, super_flags, ..mount(20, parent, kind, &path) });
        })
    };
    for root in ["/", "/null", "/a..b"] {
        assert_eq!(part(5, root, "/x", 0), "", "{root}");
    }
    // Through a link that the file system has as a directory, or out of it.
    for root in ["/a/b", "/..", "/../../etc", "/a/../b", "", "etc", "//", "/./a", "/a/"] {
        let found = part(5, root, "/x", 0);
        assert!(found.contains("is none that new containers have"), "{root}: {found}");
    }
    assert_eq!(part(1, "/bus", "/proc/bus", 1), "");
    for root in ["/1/root/etc", "/self/root", "/thread-self/cwd", "/../etc", "/./x", "/1"] {
        let found = part(1, root, &format!("/proc{root}"), 1);
        assert!(found.contains("none that new containers have"), "{root}: {found}");
    }
    assert_refused("was deleted", |dump, _| {
        dump.mounts.push(Mount { deleted: Some(true), ..mount(20, 1, 5, "/x") });
    });
    // A part of the root file system, or of a volume, that says it is memory.
    let of = |device, root: &str, flags| {
        let root = root.to_owned();
        check(move |dump, expected| {
            let volume = Mount { root: "/v".to_owned(), ..mount(20, 1, 0, "/data") };
            given(dump, Mount { device: 99, ..volume });
            volumes(expected, &["/data"], &[]);
            let super_flags = Some(0);
            dump.mounts.push(Mount { device, root, flags, super_flags, ..mount(21, 1, 5, "/x") });
        })
    };
    assert!(of(1, "/sub", 0).contains("\"/x\" is a part of that on \"/\""));
    assert!(of(1, "/", 0).contains("\"/x\" is a part of that on \"/\""));
    assert!(of(99, "/v", 0).contains("\"/x\" is a part of that on \"/data\""));
    // What hides a file may be of the container's own /dev.
    assert_eq!(of(99, "/", 0), "");
    assert_eq!(of(99, "/w", 0), "");
    assert_eq!(of(99, "/v", 1), "");
    assert_eq!(of(7, "/v", 0), "");
}

#[test]
fn what_hides_a_file_does() {
    assert_refused("nothing hides \"/proc/keys\"", |dump, _| {
        dump.mounts[5] = locked(6, 2, 1, "/proc/keys", "/keys");
    });
    let hidden = check(|dump, _| dump.mounts[5] = mount(6, 2, 5, "/proc/keys"));
    assert_eq!(hidden, "");
    assert_refused("nothing hides \"/proc/keys\"", |dump, expected| {
        dump.mounts.pop();
        given(dump, mount(6, 2, 0, "/proc/keys"));
        volumes(expected, &["/proc/keys"], &[]);
    });
}

#[test]
fn mounts_have_numbers_of_their_own() {
    assert_refused("two mounts have the number 4", |dump, _| {
        dump.mounts.push(mount(4, 1, 5, "/x"));
    });
}

/// What the dump calls by a name that the runtime does not have is not there, or something else.
#[test]
fn what_comes_from_outside_has_the_runtimes_names() {
    let named = |place: &str, key: &str, names| {
        let (place, external_key) = (place.to_owned(), Some(key.to_owned()));
        check(move |dump, expected| {
            given(dump, Mount { external_key, ..mount(20, 1, 0, &place) });
            volumes(expected, &["/run/token"], &[]);
            expected.names = names;
        })
    };
    assert_eq!(named("/run/token", "/run/token", Names::Known), "");
    for (place, key) in [("/run/token", "/var/run/token"), ("/run/data", "/run/data")] {
        let found = named(place, key, Names::Known);
        assert!(found.contains(&format!("something from the node on {place:?}")), "{found}");
        // It is judged again when they are known.
        assert_eq!(named(place, key, Names::Later), "");
    }
    // By whatever name, there is nothing for one of these.
    assert_refused("something from the node on \"/run/data\"", |dump, expected| {
        given(dump, mount(20, 1, 0, "/run/token"));
        given(dump, mount(21, 1, 0, "/run/data"));
        volumes(expected, &["/run/token"], &[]);
        expected.names = Names::Later;
    });
    assert_refused("where the new container has \"/data\"", |_, expected| {
        let reason = "a link leads \"/secret\" to \"/data\", where the new container has \"/data\"";
        expected.clashes.insert(reason.to_owned());
    });
}

/// CRIU hands flags of file systems and their sources to mount(2) as they are.
#[test]
fn flags_that_no_mount_has_are_refused() {
    const BIND: u32 = 1 << 12;
    const MOVE: u32 = 1 << 13;
    for (flags, super_flags) in
        [(0, Some(BIND)), (0, Some(MOVE)), (BIND, None), (BIND, Some(0)), (0, Some(1 << 5))]
    {
        assert_refused("\"/x\" has flags that no mount has", |dump, _| {
            let source = "/".to_owned();
            let mounted = mount(20, 1, 5, "/x");
            dump.mounts.push(Mount { source, flags, super_flags, ..mounted });
        });
    }
    // `MS_NOSUID`, `MS_NODEV`, `MS_NOEXEC`, `MS_RELATIME` or `MS_STRICTATIME`, and that it is shared.
    for times in [21, 24] {
        let usual = check(|dump, _| {
            let (flags, super_flags) = (2 | 4 | 8 | 1 << times | 1 << 20, Some(16));
            dump.mounts.push(Mount { flags, super_flags, ..mount(20, 1, 5, "/x") });
        });
        assert_eq!(usual, "");
    }
    assert_refused("names a program for the kernel to run", |dump, expected| {
        let options = "memory,release_agent=/x".to_owned();
        dump.mounts.push(Mount { options, ..locked(20, 3, 12, "/sys/fs/cgroup/x", "/") });
        expected.cgroups.insert("/sys/fs/cgroup/x".to_owned());
    });
}

/// CRIU takes the root of such a mount for its name, and mounts what that says.
#[test]
fn a_mount_from_outside_without_a_name_is_known_by_its_root() {
    let shown = |root: &str, place: &str, flags| {
        check(|dump, expected| {
            let (external, super_flags) = (Some(true), Some(0));
            let mounted = mount(20, 1, 16, place);
            let root = root.to_owned();
            dump.mounts.push(Mount { root, external, flags, super_flags, ..mounted });
            volumes(expected, &["/data", "/secret"], &["/secret"]);
        })
    };
    for root in ["CRIU:EXTERNAL_DEV", "CRIU:AUTOGENERATED", "", "/"] {
        let found = shown(root, "/data", 0);
        assert!(found.contains("something from the node on \"/data\""), "{root}: {found}");
    }
    let found = shown("/secret", "/data", 0);
    assert!(found.contains("\"/secret\" is writable"), "{found}");
    assert_eq!(shown("/secret", "/secret", 1), "");
}

/// CRIU goes to a part by its path, in which the root file system and volumes may have links.
#[test]
fn no_part_of_what_is_given_is_mounted_elsewhere() {
    let part = |kind, path: &str, root: &str, flags| {
        let (path, root) = (path.to_owned(), root.to_owned());
        check(move |dump, expected| {
            let parent = if path.starts_with("/sys/") { 3 } else { 1 };
            let volume = Mount { device: 99, ..mount(20, 1, 0, "/data") };
            given(dump, volume);
            volumes(expected, &["/data"], &[]);
            let super_flags = Some(0);
            let mounted = mount(21, parent, kind, &path);
            dump.mounts.push(Mount { device: 99, root, flags, super_flags, ..mounted });
        })
    };
    let (cgroup, tmpfs, sysfs) = (23, 5, 2);
    for (kind, path, root) in [
        (cgroup, "/sys/fs/cgroup", "/l/kubelet"),
        (cgroup, "/sys/fs/cgroup/x", "/l"),
        (tmpfs, "/x", "/l"),
        (sysfs, "/sys/l", "/l"),
    ] {
        let found = part(kind, path, root, 1);
        assert!(found.contains("is a part of that on \"/data\""), "{path} {root}: {found}");
    }
    // All of it, as a container with the node's network has the node's /sys once more.
    assert_eq!(part(cgroup, "/sys/fs/cgroup", "/", 1), "");
    // What it is bound from stays writable, and so does it.
    assert_refused("\"/sys\" is writable", |dump, expected| {
        for (id, place) in [(20, "/one"), (21, "/two")] {
            given(dump, Mount { device: 3, ..locked(id, 1, 0, place, "/") });
        }
        volumes(expected, &["/one", "/two"], &[]);
    });
}

/// For CRIU a text ends there.
#[test]
fn texts_with_an_end_in_the_middle_are_no_paths() {
    assert_refused("no place for a mount", |dump, _| dump.mounts.push(mount(20, 1, 5, "/x\0y")));
    assert_refused("is none that new containers have", |dump, _| {
        dump.mounts.push(Mount { root: "/x\0y".to_owned(), ..mount(20, 1, 5, "/x") });
    });
    for (own, other) in [("/v/secret", "/v\0x"), ("/v/secret\0x", "/v/secret")] {
        assert_refused("\"/secret\" is writable", |dump, expected| {
            given(dump, Mount { device: 99, ..locked(20, 1, 0, "/secret", own) });
            given(dump, Mount { device: 99, ..locked(21, 1, 0, "/data", other) });
            volumes(expected, &["/secret", "/data"], &["/secret"]);
        });
    }
}

/// CRIU makes a mount with a master that the dump does not have a slave of the node's.
#[test]
fn what_is_private_follows_no_mount_of_the_node() {
    const REASON: &str = "would follow this node's mounts";
    let volume = |place: &str, shared, master, private: &[&str]| {
        let (shared, master) = (Some(shared), Some(master));
        let place = place.to_owned();
        check(move |dump, expected| {
            given(dump, Mount { shared, master, ..mount(20, 1, 0, &place) });
            volumes(expected, &["/data"], &[]);
            expected.private = private.iter().map(ToString::to_string).collect();
        })
    };
    assert_eq!(volume("/data", 0, 7, &[]), "");
    assert_eq!(
        volume("/data", 7, 0, &["/data"]),
        "",
        "its group is its own, with MOVE_MOUNT_SET_GROUP"
    );
    for shared in [0, 8] {
        let found = volume("/data", shared, 7, &["/data"]);
        assert!(found.contains(&format!("\"/data\" {REASON}")), "{found}");
    }
    // The root file system is a slave in each container, but where the specification says so.
    let root = |private: &[&str]| {
        check(|dump, expected| {
            dump.mounts[0].master = Some(7);
            expected.private = private.iter().map(ToString::to_string).collect();
        })
    };
    assert_eq!(root(&["/data"]), "");
    assert!(root(&["/"]).contains(REASON));
    // By way of one that follows the node, and by none.
    for (master, private) in [(Some(7), true), (None, false)] {
        let found = check(|dump, expected| {
            given(dump, Mount { shared: Some(8), master, ..mount(20, 1, 0, "/data") });
            given(dump, Mount { master: Some(8), ..mount(21, 1, 0, "/own") });
            volumes(expected, &["/data", "/own"], &[]);
            expected.private.insert("/own".to_owned());
        });
        assert_eq!(found.contains(&format!("\"/own\" {REASON}")), private, "{found}");
    }
    // What is bound from both gets the group of either.
    assert_refused(&format!("\"/x\" {REASON}"), |dump, expected| {
        given(dump, Mount { device: 99, ..locked(20, 1, 0, "/priv", "/") });
        given(dump, Mount { device: 99, master: Some(7), ..locked(21, 1, 0, "/slave", "/") });
        let seen = locked(22, 1, 5, "/x", "/");
        let (shared, master) = (Some(8), Some(7));
        dump.mounts.push(Mount { device: 99, shared, master, ..seen });
        volumes(expected, &["/priv", "/slave"], &[]);
        expected.private.insert("/priv".to_owned());
    });
    // What is bound from the volume is of its group.
    for (device, private) in [(99, &[][..]), (98, &[]), (99, &["/data"])] {
        let found = check(|dump, expected| {
            let one = Mount { device: 99, master: Some(7), ..locked(20, 1, 0, "/data", "/") };
            given(dump, one);
            let seen = locked(21, 1, 5, "/x", "/");
            dump.mounts.push(Mount { device, master: Some(7), ..seen });
            volumes(expected, &["/data"], &[]);
            expected.private = private.iter().map(ToString::to_string).collect();
        });
        let is_let = device == 99 && private.is_empty();
        assert_eq!(!found.contains(&format!("\"/x\" {REASON}")), is_let, "{found}");
    }
}

/// Something else is at its place: by its name the new container's would not be there.
#[test]
fn a_read_only_volume_is_there_by_its_name() {
    let (host, shm) = ("/host/etc", "/shm");
    let hidden = |mounts: &[(&str, &str, u32)]| {
        check(|dump, expected| {
            for (id, (place, key, flags)) in (20..).zip(mounts) {
                let (flags, external_key) = (*flags, Some((*key).to_owned()));
                let volume = mount(id, 1, 0, place);
                given(dump, Mount { flags, super_flags: Some(0), external_key, ..volume });
            }
            volumes(expected, &[host, shm], &[host]);
        })
    };
    for mounts in [&[(shm, shm, 0)][..], &[(shm, shm, 0), (host, shm, 1)]] {
        let found = hidden(mounts);
        assert!(found.contains("\"/host/etc\" is read-only in new containers"), "{found}");
    }
    assert_eq!(hidden(&[(shm, shm, 0), (host, host, 1)]), "");
}

/// A chain of groups ends outside, in one of the dump's, or nowhere.
#[test]
fn what_follows_the_node_by_way_of_others_does() {
    let chain = |groups: &[(u32, u32)]| {
        check(|dump, expected| {
            for (id, (shared, master)) in (20..).zip(groups) {
                let (shared, master) = (Some(*shared), Some(*master));
                let place = format!("/{id}");
                given(dump, Mount { shared, master, ..mount(id, 1, 0, &place) });
                volumes(expected, &[&place], &[]);
            }
            expected.private.insert("/20".to_owned());
        })
    };
    assert_eq!(chain(&[(0, 5), (5, 6), (6, 0)]), "");
    assert_eq!(chain(&[(0, 5), (5, 6), (5, 6), (6, 0)]), "");
    for groups in [&[(0, 5), (5, 6), (6, 7)][..], &[(0, 5), (5, 6), (6, 5)], &[(5, 5)]] {
        assert!(chain(groups).contains("\"/20\" would follow"), "{groups:?}");
    }
}

/// Without `MOVE_MOUNT_SET_GROUP` CRIU binds mounts of one group from each other, and leaves what comes
/// from outside in the node's.
#[test]
fn an_old_kernel_gets_no_groups() {
    for (shared, master) in [(Some(5), None), (None, Some(5))] {
        for has_old_mounts in [false, true] {
            let found = check(|dump, expected| {
                given(dump, Mount { shared, master, ..mount(20, 1, 0, "/data") });
                volumes(expected, &["/data"], &[]);
                expected.has_old_mounts = has_old_mounts;
            });
            let is_told = found.contains("\"/data\" shares its mounts");
            assert_eq!(is_told, has_old_mounts, "{found}");
        }
    }
    let files = tempfile::tempdir().unwrap();
    let (told, none) = (files.path().join("runc.conf"), files.path().join("none"));
    fs_err::write(&told, "tcp-close\nmntns-compat-mode\n").unwrap();
    let is_old = |kernel: &str, file: &Path| {
        let facts = NodeFacts { kernel: kernel.to_owned(), ..NodeFacts::default() };
        Expected::default().told_by([&none, file], &facts).has_old_mounts
    };
    assert!(is_old("5.10.0-30-amd64", &none) && is_old("6.18.1", &told));
    assert!(!is_old("5.15.0", &none) && !is_old("6.18.1", &none));
}
