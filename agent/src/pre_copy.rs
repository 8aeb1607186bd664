//! Whether memory can be copied before the pause (`--pre-copy`): rounds of CRIU's `pre-dump` need a
//! kernel that tracks which pages a process writes to, and a way to tell the dump about them
//! (`spec/decisions/0062`).

use std::io::{self, Read as _, Seek as _, SeekFrom};

use fs_err as fs;
use rustix::param::page_size;

/// Bytes of an entry of /proc/PID/pagemap.
const ENTRY_BYTES: u64 = 8;

/// Of an entry: the page was written to since that was last forgotten (Linux,
/// Documentation/admin-guide/mm/soft-dirty.rst).
const SOFT_DIRTY: u64 = 1 << 55;

/// Why there are no rounds before the pause.
#[derive(Debug, thiserror::Error)]
pub enum PreCopyError {
    /// The kernel cannot tell what has changed between two of them.
    #[error(
        "memory cannot be copied before the pause: this kernel does not track which pages a process \
         writes to (CONFIG_MEM_SOFT_DIRTY); leave out --pre-copy, or take an increment with --base"
    )]
    NotTracked,
    /// The dump cannot be told about them.
    #[error(
        "memory cannot be copied before the pause: container {0:?} has no CRIU configuration file of the \
         agent's own, and containerd has no other way to tell CRIU what was copied before; give it the \
         annotation org.criu.config=FILE when it is created, a file in the directory criu of the agent's \
         root, or leave out --pre-copy"
    )]
    Untold(String),
    /// The kernel lets nobody who is filtered look behind another's filter.
    #[error(
        "memory cannot be copied before the pause: the container has a seccomp filter, and so has this \
         agent, so that CRIU beneath it may not stop what is filtered (PTRACE_O_SUSPEND_SECCOMP); take \
         RestrictAddressFamilies, LockPersonality and RestrictRealtime out of the agent's unit, or leave \
         out --pre-copy"
    )]
    Filtered,
    /// GPU memory is moved when the pause begins.
    #[error(
        "memory cannot be copied before the pause: the container has memory on a GPU, and the kernel does \
         not track that; leave out --pre-copy"
    )]
    Gpu,
    /// It is not known whether the kernel can.
    #[error("failed to find out whether this kernel tracks which pages a process writes to")]
    Unknown(#[source] io::Error),
}

/// Makes sure that the kernel tracks which pages are written to.
pub(crate) fn is_tracked() -> Result<(), PreCopyError> {
    match tracks_writes() {
        Ok(true) => Ok(()),
        Ok(false) => Err(PreCopyError::NotTracked),
        Err(error) => Err(PreCopyError::Unknown(error)),
    }
}

/// Writes to a page and asks the kernel whether it has seen that, as CRIU does (`criu/kerndat.c`).
fn tracks_writes() -> io::Result<bool> {
    let mut page = vec![0_u8; page_size()];
    if let Some(byte) = page.first_mut() {
        *byte = 1;
    }
    // Not optimised away, since its address is used.
    let address = u64::try_from(std::hint::black_box(&page).as_ptr().addr());
    let bytes = u64::try_from(page_size()).map_err(io::Error::other)?;
    let number = address.map_err(io::Error::other)?.checked_div(bytes).unwrap_or_default();
    let mut pagemap = fs::File::open("/proc/self/pagemap")?;
    pagemap.seek(SeekFrom::Start(number.saturating_mul(ENTRY_BYTES)))?;
    let mut entry = [0; 8];
    pagemap.read_exact(&mut entry)?;
    Ok(u64::from_le_bytes(entry) & SOFT_DIRTY != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel was built with, where it says so.
    fn built_with() -> Option<bool> {
        let packed = fs::File::open("/proc/config.gz").ok()?;
        let mut unpack = std::process::Command::new("gzip");
        let unpacked = unpack.arg("-dc").stdin(packed.into_parts().0).output().ok()?;
        let text = String::from_utf8(unpacked.stdout).ok()?;
        Some(text.lines().any(|line| line == "CONFIG_MEM_SOFT_DIRTY=y"))
    }

    #[test]
    fn the_kernel_is_asked_and_not_guessed_at() {
        let tracks = tracks_writes().unwrap();
        if let Some(built) = built_with() {
            assert_eq!(tracks, built);
        }
        match is_tracked() {
            Ok(()) => assert!(tracks),
            Err(error) => {
                let told = error.to_string();
                assert!(!tracks && told.contains("CONFIG_MEM_SOFT_DIRTY"), "{told}");
            }
        }
    }
}
