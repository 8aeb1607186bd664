//! `kyb export`

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::interchange::containerd::{self, ExportRequest, Volumes};
use kybernate_packager::progress::Progress;
use kybernate_packager::verify::verify_signature;
use kybernate_spec::Location;
use serde_json::json;

use super::{Connection, Failure, keys};
use crate::terminal::{Terminal, bytes};

/// Turn a checkpoint into a file that other tools restore or read.
///
/// Its signature is verified first, then every byte on the way; the file itself is signed by nobody.
/// It appears whole or not at all, and nothing is overwritten.
///
/// containerd: an image layout for `ctr image import`, as a tar when FILE ends with .tar, else as a
/// directory. `ctr container restore --rw --live NAME REF` restores it.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb export registry.example.com/team/job:v1 job.tar --format containerd --key team.pub")]
pub(super) struct Export {
    /// What to export.
    #[arg(value_name = "REF")]
    reference: Location,
    /// Where to.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Whose format.
    #[arg(long)]
    format: Format,
    /// What the checkpoint is called in containerd. Without it, the reference with `-containerd` at
    /// its end.
    #[arg(long)]
    name: Option<String>,
    /// What to mount on DESTINATION, where something of the source's node was mounted.
    #[arg(long = "mount", value_name = "DESTINATION=SOURCE", value_parser = mount)]
    mounts: Vec<(String, String)>,
    /// Leave behind the content of mounts, for which containerd's format has no place.
    #[arg(long)]
    without_volumes: bool,
    /// A public key that is trusted; may be given more than once.
    #[arg(long = "key", value_name = "FILE", required_unless_present = "insecure_no_signature")]
    keys: Vec<PathBuf>,
    /// Export whoever made it.
    #[arg(long, conflicts_with = "keys")]
    insecure_no_signature: bool,
    #[command(flatten)]
    connection: Connection,
}

/// A format of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// containerd's own index of a checkpoint.
    Containerd,
}

impl Export {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let keys = keys::read(&self.keys).await?;
        let name = match self.name {
            Some(name) => name,
            None => name_of(&self.reference)?,
        };
        let mut mounts = BTreeMap::new();
        for (destination, source) in self.mounts {
            if mounts.insert(destination.clone(), source).is_some() {
                return Err(Failure::usage(format!("--mount names {destination} twice")));
            }
        }
        let store = self.connection.open(&self.reference).await?;
        let stored = store.resolve(&self.reference).await?;
        let digest = stored.descriptor.digest.clone();
        if !self.insecure_no_signature {
            verify_signature(&store, &digest, &keys).await?;
        }
        let checkpoint = Checkpoint::of(&store, stored, &self.reference.to_string()).await?;
        let request = ExportRequest {
            target: self.file.clone(),
            name,
            mounts,
            volumes: if self.without_volumes { Volumes::Drop } else { Volumes::Refuse },
        };
        let progress = Progress::default();
        let Format::Containerd = self.format;
        let work = containerd::export(request, &store, &checkpoint, &progress);
        let exported = terminal.show(&progress, Box::pin(work)).await?;
        let facts = json!({
            "digest": digest,
            "file": self.file.display().to_string(),
            "index": exported.index.digest,
            "name": exported.name,
            "image": exported.image,
            "criuBytes": exported.criu_bytes,
        });
        let text = format!(
            "exported {digest}\nto       {}, {} of images\nas       {}\non       {}",
            self.file.display(),
            bytes(exported.criu_bytes),
            exported.name,
            exported.image,
        );
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}

/// Names a checkpoint after its reference: not the same, since that is the runnable image's name.
fn name_of(reference: &Location) -> Result<String, Failure> {
    match reference {
        Location::Registry(reference) => {
            let (registry, repository) = (&reference.registry, &reference.repository);
            let tag = reference.tag.as_ref().map_or("latest", |tag| tag.as_str());
            Ok(format!("{registry}/{repository}:{tag}-containerd"))
        }
        Location::Layout(_) => {
            let text = "say with --name what containerd shall call it, as example.com/job:v1";
            Err(Failure::usage(text))
        }
    }
}

fn mount(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((destination, source))
            if Path::new(destination).is_absolute() && Path::new(source).is_absolute() =>
        {
            Ok((destination.to_owned(), source.to_owned()))
        }
        _ => Err("it must be /path/in/container=/path/on/node".to_owned()),
    }
}
