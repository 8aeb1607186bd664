//! Control groups: how to thaw a container without containerd, and which processes are in it.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;
use rustix::io::Errno;

use crate::mounts::{self, Mount};
use crate::process;

/// The version of the hierarchy that container runtimes use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

/// The freezer of one container's cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Freezer {
    directory: PathBuf,
    version: Version,
}

impl Version {
    /// Returns which version runtimes use here.
    pub(crate) fn here() -> Self {
        if kybernate_packager::node::is_cgroup_v2() { Self::V2 } else { Self::V1 }
    }

    /// Returns which version a mount is a hierarchy of, when it is one.
    fn of(mount: &Mount) -> Option<Self> {
        match &*mount.kind {
            "cgroup" => Some(Self::V1),
            "cgroup2" => Some(Self::V2),
            _ => None,
        }
    }
}

impl Freezer {
    /// Finds the freezer of a container by its first process. That may be in a cgroup within the
    /// container's, as systemd is, and others in others: `made` is the path of the one that the runtime
    /// has made, where that is known. One that has ended, or is about to, is not found: in version 1 the
    /// kernel has it at the top, with everybody else (`proc_cgroup_show`).
    pub(crate) fn of(pid: u32, made: Option<&str>) -> io::Result<Self> {
        let own = Self::of_process(pid)?;
        // Whoever has moved a process elsewhere knows why.
        let around = made.and_then(|path| Self::at(path).ok());
        Ok(around.filter(|around| own.directory.starts_with(&around.directory)).unwrap_or(own))
    }

