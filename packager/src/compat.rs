//! Would a checkpoint restore on a node, and if not, why: decided from the facts alone.

use kybernate_spec::checkpoint::{CheckpointConfig, NodeFacts};

/// One reason why a checkpoint does not restore on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Incompatibility {
    /// The checkpoint was packed from a bare dump directory.
    #[error("the checkpoint carries no facts of the node it was taken on")]
    UnknownFacts,
    /// A fact that must be equal is not.
    #[error("the {fact} is {here:?} here, but was {there:?} where the checkpoint was taken")]
    Differs {
        /// Which fact.
        fact: &'static str,
        /// Its value on this node.
        here: String,
        /// Its value where the checkpoint was taken.
        there: String,
    },
    /// CRIU reads the images of its own and earlier versions only.
    #[error("CRIU {here} here is older than CRIU {there}, which took the checkpoint")]
    OlderCriu {
        /// Version on this node.
        here: String,
        /// Version where the checkpoint was taken.
        there: String,
    },
    /// The kernel lacks what a newer one had given the process.
    #[error("kernel {here} here is older than {there}, on which the checkpoint was taken")]
    OlderKernel {
        /// Release on this node.
        here: String,
        /// Release where the checkpoint was taken.
        there: String,
    },
    /// The process may have chosen code by features this CPU does not have.
    #[error("this CPU lacks {0}, which the checkpoint's process may use")]
    MissingCpuFeatures(String),
}

/// Compares a checkpoint's facts with a node's; returns every reason at once.
pub fn compare(config: &CheckpointConfig, here: &NodeFacts) -> Vec<Incompatibility> {
    let Some(there) = &config.node else {
        return vec![Incompatibility::UnknownFacts];
    };
    let mut reasons = Vec::new();
    let (here_page, there_page) = (here.page_bytes.to_string(), there.page_bytes.to_string());
    for (fact, here, there) in [
        ("CPU architecture", &here.architecture, &there.architecture),
        ("page size", &here_page, &there_page),
        ("cgroup version", &here.cgroup, &there.cgroup),
        ("Linux security module", &here.lsm, &there.lsm),
        ("CPU vendor", &here.cpu.vendor, &there.cpu.vendor),
    ] {
        if here != there {
            let (here, there) = (here.clone(), there.clone());
            reasons.push(Incompatibility::Differs { fact, here, there });
        }
    }
    // Measured: images of CRIU 4.2 fail on 4.1 in the middle of the restore ("vdso: ELF header
    // magic mismatch"); the other way round works.
    if version(&here.criu) < version(&there.criu) {
        let (here, there) = (here.criu.clone(), there.criu.clone());
        reasons.push(Incompatibility::OlderCriu { here, there });
    }
    let minor = |release: &str| version(release).into_iter().take(2).collect::<Vec<_>>();
    if minor(&here.kernel) < minor(&there.kernel) {
        let (here, there) = (here.kernel.clone(), there.kernel.clone());
        reasons.push(Incompatibility::OlderKernel { here, there });
    }
    let missing: Vec<&str> =
        there.cpu.features.difference(&here.cpu.features).map(String::as_str).collect();
    if !missing.is_empty() {
        reasons.push(Incompatibility::MissingCpuFeatures(missing.join(", ")));
    }
    reasons
}

/// Reads the leading numbers of a version: `6.18.0-1-amd64` is `[6, 18, 0]`.
fn version(text: &str) -> Vec<u64> {
    let numbers = text.split('.').map_while(|part| {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part.get(..digits)?.parse().ok()
    });
    numbers.collect()
}

#[cfg(test)]
mod tests;
