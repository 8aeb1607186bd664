//! Runs the other crates' programs on two real nodes.
//!
//! Reading order: [`root`] makes the file systems that nodes are overlays of, [`node`] starts one,
//! [`testbed`] two with a network between them; [`process`] and [`command`] are how programs are
//! started and ended.

pub mod cli;
pub mod command;
pub mod image;
pub mod node;
pub mod process;
pub mod root;
pub mod testbed;
