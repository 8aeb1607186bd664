//! Why memory is not copied before the pause (`--pre-copy`): rounds of CRIU's `pre-dump` need a kernel
//! that tracks which pages a process writes to, and a runtime that lets them be taken
//! (`spec/decisions/0036`).

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
    /// containerd does not know them.
    #[error(
        "memory cannot be copied before the pause: containerd cannot be asked for CRIU's pre-dump; \
         leave out --pre-copy, or take an increment with --base"
    )]
    NoRounds,
    /// It is not known whether the kernel can.
    #[error("failed to find out whether this kernel tracks which pages a process writes to")]
    Unknown(#[source] io::Error),
}

/// Says why there can be no rounds here.
pub(crate) fn refusal() -> PreCopyError {
    match tracks_writes() {
        Ok(true) => PreCopyError::NoRounds,
        Ok(false) => PreCopyError::NotTracked,
        Err(error) => PreCopyError::Unknown(error),
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
        let told = refusal().to_string();
        let (kernel, runtime) = (told.contains("CONFIG_MEM_SOFT_DIRTY"), told.contains("pre-dump"));
        assert_eq!((kernel, runtime), (!tracks, tracks), "{told}");
    }
}
