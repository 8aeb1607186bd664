//! Names of the files in a dump directory.

use kybernate_spec::gpu;

/// What a file of a dump is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameClass {
    /// Page contents, `pages-N.img`: always stored in shards.
    Pages,
    /// Device memory, `device-P-U.img`: always stored in shards of its own. CRIU knows nothing of it.
    Device,
    /// Any other file that CRIU reads on restore.
    Image,
    /// A log, or statistics of an earlier run: not part of a checkpoint.
    Leftover,
    /// Nothing CRIU or runc writes.
    Foreign,
}

/// Images with a fixed name (CRIU, `criu/image-desc.c`), without `.img`.
const FIXED: &[&str] = &[
    "inventory",
    "pstree",
    "files",
    "reg-files",
    "ext-files",
    "ns-files",
    "eventfd",
    "eventpoll",
    "eventpoll-tfd",
    "signalfd",
    "inotify",
    "inotify-wd",
    "fanotify",
    "fanotify-mark",
    "unixsk",
    "inetsk",
    "packetsk",
    "netlinksk",
    "tunfile",
    "timerfd",
    "pidfd",
    "bpfmap-file",
    "bpfmap-data",
    "tty",
    "tty-info",
    "tty-data",
    "pipes",
    "pipes-data",
    "fifo",
    "fifo-data",
    "sk-queues",
    "remap-fpath",
    "filelocks",
    "memfd",
    "cgroup",
    "seccomp",
    "apparmor",
    "cpuinfo",
    "binfmt-misc",
];

/// Images with a number after a dash, decimal or hexadecimal.
const NUMBERED: &[&str] = &[
    "core",
    "ids",
    "mm",
    "fs",
    "fdinfo",
    "pagemap",
    "pagemap-shmem",
    "vmas",
    "sigacts",
    "itimers",
    "posix-timers",
    "creds",
    "rlimit",
    "signal-s",
    "signal-p",
    "ghost-file",
    "tcp-stream",
    "mountpoints",
    "utsns",
    "ipcns-var",
    "ipcns-shm",
    "ipcns-msg",
    "ipcns-sem",
    "netns",
    "netdev",
    "ifaddr",
    "route",
    "route6",
    "rule",
    "iptables",
    "ip6tables",
    "nftables",
    "netns-ct",
    "netns-exp",
    "userns",
    "timens",
    "pidns",
    "autofs",
    "binfmt-misc",
];

/// Returns what a file called `name` is.
pub fn classify(name: &str) -> NameClass {
    match name {
        "descriptors.json" => return NameClass::Image,
        "dump.log" | "restore.log" | "criu.log" | "stats-dump" | "stats-restore" | "criu.pid"
        | "irmap-cache" => return NameClass::Leftover,
        _ => {}
    }
    let Some(stem) = name.strip_suffix(".img") else { return NameClass::Foreign };
    if is_numbered(stem, "pages") {
        return NameClass::Pages;
    }
    if device_of(name).is_some() {
        return NameClass::Device;
    }
    let known = FIXED.contains(&stem)
        || NUMBERED.iter().any(|prefix| is_numbered(stem, prefix))
        || is_tmpfs(stem)
        || is_amdgpu(stem);
    if known { NameClass::Image } else { NameClass::Foreign }
}

/// Returns the process id in a name like `mm-12.img`.
pub fn process_id(name: &str, prefix: &str) -> Option<u32> {
    name.strip_suffix(".img")?.strip_prefix(prefix)?.strip_prefix('-')?.parse().ok()
}

/// Returns the name of the file with what a process, by its id in its innermost namespace, has on a
/// GPU; `None` when that has no UUID as [`gpu::uuid`] writes it.
pub fn device_file(pid: u32, uuid: &str) -> Option<String> {
    let bytes = gpu::uuid_bytes(uuid)?;
    // One written otherwise would come back under another name.
    (gpu::uuid(bytes) == uuid)
        .then(|| format!("device-{pid:x}-{:032x}.img", u128::from_be_bytes(bytes)))
}

/// Returns the process and the GPU that a file of device memory is of.
pub fn device_of(name: &str) -> Option<(u32, String)> {
    let (pid, digits) = name.strip_suffix(".img")?.strip_prefix("device-")?.split_once('-')?;
    let number = u32::from_str_radix(pid, 16).ok().filter(|number| format!("{number:x}") == pid)?;
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if digits.len() != 32 || !digits.bytes().all(is_digit) {
        return None;
    }
    let bytes = u128::from_str_radix(digits, 16).ok()?.to_be_bytes();
    Some((number, gpu::uuid(bytes)))
}

fn is_numbered(stem: &str, prefix: &str) -> bool {
    stem.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('-')).is_some_and(is_number)
}

fn is_number(text: &str) -> bool {
    (1..=20).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// `tmpfs-N.tar.gz` and `tmpfs-dev-N.tar.gz`.
fn is_tmpfs(stem: &str) -> bool {
    stem.strip_suffix(".tar.gz")
        .is_some_and(|stem| is_numbered(stem, "tmpfs") || is_numbered(stem, "tmpfs-dev"))
}

/// Files of CRIU's amdgpu plugin: a few words and numbers after `amdgpu-`.
fn is_amdgpu(stem: &str) -> bool {
    stem.strip_prefix("amdgpu-").is_some_and(|rest| {
        (1..=64).contains(&rest.len())
            && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    })
}
