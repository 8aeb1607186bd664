//! `[staging]`: where dumps lie while they are taken or restored, and where checkpoints are kept
//! ready for a restore.

use std::path::{Path, PathBuf};

use bytesize::ByteSize;

use super::reader::Reader;
use super::{ConfigError, path};

/// Smallest budget: room for one small container.
const BUDGET_MIN: u64 = 1 << 20;
/// The largest. Of still more a tmpfs would have no limit at all: its pages are counted past 64 bits.
const BUDGET_MAX: u64 = 1 << 50;

/// Where dumps are staged.
#[derive(Clone, Debug, PartialEq)]
pub struct StagingConfig {
    /// A directory on a tmpfs, used while a dump fits there.
    pub tmpfs: PathBuf,
    /// Share of the available memory that a dump may take there.
    pub memory_share: f64,
    /// Where checkpoints are kept ready in memory.
    pub ram: Option<TierConfig>,
    /// Where checkpoints are kept ready on disk.
    pub nvme: Option<TierConfig>,
}

/// A place where checkpoints are kept ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierConfig {
    /// The directory, for this alone.
    pub directory: PathBuf,
    /// Most bytes of all checkpoints there together.
    pub budget: u64,
    /// Whether all of a checkpoint is read and proven before each use.
    pub verify: bool,
}

/// Reads the table. `root` is the agent's directory.
pub(super) fn read(file: &mut Reader<'_>, root: &Path) -> StagingConfig {
    const DEFAULT_SHARE: f64 = 0.5;
    let mut table = file.table("staging");
    let tmpfs = path(&mut table, "tmpfs", None, "/run/kybernate/stage");
    let memory_share = table.number("memory_share").unwrap_or(DEFAULT_SHARE);
    if !(0.0..=1.0).contains(&memory_share) {
        let place = table.place("memory_share");
        let written = memory_share.to_string();
        table.wrong(ConfigError::Bounds(place, "between 0 and 1", written));
    }
    let ram = tier(&mut table, "ram", "/run/kybernate/ram", false);
    let nvme = tier(&mut table, "nvme", &root.join("nvme").display().to_string(), true);
    // What lies in these is removed when the agent starts, or is the agent's own.
    let mut taken =
        vec![tmpfs.clone(), root.join("stage"), root.join("operations"), root.join("suspended")];
    for (name, tier) in [("ram", &ram), ("nvme", &nvme)] {
        let Some(tier) = tier else { continue };
        let own = &tier.directory;
        if let Some(other) = taken.iter().find(|t| t.starts_with(own) || own.starts_with(t)) {
            let place = table.place(&format!("{name}.directory"));
            let wrong = ConfigError::Overlap(place, own.clone(), other.clone());
            table.wrong(wrong);
        }
        taken.push(own.clone());
    }
    table.finish();
    StagingConfig { tmpfs, memory_share, ram, nvme }
}

/// Reads one tier; there is none without a budget.
fn tier(staging: &mut Reader<'_>, name: &str, default: &str, is_disk: bool) -> Option<TierConfig> {
    let mut table = staging.table(name);
    let directory = path(&mut table, "directory", None, default);
    let budget = size(&mut table, "budget");
    // What lies in memory is as good as the memory.
    let verify = is_disk && table.flag("verify").unwrap_or(true);
    table.finish();
    Some(TierConfig { directory, budget: budget?, verify })
}

fn size(table: &mut Reader<'_>, key: &str) -> Option<u64> {
    let text = table.text(key)?;
    let size = text.parse::<ByteSize>().ok().map(|size| size.0);
    let size = size.filter(|size| (BUDGET_MIN..=BUDGET_MAX).contains(size));
    if size.is_none() {
        let place = table.place(key);
        table.wrong(ConfigError::Bounds(place, "a size from \"1MiB\" to \"1PiB\"", text));
    }
    size
}
