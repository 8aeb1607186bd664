//! What the agent is to bring to its node, and for whom it may: `kyb restore`, `stage`, `provide`.

use std::path::PathBuf;

use clap::Args;
use kybernate_packager::agent_api::Operation;
use kybernate_packager::key::PublicKey;
use kybernate_spec::Location;
use serde_json::{Value, json};

use super::agent::{AgentSocket, time_out, times};
use super::stage::word;
use super::{Connection, Failure, keys};
use crate::terminal::bytes;

/// How a checkpoint gets to a node, and whose may.
#[derive(Debug, Args)]
pub(super) struct Bring {
    /// Public keys to trust for this, instead of the node's policy; may be given more than once. The
    /// node's configuration must permit it (`allow_request_keys`).
    #[arg(long = "key", value_name = "FILE", conflicts_with = "insecure_no_signature")]
    keys: Vec<PathBuf>,
    /// Take it whoever made it. The node's configuration must permit that too.
    #[arg(long)]
    insecure_no_signature: bool,
    /// Cancel when it takes longer than this.
    #[arg(long, value_name = "TIME", value_parser = time_out)]
    timeout: Option<u32>,
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    pub(super) agent: AgentSocket,
}

/// The same, as the agent is asked.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) reference: String,
    pub(super) plain_http: bool,
    pub(super) insecure_no_signature: bool,
    pub(super) public_keys: Vec<String>,
    pub(super) timeout_seconds: u32,
}

impl Bring {
    /// Reads the keys.
    pub(super) async fn ask(&self, location: &Location) -> Result<Asked, Failure> {
        let Location::Registry(reference) = location else {
            return Err(Failure::usage("the agent pulls from registries, not from layouts"));
        };
        let keys = keys::read(&self.keys).await?;
        Ok(Asked {
            reference: reference.to_string(),
            plain_http: self.connection.is_plain(reference),
            insecure_no_signature: self.insecure_no_signature,
            public_keys: keys.iter().map(PublicKey::to_pem).collect(),
            timeout_seconds: self.timeout.unwrap_or_default(),
        })
    }
}

/// Returns what programs are told of an operation, with what only this kind of it has.
pub(super) fn facts(done: &Operation, own: Value) -> Value {
    let sizes = done.sizes.unwrap_or_default();
    let mut facts = json!({
        "operation": done.id,
        "reference": done.reference,
        "digest": done.digest,
        "timesMicroseconds": times(done),
        "warnings": done.warnings,
        "sizes": {
            "dumpBytes": sizes.dump_bytes,
            "pageBytes": sizes.page_bytes,
            "transferredBytes": sizes.transferred_bytes,
        },
    });
    if let (Value::Object(facts), Value::Object(own)) = (&mut facts, own) {
        facts.extend(own);
    }
    facts
}

/// Tells how much came over the network.
pub(super) fn received(done: &Operation) -> String {
    format!("{} received", bytes(done.sizes.unwrap_or_default().transferred_bytes))
}

/// Tells the same of a dump that may have been here.
pub(super) fn received_or_staged(done: &Operation) -> String {
    let staged = word(done.tier()).map(|tier| format!(", the dump was ready in {tier}"));
    received(done) + &staged.unwrap_or_default()
}
