//! Versions of NVIDIA's driver.

/// First driver with `cuCheckpointProcess*`.
pub(crate) const FIRST: u64 = 570;

/// Reads the version out of what the kernel module tells of itself.
pub(super) fn of(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.contains("NVRM version"))?;
    let is_version = |word: &&str| {
        let mut numbers = word.split('.');
        word.contains('.') && numbers.all(|number| number.parse::<u64>().is_ok())
    };
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// Returns the first number of a version.
pub(crate) fn major(version: &str) -> Option<u64> {
    version.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kernel_modules_tell_their_version() {
        let proprietary = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 \
                           01:44:30 UTC 2024\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release \
                    Build  (dvs-builder@U22)\n";
        assert_eq!(of(proprietary).as_deref(), Some("550.54.14"));
        assert_eq!(of(open).as_deref(), Some("580.95.05"));
        assert_eq!((of("GCC version: 12.2.0"), of("")), (None, None));
        assert_eq!((major("580.95.05"), major("x")), (Some(580), None));
    }
}
