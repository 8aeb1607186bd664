//! The packager against real registries, the real cosign, and the built `kyb`.
#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]
#![expect(clippy::panic, reason = "a failed step here is a failed test")]
#![expect(clippy::indexing_slicing, reason = "a failed step here is a failed test")]
#![expect(clippy::print_stderr, reason = "a skipped test says so")]

mod agent;
mod artifact;
mod claims;
mod commands;
mod compat;
mod copying;
mod cosign;
mod deep;
mod door;
mod dump;
mod hostile;
mod increments;
mod inspecting;
mod interchange;
mod kyb;
mod login;
mod looking;
mod policies;
mod proxy;
mod registry;
mod remote;
mod schema;
mod signing;
mod trace;
mod transfers;
mod unpacking;
mod usage;
