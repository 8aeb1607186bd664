//! How far a dump is: CRIU tells nobody, but what it writes can be seen.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use kybernate_packager::progress::Progress;

/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Does `work`, which writes files into `directory`, and counts their bytes as this step's.
/// `expected` is how many there will be, about.
pub(super) async fn measure<T>(
    directory: &Path,
    expected: u64,
    progress: &Progress,
    work: impl Future<Output = T>,
) -> T {
    progress.expect(expected);
    let mut work = std::pin::pin!(work);
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    let mut seen = 0;
    loop {
        tokio::select! {
            done = &mut work => return done,
            _ = ticks.tick() => {
                let directory = directory.to_owned();
                let look = tokio::task::spawn_blocking(move || bytes(directory));
                let now = look.await.unwrap_or_default().max(seen);
                progress.advance(now - seen);
                seen = now;
            }
        }
    }
}

/// Returns how many bytes the files of a directory have, as far as they can be looked at.
pub(super) fn bytes(directory: PathBuf) -> u64 {
    let Ok(entries) = fs::read_dir(directory) else { return 0 };
    let sizes = entries.filter_map(|entry| Some(entry.ok()?.metadata().ok()?.len()));
    sizes.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_written_counts_as_done() {
        let directory = tempfile::tempdir().unwrap();
        let progress = Progress::default();
        progress.step("dump");
        let work = async {
            for length in [1000, 3000] {
                fs::write(directory.path().join("pages-1.img"), vec![0; length]).unwrap();
                tokio::time::timeout(2 * LOOK_EVERY, std::future::pending::<()>())
                    .await
                    .unwrap_err();
            }
        };
        measure(directory.path(), 4000, &progress, work).await;
        let now = progress.snapshot();
        assert_eq!((now.done, now.total), (3000, 4000));
    }
}
