//! What is asked of `Provide`.

use kybernate_packager::agent_api as api;
use kybernate_spec::{Digest, Location};
use serde_json::json;

use crate::app::Rejection;
use crate::operations::{Kind, Subject};
use crate::restore;

/// Longest name of an image: what a reference may have.
const NAME_BYTES_MAX: usize = 512;

/// How much of a digest stands for it in a name.
const SHORT_DIGEST: usize = 12;

/// A checkpoint that is to be an image of containerd's.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    /// What a restore would have to say to be let in.
    pub(super) admission: restore::Order,
    /// What the image is called; made of the reference when absent.
    image: Option<String>,
}

impl Order {
    /// Understands a request.
    pub(crate) fn parse(request: api::ProvideRequest) -> Result<Self, Rejection> {
        let image = Some(request.image).filter(|name| !name.is_empty());
        if let Some(name) = &image
            && !is_name(name)
        {
            return Err(Rejection::Invalid(format!(
                "{name:?} is no name for an image, as example.com/job:v1 is one"
            )));
        }
        let admission = restore::Order::parse(api::RestoreRequest {
            reference: request.reference,
            containerd_namespace: request.containerd_namespace,
            allow: request.allow,
            plain_http: request.plain_http,
            insecure_no_signature: request.insecure_no_signature,
            public_keys: request.public_keys,
            timeout_seconds: request.timeout_seconds,
            ..api::RestoreRequest::default()
        })?;
        Ok(Self { admission: admission.for_containerd(), image })
    }

    /// Returns what the operation is about.
    pub(crate) fn subject(&self) -> Subject {
        Subject { kind: Kind::Provide, ..self.admission.subject() }
    }

    /// Names the image of the checkpoint with this digest: not as the reference, which is what an
    /// ordinary pull calls the runnable image.
    pub(super) fn image(&self, checkpoint: &Digest) -> String {
        if let Some(name) = &self.image {
            return name.clone();
        }
        let short = || checkpoint.hex().chars().take(SHORT_DIGEST).collect::<String>();
        let (repository, tag) = match &self.admission.location {
            Location::Registry(reference) => {
                let tag = match (&reference.tag, &reference.digest) {
                    (Some(tag), _) => tag.to_string(),
                    (None, Some(_)) => short(),
                    (None, None) => "latest".to_owned(),
                };
                (format!("{}/{}", reference.registry, reference.repository), tag)
            }
            Location::Layout(_) => ("localhost/checkpoint".to_owned(), short()),
        };
        format!("{repository}:{tag}-containerd")
    }

    /// Stands for what the request makes of a checkpoint: what differs in it makes another image.
    pub(super) fn fingerprint(&self) -> Digest {
        let allow = &self.admission.allow;
        let mounts = allow.mounts.iter();
        let mounts = mounts.map(|mount| (&mount.source, &mount.destination, mount.read_only));
        let text = json!({
            "mounts": mounts.collect::<Vec<_>>(),
            "devices": allow.devices,
            "capabilities": allow.capabilities,
            "hostNamespaces": allow.host_namespaces,
            "network": allow.network,
            "newPrivileges": allow.new_privileges,
        });
        Digest::of(text.to_string().as_bytes())
    }
}

/// Whether something can be the name of an image: containerd takes almost anything, people and
/// programs do not.
fn is_name(name: &str) -> bool {
    name.len() <= NAME_BYTES_MAX
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/:@+".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(change: impl FnOnce(&mut api::ProvideRequest)) -> Result<Order, Rejection> {
        let mut request = api::ProvideRequest {
            reference: "localhost:5000/team/web:1".to_owned(),
            ..api::ProvideRequest::default()
        };
        change(&mut request);
        Order::parse(request)
    }

    #[test]
    fn an_image_is_not_called_as_an_ordinary_pull_calls_it() {
        let checkpoint = Digest::of(b"index");
        let hex = &checkpoint.hex()[..SHORT_DIGEST];
        let named = |reference: &str| {
            order(|request| reference.clone_into(&mut request.reference))
                .unwrap()
                .image(&checkpoint)
        };
        assert_eq!(named("localhost:5000/team/web:1"), "localhost:5000/team/web:1-containerd");
        assert_eq!(named("localhost:5000/web"), "localhost:5000/web:latest-containerd");
        let by_digest = named(&format!("localhost:5000/web@{checkpoint}"));
        assert_eq!(by_digest, format!("localhost:5000/web:{hex}-containerd"));
        let own = order(|request| request.image = "example.com/x:1".to_owned()).unwrap();
        assert_eq!(own.image(&checkpoint), "example.com/x:1");
    }

    #[test]
    fn names_that_nobody_could_write_are_refused() {
        for wrong in ["-x", "a b", "/x", "é", "a\nb", &"x".repeat(NAME_BYTES_MAX + 1)] {
            let refused = order(|request| wrong.clone_into(&mut request.image)).unwrap_err();
            assert!(matches!(refused, Rejection::Invalid(_)), "{wrong:?}");
        }
    }

    #[test]
    fn what_is_allowed_makes_another_image() {
        let plain = order(|_| {}).unwrap();
        let same = order(|request| request.allow = Some(api::Allowances::default())).unwrap();
        assert_eq!(plain.fingerprint(), same.fingerprint());
        let more = order(|request| {
            request.allow.get_or_insert_default().capabilities = vec!["CAP_KILL".to_owned()];
        });
        assert_ne!(plain.fingerprint(), more.unwrap().fingerprint());
    }
}
