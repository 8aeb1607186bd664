//! CRIU's plugins, which CRIU itself loads: what bears on them is where they are and how they are
//! called. A plugin that has saved something enters its name into the dump's inventory (since CRIU
//! 4.1), and CRIU restores nothing without it.

use std::path::Path;

/// The plugin that moves the memory of NVIDIA's GPUs, by its name in an inventory.
pub(crate) const CUDA: &str = "cuda_plugin";

/// Where CRIU's plugins are (`criu/config.c`, and Debian's place).
pub(crate) const PLACES: [&str; 3] =
    ["/usr/lib/criu", "/usr/lib/x86_64-linux-gnu/criu", "/usr/local/lib/criu"];

/// Whether this node has a plugin.
pub(crate) fn is_here(name: &str) -> bool {
    PLACES.iter().any(|place| Path::new(place).join(format!("{name}.so")).exists())
}
