//! The node agent: takes and restores checkpoints through containerd.
//!
//! Reading order: [`config`] is what the agent is told, [`app`] what its parts share; [`api`] serves
//! the requests, [`operations`] keeps what became of them. `checkpoint` and `restore` do the
//! work, [`guardian`] brings a paused source back when the agent cannot, [`hooks`] are
//! the operator's programs around a checkpoint, [`gate`] reads CRIU's
//! images before CRIU does, [`staging`] keeps checkpoints ready, [`suspend`] freezes containers in
//! place, [`gpu`] moves GPU memory, `undo` takes away what a failure leaves, `waiting` says what that waits for. [`access`] says who may
//! ask, and [`door`] lets callers in from the network. [`runtime`] is containerd.

pub mod access;
pub mod api;
pub mod app;
mod cgroup;
mod checkpoint;
pub mod config;
mod connections;
mod container;
mod criu_config;
mod criu_log;
pub mod door;
mod dumper;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod gate;
pub mod gpu;
pub mod guardian;
mod health;
pub mod hooks;
mod layer;
mod links;
mod local;
pub mod memory;
pub mod metrics;
mod mounts;
mod network;
mod node;
pub mod operations;
mod orphan;
mod patience;
pub mod pre_copy;
mod preflight;
mod private;
mod process;
mod reload;
pub mod rescue;
mod restore;
mod revive;
mod room;
mod rootfs;
pub mod runtime;
pub mod serve;
mod stage;
pub mod staging;
pub mod suspend;
pub mod tasks;
pub mod trust;
mod undo;
mod vfork;
mod waiting;
pub mod wrapper;
