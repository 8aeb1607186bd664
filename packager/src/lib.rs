//! Dump to artifact and back, registry client, signing, and the `kyb` command.
//!
//! Reading order: [`store`] is where artifacts are kept ([`remote`] and [`layout`] are its kinds);
//! [`pack`] makes an artifact from a dump directory and [`unpack`] a dump directory from an
//! artifact; [`agent_api`] is the node agent's API.

pub mod agent_api;
pub mod layout;
pub mod progress;
pub mod remote;
pub mod store;
