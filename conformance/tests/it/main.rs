//! Checks of the workspace itself, and of its programs on two real nodes.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failed step here is a failed test, and its words are wanted"
)]

mod apparmor;
mod calls;
mod cgroups;
mod clients;
mod cluster;
mod command_lines;
mod connections;
mod copies;
mod emulated;
mod expiry;
mod failures;
mod gpus;
mod harness;
mod hooks;
mod increments;
mod interchange;
mod journeys;
mod looking;
mod names;
mod networks;
mod nodes;
mod oci;
mod pods;
mod pre_copies;
mod preflights;
mod privileges;
mod provisions;
mod refusals;
mod runtimes;
mod shared_memory;
mod stagings;
mod strangers;
mod suspensions;
mod traces;
mod trust;
mod units;
mod vectors;
mod workloads;
mod workspace;
mod written;
