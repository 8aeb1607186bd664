//! `kyb provide`

use std::path::PathBuf;

use clap::Args;
use kybernate_packager::agent_api::ProvideRequest;
use kybernate_packager::key::PublicKey;
use kybernate_spec::Location;
use serde_json::json;

use super::agent::{AgentSocket, refused, time_out, times};
use super::identifier::identifier;
use super::restore::Allow;
use super::stage::word;
use super::{Connection, Failure, keys};
use crate::terminal::{Terminal, bytes};

/// Make a checkpoint an image that this node's containerd restores by itself.
///
/// This node's agent verifies it, compares its facts and judges its identity as for a restore. Then
/// the dump goes as a tar into containerd's content store, beside the container image that it needs,
/// as containerd's own checkpoints are kept there: `ctr container restore --rw --live` and any other
/// client of containerd takes it, and the agent is not needed any more. Nothing is overwritten, and
/// `ctr image rm` lets everything go. Ctrl-C cancels, a second Ctrl-C leaves it to the agent.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb provide registry.example.com/team/job:v1\n  \
    ctr container restore --rw --live job-2 registry.example.com/team/job:v1-containerd")]
pub(super) struct Provide {
    /// What to provide.
    #[arg(value_name = "REF")]
    reference: Location,
    /// What the image is called in containerd. Without it, the reference with `-containerd` at its
    /// end.
    #[arg(long)]
    name: Option<String>,
    /// containerd's namespace of the image and of what is restored from it.
    #[arg(long, default_value = "default", value_parser = identifier)]
    namespace: String,
    /// Public keys to trust for this, instead of the node's policy; may be given more than once. The
    /// node's configuration must permit it (`allow_request_keys`).
    #[arg(long = "key", value_name = "FILE", conflicts_with = "insecure_no_signature")]
    keys: Vec<PathBuf>,
    /// Provide it whoever made it. The node's configuration must permit that too.
    #[arg(long)]
    insecure_no_signature: bool,
    /// Cancel when it takes longer than this.
    #[arg(long, value_name = "TIME", value_parser = time_out)]
    timeout: Option<u32>,
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    agent: AgentSocket,
    #[command(flatten)]
    allow: Allow,
}

impl Provide {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let Location::Registry(reference) = &self.reference else {
            return Err(Failure::usage("the agent pulls from registries, not from layouts"));
        };
        let keys = keys::read(&self.keys).await?;
        let request = ProvideRequest {
            reference: reference.to_string(),
            containerd_namespace: self.namespace.clone(),
            image: self.name.unwrap_or_default(),
            allow: Some(self.allow.into()),
            plain_http: self.connection.is_plain(reference),
            insecure_no_signature: self.insecure_no_signature,
            public_keys: keys.iter().map(PublicKey::to_pem).collect(),
            timeout_seconds: self.timeout.unwrap_or_default(),
        };
        let mut client = self.agent.connect().await?;
        let begun = client.provide(request).await.map_err(refused)?.into_inner();
        let done = self.agent.follow(terminal, begun).await?;
        let sizes = done.sizes.unwrap_or_default();
        let facts = json!({
            "operation": done.id,
            "reference": done.reference,
            "digest": done.digest,
            "image": done.image,
            "namespace": self.namespace,
            "staged": word(done.tier()),
            "warnings": done.warnings,
            "timesMicroseconds": times(&done),
            "sizes": {
                "dumpBytes": sizes.dump_bytes,
                "pageBytes": sizes.page_bytes,
                "transferredBytes": sizes.transferred_bytes,
            },
        });
        let within = match &*self.namespace {
            "default" => String::new(),
            other => format!(" -n {other}"),
        };
        let text = format!(
            "provided {}\nas       {}, {} received{}\nrestore  ctr{within} container restore --rw \
             --live NAME {}",
            done.digest,
            done.image,
            bytes(sizes.transferred_bytes),
            word(done.tier())
                .map(|tier| format!(", the dump was ready in {tier}"))
                .unwrap_or_default(),
            done.image,
        );
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}
