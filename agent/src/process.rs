//! What /proc tells about the processes of a container.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use rustix::process::{Pid, Signal, kill_process};

/// Where the kernel tells of processes.
pub(crate) const PROC: &str = "/proc";

/// How CRIU is called.
pub(crate) const CRIU: &str = "criu";

/// How runc is called, when it is not inside of a container yet.
pub(crate) const RUNC: &str = "runc";

/// How long the runtime may take when CRIU has ended well. It closes a socket and writes a file.
pub(crate) const CRIU_GRACE: Duration = Duration::from_secs(10);

/// A process, told from a later one with the same id.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pid: u32,
    started: u64,
}

impl Known {
    /// Returns the process `pid`; `None` when it has ended, or cannot be looked at.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        started(pid).ok().flatten().map(|started| Self { pid, started })
    }

    /// Whether it has not ended yet, or nobody has asked how.
    pub(crate) fn is_there(self) -> bool {
        is_there(self.pid, self.started)
    }
}

/// Whether a path leads to the namespace that this process is in, as containerd is and runc.
pub(crate) fn is_the_nodes(path: impl AsRef<Path>) -> bool {
    let number = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let found = number(path.as_ref());
    let own = |kind: &&str| number(&Path::new(PROC).join("self/ns").join(kind));
    found.is_some() && ["net", "pid"].iter().any(|kind| own(kind) == found)
}

/// Returns this program, to be run once more. One that was replaced, as an upgrade does while it runs,
/// has no name any more.
pub(crate) fn own_program() -> PathBuf {
    let named = std::env::current_exe().ok().filter(|path| path.exists());
    named.unwrap_or_else(|| "/proc/self/exe".into())
}

/// Returns how much memory can be had without swapping.
pub(crate) fn memory_available() -> io::Result<u64> {
    let text = read("/proc/meminfo")?;
    kibibytes(&text, "MemAvailable:").ok_or_else(|| io::Error::other("no MemAvailable in meminfo"))
}

/// Returns the CRIU that works on the process `pid`, or has anything in `directory` open: its log
/// until it ends. Near its end it traces nobody, and has yet to put the freezer back as it was and
/// to write its last files.
pub(crate) fn dumper(pid: u32, directory: &Path) -> Option<u32> {
    dumping(pid).or_else(|| writer(directory))
}

/// Returns the CRIU that works on the process `pid`.
pub(crate) fn dumping(pid: u32) -> Option<u32> {
    // Not a debugger, which is none of our business.
    tracer(pid).filter(|tracer| is_criu(*tracer))
}

/// Returns the process that traces `pid` or one of its threads.
pub(crate) fn tracer(pid: u32) -> Option<u32> {
    threads(pid).ok()?.into_iter().find_map(|thread| {
        let status = read(format!("/proc/{pid}/task/{thread}/status")).ok()?;
        let tracer = field(&status, "TracerPid:")?.parse().ok()?;
        (tracer != 0).then_some(tracer)
    })
}

/// Returns the CRIU that has something in `directory` open.
pub(crate) fn writer(directory: &Path) -> Option<u32> {
    writers(directory).next()
}

/// Returns every CRIU that has something in `directory` open, as its log: also whom one has made to try
/// what the kernel can, and left when it was killed.
pub(crate) fn writers(directory: &Path) -> impl Iterator<Item = u32> {
    let criu = programs(Path::new(PROC)).unwrap_or_default().into_iter();
    let criu = criu.filter(|program| program.is(CRIU));
    criu.filter(move |criu| criu.has_open(directory)).map(|criu| criu.pid)
}

fn is_criu(pid: u32) -> bool {
    Program::find(Path::new(PROC), &pid.to_string()).is_some_and(|program| program.is(CRIU))
}

/// A process by its name, which whoever it is gives itself.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) pid: u32,
    /// `/proc/PID`.
    directory: PathBuf,
    /// As the kernel remembers its program: 15 bytes at most.
    name: Vec<u8>,
}

/// Returns the processes in a `/proc`. One that ends meanwhile may be left out.
pub(crate) fn programs(proc: &Path) -> io::Result<Vec<Program>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(proc)? {
        found.extend(entry?.file_name().to_str().and_then(|pid| Program::find(proc, pid)));
    }
    Ok(found)
}

impl Program {
    fn find(proc: &Path, pid: &str) -> Option<Self> {
        let (pid, directory) = (pid.parse().ok()?, proc.join(pid));
        let name = fs::read(directory.join("comm")).ok()?;
        let name = name.strip_suffix(b"\n").unwrap_or(&name).to_vec();
        Some(Self { pid, directory, name })
    }

    /// Whether it is called so.
    pub(crate) fn is(&self, name: &str) -> bool {
        self.name == name.as_bytes()
    }

    /// Returns its words, each with a zero behind it. One that has ended, and waits for its parent, has
    /// none.
    pub(crate) fn line(&self) -> Vec<u8> {
        fs::read(self.directory.join("cmdline")).unwrap_or_default()
    }

