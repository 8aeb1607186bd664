//! How many files a process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit as far as it goes without privileges: each process of a dump is an open file
/// while it is packed or unpacked, and most systems begin with 1,024.
pub fn raise_limit() {
    let files = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files }) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}
