//! What may refuse a restore before anything large moves: who decides about the signature, facts,
//! and what the request does not allow.

use kybernate_packager::compat::{Finding, Offer, Outcome, Rule, Subject, Target, examine};
use kybernate_packager::key::PublicKey;
use kybernate_spec::checkpoint::NodeFacts;

use super::{Order, Purpose};
use crate::config::Config;
use crate::operations::RefusedBy;

/// A rule said no.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .reasons.join("; "))]
pub(crate) struct Refusal {
    pub(crate) by: RefusedBy,
    pub(crate) reasons: Vec<String>,
}

impl Refusal {
    pub(super) fn one(by: RefusedBy, reason: impl Into<String>) -> Self {
        Self { by, reasons: vec![reason.into()] }
    }

    /// Refuses for these reasons, unless there are none.
    pub(super) fn unless_none(
        by: RefusedBy,
        reasons: impl IntoIterator<Item = String>,
    ) -> Result<(), Self> {
        let reasons: Vec<String> = reasons.into_iter().collect();
        if reasons.is_empty() { Ok(()) } else { Err(Self { by, reasons }) }
    }
}

/// Who decides whether a checkpoint may be trusted.
#[derive(Debug)]
pub(super) enum Judge {
    /// One of these keys, which the request brought, must have signed.
    Keys(Vec<PublicKey>),
    /// Nobody: the request wants it unsigned.
    Nobody,
    /// The node's policy.
    Policy,
}

/// Decides who decides.
pub(super) fn judge(order: &Order, config: &Config) -> Result<Judge, Refusal> {
    let refuse = |reason: &str| Err(Refusal::one(RefusedBy::Policy, reason));
    match (order.keys.is_empty(), order.unsigned) {
        (false, _) if config.allow_request_keys => Ok(Judge::Keys(order.keys.clone())),
        (false, _) => refuse("this node takes no keys from requests (allow_request_keys)"),
        (true, true) if config.allow_unsigned => Ok(Judge::Nobody),
        (true, true) => refuse("this node restores nothing unsigned (allow_unsigned)"),
        (true, false) => Ok(Judge::Policy),
    }
}

