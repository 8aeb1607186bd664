//! The filters of `seccomp.img`, each with the one that its thread had before it (`criu/seccomp.c`).

use std::collections::BTreeMap;

use kybernate_packager::criu::messages::{Seccomp, SeccompFilter, ThreadCore};

use super::Refused;

/// `SECCOMP_MODE_FILTER`.
const FILTERED: i32 = 2;
/// `SECCOMP_FILTER_FLAG_TSYNC`.
const FOR_ALL_THREADS: u32 = 1;
/// With `SECCOMP_FILTER_FLAG_LOG`: the kernel tells of no other.
const FLAGS: u32 = FOR_ALL_THREADS | 2;

/// All filters of a dump, by their numbers.
#[derive(Debug, Default)]
pub(in crate::gate) struct Filters(Vec<Filter>);

/// What matters of a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Filter {
    /// Nothing where it has no program that CRIU and the kernel take as it is.
    refused: Option<Refused>,
    /// How it is installed.
    flags: u32,
    /// The filter that was there before.
    previous: Option<u32>,
}

impl Filters {
    pub(in crate::gate) fn of(image: &Seccomp) -> Self {
        // Each process has its own of the same program.
        let mut known: BTreeMap<&[u8], Option<Refused>> = BTreeMap::new();
        let filters = image.filters.iter().map(|filter| {
            let SeccompFilter { program, previous, flags } = filter;
            let refused = known.entry(program).or_insert_with(|| Refused::by_program(program));
            Filter { refused: *refused, flags: flags.unwrap_or(0), previous: *previous }
        });
        Self(filters.collect())
    }

    /// Returns what is refused to a process's first thread, and to the `others`, of which some may make any
    /// call. CRIU writes filters with the first thread alone when all have the same, and restores them so:
    /// for all of them, which the kernel does where no other has any.
    pub(in crate::gate) fn refused<'a>(
        &self,
        first: &ThreadCore,
        others: impl Iterator<Item = &'a ThreadCore>,
    ) -> Result<Vec<Option<Refused>>, String> {
        let (own, shared) = self.of_thread(first)?;
        let mut all = vec![own];
        for other in others {
            let (own, synced) = self.of_thread(other)?;
            if synced.is_some() || shared.is_some() && own.is_some() {
                return Err("has seccomp filters beside those that are for all threads".to_owned());
            }
            all.push(own.or(shared));
        }
        Ok(all)
    }

    /// Returns what is refused to a thread, and what of that is for all threads of its process; nothing where
    /// it has no filters, or none that is.
    fn of_thread(&self, thread: &ThreadCore) -> Result<(Option<Refused>, Option<Refused>), String> {
        match thread.seccomp_mode.unwrap_or(0) {
            0 => Ok((None, None)),
            FILTERED => {
                let chain = self.chain(thread.seccomp_filter.unwrap_or(0))?;
                let synced = chain.iter().filter(|(_, flags)| flags & FOR_ALL_THREADS != 0);
                let synced: Vec<Refused> = synced.map(|(refused, _)| *refused).collect();
                let shared = (!synced.is_empty()).then(|| synced.into_iter().collect());
                Ok((Some(chain.iter().map(|(refused, _)| *refused).collect()), shared))
            }
            // Strict: it may read, write and end.
            _ => Ok((Some(Refused::ALL), None)),
        }
    }

    /// Returns what a filter and all those before it refuse, with their flags.
    fn chain(&self, number: u32) -> Result<Vec<(Refused, u32)>, String> {
        let (mut chain, mut next) = (Vec::new(), Some(number));
        while let Some(number) = next {
            let found = usize::try_from(number).ok().and_then(|at| self.0.get(at));
            let Some(filter) = found else {
                return Err(format!("names seccomp filter {number}, which is not there"));
            };
            let Some(refused) = filter.refused else {
                return Err(format!("names seccomp filter {number}, which is no program"));
            };
            if filter.flags & !FLAGS != 0 {
                return Err(format!(
                    "names seccomp filter {number}, with flags that no kernel tells of"
                ));
            }
            if chain.len() == self.0.len() {
                return Err("has seccomp filters that follow each other in a circle".to_owned());
            }
            chain.push((refused, filter.flags));
            next = filter.previous;
        }
        Ok(chain)
    }
}
