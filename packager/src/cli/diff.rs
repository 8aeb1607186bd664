//! `kyb diff`

use clap::Args;
use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::difference::{
    Change, Comparison, Difference, PAGE_BYTES, PageCounts, RegionDifference,
};
use kybernate_packager::progress::Progress;
use kybernate_spec::Location;

use super::inspect::memory_kind;
use super::page::{Cell, Page, Table, Tone};
use super::{Connection, Failure};
use crate::terminal::{Terminal, bytes, say};

/// Rows shown of each table.
const ROWS: usize = 40;

/// Show which memory changed between two checkpoints of a container.
///
/// Pages are found by process and address. What is stored in one place is the same; the rest is
/// compared by page hashes, or by fetching the chunks it is in where there are none: how much that
/// is, is said before.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb diff registry.example.com/team/job:v1 registry.example.com/team/job:v2\n\n\
    Counts are pages of 4 KiB: changed, added (stored in the second only), removed (not in the \
    second's dump), zeroed, and unknown (not compared, with --no-fetch).")]
pub(super) struct Diff {
    /// The earlier one.
    #[arg(value_name = "REF")]
    from: Location,
    /// The later one.
    #[arg(value_name = "REF")]
    to: Location,
    /// Fetch no pages and no page hashes: tell what is known without.
    #[arg(long)]
    no_fetch: bool,
    /// Show everything: also what has not changed, and long lists whole.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    connection: Connection,
}

impl Diff {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let (from, to) =
            futures::try_join!(self.connection.open(&self.from), self.connection.open(&self.to))?;
        let (old, new) = futures::try_join!(
            Checkpoint::open(&from, &self.from),
            Checkpoint::open(&to, &self.to)
        )?;
        let comparison = Box::pin(Comparison::begin((&from, old), (&to, new))).await?;
        let wanted = comparison.bytes_to_fetch();
        let difference = if self.no_fetch {
            comparison.as_far_as_known()
        } else {
            if wanted > 0 {
                say(&format!("fetching {} to compare what is stored twice", bytes(wanted)));
            }
            let progress = Progress::default();
            Box::pin(terminal.show(&progress, comparison.finish(&progress))).await?
        };
        terminal.print_page(&difference, &tell(&difference, self.all)).map_err(Failure::failed)
    }
}

fn tell(difference: &Difference, all: bool) -> Page {
    let mut page = Page::default();
    page.fact("from", difference.from.to_string());
    let based = if difference.based { ", based on it" } else { "" };
    page.fact("to", format!("{}{based}", difference.to));
    let pages = &difference.pages;
    page.fact("differing", amount(pages.differing()));
    page.fact("unchanged", amount(pages.unchanged));
    if pages.unknown > 0 {
        page.fact("unknown", Cell::new(&amount(pages.unknown), Tone::Odd));
    }
    if difference.fetched_bytes > 0 {
        page.fact("fetched", bytes(difference.fetched_bytes));
    }
    let rows = if all { usize::MAX } else { ROWS };
    let mut table = counted(&["PID", "WHAT"], &["NAME"], rows);
    for process in difference
        .processes
        .iter()
        .filter(|process| all || process.change != Change::Kept || !process.pages.is_quiet())
    {
        let mut row = vec![Cell::number(&process.pid.to_string()), change(process.change)];
        row.extend(counts(&process.pages));
        row.push((&process.name).into());
        table.row(row);
    }
    page.table("PROCESSES", table);
    let regions = difference.processes.iter().flat_map(|process| &process.regions);
    let mut table = counted(&["PID", "START", "LENGTH", "WHAT"], &["KIND"], rows);
    for region in regions
        .chain(&difference.shared)
        .filter(|region| all || region.change != Change::Kept || !region.pages.is_quiet())
    {
        table.row(region_row(region));
    }
    page.table("MEMORY", table);
    page
}

fn region_row(region: &RegionDifference) -> Vec<Cell> {
    let mut row = vec![
        Cell::number(&region.pid.to_string()),
        Cell::number(&format!("{:#x}", region.start)),
        Cell::number(&bytes(region.end.saturating_sub(region.start))),
        change(region.change),
    ];
    row.extend(counts(&region.pages));
    let path = region.path.as_deref().unwrap_or_default();
    row.push(format!("{} {path}", memory_kind(region.kind)).into());
    row
}

fn counted(first: &[&str], last: &[&str], rows: usize) -> Table {
    let counts = ["CHANGED", "ADDED", "REMOVED", "ZEROED", "UNCHANGED", "UNKNOWN"];
    Table::new(&[first, &counts, last].concat(), rows)
}

fn counts(pages: &PageCounts) -> [Cell; 6] {
    let all =
        [pages.changed, pages.added, pages.removed, pages.zeroed, pages.unchanged, pages.unknown];
    all.map(|count| Cell::number(&count.to_string()))
}

fn change(change: Change) -> Cell {
    match change {
        Change::Kept => "kept".into(),
        Change::Added => Cell::new("added", Tone::Good),
        Change::Removed => Cell::new("removed", Tone::Bad),
    }
}

fn amount(pages: u64) -> String {
    format!("{pages} pages, {}", bytes(pages.saturating_mul(PAGE_BYTES)))
}
