//! `kyb inspect`

use std::fmt::Write as _;

use clap::Args;
use kybernate_packager::inspect::{Inspected, inspect};
use kybernate_spec::Location;

use super::{Connection, Failure};
use crate::terminal::{Terminal, bytes};

/// Show what a checkpoint says about itself: facts, sizes, parts, signatures.
///
/// Nothing large is moved, and nothing is verified: `kyb verify` does that.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb inspect registry.example.com/team/job:v1 --json")]
pub(super) struct Inspect {
    /// What to look at.
    #[arg(value_name = "REF")]
    reference: Location,
    #[command(flatten)]
    connection: Connection,
}

impl Inspect {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let store = self.connection.open(&self.reference).await?;
        let inspected = inspect(&store, &self.reference).await?;
        terminal.print(&inspected, &tell(&inspected)).map_err(Failure::failed)
    }
}

fn tell(inspected: &Inspected) -> String {
    let config = &inspected.config;
    let sizes = &config.sizes;
    let mut lines = Lines::default();
    lines.add("checkpoint", &inspected.digest.to_string());
    lines.add("format", &config.version);
    lines.add_some("taken", config.created.as_deref());
    lines.add_some("not after", config.not_after.as_deref());
    let source = &config.source;
    lines.add_some("container", source.container.as_deref());
    lines.add_some("namespace", source.namespace.as_deref());
    lines.add_some("cluster", source.cluster.as_deref());
    lines.add_some("image", source.image.as_deref());
    match &config.node {
        None => lines.add("node", "unknown: packed without facts"),
        Some(node) => {
            let text = format!(
                "{} {}, kernel {}, cgroup {}, CRIU {}, {}, containerd {}",
                node.os,
                node.architecture,
                node.kernel,
                node.cgroup,
                node.criu,
                node.runtime,
                node.containerd
            );
            lines.add("node", &text);
        }
    }
    let text = format!(
        "{} processes, {} threads; {} in the dump, {} of pages stored",
        sizes.processes,
        sizes.threads,
        bytes(sizes.dump_bytes),
        bytes(sizes.page_bytes)
    );
    lines.add("content", &text);
    for layer in &inspected.layers {
        let title = layer.title.as_deref().unwrap_or("-");
        lines.add("  part", &format!("{title} {} {}", bytes(layer.bytes), layer.digest));
    }
    let runnable = inspected.runnable.as_ref().map_or_else(
        || "none".to_owned(),
        |layers| format!("{} layers, {}", layers.len(), bytes(inspected.runnable_bytes)),
    );
    lines.add("runnable", &runnable);
    let signatures = match inspected.unverified_signatures.len() {
        0 => "none".to_owned(),
        count => format!("{count}, not verified here"),
    };
    lines.add("signatures", &signatures);
    lines.text
}

/// Lines of a name and what it is.
#[derive(Default)]
struct Lines {
    text: String,
}

impl Lines {
    fn add(&mut self, name: &str, what: &str) {
        // Writing to a string does not fail.
        let _written = writeln!(self.text, "{name:<11} {what}");
    }

    fn add_some(&mut self, name: &str, what: Option<&str>) {
        if let Some(what) = what {
            self.add(name, what);
        }
    }
}
