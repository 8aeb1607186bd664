//! `kyb export`

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args, ValueEnum};
use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::interchange::{Volumes, containerd, cri};
use kybernate_packager::progress::Progress;
use kybernate_packager::store::Store;
use kybernate_spec::Location;
use serde_json::{Value, json};

use super::trust::Trust;
use super::{Connection, Failure};
use crate::terminal::{Terminal, bytes, say};

/// Turn a checkpoint into a file that other tools restore or read.
///
/// Its signature is verified first, then every byte on the way; the file itself is signed by nobody.
/// It appears whole or not at all, and nothing is overwritten.
///
/// containerd: an image layout for `ctr image import`, as a tar when FILE ends with .tar, else as a
/// directory. `ctr container restore --rw --live NAME REF` restores it.
///
/// cri: the archive that kubelet's checkpoint API leaves with CRI-O or containerd, which
/// checkpointctl reads.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("trusted")
        .args(["keys", "policy", "insecure_no_signature"])
        .required(true),
    after_help = "Example:\n  \
        kyb export registry.example.com/team/job:v1 job.tar --format containerd --key team.pub"
)]
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
    #[command(flatten)]
    trust: Trust,
    /// Export whoever made it.
    #[arg(long)]
    insecure_no_signature: bool,
    #[command(flatten)]
    connection: Connection,
}

/// A format of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// containerd's own index of a checkpoint.
    Containerd,
    /// The archive of kubelet's checkpoint API: CRI-O's, containerd's.
    Cri,
    /// Podman's export; comes in only.
    Podman,
}

impl Export {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        if self.format == Format::Podman {
            let text = "Podman restores only what Podman's own configuration comes with: \
                        export --format cri for checkpointctl and CRI-O";
            return Err(Failure::usage(text));
        }
        let trusted = self.trust.read().await?;
        let mut mounts = BTreeMap::new();
        for (destination, source) in &self.mounts {
            if mounts.insert(destination.clone(), source.clone()).is_some() {
                return Err(Failure::usage(format!("--mount names {destination} twice")));
            }
        }
        let name = match (&self.name, self.format) {
            (Some(name), _) => name.clone(),
            (None, Format::Containerd) => name_of(&self.reference)?,
            (None, _) => String::new(),
        };
        let store = self.connection.open(&self.reference).await?;
        let stored = store.resolve(&self.reference).await?;
        let digest = stored.descriptor.digest.clone();
        if !self.insecure_no_signature {
            let found = trusted.check(&store, &stored, &self.reference).await?;
            if !found.is_signed() {
                say(&found.tell());
            }
        }
        let checkpoint = Checkpoint::of(&store, stored, &self.reference.to_string()).await?;
        let (more, text) = if self.format == Format::Containerd {
            self.containerd(name, mounts, (&store, &checkpoint), terminal).await?
        } else {
            self.cri(mounts, (&store, &checkpoint), terminal).await?
        };
        let file = self.file.display().to_string();
        let mut facts = json!({ "digest": digest, "file": file });
        if let (Some(facts), Some(more)) = (facts.as_object_mut(), more.as_object()) {
            facts.extend(more.clone());
        }
        let text = format!("exported {digest}\nto       {file}{text}");
        terminal.print(&facts, &text).map_err(Failure::failed)
    }

    async fn containerd(
        &self,
        name: String,
        mounts: BTreeMap<String, String>,
        (store, checkpoint): (&Store, &Checkpoint),
        terminal: &Terminal,
    ) -> Result<(Value, String), Failure> {
        let target = self.file.clone();
        let volumes = self.volumes();
        let request = containerd::ExportRequest { target, name, mounts, volumes };
        let progress = Progress::default();
        let work = containerd::export(request, store, checkpoint, &progress);
        let exported = terminal.show(&progress, Box::pin(work)).await?;
        let text = format!(
            ", {} of images
as       {}
on       {}",
            bytes(exported.criu_bytes),
            exported.name,
            exported.image
        );
        let more = json!({
            "index": exported.index.digest,
            "name": exported.name,
            "image": exported.image,
            "criuBytes": exported.criu_bytes,
        });
        Ok((more, text))
    }

    async fn cri(
        &self,
        mounts: BTreeMap<String, String>,
        (store, checkpoint): (&Store, &Checkpoint),
        terminal: &Terminal,
    ) -> Result<(Value, String), Failure> {
        let request = cri::ExportRequest {
            target: self.file.clone(),
            reference: self.reference.to_string(),
            mounts,
            volumes: self.volumes(),
        };
        let progress = Progress::default();
        let work = cri::export(request, store, checkpoint, &progress);
        let exported = terminal.show(&progress, Box::pin(work)).await?;
        let text = format!(
            ", {}
on       {}",
            bytes(exported.bytes),
            exported.image
        );
        Ok((json!({ "image": exported.image, "bytes": exported.bytes }), text))
    }

    const fn volumes(&self) -> Volumes {
        if self.without_volumes { Volumes::Drop } else { Volumes::Refuse }
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
