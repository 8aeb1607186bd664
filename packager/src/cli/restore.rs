//! `kyb restore`

use bytesize::ByteSize;
use clap::Args;
use kybernate_packager::agent_api::{Allowances, Limits, RestoreRequest};
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
    limits: Limit,
    #[command(flatten)]
    allow: Allow,
}

/// What the restored container may use at most.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Limits")]
pub(super) struct Limit {
    /// Give it this much memory at most, as 512MiB.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory_limit: Option<u64>,
    /// Give it this many processors at most, as 1.5.
    #[arg(long, value_name = "NUMBER", value_parser = cpu_millis)]
    cpus: Option<u32>,
}

/// Reads how much memory, in bytes.
fn memory(text: &str) -> Result<u64, &'static str> {
    let bytes = text.parse::<ByteSize>().ok().map(|size| size.as_u64());
    let bytes = bytes.filter(|bytes| *bytes >= 4 << 20 && i64::try_from(*bytes).is_ok());
    bytes.ok_or("it must be a size from 4MiB to 8EiB, as 512MiB")
}

/// Reads a number of processors, in thousandths.
fn cpu_millis(text: &str) -> Result<u32, &'static str> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let is_short = part.len() <= 3 && part.bytes().all(|byte| byte.is_ascii_digit());
    let millis = format!("{whole}{part:0<3}").parse().ok().filter(|_| is_short);
    let millis = millis.filter(|millis| (10..=4_096_000).contains(millis));
    millis.ok_or("it must be a number from 0.01 to 4096, as 1.5, with three decimals at most")
}

impl From<Limit> for Limits {
    fn from(limit: Limit) -> Self {
        Self {
            memory_bytes: limit.memory_limit.unwrap_or_default(),
            cpu_millis: limit.cpus.unwrap_or_default(),
        }
    }
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
            limits: Some(self.limits.into()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        assert_eq!((memory("4MiB"), memory("1GB")), (Ok(4 << 20), Ok(1_000_000_000)));
        for text in ["", "0", "1MiB", "-1", "99999999TB", "much"] {
            memory(text).unwrap_err();
        }
    }

    #[test]
    fn processors_are_read_in_thousandths() {
        for (text, millis) in [("1", 1000), ("1.5", 1500), ("0.01", 10), ("2.125", 2125)] {
            assert_eq!(cpu_millis(text), Ok(millis));
        }
        for text in ["", "0", "0.001", "-1", "1.2345", "1.x", "99999", "1e3"] {
            cpu_millis(text).unwrap_err();
        }
    }
}
