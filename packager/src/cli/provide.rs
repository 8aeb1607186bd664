//! `kyb provide`

use clap::Args;
use kybernate_packager::agent_api::ProvideRequest;
use kybernate_spec::Location;
use serde_json::json;

use super::Failure;
use super::agent::refused;
use super::bring::{Bring, facts, received_or_staged};
use super::identifier::identifier;
use super::restore::Allow;
use super::stage::word;
use crate::terminal::Terminal;

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
    #[command(flatten)]
    bring: Bring,
    #[command(flatten)]
    allow: Allow,
}

impl Provide {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let asked = self.bring.ask(&self.reference).await?;
        let request = ProvideRequest {
            reference: asked.reference,
            containerd_namespace: self.namespace.clone(),
            image: self.name.unwrap_or_default(),
            allow: Some(self.allow.into()),
            plain_http: asked.plain_http,
            insecure_no_signature: asked.insecure_no_signature,
            public_keys: asked.public_keys,
            timeout_seconds: asked.timeout_seconds,
        };
        let mut client = self.bring.agent.connect().await?;
        let begun = client.provide(request).await.map_err(refused)?.into_inner();
        let done = self.bring.agent.follow(terminal, begun).await?;
        let own = json!({
            "image": done.image,
            "namespace": self.namespace,
            "staged": word(done.tier()),
        });
        let within = match &*self.namespace {
            "default" => String::new(),
            other => format!(" -n {other}"),
        };
        let text = format!(
            "provided {}\nas       {}, {}\nrestore  ctr{within} container restore --rw --live NAME {}",
            done.digest,
            done.image,
            received_or_staged(&done),
            done.image,
        );
        terminal.print(&facts(&done, own), &text).map_err(Failure::failed)
    }
}
