//! Restores a checkpoint into a new container: what is asked for, and the rules that may refuse it.
//!
//! [`steps`] has the order of things; [`rules`] decides by facts and policy, [`spec`] builds the
//! new container's runtime specification, [`image`] gives containerd its root file system,
//! [`launch`] makes and starts it. [`provide`] leaves the last of it to containerd's own restore.

use std::num::{NonZeroU32, NonZeroU64};
use std::str::FromStr as _;
use std::time::Duration;

use kybernate_packager::agent_api as api;
use kybernate_packager::criu::is_capability;
use kybernate_packager::key::PublicKey;
use kybernate_spec::Location;

pub(crate) mod admission;
pub(crate) mod bring;
mod claim;
mod gpu;
mod image;
mod launch;
mod layers;
mod live;
pub(crate) mod materialise;
mod memory;
pub(crate) mod noted;
mod pod;
pub(crate) mod provide;
mod root;
mod rules;
mod spec;
mod steps;
mod trust;
mod user;
pub(crate) mod volume;

pub(crate) use self::claim::{Claims, claim, finish as finish_claim, reserve_claimed, settle};
pub(crate) use self::steps::run;
pub(crate) use self::volume::sweep;
use crate::app::Rejection;
use crate::checkpoint::time_out;
use crate::container::{is_name, namespace_or_default};
use crate::operations::{Kind, Subject};
use crate::rootfs::Bind;

/// Label of a restored container: the digest of its checkpoint.
pub(crate) const CHECKPOINT_LABEL: &str = "io.kybernate.checkpoint";

/// On a restored image, where its layers are that containerd does not have.
pub(crate) const ORIGIN_LABEL: &str = "io.kybernate.origin";

/// On a restored image, present when plain HTTP leads there.
pub(crate) const PLAIN_HTTP_LABEL: &str = "io.kybernate.origin.plain-http";

/// Label of what a restore made in containerd: its operation. What has another one is never undone,
/// whatever it is called.
pub(crate) const OPERATION_LABEL: &str = "io.kybernate.operation";

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    location: Location,
    pub(crate) namespace: String,
    /// Name of the new container; the source's when absent.
    pub(crate) container: Option<String>,
    allow: Allowances,
    limits: Limits,
    plain_http: bool,
    unsigned: bool,
    keys: Vec<PublicKey>,
    time_out: Option<Duration>,
    purpose: Purpose,
}

/// What a checkpoint is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// To be restored now.
    Now,
    /// To be ready: what a restore may ask for is not known yet.
    Later,
    /// To be an image that containerd restores by itself.
    Image,
}

/// What the new container may have beyond the defaults.
#[derive(Clone, Debug, Default)]
struct Allowances {
    mounts: Vec<AllowedMount>,
    devices: Vec<String>,
    capabilities: Vec<String>,
    host_namespaces: Vec<String>,
    /// A network namespace of this node that it joins, by its path.
    network: Option<String>,
    no_seccomp: bool,
    new_privileges: bool,
    unknown_facts: bool,
}

/// Something of this node in the new container.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AllowedMount {
    source: String,
    destination: String,
    read_only: bool,
}

/// How much of the node the new container may use.
#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    memory_bytes: Option<NonZeroU64>,
    cpu_millis: Option<NonZeroU32>,
}

/// Less cannot hold what the runtime itself needs in a container's cgroup.
const MEMORY_LIMIT_MIN: u64 = 4 << 20;
/// The kernel's shortest quota, 1 ms, in a period of 100 ms (`sched_cfs_bandwidth`).
const CPU_MILLIS_MIN: u32 = 10;
const CPU_MILLIS_MAX: u32 = 4_096_000;

impl From<&AllowedMount> for Bind {
    fn from(mount: &AllowedMount) -> Self {
        let AllowedMount { source, destination, read_only } = mount;
        Self { place: destination.clone(), source: source.into(), read_only: *read_only }
    }
}

impl Order {
    /// Understands a request.
    pub(crate) fn parse(request: api::RestoreRequest) -> Result<Self, Rejection> {
        let location = Location::from_str(&request.reference)?;
        let mut keys = Vec::new();
        for pem in &request.public_keys {
            let key = PublicKey::from_pem(pem.as_bytes());
            keys.push(
                key.map_err(|error| Rejection::Invalid(kybernate_spec::chain(&error).to_string()))?,
            );
        }
        let container = Some(request.name).filter(|name| !name.is_empty());
        if let Some(name) = &container
            && !is_name(name)
        {
            return Err(Rejection::Invalid(format!("{name:?} is no name for a container")));
        }
        Ok(Self {
            location,
            namespace: namespace_or_default(request.containerd_namespace)?,
            container,
            allow: Allowances::parse(request.allow.unwrap_or_default())?,
            limits: Limits::parse(request.limits.unwrap_or_default())?,
            plain_http: request.plain_http,
            unsigned: request.insecure_no_signature,
            keys,
            time_out: time_out(request.timeout_seconds),
            purpose: Purpose::Now,
        })
    }

