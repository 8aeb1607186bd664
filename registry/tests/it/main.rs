//! The registry over real sockets, on real directories.

mod access;
mod access_policy;
mod corruption;
mod crash;
mod faults;
mod full;
mod gc;
mod harness;
mod hostile;
mod immutable;
mod index;
mod list;
mod manifest;
mod model;
mod operations;
mod process;
mod pull;
mod push;
mod quota;
mod referrers;
mod restart;
mod retention;
mod retry;
mod scrub;
mod serve;
mod soak;
