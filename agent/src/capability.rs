//! Capabilities that containers get.

/// What containerd gives a container.
pub(crate) const DEFAULT: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FSETID",
    "CAP_FOWNER",
    "CAP_MKNOD",
    "CAP_NET_RAW",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETFCAP",
    "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
    "CAP_KILL",
    "CAP_AUDIT_WRITE",
];

#[cfg(test)]
mod tests {
    use kybernate_packager::criu::is_capability;

    use super::*;

    #[test]
    fn what_containers_get_are_capabilities() {
        assert!(DEFAULT.iter().all(|name| is_capability(name)));
    }
}
