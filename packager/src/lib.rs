//! Dump to artifact and back, registry client, signing, and the `kyb` command.
//!
//! Reading order: [`store`] is where artifacts are kept ([`remote`] and [`layout`] are its kinds);
//! [`pack`] makes an artifact from a dump directory, [`artifact`] opens one, and [`unpack`] makes a
//! dump directory of it again; [`inspect`] and [`inside`] look into one,
//! [`difference`] and [`listing`] at several; [`policy`] says whose signature counts; [`criu`] and
//! [`images_pack`] know the files of a dump; [`interchange`] knows the checkpoints of others;
//! [`runtime_spec`] knows what runtimes are told; [`compat`] tells whether a [`node`] can restore it;
//! [`agent_api`] is the node agent's API.

pub mod agent_api;
pub mod artifact;
mod bundle;
mod checked;
pub mod claim;
pub mod compat;
pub mod copy;
pub mod criu;
pub mod difference;
pub mod docker_config;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod images_pack;
pub mod inside;
pub mod inspect;
pub mod interchange;
pub mod key;
pub mod layout;
mod leftovers;
pub mod listing;
pub mod node;
pub mod open_files;
pub mod outline;
pub mod pack;
pub mod policy;
pub mod progress;
pub mod remote;
pub mod runtime_spec;
pub mod sign;
pub mod spans;
pub mod store;
mod stored;
pub mod trace_parent;
pub mod unix_socket;
pub mod unpack;
pub mod verify;
pub mod walk;
mod wanted;
