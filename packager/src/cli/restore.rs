//! `kyb restore`

use clap::Args;
use kybernate_packager::agent_api::{Allowances, RestoreRequest};
use kybernate_spec::Location;
use serde_json::json;

use super::Failure;
use super::agent::refused;
use super::bring::{Bring, facts, received_or_staged};
use super::identifier::identifier;
use super::offer::Offer;
use super::stage::word;
use crate::terminal::Terminal;

/// Restore a checkpoint into a new container on this node.
///
/// This node's agent verifies the signature, compares the facts with the node, decodes who the
/// processes would be, and only then restores. Whatever goes beyond the defaults is refused unless
/// it is allowed here by name. Ctrl-C cancels the restore, a second Ctrl-C leaves it to the agent.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    kyb restore registry.example.com/team/job:v1 --name job-2")]
pub(super) struct Restore {
    /// What to restore.
    #[arg(value_name = "REF")]
    reference: Location,
    /// containerd's id of the new container. Without it, the source's name.
    #[arg(long, value_parser = identifier)]
    name: Option<String>,
    /// containerd's namespace of the new container.
    #[arg(long, default_value = "default", value_parser = identifier)]
    namespace: String,
    #[command(flatten)]
    bring: Bring,
    #[command(flatten)]
    allow: Allow,
}

/// What the restored container may have beyond the defaults.
#[derive(Debug, Args)]
#[command(next_help_heading = "Allowances")]
pub(super) struct Allow {
    #[command(flatten)]
    offer: Offer,
    /// Keep a capability, as `CAP_NET_ADMIN`.
    #[arg(long = "allow-cap", value_name = "CAP")]
    capabilities: Vec<String>,
    /// Run without a seccomp filter.
    #[arg(long = "allow-no-seccomp")]
    no_seccomp: bool,
    /// Be able to gain privileges.
    #[arg(long = "allow-new-privileges")]
    new_privileges: bool,
    /// Have been packed without facts, or without one that a rule needs.
    #[arg(long = "allow-unknown-facts")]
    unknown_facts: bool,
}

impl From<Allow> for Allowances {
    fn from(allow: Allow) -> Self {
        Self {
            mounts: allow.offer.mounts,
            devices: allow.offer.devices,
            capabilities: allow.capabilities,
            host_namespaces: allow.offer.host_namespaces,
            no_seccomp: allow.no_seccomp,
            new_privileges: allow.new_privileges,
            unknown_facts: allow.unknown_facts,
        }
    }
}

impl Restore {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let asked = self.bring.ask(&self.reference).await?;
        let request = RestoreRequest {
            reference: asked.reference,
            containerd_namespace: self.namespace,
            name: self.name.unwrap_or_default(),
            allow: Some(self.allow.into()),
            plain_http: asked.plain_http,
            insecure_no_signature: asked.insecure_no_signature,
            timeout_seconds: asked.timeout_seconds,
            public_keys: asked.public_keys,
        };
        let mut client = self.bring.agent.connect().await?;
        let begun = client.restore(request).await.map_err(refused)?.into_inner();
        let done = self.bring.agent.follow(terminal, begun).await?;
        let own = json!({
            "container": done.restored_container,
            "pid": done.restored_pid,
            "staged": word(done.tier()),
        });
        let text = format!(
            "restored {}\nas       {}, process {}, {}",
            done.digest,
            done.restored_container,
            done.restored_pid,
            received_or_staged(&done),
        );
        terminal.print(&facts(&done, own), &text).map_err(Failure::failed)
    }
}
