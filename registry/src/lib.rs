//! An OCI registry on a directory.
//!
//! Reading order: [`cli`] and [`config`] say what can be asked and set, [`server`] accepts connections and drains them,
//! [`api`] answers every request over [`route`], [`range`] and [`condition`], and [`error`] is the one place where
//! a failure becomes a reply. Below HTTP, [`upload`] takes a body apart into durable bytes, and
//! [`store`] keeps them: content by digest, and small records that say which repository may show
//! which content; [`index`] lists them faster. [`access`] says who may do what, [`tls`] encrypts.
//! [`metrics`] counts, [`telemetry`] logs, [`trace`] tells collectors, `notify` tells others what happens. [`tasks`] is the work that shutdown
//! waits for.

pub mod access;
pub mod admin;
pub mod api;
pub mod app;
pub mod cli;
pub mod condition;
pub mod config;
pub mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod gc;
pub mod index;
mod janitor;
pub mod maintain;
pub mod manifest;
pub mod metrics;
mod notify;
mod places;
mod quota;
pub mod range;
mod request_id;
pub mod retention;
pub mod route;
pub mod scrub;
pub mod server;
pub mod store;
pub mod tasks;
pub mod telemetry;
pub mod tls;
pub mod trace;
pub mod upload;
