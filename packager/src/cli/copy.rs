//! `kyb copy`

use clap::Args;
use kybernate_packager::copy::copy;
use kybernate_packager::progress::Progress;
use kybernate_spec::Location;
use serde_json::json;

use super::{Connection, Failure};
use crate::terminal::{Terminal, bytes};

/// Copy a checkpoint, or any image, with everything that belongs to it.
///
/// Children, blobs and signatures are copied, only what is missing, and the digest stays the same.
/// A copy that was cut off goes on where it stopped when it is repeated. The tag comes last.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb copy east.example.com/team/job:v1 west.example.com/team/job:v1\n  \
    kyb copy registry.example.com/team/job:v1 oci:/media/stick/job:v1")]
pub(super) struct Copy {
    /// What to copy.
    #[arg(value_name = "SRC")]
    source: Location,
    /// Where to. Without a tag, the source's tag is used.
    #[arg(value_name = "DST")]
    target: Location,
    #[command(flatten)]
    connection: Connection,
}

impl Copy {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        if self.target.digest().is_some() {
            return Err(Failure::usage(format!(
                "{} names a digest: a copy keeps the digest it has",
                self.target
            )));
        }
        let tag = self.target.tag().or(self.source.tag()).cloned();
        let source = self.connection.open(&self.source).await?;
        let root = source.resolve(&self.source).await?;
        let target = self.connection.open(&self.target).await?;
        let digest = root.descriptor.digest.clone();
        let progress = Progress::default();
        let work = copy(&source, root, &target, tag.as_ref(), &progress);
        let copied = terminal.show(&progress, Box::pin(work)).await?;
        let facts = json!({
            "digest": digest,
            "tag": tag,
            "manifests": copied.manifests,
            "referrers": copied.referrers,
            "blobs": {
                "sent": copied.blobs_sent,
                "present": copied.blobs_present,
                "mounted": copied.blobs_mounted,
            },
            "bytesSent": copied.bytes_sent,
        });
        let text = format!(
            "copied {digest}\n       {} sent in {} blobs, {} were there, {} mounted; \
             {} manifests, {} of them referrers",
            bytes(copied.bytes_sent),
            copied.blobs_sent,
            copied.blobs_present,
            copied.blobs_mounted,
            copied.manifests,
            copied.referrers,
        );
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}
