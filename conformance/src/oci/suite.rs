//! All checks, in the order of the specification.

use super::check::{Check, Checks};

mod base;
mod blob;
mod catalog;
mod chunk;
mod condition;
mod delete;
mod digest;
mod error;
mod filter;
mod manifest;
mod method;
mod mount;
mod name;
mod parallel;
mod push;
mod put;
mod range;
mod referrer;
mod repeat;
mod session;
mod tag;
mod tags;

/// Returns every check of both editions.
pub fn all() -> Vec<Check> {
    let mut checks = Checks::default();
    base::add(&mut checks);
    name::add(&mut checks);
    tag::add(&mut checks);
    digest::add(&mut checks);
    manifest::add(&mut checks);
    blob::add(&mut checks);
    range::add(&mut checks);
    condition::add(&mut checks);
    push::add(&mut checks);
    chunk::add(&mut checks);
    session::add(&mut checks);
    mount::add(&mut checks);
    put::add(&mut checks);
    tags::add(&mut checks);
    referrer::add(&mut checks);
    filter::add(&mut checks);
    delete::add(&mut checks);
    repeat::add(&mut checks);
    parallel::add(&mut checks);
    error::add(&mut checks);
    method::add(&mut checks);
    catalog::add(&mut checks);
    checks.finish()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::all;
    use crate::oci::check::{Edition, Level};

    #[test]
    fn identifiers_are_unique_and_fit_into_repository_names() {
        let mut seen = BTreeSet::new();
        for check in all() {
            let name: kybernate_spec::RepositoryName = check.id.parse().unwrap();
            assert!(seen.insert(name.to_string()), "{} is there twice", check.id);
            assert!(!check.section.is_empty(), "{} cites nothing", check.id);
        }
    }

    #[test]
    fn there_are_enough_of_them() {
        let checks = all();
        let count = |edition, level| {
            let of = |check: &&crate::oci::check::Check| check.need.in_edition(edition) == level;
            checks.iter().filter(of).count()
        };
        assert!(checks.len() - count(Edition::Stable, None) >= 300);
        assert!(count(Edition::Stable, Some(Level::Must)) >= 200);
        assert!(count(Edition::Stable, None) >= 10, "the main branch adds something");
    }
}
