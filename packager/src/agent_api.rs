//! The agent's API, generated from `spec/proto/kybernate/agent/v1/agent.proto`: its client for
//! `kyb`, its server for the agent.

/// Where the agent serves by default.
pub const AGENT_SOCKET: &str = "/run/kybernate/agent.sock";

/// Metadata of a status: the rule that refused a request, as `Operation.refused_by` names it.
pub const REFUSED_BY: &str = "kybernate-refused-by";

/// Metadata of a status: a container is not restored, and nor may it start afresh.
pub const NEVER_FRESH: &str = "kybernate-never-fresh";

pub use self::generated::*;

#[expect(
    missing_docs,
    unused_qualifications,
    clippy::pedantic,
    clippy::as_conversions,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::clone_on_ref_ptr,
    reason = "generated code; the documentation is in the proto file"
)]
mod generated {
    tonic::include_proto!("kybernate.agent.v1");
}
