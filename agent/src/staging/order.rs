//! What is asked of `Stage`.

use kybernate_packager::agent_api as api;

use super::Tier;
use crate::app::Rejection;
use crate::operations::{Kind, Subject};
use crate::restore;

/// A checkpoint to be staged.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    /// What a restore would have to say to be let in.
    pub(super) admission: restore::Order,
    pub(super) tier: Tier,
}

impl Order {
    /// Understands a request.
    pub(crate) fn parse(request: api::StageRequest) -> Result<Self, Rejection> {
        let tier = match request.tier() {
            api::Tier::Ram => Tier::Ram,
            api::Tier::Nvme => Tier::Nvme,
            api::Tier::Unspecified => {
                return Err(Rejection::Invalid("no tier is named: ram or nvme".to_owned()));
            }
        };
        let allow = api::Allowances {
            unknown_facts: request.allow_unknown_facts,
            ..api::Allowances::default()
        };
        let admission = restore::Order::parse(api::RestoreRequest {
            reference: request.reference,
            containerd_namespace: request.containerd_namespace,
            allow: Some(allow),
            plain_http: request.plain_http,
            insecure_no_signature: request.insecure_no_signature,
            public_keys: request.public_keys,
            timeout_seconds: request.timeout_seconds,
            ..api::RestoreRequest::default()
        })?;
        Ok(Self { admission: admission.for_later(), tier })
    }

    /// Returns what the operation is about.
    pub(crate) fn subject(&self) -> Subject {
        Subject { kind: Kind::Stage, ..self.admission.subject() }
    }
}
