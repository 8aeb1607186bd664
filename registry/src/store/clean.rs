//! What is swept: temporary files, uploads left alone, corrupt content long enough kept.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fs_err as fs;

use super::{Store, StoreError, UploadFile, remove_quietly};

/// How long corrupt content is kept for whoever wants to know what happened to the disk.
const CORRUPT_LIFE: Duration = Duration::from_hours(7 * 24);

impl Store {
    /// Removes uploads that were left alone, but not those that are `busy`, and corrupt content whose
    /// time is over. Blocks.
    pub(crate) fn sweep(
        &self,
        now: SystemTime,
        busy: &dyn Fn(&UploadFile) -> bool,
    ) -> Result<(), StoreError> {
        self.sweep_uploads(now, busy)
            .and_then(|()| self.sweep_corrupt(now))
            .map_err(StoreError::during("sweep what has expired"))
    }

    /// What a start does: also what a killed process was writing goes.
    pub(super) fn clean(&self, now: SystemTime) -> io::Result<()> {
        for entry in fs::read_dir(self.layout.temporary())? {
            remove_quietly(&entry?.path());
        }
        self.sweep_uploads(now, &|_nobody_is_here_yet| false)?;
        self.sweep_corrupt(now)
    }

    fn sweep_uploads(&self, now: SystemTime, busy: &dyn Fn(&UploadFile) -> bool) -> io::Result<()> {
        let mut expired = 0;
        for entry in fs::read_dir(self.layout.uploads())? {
            let name = entry?.file_name();
            if name.to_str().is_some_and(|name| self.expire_upload(name, now, busy)) {
                expired += 1;
            }
        }
        if expired > 0 {
            tracing::info!(expired, "removed uploads that were never finished");
        }
        Ok(())
    }

    fn sweep_corrupt(&self, now: SystemTime) -> io::Result<()> {
        for entry in fs::read_dir(self.layout.corrupt())? {
            let entry = entry?;
            // Moving it here set its change time.
            let moved = u64::try_from(entry.metadata()?.ctime()).unwrap_or(0);
            let moved = UNIX_EPOCH + Duration::from_secs(moved);
            if now.duration_since(moved).is_ok_and(|age| age > CORRUPT_LIFE) {
                remove_quietly(&entry.path());
            }
        }
        Ok(())
    }
}
