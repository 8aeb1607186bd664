//! What the node runs.

use kybernate_spec::checkpoint::{CheckpointConfig, NodeFacts};

use super::{Answer, Outcome, equal, holds_if, not_older, told};

pub(super) fn page_size(here: u32, there: u32) -> Answer {
    let text = |bytes: u32| if bytes == 0 { String::new() } else { bytes.to_string() };
    equal("page size", &text(here), &text(there))
}

/// Runtimes name the mounts in CRIU's images in their own ways.
pub(super) fn runtime_name(here: &str, there: &str) -> Answer {
    equal("OCI runtime", name(here), name(there))
}

pub(super) fn runtime_version(here: &str, there: &str) -> Answer {
    if name(here) != name(there) {
        // The other rule says so; versions of two programs cannot be compared.
        return (Outcome::Holds, told("OCI runtime", here, there));
    }
    let version = |text| str::strip_prefix(text, name(text)).unwrap_or_default().trim_start();
    not_older("the OCI runtime", (version(here), version(there)), 2)
}

/// CRIU installs the filters anew.
pub(super) fn seccomp(config: &CheckpointConfig, here: &NodeFacts) -> Answer {
    if !config.needs.identity.seccomp {
        let text = "not every process of the checkpoint had a seccomp filter".to_owned();
        return (Outcome::Holds, text);
    }
    let kernel = &here.kernel;
    match here.seccomp {
        Some(true) => (Outcome::Holds, format!("kernel {kernel} has the seccomp filters it needs")),
        Some(has) => {
            let text = format!("kernel {kernel} has none of the seccomp filters its processes had");
            (holds_if(has), text)
        }
        None => (Outcome::Unknown, format!("whether {kernel} has seccomp filters is not known")),
    }
}

fn name(runtime: &str) -> &str {
    runtime.split(' ').next().unwrap_or_default()
}