    /// Returns the same for a checkpoint that is only to be ready.
    pub(crate) fn for_later(self) -> Self {
        Self { purpose: Purpose::Later, ..self }
    }

    /// Returns the same for a checkpoint that becomes an image of containerd's.
    fn for_containerd(self) -> Self {
        Self { purpose: Purpose::Image, ..self }
    }

    /// Returns what is to be restored, as it was written.
    pub(crate) fn reference(&self) -> String {
        self.location.to_string()
    }

    /// Returns what the operation is about.
    pub(crate) fn subject(&self) -> Subject {
        Subject {
            kind: Kind::Restore,
            container: self.container.clone().unwrap_or_default(),
            namespace: self.namespace.clone(),
            reference: self.location.to_string(),
            time_out: self.time_out,
        }
    }
}

impl Allowances {
    fn parse(allow: api::Allowances) -> Result<Self, Rejection> {
        let invalid = |text: String| Err(Rejection::Invalid(text));
        let mut mounts = Vec::new();
        for mount in allow.mounts {
            let api::Mount { source, destination, read_only } = mount;
            for path in [&source, &destination] {
                if !path.starts_with('/') || path.split('/').any(|part| part == "..") {
                    return invalid(format!("{path:?} is no absolute path to mount"));
                }
            }
            mounts.push(AllowedMount { source, destination, read_only });
        }
        for device in &allow.devices {
            if !device.starts_with("/dev/") || device.split('/').any(|part| part == "..") {
                return invalid(format!("{device:?} is no device in /dev"));
            }
        }
        for name in &allow.capabilities {
            if !is_capability(name) {
                return invalid(format!("{name:?} is no capability, as CAP_SYS_PTRACE is one"));
            }
        }
        let (host_namespaces, network) = namespaces(allow.host_namespaces)?;
        Ok(Self {
            mounts,
            devices: allow.devices,
            capabilities: allow.capabilities,
            host_namespaces,
            network,
            no_seccomp: allow.no_seccomp,
            new_privileges: allow.new_privileges,
            unknown_facts: allow.unknown_facts,
        })
    }
}

impl Limits {
    fn parse(limits: api::Limits) -> Result<Self, Rejection> {
        let api::Limits { memory_bytes, cpu_millis } = limits;
        if (1..MEMORY_LIMIT_MIN).contains(&memory_bytes) {
            let text =
                format!("a memory limit of {memory_bytes} bytes is too small: 4 MiB at least");
            return Err(Rejection::Invalid(text));
        }
        if i64::try_from(memory_bytes).is_err() {
            let text = format!("a memory limit of {memory_bytes} bytes is more than there can be");
            return Err(Rejection::Invalid(text));
        }
        if cpu_millis > CPU_MILLIS_MAX {
            let text =
                format!("{cpu_millis} thousandths of a processor are too many: 4,096,000 at most");
            return Err(Rejection::Invalid(text));
        }
        if (1..CPU_MILLIS_MIN).contains(&cpu_millis) {
            let text = format!("{cpu_millis} thousandths of a processor are too few: 10 at least");
            return Err(Rejection::Invalid(text));
        }
        Ok(Self {
            memory_bytes: NonZeroU64::new(memory_bytes),
            cpu_millis: NonZeroU32::new(cpu_millis),
        })
    }
}

/// Tells namespaces of the host from a network that is named by its path.
fn namespaces(named: Vec<String>) -> Result<(Vec<String>, Option<String>), Rejection> {
    let (mut of_host, mut networks) = (Vec::new(), Vec::new());
    for name in named {
        match name.strip_prefix("network:") {
            Some(path) if path.starts_with('/') && !path.split('/').any(|part| part == "..") => {
                networks.push(path.to_owned());
            }
            Some(path) => {
                let text = format!("{path:?} is no absolute path of a network namespace");
                return Err(Rejection::Invalid(text));
            }
            None if ["network", "pid", "ipc", "uts"].contains(&&*name) => of_host.push(name),
            None => {
                let text =
                    format!("{name:?} is no namespace: network, network:PATH, pid, ipc or uts");
                return Err(Rejection::Invalid(text));
            }
        }
    }
    if networks.len() + usize::from(of_host.iter().any(|name| name == "network")) > 1 {
        return Err(Rejection::Invalid("it can be in one network only".to_owned()));
    }
    Ok((of_host, networks.pop()))
}

#[cfg(test)]
mod tests;
