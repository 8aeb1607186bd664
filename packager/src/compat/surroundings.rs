//! What the process needs around it: a root file system, mounts, devices, namespaces.

use super::{Answer, Outcome, Subject, Target, holds_if};

/// Mounts from outside that every runtime makes by itself, and that no one has to allow.
const OWN_MOUNTS: &[&str] = &["/sys/fs/cgroup"];

/// The files of the container must come from somewhere.
pub(super) fn image(subject: &Subject<'_>, target: &Target<'_>) -> Answer {
    match (subject.runnable, target.image) {
        (Some(own), _) => (Outcome::Holds, format!("the artifact has its runnable image {own}")),
        (None, Some(other)) => (Outcome::Holds, format!("the container here is made of {other}")),
        (None, None) => {
            let text = "the artifact has no runnable image, so its files are not known here";
            (Outcome::Broken, text.to_owned())
        }
    }
}

/// A container that is made of another image must be made of the right one.
pub(super) fn image_digest(subject: &Subject<'_>, target: &Target<'_>) -> Answer {
    let Some(here) = target.image else {
        return (
            Outcome::Holds,
            "the container here is made of the artifact's own image".to_owned(),
        );
    };
    if subject.index == Some(here) || subject.runnable == Some(here) {
        return (Outcome::Holds, format!("the container here is made of the checkpoint, {here}"));
    }
    if let Some(source) = &subject.config.source.image_digest {
        let text = format!("the container image is {here} here, and the source's was {source}");
        return (holds_if(here == source), text);
    }
    let text = format!("the container image is {here} here, and the source's is not known");
    (Outcome::Unknown, text)
}

/// What came from the source's node must be given by this one.
pub(super) fn mounts(subject: &Subject<'_>, target: &Target<'_>) -> Answer {
    let external = subject.config.needs.mounts.iter().filter(|mount| mount.external);
    let missing = external.map(|mount| &*mount.destination).filter(|place| {
        !target.offer.mounts.iter().any(|offered| offered == place)
            && !subject.volumes.contains(place)
            && !OWN_MOUNTS.contains(place)
    });
    let missing: Vec<String> = missing
        .map(|place| {
            format!(
                "the source had something of its node on {place:?} \
                 (allow.mounts, --allow-mount SOURCE:{place})"
            )
        })
        .collect();
    all(missing, "every mount of the source is given")
}

pub(super) fn devices(subject: &Subject<'_>, target: &Target<'_>) -> Answer {
    let needed = subject.config.needs.devices.iter();
    let missing: Vec<String> = needed
        .filter(|device| !target.offer.devices.contains(device))
        .map(|device| {
            format!("the source had device {device:?} (allow.devices, --allow-device {device})")
        })
        .collect();
    all(missing, "every device of the source is given")
}

pub(super) fn devices_present(subject: &Subject<'_>, target: &Target<'_>) -> Answer {
    let needed = &subject.config.needs.devices;
    if needed.is_empty() {
        return (Outcome::Holds, "the source had no devices of its node".to_owned());
    }
    let Some(here) = &target.node.devices else {
        let text = format!("whether {} are here is not known", needed.join(", "));
        return (Outcome::Unknown, text);
    };
    let missing: Vec<String> = needed
        .iter()
        .filter(|device| !here.contains(*device))
        .map(|device| format!("the source had device {device:?}, and there is none here"))
        .collect();
    all(missing, "every device of the source is here")
}

pub(super) fn namespaces(subject: &Subject<'_>, target: &Target<'_>) -> Answer {
    let needed = subject.config.needs.host_namespaces.iter();
    let missing: Vec<String> = needed
        .filter(|name| !target.offer.host_namespaces.contains(name))
        .map(|name| {
            format!(
                "the source was in its host's {name} namespace \
                 (allow.host_namespaces, --allow-host-namespace {name})"
            )
        })
        .collect();
    all(missing, "every namespace of its host is given")
}

fn all(missing: Vec<String>, well: &str) -> Answer {
    if missing.is_empty() {
        return (Outcome::Holds, well.to_owned());
    }
    (Outcome::Broken, missing.join("; "))
}