/// Compares the checkpoint with this node and with what the request gives to the new container.
/// Every rule that does not hold is told.
pub(super) fn compatible(
    order: &Order,
    subject: &Subject<'_>,
    here: &NodeFacts,
) -> Result<(), Refusal> {
    let allow = &order.allow;
    let offer = Offer {
        mounts: allow.mounts.iter().map(|mount| mount.destination.clone()).collect(),
        devices: allow.devices.clone(),
        host_namespaces: allow.host_namespaces.clone(),
    };
    let report = examine(subject, &Target { node: here, image: None, offer });
    let is_unknown = |found: &Finding| found.outcome == Outcome::Unknown;
    let is_asked = |found: &Finding| match order.purpose {
        // What is staged may be restored by a request that gives more.
        Purpose::Later => !found.rule.is_about_the_request(),
        // Places are told by the names to which the links of the image lead. The facts have others, and the gate
        // knows which mounts there are.
        Purpose::Image => found.rule != Rule::Mounts,
        Purpose::Now => true,
    };
    let obstacles: Vec<&Finding> = report
        .obstacles()
        .filter(|found| !(allow.unknown_facts && is_unknown(found)) && is_asked(found))
        .collect();
    if obstacles.is_empty() {
        return Ok(());
    }
    // What the request could have allowed is the node's policy; anything else no request changes.
    let policy = obstacles.iter().all(|found| found.rule.is_about_the_request());
    let by = if policy { RefusedBy::Policy } else { RefusedBy::Compatibility };
    let reason = |found: &&Finding| {
        let Finding { rule, message, .. } = found;
        let hint =
            if is_unknown(found) { " (allow.unknown_facts, --allow-unknown-facts)" } else { "" };
        format!("{rule}: {message}{hint}")
    };
    Err(Refusal { by, reasons: obstacles.iter().map(reason).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServeArgs;
    use kybernate_packager::agent_api as api;
    use kybernate_packager::key::SigningKey;
    use kybernate_spec::Digest;
    use kybernate_spec::checkpoint::{CheckpointConfig, CpuFacts, NeededMount};

    fn order(change: impl FnOnce(&mut api::RestoreRequest)) -> Order {
        let mut request = api::RestoreRequest {
            reference: "localhost:5000/team/web:1".to_owned(),
            allow: Some(api::Allowances::default()),
            ..api::RestoreRequest::default()
        };
        change(&mut request);
        Order::parse(request).unwrap()
    }

    fn node() -> NodeFacts {
        NodeFacts {
            architecture: "arm64".to_owned(),
            kernel: "6.12".to_owned(),
            page_bytes: 4096,
            cgroup: "v2".to_owned(),
            lsm: "none".to_owned(),
            cpu: CpuFacts {
                vendor: "0x41".to_owned(),
                features: ["fp".to_owned()].into(),
                ..CpuFacts::default()
            },
            criu: "4.1".to_owned(),
            ..NodeFacts::default()
        }
    }

    #[test]
    fn requests_bring_keys_or_none_only_where_the_node_lets_them() {
        let pem = SigningKey::generate().unwrap().public().to_pem();
        let with_key = order(|request| request.public_keys.push(pem));
        let unsigned = order(|request| request.insecure_no_signature = true);
        let mut config = ServeArgs::default().validate().unwrap();
        for (order, word) in [(&with_key, "allow_request_keys"), (&unsigned, "allow_unsigned")] {
            let refused = judge(order, &config).unwrap_err();
            assert_eq!(refused.by, RefusedBy::Policy);
            assert!(refused.to_string().contains(word), "{refused}");
        }
        assert!(matches!(judge(&order(|_| {}), &config), Ok(Judge::Policy)));
        (config.allow_request_keys, config.allow_unsigned) = (true, true);
        assert!(matches!(judge(&with_key, &config), Ok(Judge::Keys(keys)) if keys.len() == 1));
        assert!(matches!(judge(&unsigned, &config), Ok(Judge::Nobody)));
    }

    #[test]
    fn what_the_source_had_must_be_allowed_by_name() {
        let mut facts = CheckpointConfig { node: Some(node()), ..CheckpointConfig::default() };
        let mount = |destination: &str| NeededMount {
            destination: destination.to_owned(),
            kind: "bind".to_owned(),
            options: Vec::new(),
            external: true,
        };
        facts.needs.mounts = vec![mount("/data"), mount("/dev/shm"), mount("/sys/fs/cgroup")];
        facts.needs.devices = vec!["/dev/kvm".to_owned()];
        facts.needs.host_namespaces = vec!["network".to_owned()];

        let runnable = Digest::of(b"runnable");
        let subject = Subject {
            config: &facts,
            index: None,
            runnable: Some(&runnable),
            volumes: vec!["/dev/shm"],
        };
        let here = NodeFacts { devices: Some(["/dev/kvm".to_owned()].into()), ..node() };
        let refused = compatible(&order(|_| {}), &subject, &here).unwrap_err();
        assert_eq!((refused.by, refused.reasons.len()), (RefusedBy::Policy, 3));
        for flag in ["--allow-mount SOURCE:/data", "--allow-device", "--allow-host-namespace"] {
            assert!(refused.to_string().contains(flag), "{flag} is missing in {refused}");
        }
        let allowed = order(|request| {
            request.allow = Some(api::Allowances {
                mounts: vec![api::Mount {
                    source: "/srv".to_owned(),
                    destination: "/data".to_owned(),
                    read_only: true,
                }],
                devices: vec!["/dev/kvm".to_owned()],
                host_namespaces: vec!["network".to_owned()],
                ..api::Allowances::default()
            });
        });
        compatible(&allowed, &subject, &here).unwrap();
        // Whoever provides may have to tell another place, and the gate asks for it.
        let refused = compatible(&order(|_| {}).for_containerd(), &subject, &here).unwrap_err();
        assert_eq!(refused.reasons.len(), 2, "{refused}");
        assert!(!refused.to_string().contains("--allow-mount"), "{refused}");
        // What no request changes goes before.
        let nowhere = NodeFacts { devices: Some([].into()), ..node() };
        let refused = compatible(&order(|_| {}), &subject, &nowhere).unwrap_err();
        assert_eq!((refused.by, refused.reasons.len()), (RefusedBy::Compatibility, 4));
    }

    #[test]
    fn unknown_facts_must_be_allowed() {
        let unknown = CheckpointConfig::default();
        let partly = CheckpointConfig {
            node: Some(NodeFacts { criu: String::new(), ..node() }),
            ..CheckpointConfig::default()
        };
        let runnable = Digest::of(b"runnable");
        for (config, rule) in [(&unknown, "facts: "), (&partly, "criu: ")] {
            let (runnable, volumes) = (Some(&runnable), Vec::new());
            let subject = Subject { config, index: None, runnable, volumes };
            let refused = compatible(&order(|_| {}), &subject, &node()).unwrap_err();
            assert_eq!((refused.by, refused.reasons.len()), (RefusedBy::Compatibility, 1));
            assert!(refused.to_string().starts_with(rule), "{refused}");
            assert!(refused.to_string().contains("--allow-unknown-facts"));
            let allowed = order(|r| r.allow.get_or_insert_default().unknown_facts = true);
            compatible(&allowed, &subject, &node()).unwrap();
            // What is known to be wrong is not allowed by that.
            let subject = Subject { runnable: None, ..subject };
            let refused = compatible(&allowed, &subject, &node()).unwrap_err();
            assert!(refused.to_string().starts_with("image: "), "{refused}");
        }
    }
}