    fn of_process(pid: u32) -> io::Result<Self> {
        for thread in process::threads(pid)? {
            let membership = fs::read_to_string(format!("/proc/{pid}/task/{thread}/cgroup"));
            // Asked behind it: then it was not there by that.
            if process::has_ended(thread)? {
                continue;
            }
            match Self::find(&membership?) {
                // It is about to, and others may not be.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                found => return found,
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// Finds the freezer of a cgroup by its path in the hierarchy.
    pub(crate) fn at(path: &str) -> io::Result<Self> {
        Self::find(&format!("1:freezer:{path}\n0::{path}\n"))
    }

    fn find(membership: &str) -> io::Result<Self> {
        let mounts = mounts::own()?;
        let found = find(membership, &mounts, Version::here());
        let found = found.ok_or_else(|| {
            io::Error::other("no mounted cgroup hierarchy can freeze the container")
        })?;
        if found.is_everybody(&mounts) {
            let why = "it has ended, or has no cgroup of its own";
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
        Ok(found)
    }

    /// Whether it is at the top, and would freeze us too.
    fn is_everybody(&self, mounts: &[Mount]) -> bool {
        mounts.iter().any(|mount| mount.point == self.directory)
    }

    /// Whether processes are held back, or about to be.
    pub(crate) fn is_frozen(&self) -> io::Result<bool> {
        let text = process::read(self.file())?;
        Ok(match self.version {
            Version::V1 => text.trim() != "THAWED",
            Version::V2 => text.trim() == "1",
        })
    }

    /// Whether processes are held back by it or by a cgroup around it. (v2: `cgroup.freeze` is what was
    /// written to that cgroup alone; v1 tells what holds.)
    pub(crate) fn is_held(&self) -> io::Result<bool> {
        let is_frozen = self.is_frozen()?;
        if is_frozen || self.version == Version::V1 {
            return Ok(is_frozen);
        }
        let around = self.directory.ancestors().skip(1);
        let mut asked = around.map_while(|directory| {
            // The top has none.
            fs::read_to_string(directory.join("cgroup.freeze")).ok()
        });
        Ok(asked.any(|text| text.trim() == "1"))
    }

    /// Whether every process is held back by now: none of them is within a system call.
    pub(crate) fn holds(&self) -> io::Result<bool> {
        Ok(match self.version {
            Version::V1 => fs::read_to_string(self.file())?.trim() == "FROZEN",
            Version::V2 => {
                let events = fs::read_to_string(self.directory.join("cgroup.events"))?;
                events.lines().any(|line| line == "frozen 1")
            }
        })
    }

    /// Whether there are cgroups within it, with processes of their own.
    pub(crate) fn is_divided(&self) -> io::Result<bool> {
        for entry in fs::read_dir(&self.directory)? {
            if entry?.file_type()?.is_dir() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Freezes the container.
    pub(crate) fn freeze(&self) -> io::Result<()> {
        let word = match self.version {
            Version::V1 => "FROZEN",
            Version::V2 => "1",
        };
        fs::write(self.file(), word)
    }

    /// Lets the container run.
    pub(crate) fn thaw(&self) -> io::Result<()> {
        let word = match self.version {
            Version::V1 => "THAWED",
            Version::V2 => "0",
        };
        fs::write(self.file(), word)
    }

    /// Returns the processes in the cgroup and in those within it; none when there is no such cgroup. One
    /// that moves meanwhile may be missed, unless all are held back.
    pub(crate) fn processes(&self) -> io::Result<Vec<u32>> {
        let mut found = BTreeSet::new();
        for directory in within(&self.directory)? {
            match process::read(directory.join("cgroup.procs")) {
                Ok(text) => {
                    found.extend(text.lines().filter_map(|line| line.trim().parse::<u32>().ok()));
                }
                // A cgroup of threads: their processes are told by one around it.
                Err(error) if is_gone(&error) || is(&error, Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found.into_iter().collect())
    }

    /// Kills the processes in the cgroup and in those within it, and returns them. Who is held back ends when
    /// it may run.
    pub(crate) fn kill(&self) -> io::Result<Vec<u32>> {
        let processes = self.processes()?;
        processes.iter().try_for_each(|pid| process::kill(*pid))?;
        Ok(processes)
    }

    /// Returns how many bytes its processes may get before a limit of it, or of a cgroup around it, is
    /// met; `None` when there is no limit, or none that can be seen (v1).
    pub(crate) fn memory_left(&self) -> Option<u64> {
        if self.version == Version::V1 {
            return None;
        }
        let number = |directory: &Path, name: &str| -> Option<u64> {
            fs::read_to_string(directory.join(name)).ok()?.trim().parse().ok()
        };
        let left = |directory: &Path| {
            let limit = number(directory, "memory.max")?;
            Some(limit.saturating_sub(number(directory, "memory.current")?))
        };
        self.directory.ancestors().filter_map(left).min()
    }

    fn file(&self) -> PathBuf {
        self.directory.join(match self.version {
            Version::V1 => "freezer.state",
            Version::V2 => "cgroup.freeze",
        })
    }
}

/// Returns the path of a `cgroupsPath`: one as it is, or systemd's `SLICE:PREFIX:NAME`, in which
/// every part of the slice's name is a directory of its own (systemd.slice(5)).
pub(crate) fn path(named: &str) -> Option<String> {
    if named.starts_with('/') {
        return Some(named.to_owned());
    }
    let mut parts = named.split(':');
    let (slice, prefix, name) = (parts.next()?, parts.next()?, parts.next()?);
    let slice = slice.strip_suffix(".slice")?;
    let mut found = String::new();
    for (at, _) in slice.match_indices('-').chain([(slice.len(), "")]) {
        found = format!("{found}/{}.slice", slice.get(..at)?);
    }
    let unit = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}-{name}") };
    Some(format!("{found}/{unit}.scope"))
}

/// Removes a cgroup without processes from every hierarchy, with those within it. What is in use, or was
/// never made, stays.
pub(crate) fn remove(path: &str) -> io::Result<()> {
    for hierarchy in hierarchies()? {
        let Some(directory) = resolve(&hierarchy, path) else { continue };
        for directory in within(&directory)?.into_iter().rev() {
            // In use or never made: both are fine.
            fs::remove_dir(directory).unwrap_or_default();
        }
    }
    Ok(())
}

/// Returns a cgroup and all within it, each behind those around it.
fn within(top: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = vec![top.to_owned()];
    let mut looked = 0;
    while let Some(directory) = found.get(looked).cloned() {
        looked += 1;
        let entries = match fs::read_dir(directory) {
            Err(error) if is_gone(&error) => continue,
            entries => entries?,
        };
        for entry in entries {
            match entry.and_then(|entry| Ok((entry.file_type()?.is_dir(), entry.path()))) {
                Ok((true, path)) => found.push(path),
                Ok((false, _)) => {}
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(found)
}

/// Whether what was looked at has been removed.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || is(error, Errno::NODEV)
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Moves this process or one of its children to the top of every hierarchy, so that whoever ends our
/// service's cgroup does not end it. Returns how often it worked.
pub(crate) fn leave(pid: u32) -> io::Result<usize> {
    let pid = pid.to_string();
    let join = |hierarchy: &Mount| fs::write(hierarchy.point.join("cgroup.procs"), &pid).is_ok();
    Ok(hierarchies()?.filter(join).count())
}

/// Returns the names that version 1 hierarchies have in containers, which are those of their mount
/// points here. None where runtimes use version 2.
pub(crate) fn names() -> io::Result<Vec<String>> {
    if Version::here() == Version::V2 {
        return Ok(Vec::new());
    }
    let first = |mount: &Mount| Version::of(mount) == Some(Version::V1);
    let name = |mount: Mount| Some(mount.point.file_name()?.to_str()?.to_owned());
    Ok(hierarchies()?.filter(first).filter_map(name).collect())
}

/// Returns the mounted hierarchies.
fn hierarchies() -> io::Result<impl Iterator<Item = Mount>> {
    Ok(mounts::own()?.into_iter().filter(|mount| Version::of(mount).is_some()))
}

/// Returns the directory of a cgroup by its path in the hierarchy, when the mount shows it.
fn resolve(hierarchy: &Mount, path: &str) -> Option<PathBuf> {
    let path = Path::new("/").join(path);
    let below = path.strip_prefix(&hierarchy.root).ok()?;
    let plain = below.components().all(|c| matches!(c, std::path::Component::Normal(_)));
    plain.then(|| hierarchy.point.join(below))
}

/// Picks the hierarchy that freezes: v1's freezer controller, or v2.
fn find(membership: &str, mounts: &[Mount], preferred: Version) -> Option<Freezer> {
    let mut mounted = mounts.iter().filter(|mount| Version::of(mount) == Some(preferred));
    let (path, hierarchy) = match preferred {
        Version::V1 => {
            let is_freezer = |names: &str| names.split(',').any(|name| name == "freezer");
            let path = membership.lines().find_map(|line| {
                let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
                is_freezer(controllers).then_some(path)
            });
            (path?, mounted.find(|mount| is_freezer(&mount.options))?)
        }
        Version::V2 => {
            let path = membership.lines().find_map(|line| line.strip_prefix("0::"));
            (path?, mounted.next()?)
        }
    };
    Some(Freezer { directory: resolve(hierarchy, path)?, version: preferred })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "\
29 23 0:26 / /sys/fs/cgroup rw,nosuid - tmpfs tmpfs rw,mode=755
30 29 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
31 29 0:28 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
32 29 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const V2: &str = "29 23 0:26 /node /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

    fn read(mountinfo: &str) -> Vec<Mount> {
        mounts::read(mountinfo.as_bytes()).collect()
    }

    #[test]
    fn the_freezer_is_found_in_the_first_version() {
        let membership = "9:freezer:/default/web\n3:cpu,cpuacct:/default/web\n0::/\n";
        let found = find(membership, &read(V1), Version::V1).unwrap();
        assert_eq!(found.file(), Path::new("/sys/fs/cgroup/freezer/default/web/freezer.state"));
        assert!(!found.is_everybody(&read(V1)));
    }

    #[test]
    fn the_freezer_is_found_in_the_second_version_below_the_mounted_directory() {
        let found = find("0::/node/default/web\n", &read(V2), Version::V2).unwrap();
        assert_eq!(found.file(), Path::new("/sys/fs/cgroup/default/web/cgroup.freeze"));
    }

    /// As of systemd in a container, whose cgroup is `init.scope` within the one that is frozen.
    #[test]
    fn what_is_within_a_frozen_cgroup_is_held() {
        let top = tempfile::tempdir().unwrap();
        let within = top.path().join("pods/web/init.scope");
        fs::create_dir_all(&within).unwrap();
        let write = |directory: &str, word: &str| {
            fs::write(top.path().join(directory).join("cgroup.freeze"), word).unwrap();
        };
        for directory in ["pods", "pods/web", "pods/web/init.scope"] {
            write(directory, "0\n");
        }
        let freezer = Freezer { directory: within, version: Version::V2 };
        assert!(!freezer.is_held().unwrap());
        write("pods/web", "1\n");
        assert!(freezer.is_held().unwrap() && !freezer.is_frozen().unwrap());
        write("pods/web", "0\n");
        write("pods/web/init.scope", "1\n");
        assert!(freezer.is_held().unwrap());
    }

    #[test]
    fn who_is_in_cgroups_within_it_is_told() {
        let top = tempfile::tempdir().unwrap();
        let freezer = Freezer { directory: top.path().join("web"), version: Version::V2 };
        assert_eq!(freezer.processes().unwrap(), [0; 0]);
        for (place, pids) in
            [("", ""), ("init.scope", "7\n"), ("system.slice/x.service", "12\n9\n")]
        {
            let directory = freezer.directory.join(place);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("cgroup.procs"), pids).unwrap();
        }
        assert_eq!(freezer.processes().unwrap(), [7, 9, 12]);
    }

    #[test]
    fn a_cgroup_outside_the_mount_is_not_guessed() {
        assert_eq!(find("0::/other/web\n", &read(V2), Version::V2), None);
        assert_eq!(find("0::/node/../../x\n", &read(V2), Version::V2), None);
        // Its name only begins like that of the mounted one.
        assert_eq!(find("0::/node-2/web\n", &read(V2), Version::V2), None);
        for (everybody, mounts, version) in
            [("0::/node\n", V2, Version::V2), ("9:freezer:/\n", V1, Version::V1)]
        {
            let mounts = read(mounts);
            assert!(find(everybody, &mounts, version).unwrap().is_everybody(&mounts));
        }
    }

    #[test]
    fn both_forms_of_cgroups_are_paths() {
        assert_eq!(path("/kubepods/pod1/c").as_deref(), Some("/kubepods/pod1/c"));
        let found = path("kubepods-besteffort-pod1.slice:cri-containerd:c");
        let expected = "/kubepods.slice/kubepods-besteffort.slice/\
                        kubepods-besteffort-pod1.slice/cri-containerd-c.scope";
        assert_eq!(found.as_deref(), Some(expected));
        assert_eq!(path("relative"), None);
    }
}
