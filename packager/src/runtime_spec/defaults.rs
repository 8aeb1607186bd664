//! What containerd gives a container for which nothing else is said (its `oci.WithDefaultSpec`).

use serde_json::{Value, json};

/// Version of the runtime specification that every runc of this decade reads.
pub const OCI_VERSION: &str = "1.0.2";

/// Devices every container gets from its runtime.
pub const DEVICES: &[&str] = &[
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/console",
    "/dev/ptmx",
];

/// Devices every container may use: type, major, minor (any, when absent).
const ALLOWED_DEVICES: &[(u32, Option<u32>)] = &[
    (1, Some(3)),
    (1, Some(5)),
    (1, Some(7)),
    (1, Some(8)),
    (1, Some(9)),
    (5, Some(0)),
    (5, Some(1)),
    (5, Some(2)),
    (136, None),
];

/// Capabilities.
pub const CAPABILITIES: &[&str] = &[
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// Paths that are hidden from containers.
pub const MASKED: &[&str] = &[
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
    "/proc/scsi",
];

/// Paths that containers may look at but not change.
pub const READ_ONLY: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Mounts: destination, type, source, options.
const MOUNTS: &[(&str, &str, &str, &str)] = &[
    ("/proc", "proc", "proc", "nosuid,noexec,nodev"),
    ("/dev", "tmpfs", "tmpfs", "nosuid,strictatime,mode=755,size=65536k"),
    ("/dev/pts", "devpts", "devpts", "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,gid=5"),
    ("/dev/shm", "tmpfs", "shm", "nosuid,noexec,nodev,mode=1777,size=65536k"),
    ("/dev/mqueue", "mqueue", "mqueue", "nosuid,noexec,nodev"),
    ("/sys", "sysfs", "sysfs", "nosuid,noexec,nodev,ro"),
    ("/run", "tmpfs", "tmpfs", "nosuid,strictatime,mode=755,size=65536k"),
];

/// Where containers see their cgroups, when they do: those of Pods and of Podman.
pub const CGROUPS: &str = "/sys/fs/cgroup";

/// Returns the mount of a container's own cgroups, as a specification has it.
pub fn cgroups() -> Value {
    mount(&(CGROUPS, "cgroup", "cgroup", "nosuid,noexec,nodev,relatime,ro"))
}

/// Returns what is mounted into every container, as a specification has it, but what `is_taken` says
/// of the destination that something else is there.
pub fn mounts(is_taken: impl Fn(&str) -> bool) -> impl Iterator<Item = Value> {
    let own = MOUNTS.iter().filter(move |(destination, ..)| !is_taken(destination));
    own.map(mount)
}

fn mount((destination, kind, source, options): &(&str, &str, &str, &str)) -> Value {
    json!({
        "destination": destination, "type": kind, "source": source,
        "options": options.split(',').collect::<Vec<_>>(),
    })
}

/// Returns the limits, as a specification has them.
pub fn rlimits() -> Value {
    json!([{ "type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024 }])
}

/// Returns the rules for devices, as a specification has them: none but those every container may
/// use.
pub fn device_rules() -> Vec<Value> {
    let mut rules = vec![json!({ "allow": false, "access": "rwm" })];
    for (major, minor) in ALLOWED_DEVICES {
        let mut rule = json!({ "allow": true, "type": "c", "major": major, "access": "rwm" });
        if let (Some(minor), Some(fields)) = (minor, rule.as_object_mut()) {
            fields.insert("minor".to_owned(), json!(minor));
        }
        rules.push(rule);
    }
    rules
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu::is_capability;

    #[test]
    fn what_containers_get_are_capabilities() {
        assert!(CAPABILITIES.iter().all(|name| is_capability(name)));
        assert!(CAPABILITIES.is_sorted());
    }

    #[test]
    fn what_is_taken_is_not_mounted() {
        let destination = |mount: Value| mount["destination"].as_str().map(str::to_owned);
        let found: Vec<_> = mounts(|place| place == "/run").filter_map(destination).collect();
        assert_eq!(found, ["/proc", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys"]);
    }
}
