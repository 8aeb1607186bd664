//! The filters of `seccomp.img`, each with the one that its thread had before it (`criu/seccomp.c`).

use kybernate_packager::criu::messages::{Seccomp, SeccompFilter, ThreadCore};

use super::Refused;

/// `SECCOMP_MODE_FILTER`.
const FILTERED: i32 = 2;
/// `SECCOMP_FILTER_FLAG_TSYNC`.
const FOR_ALL_THREADS: u32 = 1;

/// All filters of a dump, by their numbers.
#[derive(Debug, Default)]
pub(in crate::gate) struct Filters(Vec<Filter>);

/// What matters of a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Filter {
    /// Whether it has a program.
    known: bool,
    /// Whether it is installed for all threads of a process at once.
    synced: bool,
    refused: Refused,
    /// The filter that was there before.
    previous: Option<u32>,
}

impl Filters {
    pub(in crate::gate) fn of(image: &Seccomp) -> Self {
        Self(image.filters.iter().map(Filter::of).collect())
    }

    /// Returns what is refused to a thread; nothing where it may make any call.
    pub(in crate::gate) fn refused(&self, thread: &ThreadCore) -> Result<Option<Refused>, String> {
        match thread.seccomp_mode.unwrap_or(0) {
            0 => Ok(None),
            FILTERED => {
                let number = thread.seccomp_filter.unwrap_or(0);
                let chain = self.chain(number)?;
                Ok(Some(chain.iter().map(|filter| filter.refused).collect()))
            }
            // Strict: it may read, write and end.
            _ => Ok(Some(Refused::ALL)),
        }
    }

    /// Returns what a process's first thread has refused to all the others. CRIU writes filters with that
    /// thread alone when all have the same, and restores them so: each by its own flags.
    pub(in crate::gate) fn shared(&self, first: &ThreadCore) -> Result<Option<Refused>, String> {
        if first.seccomp_mode != Some(FILTERED) {
            return Ok(None);
        }
        let chain = self.chain(first.seccomp_filter.unwrap_or(0))?;
        let synced = chain.iter().filter(|filter| filter.synced);
        let synced: Vec<Refused> = synced.map(|filter| filter.refused).collect();
        Ok((!synced.is_empty()).then(|| synced.into_iter().collect()))
    }

    /// Returns a filter and all those before it.
    fn chain(&self, number: u32) -> Result<Vec<Filter>, String> {
        let (mut chain, mut next) = (Vec::new(), Some(number));
        while let Some(number) = next {
            let found = usize::try_from(number).ok().and_then(|at| self.0.get(at));
            let Some(filter) = found.filter(|filter| filter.known) else {
                return Err(format!("names seccomp filter {number}, which is not there"));
            };
            if chain.len() == self.0.len() {
                return Err("has seccomp filters that follow each other in a circle".to_owned());
            }
            chain.push(*filter);
            next = filter.previous;
        }
        Ok(chain)
    }
}

impl Filter {
    fn of(filter: &SeccompFilter) -> Self {
        Self {
            known: !filter.program.is_empty(),
            synced: filter.flags.unwrap_or(0) & FOR_ALL_THREADS != 0,
            refused: Refused::by_program(&filter.program),
            previous: filter.previous,
        }
    }
}
