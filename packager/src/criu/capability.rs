//! Capabilities by number (capabilities(7), linux/capability.h).

use std::collections::BTreeSet;

/// Names by number.
const NAMES: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
];

/// Whether there is a capability of this name.
pub fn is_capability(name: &str) -> bool {
    NAMES.contains(&name)
}

/// Returns the capabilities of a set as CRIU and the kernel write it: 32 bits a word. A bit that
/// has no name yet gets one by its number.
pub fn capability_names(words: &[u32]) -> BTreeSet<String> {
    let bits = words.iter().enumerate().flat_map(|(position, word)| {
        (0..u32::BITS).filter(move |bit| word & (1 << bit) != 0).map(move |bit| {
            let bit = usize::try_from(bit).unwrap_or(usize::MAX);
            position.saturating_mul(32).saturating_add(bit)
        })
    });
    bits.map(|bit| NAMES.get(bit).map_or_else(|| format!("CAP_{bit}"), ToString::to_string))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_have_names() {
        assert_eq!(
            capability_names(&[1 << 21, 1 << 8]),
            ["CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE"].map(str::to_owned).into()
        );
        assert_eq!(capability_names(&[0, 0, 1]), ["CAP_64".to_owned()].into());
    }
}
