//! What may refuse a restore before anything large moves: signature, time, facts, and what the
//! request does not allow.

use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::compat::{Finding, Offer, Outcome, Subject, Target, examine};
use kybernate_packager::key::PublicKey;
use kybernate_packager::store::Store;
use kybernate_packager::verify::{VerifyError, verify_signature};
use kybernate_spec::checkpoint::{CheckpointConfig, NodeFacts};
use kybernate_spec::{Location, chain};

use super::{Order, Purpose};
use crate::config::Config;
use crate::operations::RefusedBy;
use crate::trust::Question;

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
}

/// Which keys count.
#[derive(Debug)]
pub(super) enum Keys {
    /// One of these must have signed.
    Any(Vec<PublicKey>),
    /// Nobody has to.
    None,
}

/// Decides which keys may vouch for this checkpoint.
pub(super) fn keys(
    order: &Order,
    config: &Config,
    facts: &CheckpointConfig,
) -> Result<Keys, Refusal> {
    let refuse = |reason: String| Err(Refusal::one(RefusedBy::Policy, reason));
    if !order.keys.is_empty() {
        if config.allow_request_keys {
            return Ok(Keys::Any(order.keys.clone()));
        }
        let text = "this node takes no keys from requests (allow_request_keys)";
        return refuse(text.to_owned());
    }
    if order.unsigned {
        if config.allow_unsigned {
            return Ok(Keys::None);
        }
        let text = "this node restores nothing unsigned (allow_unsigned)";
        return refuse(text.to_owned());
    }
    let repository = repository(&order.location);
    let source_namespace = facts.source.namespace.as_deref().unwrap_or_default();
    let question =
        Question { repository: &repository, source_namespace, target_namespace: &order.namespace };
    let rules = config.trust.iter().filter(|rule| rule.covers(question));
    let keys: Vec<PublicKey> = rules.map(|rule| rule.key.clone()).collect();
    if keys.is_empty() {
        return refuse(format!(
            "no rule of this node's trust policy lets checkpoints of {repository}, taken in \
             namespace {source_namespace:?}, into namespace {:?}",
            order.namespace
        ));
    }
    Ok(Keys::Any(keys))
}

/// Checks the signature. An error that is no refusal means that nothing is known.
pub(super) async fn signature(
    store: &Store,
    checkpoint: &Checkpoint,
    keys: Keys,
) -> Result<Result<(), Refusal>, VerifyError> {
    let Keys::Any(keys) = keys else { return Ok(Ok(())) };
    match verify_signature(store, &checkpoint.stored.descriptor.digest, &keys).await {
        Ok(_) => Ok(Ok(())),
        Err(error) if error.is_refusal() => {
            Ok(Err(Refusal::one(RefusedBy::Signature, chain(&error).to_string())))
        }
        Err(error) => Err(error),
    }
}

/// Refuses what is past its time.
pub(super) fn time(facts: &CheckpointConfig, now: jiff::Timestamp) -> Result<(), Refusal> {
    let Some(not_after) = &facts.not_after else { return Ok(()) };
    let refuse = |reason| Err(Refusal::one(RefusedBy::Policy, reason));
    match not_after.parse::<jiff::Timestamp>() {
        Ok(end) if now <= end => Ok(()),
        Ok(end) => refuse(format!("it was not to be restored after {end}")),
        Err(_) => refuse(format!("its last time of restore, {not_after:?}, is no time")),
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
    // What is staged may be restored by a request that gives more.
    let is_asked =
        |found: &Finding| order.purpose == Purpose::Now || !found.rule.is_about_the_request();
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

/// Returns the name of the repository as trust policies write it.
pub(crate) fn repository(location: &Location) -> String {
    match location {
        Location::Registry(reference) => {
            format!("{}/{}", reference.registry, reference.repository)
        }
        Location::Layout(layout) => format!("oci:{}", layout.directory.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServeArgs;
    use crate::trust::{Glob, Rule};
    use kybernate_packager::agent_api as api;
    use kybernate_packager::key::SigningKey;
    use kybernate_spec::Digest;
    use kybernate_spec::checkpoint::{CpuFacts, NeededMount, Source};

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

    fn taken_in(namespace: &str) -> CheckpointConfig {
        let source = Source { namespace: Some(namespace.to_owned()), ..Source::default() };
        CheckpointConfig { source, ..CheckpointConfig::default() }
    }

    fn policy() -> Config {
        let mut config = ServeArgs::default().validate().unwrap();
        config.trust.push(Rule {
            key: SigningKey::generate().unwrap().public().clone(),
            repository: Glob::new("localhost:5000/team/*"),
            source_namespace: Glob::new("*"),
            target_namespace: None,
        });
        config
    }

    #[test]
    fn only_keys_of_matching_rules_count() {
        let same = keys(&order(|_| {}), &policy(), &taken_in("default")).unwrap();
        assert!(matches!(same, Keys::Any(keys) if keys.len() == 1));
        let other = keys(&order(|_| {}), &policy(), &taken_in("bank")).unwrap_err();
        assert_eq!(other.by, RefusedBy::Policy);
        assert!(other.to_string().contains("namespace \"bank\""), "{other}");
    }

    #[test]
    fn requests_bring_keys_or_none_only_where_the_node_lets_them() {
        let pem = SigningKey::generate().unwrap().public().to_pem();
        let with_key = order(|request| request.public_keys.push(pem));
        let unsigned = order(|request| request.insecure_no_signature = true);
        let mut config = policy();
        for (order, word) in [(&with_key, "allow_request_keys"), (&unsigned, "allow_unsigned")] {
            let refused = keys(order, &config, &taken_in("default")).unwrap_err();
            assert!(refused.to_string().contains(word), "{refused}");
        }
        (config.allow_request_keys, config.allow_unsigned) = (true, true);
        assert!(matches!(keys(&with_key, &config, &taken_in("x")), Ok(Keys::Any(_))));
        assert!(matches!(keys(&unsigned, &config, &taken_in("x")), Ok(Keys::None)));
    }

    #[test]
    fn what_is_past_its_time_is_refused() {
        let now = "2026-11-21T12:00:00Z".parse().unwrap();
        let until = |text: &str| CheckpointConfig {
            not_after: Some(text.to_owned()),
            ..CheckpointConfig::default()
        };
        time(&CheckpointConfig::default(), now).unwrap();
        time(&until("2026-11-21T12:00:00Z"), now).unwrap();
        assert!(time(&until("2026-11-21T11:59:59Z"), now).is_err());
        assert!(time(&until("tomorrow"), now).is_err());
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
