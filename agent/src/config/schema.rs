//! What a configuration file may have, for `kybernate-agent schema` and for the example in
//! `deploy/agent`. Tests hold both to what is read.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::access::Right;
use crate::hooks::When;

/// The configuration of kybernate-agent. Each setting that is not in a list also has a name in the
/// environment, which wins: `[staging] tmpfs` is `KYBERNATE_AGENT_STAGING_TMPFS`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts: `Config` has the values")]
#[schemars(title = "kybernate-agent")]
pub(super) struct File {
    /// Name of this node; the host's name by default.
    node: Option<String>,
    /// Name of the cluster, written into checkpoints.
    cluster: Option<String>,
    /// Directory for everything the agent keeps.
    root: Option<String>,
    /// Unix socket to serve on; only root can use it.
    socket: Option<String>,
    /// Socket of containerd.
    containerd: Option<String>,
    /// Where figures for Prometheus are, at /metrics, and health, at /healthz and /readyz: `IP:PORT` or
    /// `unix:PATH`. Nowhere by default.
    metrics: Option<String>,
    /// How log lines look: `text` or `json`.
    log_format: Option<LogFormat>,
    /// Longest time a source is paused, unless the request says otherwise, from `1s` to `1h`.
    pause_deadline: Option<String>,
    /// How long CRIU may restore without a byte of memory that comes, from `1s` to `24h`; `30m` by
    /// default. Then it is ended, and what it has made is taken away. Not for pods, which have
    /// `pods.restore_limit`.
    restore_stall: Option<String>,
    /// Whether every checkpoint carries page hashes, so that the next one can be an increment of it.
    page_hashes: Option<bool>,
    /// Whether CRIU gets a dump's memory as it comes from the registry, where the kernel has FUSE and
    /// few processes are restored; else it is written to `staging` first.
    pages_on_demand: Option<bool>,
    /// Whether a request may bring the keys it trusts.
    allow_request_keys: Option<bool>,
    /// Whether a request may ask to restore what nobody signed.
    allow_unsigned: Option<bool>,
    /// Whether restored processes must have a seccomp filter that refuses what every usual profile does.
    require_seccomp: Option<bool>,
    /// Where dumps lie while they are taken or restored.
    staging: Option<Staging>,
    /// How GPU memory gets into a checkpoint.
    gpu: Option<Gpu>,
    /// How pods' containers are restored, by kybernate-runc.
    pods: Option<Pods>,
    /// Where callers from the network come in; nowhere by default.
    network: Option<Network>,
    /// Who may ask for what; by default only root, over the socket, who may everything.
    caller: Option<Vec<Caller>>,
    /// Programs that run around checkpoints; none by default.
    hooks: Option<Vec<Hook>>,
    /// How registries are reached where no request can say so.
    registry: Option<Vec<Registry>>,
    /// Keys to sign with.
    sign_keys: Option<Vec<SignKey>>,
    /// Whose checkpoints are restored here, from where to where; nobody's by default.
    trust: Option<Vec<Trust>>,
    /// A policy file with more such rules, as `kyb verify --policy` takes it. It and its keys are
    /// read again when they change.
    trust_policy: Option<String>,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One object per line.
    Json,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct Staging {
    /// A directory in memory; the agent mounts a tmpfs there unless one is.
    tmpfs: Option<String>,
    /// Share of the free memory that a dump may take there, and of all memory for the mount.
    memory_share: Option<f64>,
    /// Checkpoints that are kept ready in memory (`kyb stage --tier ram`); none without a budget.
    ram: Option<Tier>,
    /// Checkpoints that are kept ready on disk (`kyb stage --tier nvme`); none without a budget.
    nvme: Option<DiskTier>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct Tier {
    /// A directory for this alone: a tmpfs, which the agent mounts there unless one is.
    directory: Option<String>,
    /// Most bytes of all checkpoints there together, as `8GiB`.
    budget: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct DiskTier {
    /// A directory for this alone.
    directory: Option<String>,
    /// Most bytes of all checkpoints there together, as `100GiB`.
    budget: Option<String>,
    /// Whether all of a checkpoint is read and proven before each restore from there; `true` by
    /// default. Not needed where the file system or the device does that.
    verify: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct Gpu {
    /// Who moves GPU memory: `driver` (the agent, by the driver's checkpoint calls; the default),
    /// `plugin` (CRIU, by its `cuda_plugin.so`) or `none`.
    method: Option<String>,
    /// Where GPU memory goes when a container is dumped: `auto` (files of its own where the driver has
    /// custom storage, 615; else the memory of the processes; the default), `pages` (always that) or
    /// `device` (always files; refused where the driver cannot).
    storage: Option<String>,
    /// The driver's library; `libcuda.so.1` where the driver is loaded by default.
    driver: Option<String>,
    /// The management library; `libnvidia-ml.so.1` by default.
    management: Option<String>,
    /// How long a process's work on its GPU may take to end, from `100ms`; `10s` by default.
    lock_limit: Option<String>,
    /// How long GPU memory may take to be moved, up to `1h`; `5m` by default.
    limit: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct Pods {
    /// How long CRIU may take, from `1s` to `1h`; `100s` by default.
    restore_limit: Option<String>,
    /// Whether what lies in a pod's emptyDirs goes along with a checkpoint. One that two containers of
    /// a pod share is better named in the request for one of them.
    capture_empty_dirs: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct Network {
    /// `IP:PORT`. Without it there is no way in from the network.
    listen: Option<String>,
    /// Our certificate and those that lead to its authority (PEM). This and the other files are read
    /// again when they change.
    certificate: Option<String>,
    /// Its private key (PEM).
    key: Option<String>,
    /// The authorities of client certificates (PEM). Nobody comes in without one.
    client_ca: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct Caller {
    /// `uid:NUMBER`, a user of this machine over the socket, or `certificate:NAME`: whoever has a
    /// client certificate with such a common name, URI or DNS name, over the network. `*` also stands
    /// for `/`.
    who: String,
    /// What they may do. `allow`, to give what is restored mounts, devices, capabilities or namespaces
    /// of the host, and to name directories of the node (`oci:`), is as good as root on this node.
    may: Vec<Right>,
    /// containerd's namespaces it counts for, as `k8s.io` or `*`.
    namespaces: Vec<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct Hook {
    /// What requests and messages call it.
    name: String,
    /// When it runs.
    when: When,
    /// The program's path, and its arguments.
    command: Vec<String>,
    /// How long it may take, from `1s` to `5m`; `10s` by default. Then it is killed with all it has
    /// started, and has failed.
    limit: Option<String>,
    /// For the containers with such ids, as `db-*`; for all by default.
    containers: Option<Vec<String>>,
    /// In such namespaces of containerd's; in all by default.
    namespaces: Option<Vec<String>>,
    /// Whether it runs only when a request names it.
    on_request: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct Registry {
    /// `host[:port]`, as references have it.
    host: String,
    /// Whether it speaks plain HTTP.
    plain_http: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct SignKey {
    /// What requests call it.
    name: String,
    /// The private key, as `kyb keygen` writes it.
    file: String,
    /// A file with its password.
    password_file: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct Trust {
    /// The public key (PEM).
    key: String,
    /// Repositories it counts for, as `registry.example.com/team/*`.
    repository: String,
    /// Namespaces of the sources it counts for; `*` by default.
    source_namespace: Option<String>,
    /// Namespaces that may be restored into; the source's own by default.
    target_namespace: Option<String>,
}
