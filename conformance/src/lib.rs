//! Runs the other crates' programs on two real nodes.
//!
//! Reading order: [`root`] makes the file systems that nodes are overlays of, [`node`] starts one,
//! [`testbed`] two with a network between them, [`preflight`] says what a machine lacks; [`process`]
//! and [`command`] are how programs are started and ended. [`image`] builds the workload's image, [`programs`] one of
//! other people's;
//! [`scenario`] puts registry, agents and keys together for the demo, the tests and the benchmark.
//! [`cluster`] is Kubernetes on the nodes, [`machine`] another kernel below all of them.
//! [`oci`] is the conformance suite for any OCI registry, [`vectors`] the one for readers of the
//! artifact; they need none of the others.

mod bench;
pub mod cli;
pub mod cluster;
pub mod command;
mod demo;
pub mod image;
pub mod machine;
pub mod node;
pub mod oci;
pub mod preflight;
pub mod process;
pub mod programs;
pub mod root;
pub mod scenario;
pub mod testbed;
pub mod vectors;