    /// Whether it has something in `directory` open.
    fn has_open(&self, directory: &Path) -> bool {
        let files = fs::read_dir(self.directory.join("fd")).ok().into_iter().flatten();
        let mut links = files.filter_map(Result::ok).map(|file| fs::read_link(file.path()));
        links.any(|link| link.is_ok_and(|link| link.starts_with(directory)))
    }
}

/// Reads a file of /proc. A process's name and those of its files are whatever bytes it chose; nobody
/// is to be kept from letting it run by them. An error in the middle is the kernel's own, which tells
/// whether the process has gone.
pub(crate) fn read(path: impl AsRef<Path>) -> io::Result<String> {
    let (mut file, _path) = fs::File::open(path.as_ref())?.into_parts();
    let mut text = Vec::new();
    io::Read::read_to_end(&mut file, &mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Whether a command line has a word.
pub(crate) fn has_word(line: &[u8], word: &[u8]) -> bool {
    line.split(|byte| *byte == 0).any(|found| found == word)
}

/// Whether a killed CRIU left its code in a process with these `maps` (`proc_pid_maps(5)`) so that no
/// CRIU can dump it again: it makes a process do system calls from its first executable mapping,
/// which it has to write to, and its own, being shared memory, cannot be written to.
pub(crate) fn is_infected(maps: &str) -> bool {
    let executable = |line: &&str| line.split(' ').nth(1).is_some_and(|modes| modes.contains('x'));
    maps.lines().find(executable).is_some_and(|line| line.contains(" /memfd:CRIUMFD"))
}

/// Whether a process sleeps in a system call of its own, and nobody traces it: one that was restored
/// has run, then.
pub(crate) fn sleeps(pid: u32) -> bool {
    let status = read(format!("/proc/{pid}/status")).unwrap_or_default();
    let is = |key, value: &str| field(&status, key).is_some_and(|text| text.starts_with(value));
    is("State:", "S") && field(&status, "TracerPid:") == Some("0")
}

/// Returns the threads of a process, its first one too.
pub(crate) fn threads(pid: u32) -> io::Result<Vec<u32>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        threads.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(threads)
}

/// Whether a thread has ended, whether or not anybody has asked how.
pub(crate) fn has_ended(thread: u32) -> io::Result<bool> {
    match read(format!("/proc/{thread}/status")) {
        Ok(status) => Ok(field(&status, "State:").is_none_or(|is| is.starts_with(['Z', 'X']))),
        Err(error) if is_gone(&error) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Whether what /proc does not tell is for want of the process.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    let no_such_process = rustix::io::Errno::SRCH.raw_os_error();
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(no_such_process)
}

/// Whether a process is to die of SIGKILL as soon as it runs: one that is frozen does not before.
pub(crate) fn is_killed(pid: u32) -> bool {
    let status = read(format!("/proc/{pid}/status")).unwrap_or_default();
    let kill = 1_u64 << (Signal::KILL.as_raw() - 1);
    let pends = |key| u64::from_str_radix(field(&status, key)?, 16).ok();
    ["SigPnd:", "ShdPnd:"].iter().filter_map(|key| pends(key)).any(|pending| pending & kill != 0)
}

/// Whether a process runs under a seccomp filter (`proc_pid_status(5)`).
pub(crate) fn is_filtered(pid: u32) -> bool {
    let status = read(format!("/proc/{pid}/status")).unwrap_or_default();
    field(&status, "Seccomp:") == Some("2")
}

/// Returns when a process began, in ticks since the machine did (`proc_pid_stat(5)`, field 22), or that it
/// has ended: no other process has the same id and the same beginning.
pub(crate) fn started(pid: u32) -> io::Result<Option<u64>> {
    let text = match fs::read(format!("/proc/{pid}/stat")) {
        Err(error) if is_gone(&error) => return Ok(None),
        read => read?,
    };
    // The second field is the name, in parentheses, and may hold anything.
    let end = text.iter().rposition(|byte| *byte == b')');
    let rest = end.and_then(|end| std::str::from_utf8(text.get(end + 1..)?).ok());
    let ticks = rest.and_then(|rest| rest.split_ascii_whitespace().nth(19)?.parse().ok());
    ticks.map(Some).ok_or_else(|| io::Error::other("no beginning in /proc/PID/stat"))
}

/// Whether the process that began then has not ended yet, or nobody has asked how. One that cannot be looked
/// at, for want of descriptors or memory, is there: nobody may leave it as it is for that.
pub(crate) fn is_there(pid: u32, born: u64) -> bool {
    started(pid).map_or(true, |found| found == Some(born))
}

/// Returns the parent of a process.
pub(crate) fn parent(pid: u32) -> Option<u32> {
    field(&read(format!("/proc/{pid}/status")).ok()?, "PPid:")?.parse().ok()
}

/// Returns a process's id in its innermost namespace (`NSpid`); `None` when it has ended.
pub(crate) fn inner(pid: u32) -> Option<u32> {
    let status = read(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().last()?.parse().ok()
}

/// Kills one process, if it is there.
pub(crate) fn kill(pid: u32) -> io::Result<()> {
    signal(pid, Signal::KILL)
}

/// Sends one process a signal, if it is there.
pub(crate) fn signal(pid: u32, signal: Signal) -> io::Result<()> {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return Ok(());
    };
    match kill_process(pid, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns what a line of such a text says in kB, in bytes.
pub(crate) fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let number: u64 = field(text, key)?.split_whitespace().next()?.parse().ok()?;
    number.checked_mul(1024)
}

/// Returns what stands after `key` at the beginning of a line.
pub(crate) fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim)
}

/// Whether a process has a child that was CRIU (`/proc/PID/task/TID/children`, which a kernel that
/// CRIU works on has).
pub(crate) fn has_dead_criu(proc: &Path, runtime: u32) -> io::Result<bool> {
    for thread in fs::read_dir(proc.join(runtime.to_string()).join("task"))? {
        let children = read(thread?.path().join("children"))?;
        let is_dead = |child: &str| {
            let status = read(proc.join(child).join("status")).unwrap_or_default();
            let is = |key, value: &str| field(&status, key).is_some_and(|is| is.starts_with(value));
            is("State:", "Z") && is("Name:", CRIU)
        };
        if children.split_ascii_whitespace().any(is_dead) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_sleeps_and_who_has_ended_does_not() {
        let mut child = std::process::Command::new("cat");
        let child = child.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
        let mut child = child.spawn().unwrap();
        while !sleeps(child.id()) {
            std::thread::yield_now();
        }
        assert!(!has_ended(child.id()).unwrap());
        child.kill().unwrap();
        while fs::read_to_string(format!("/proc/{}/status", child.id()))
            .is_ok_and(|status| !status.contains("Z (zombie)"))
        {
            std::thread::yield_now();
        }
        assert!(!sleeps(child.id()) && has_ended(child.id()).unwrap());
        let found = crate::cgroup::Freezer::of(child.id(), None).unwrap_err();
        assert_eq!(found.kind(), io::ErrorKind::NotFound);
        child.wait().unwrap();
        assert!(!sleeps(child.id()) && has_ended(child.id()).unwrap());
    }

    #[test]
    fn a_child_that_was_criu_and_is_dead_tells() {
        let proc = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = proc.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let tells = || has_dead_criu(proc.path(), 7).unwrap();
        write("7/task/7/children", "");
        write("7/task/8/children", "10 11 ");
        assert!(!tells(), "they have ended meanwhile");
        write("10/status", "Name:\tcriu\nState:\tS (sleeping)\n");
        write("11/status", "Name:\trunc\nState:\tZ (zombie)\n");
        assert!(!tells());
        write("10/status", "Name:\tcriu\nState:\tZ (zombie)\n");
        assert!(tells());
        has_dead_criu(proc.path(), 9).unwrap_err();
    }

    #[test]
    fn code_that_a_killed_criu_left_matters_when_it_comes_first() {
        let heap = "555591722000-555591744000 rw-p 00000000 00:00 0 [heap]\n";
        let left = "7fb41a26a000-7fb41a26f000 r-xs 00000000 00:01 7511 /memfd:CRIUMFD (deleted)\n";
        let own = "7fb41a3e7000-7fb41a3ef000 r-xp 00000000 00:1f 42 /workload\n";
        assert!(is_infected(&[heap, left, own].concat()));
        assert!(!is_infected(&[heap, own, left].concat()) && !is_infected(&[heap, own].concat()));
    }

    #[test]
    fn sizes_are_read_in_kibibytes() {
        let status = "Name:\tcat\nVmRSS:\t  99 kB\nRssAnon:\t     128 kB\nTracerPid:\t17\n";
        assert_eq!(kibibytes(status, "RssAnon:"), Some(128 << 10));
        assert_eq!(field(status, "TracerPid:"), Some("17"));
        assert_eq!(kibibytes(status, "RssShmem:"), None);
    }

    #[test]
    fn a_process_is_known_by_its_beginning() {
        let own = started(std::process::id()).unwrap().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let later = started(child.id()).unwrap().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(own > 0 && later >= own);
        assert_eq!(started(child.id()).unwrap(), None);
    }

    #[test]
    fn this_process_has_memory_and_no_tracer() {
        assert!(memory_available().unwrap() > 0);
        assert_eq!(tracer(std::process::id()), None);
        assert!(started(std::process::id()).unwrap().is_some_and(|ticks| ticks > 0));
        assert_eq!(started(0).unwrap(), None);
        assert_eq!(dumper(std::process::id(), Path::new("/nowhere")), None);
    }
}
