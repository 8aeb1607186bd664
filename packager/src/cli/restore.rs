//! `kyb restore`

use std::path::PathBuf;

use clap::Args;
use kybernate_packager::agent_api::{Allowances, RestoreRequest};
use kybernate_spec::Location;
use serde_json::json;

use super::agent::{AgentSocket, refused, time_out, times};
use super::identifier::identifier;
use super::offer::Offer;
use super::stage::word;
use super::{Connection, Failure, keys};
use crate::terminal::{Terminal, bytes};

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
    /// Public keys to trust for this restore, instead of the node's policy; may be given more than
    /// once. The node's configuration must permit it (`allow_request_keys`).
    #[arg(long = "key", value_name = "FILE", conflicts_with = "insecure_no_signature")]
    keys: Vec<PathBuf>,
    /// Restore whoever made it. The node's configuration must permit that too.
    #[arg(long)]
    insecure_no_signature: bool,
    /// Cancel the restore when it takes longer than this.
    #[arg(long, value_name = "TIME", value_parser = time_out)]
    timeout: Option<u32>,
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    agent: AgentSocket,
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
        let Location::Registry(reference) = &self.reference else {
            return Err(Failure::usage("the agent pulls from registries, not from layouts"));
        };
        let keys = keys::read(&self.keys).await?;
        let request = RestoreRequest {
            reference: reference.to_string(),
            containerd_namespace: self.namespace,
            name: self.name.unwrap_or_default(),
            allow: Some(self.allow.into()),
            plain_http: self.connection.is_plain(reference),
            insecure_no_signature: self.insecure_no_signature,
            timeout_seconds: self.timeout.unwrap_or_default(),
            public_keys: keys.iter().map(kybernate_packager::key::PublicKey::to_pem).collect(),
        };
        let mut client = self.agent.connect().await?;
        let begun = client.restore(request).await.map_err(refused)?.into_inner();
        let done = self.agent.follow(terminal, begun).await?;
        let sizes = done.sizes.unwrap_or_default();
        let facts = json!({
            "operation": done.id,
            "reference": done.reference,
            "digest": done.digest,
            "container": done.restored_container,
            "pid": done.restored_pid,
            "staged": word(done.tier()),
            "timesMicroseconds": times(&done),
            "sizes": {
                "dumpBytes": sizes.dump_bytes,
                "pageBytes": sizes.page_bytes,
                "transferredBytes": sizes.transferred_bytes,
            },
        });
        let text = format!(
            "restored {}\nas       {}, process {}, {} received{}",
            done.digest,
            done.restored_container,
            done.restored_pid,
            bytes(sizes.transferred_bytes),
            word(done.tier())
                .map(|tier| format!(", the dump was ready in {tier}"))
                .unwrap_or_default(),
        );
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}
