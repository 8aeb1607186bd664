//! What the agent is told: flags, environment, and a TOML file for what is a list.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, Read as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_packager::agent_api::AGENT_SOCKET;
use kybernate_packager::key::{KeyError, PublicKey, SigningKey};
use kybernate_packager::policy::{Mistake, Rule};
use kybernate_spec::Location;

mod access;
mod gpu;
mod hooks;
mod pods;
mod reader;
mod schema;
mod staging;

pub use self::access::NetworkConfig;
pub use self::gpu::{GpuConfig, GpuMethod, GpuStorage};
pub use self::pods::{PodsConfig, RegistryConfig};
use self::reader::{Reader, Sources};
pub use self::schema::LogFormat;
pub use self::staging::{StagingConfig, TierConfig};
use crate::access::{Callers, Rules};
use crate::door;
use crate::hooks::HookConfig;
use crate::metrics::Address;
use crate::trust::Trust;

/// What ends a scheme, which no name of a repository has.
const SCHEME_END: &str = "://";

/// Names in the environment that are options of the command, and no more.
const OPTIONS: &[&str] = &["CONFIG", "SOCKET", "CONTAINERD", "ROOT", "NODE", "LOG_FORMAT"];

/// Bytes of a configuration.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// Read when no file is named; it need not exist.
pub(crate) const DEFAULT_FILE: &str = "/etc/kybernate/agent.toml";

/// Where the agent keeps everything, and where containerd answers, unless it is told otherwise.
pub(crate) const DEFAULT_ROOT: &str = "/var/lib/kybernate";
pub(crate) const DEFAULT_CONTAINERD: &str = "/run/containerd/containerd.sock";

/// Below the agent's directory: the records of operations.
pub(crate) const OPERATIONS: &str = "operations";

/// Longest pause that can be asked for. Longer than any dump, short enough that a forgotten
/// container comes back the same day.
pub(crate) const PAUSE_DEADLINE_MAX: Duration = Duration::from_hours(1);

const PAUSE_DEADLINE: Duration = Duration::from_mins(1);

/// CRIU can hang for ever. Restoring reads the memory once; this is enough for hundreds of GiB.
const RESTORE_STALL: Duration = Duration::from_mins(30);

/// Longest time that CRIU may be allowed to stand still. Whoever waits longer waits for nothing.
const RESTORE_STALL_MAX: Duration = Duration::from_hours(24);

/// How the agent is started.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ServeArgs {
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE", env = "KYBERNATE_AGENT_CONFIG")]
    pub config: Option<PathBuf>,
    /// Unix socket to serve on.
    #[arg(long, value_name = "PATH", env = "KYBERNATE_AGENT_SOCKET")]
    pub socket: Option<PathBuf>,
    /// containerd's socket.
    #[arg(long, value_name = "ADDR", env = "KYBERNATE_AGENT_CONTAINERD")]
    pub containerd: Option<PathBuf>,
    /// Directory for everything the agent keeps.
    #[arg(long, value_name = "DIR", env = "KYBERNATE_AGENT_ROOT")]
    pub root: Option<PathBuf>,
    /// Name of this node.
    #[arg(long, value_name = "NAME", env = "KYBERNATE_AGENT_NODE")]
    pub node: Option<String>,
    /// How log lines look.
    #[arg(long, value_name = "FORMAT", env = "KYBERNATE_AGENT_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
}

/// A configuration that can work.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own")]
pub struct Config {
    /// Name of this node.
    pub node: String,
    /// Name of the cluster, written into checkpoints.
    pub cluster: Option<String>,
    /// Directory for everything the agent keeps.
    pub root: PathBuf,
    /// Unix socket to serve on.
    pub socket: PathBuf,
    /// containerd's socket.
    pub containerd: PathBuf,
    /// Where figures for Prometheus are.
    pub metrics: Option<Address>,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Where dumps are staged.
    pub staging: StagingConfig,
    /// How GPU memory gets into a checkpoint.
    pub gpu: GpuConfig,
    /// How pods' containers are restored.
    pub pods: PodsConfig,
    /// Where callers from the network come in.
    pub network: Option<NetworkConfig>,
    /// Who but root may ask for what.
    pub callers: Arc<Callers>,
    /// What runs around checkpoints.
    pub hooks: Vec<HookConfig>,
    /// How registries are reached where no request can say so.
    pub registries: Vec<RegistryConfig>,
    /// Keys to sign with.
    pub sign_keys: Vec<NamedKey>,
    /// Whose checkpoints are restored, from where to where.
    pub trust: Arc<Trust>,
    /// Whether a request may bring the keys it trusts.
    pub allow_request_keys: bool,
    /// Whether a request may ask to restore what nobody signed.
    pub allow_unsigned: bool,
    /// Whether restored processes must have a seccomp filter that refuses what every usual profile does.
    pub require_seccomp: bool,
    /// How long a source is paused at most, unless the request says otherwise.
    pub pause_deadline: Duration,
    /// How long CRIU may restore without a byte of memory that comes.
    pub restore_stall: Duration,
    /// Whether every checkpoint carries page hashes, so that the next one can be an increment of it.
    pub page_hashes: bool,
    /// Whether CRIU gets a dump's memory as it comes from the registry, and not from a copy.
    pub pages_on_demand: bool,
}

/// A key the agent signs with.
#[derive(Clone)]
pub struct NamedKey {
    /// What requests call it.
    pub name: String,
    /// The key.
    pub key: Arc<SigningKey>,
}

/// One thing that is wrong with the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("failed to read the configuration")]
    Read(#[source] io::Error),
    /// The file is no TOML.
    #[error("failed to parse {0:?}")]
    Parse(PathBuf, #[source] toml::de::Error),
    /// There is no such setting.
    #[error("{0} is not a setting")]
    Unknown(String),
    /// A setting that must be there is not.
    #[error("{0} is missing")]
    Missing(String),
    /// A setting is of another type.
    #[error("{0} must be {1}, not {2}")]
    Mistyped(String, &'static str, &'static str),
    /// A path is relative.
    #[error("{0} must be an absolute path, not {1:?}")]
    RelativePath(String, PathBuf),
    /// A value is out of bounds.
    #[error("{0} must be {1}, not {2:?}")]
    Bounds(String, &'static str, String),
    /// A name is given twice.
    #[error("{0} is given twice: {1:?}")]
    Twice(String, String),
    /// Two directories are one, or one is in the other.
    #[error("{0} must be a directory of its own: {1:?} and {2:?} are in one another")]
    Overlap(String, PathBuf, PathBuf),
    /// A key cannot be used.
    #[error("{0} cannot be used")]
    Key(String, #[source] Box<KeyError>),
    /// Certificates cannot be used.
    #[error("{0} cannot be used")]
    Tls(String, #[source] door::Mistake),
    /// Something is wrong with the trust policy.
    #[error(transparent)]
    Policy(#[from] Mistake),
}

impl ServeArgs {
    /// Reads the file and the environment and checks everything; returns all that is wrong at once.
    pub fn validate(self) -> Result<Config, Vec<ConfigError>> {
        let named = |(name, value): (OsString, OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        self.validate_with(std::env::vars_os().filter_map(named))
    }

    fn validate_with(
        self,
        environment: impl Iterator<Item = (String, String)>,
    ) -> Result<Config, Vec<ConfigError>> {
        let (text, table) = self.read().map_err(|error| vec![error])?;
        let mut sources = Sources::new(&text, environment);
        let config = self.merge(table, &mut sources);
        let wrong = sources.finish(OPTIONS);
        if wrong.is_empty() { Ok(config) } else { Err(wrong) }
    }

    /// Returns the file that is read, or would be if it were there.
    pub(crate) fn file(&self) -> &Path {
        self.config.as_deref().unwrap_or(Path::new(DEFAULT_FILE))
    }

    fn read(&self) -> Result<(String, toml::Table), ConfigError> {
        let path = self.file();
        let text = match text_of(path) {
            Ok(text) => text,
            Err(error) if self.config.is_none() && error.kind() == io::ErrorKind::NotFound => {
                String::new()
            }
            Err(error) => return Err(ConfigError::Read(error)),
        };
        let table = text.parse().map_err(|error| ConfigError::Parse(path.to_owned(), error))?;
        Ok((text, table))
    }

    fn merge(self, table: toml::Table, sources: &mut Sources) -> Config {
        let source = self.clone();
        let mut file = Reader::new(table, "", sources);
        let written = file.text("node");
        let node = name(&mut file, "node", self.node.or(written));
        let root = root(&mut file, self.root);
        let config = Config {
            node: node.unwrap_or_else(host_name),
            cluster: cluster(&mut file),
            socket: path(&mut file, "socket", self.socket, AGENT_SOCKET),
            containerd: path(&mut file, "containerd", self.containerd, DEFAULT_CONTAINERD),
            metrics: metrics(&mut file),
            log_format: self.log_format.or(log_format(&mut file)).unwrap_or_default(),
            staging: staging::read(&mut file, &root),
            sign_keys: file.each("sign_keys", sign_key).into_iter().flatten().collect(),
            trust: Arc::new(trust(&mut file)),
            allow_request_keys: file.flag("allow_request_keys").unwrap_or(false),
            allow_unsigned: file.flag("allow_unsigned").unwrap_or(false),
            require_seccomp: file.flag("require_seccomp").unwrap_or(false),
            pause_deadline: pause_deadline(&mut file),
            restore_stall: restore_stall(&mut file),
            gpu: gpu::gpu(&mut file),
            pods: pods::pods(&mut file),
            network: access::network(&mut file),
            callers: Arc::new(Callers::from(source, callers(&mut file))),
            hooks: file.each("hooks", hooks::hook).into_iter().flatten().collect(),
            registries: file.each("registry", pods::registry),
            page_hashes: file.flag("page_hashes").unwrap_or(true),
            pages_on_demand: file.flag("pages_on_demand").unwrap_or(true),
            root,
        };
        once(&mut file, "sign_keys.name", config.sign_keys.iter().map(|key| &*key.name));
        once(&mut file, "hooks.name", config.hooks.iter().map(|one| &*one.hook.name));
        once(&mut file, "registry.host", config.registries.iter().map(|one| &*one.host));
        file.finish();
        config
    }
}

impl Config {
    /// Reads a configuration file alone, without options and environment; returns all that is wrong
    /// at once.
    pub fn read(file: PathBuf) -> Result<Self, Vec<ConfigError>> {
        let arguments = ServeArgs { config: Some(file), ..ServeArgs::default() };
        arguments.validate_with(std::iter::empty())
    }

    /// Returns the JSON schema of the configuration file.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(schema::File).to_value()
    }

    /// Returns the directory of one operation's state.
    pub(crate) fn operations(&self) -> PathBuf {
        self.root.join(OPERATIONS)
    }

    /// Returns the directory of what is suspended.
    pub(crate) fn suspended(&self) -> PathBuf {
        self.root.join("suspended")
    }

    /// Returns the staging directory on disk.
    pub(crate) fn disk_stage(&self) -> PathBuf {
        self.root.join("stage")
    }

    /// Returns the directory of CRIU's configuration files for containers that others make.
    pub(crate) fn criu_configs(&self) -> PathBuf {
        self.root.join("criu")
    }

    /// Returns the directory of what restored containers need as long as they are there.
    pub(crate) fn volumes(&self) -> PathBuf {
        let memory = &self.staging.tmpfs;
        memory.parent().unwrap_or(memory).join("volumes")
    }

    /// Returns the directory in which CRIU finds the cgroups of version 2.
    pub(crate) fn cgroup_yard(&self) -> PathBuf {
        self.volumes().with_file_name("cgroups")
    }

    /// Returns the directory of captured mounts of restored containers, but for shared memory.
    pub(crate) fn disk_volumes(&self) -> PathBuf {
        self.root.join("volumes")
    }

    /// Returns the directory of the notes of which pods' containers were restored.
    pub(crate) fn restored(&self) -> PathBuf {
        self.root.join("restored")
    }

    /// Whether a reference that no request came with is reached by plain HTTP.
    pub(crate) fn is_plain_http(&self, location: &Location) -> bool {
        let Location::Registry(reference) = location else { return false };
        let host = reference.registry.to_string();
        self.registries.iter().any(|one| one.host == host && one.plain_http)
    }

    /// Returns the options for CRIU that containers name which an earlier agent restored.
    pub(crate) fn criu_config(&self) -> PathBuf {
        self.root.join("criu.conf")
    }

    /// Finds a key to sign with.
    pub(crate) fn sign_key(&self, name: &str) -> Option<&NamedKey> {
        self.sign_keys.iter().find(|key| key.name == name)
    }
}

impl std::fmt::Debug for NamedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NamedKey({:?})", self.name)
    }
}

fn path(file: &mut Reader<'_>, key: &str, flag: Option<PathBuf>, default: &str) -> PathBuf {
    let written = file.text(key).map(PathBuf::from);
    let path = flag.or(written).unwrap_or_else(|| default.into());
    if !path.is_absolute() {
        let place = file.place(key);
        file.wrong(ConfigError::RelativePath(place, path.clone()));
    }
    path
}

/// Reads the agent's directory, which nobody else can look into from the first start on: the whole machine
/// would not get on with a `/var` of that kind.
fn root(file: &mut Reader<'_>, flag: Option<PathBuf>) -> PathBuf {
    /// Directories of the system that are not at the top (hier(7)).
    const SYSTEM: [&str; 10] = [
        "/var/cache",
        "/var/lib",
        "/var/lock",
        "/var/log",
        "/var/run",
        "/var/spool",
        "/var/tmp",
        "/usr/lib",
        "/usr/local",
        "/usr/share",
    ];
    let root = path(file, "root", flag, DEFAULT_ROOT);
    let is_top = root.parent().is_none_or(|above| above == Path::new("/"));
    let leads_elsewhere = root.components().any(|part| part == Component::ParentDir)
        || root.to_string_lossy().contains(char::is_control);
    let is_systems = is_top || SYSTEM.iter().any(|one| root == Path::new(one));
    if root.is_absolute() && (is_systems || leads_elsewhere) {
        let place = file.place("root");
        let wanted = "a directory of the agent's own, as /var/lib/kybernate";
        file.wrong(ConfigError::Bounds(place, wanted, root.display().to_string()));
    }
    root
}

/// Checks a name that is written into checkpoints and logs.
fn name(file: &mut Reader<'_>, key: &str, given: Option<String>) -> Option<String> {
    let name = given?;
    if name.is_empty() || name.contains(|one: char| one.is_control() || one.is_whitespace()) {
        let place = file.place(key);
        file.wrong(ConfigError::Bounds(place, "a name without spaces", name.clone()));
    }
    Some(name)
}

fn cluster(file: &mut Reader<'_>) -> Option<String> {
    let written = file.text("cluster");
    name(file, "cluster", written)
}

/// Reads a configuration from what is a file: who opens a FIFO waits, and a device has no end.
fn text_of(path: &Path) -> io::Result<String> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = fs::OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other(format!("{} is no regular file", path.display())));
    }
    let mut text = String::new();
    file.take(CONFIG_BYTES_MAX.saturating_add(1)).read_to_string(&mut text)?;
    if u64::try_from(text.len()).is_ok_and(|bytes| bytes <= CONFIG_BYTES_MAX) {
        return Ok(text);
    }
    Err(io::Error::other(format!("{} has more than {CONFIG_BYTES_MAX} bytes", path.display())))
}

fn sign_key(table: &mut Reader<'_>) -> Option<NamedKey> {
    let name = table.required("name");
    let file = table.required("file");
    let password_file = table.text("password_file");
    if file.is_empty() {
        return None;
    }
    let password = || {
        let Some(path) = password_file else { return Ok(None) };
        let text = fs::read_to_string(path)?;
        Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()))
    };
    match SigningKey::from_file(Path::new(&file), password) {
        Ok(key) => Some(NamedKey { name, key: Arc::new(key) }),
        Err(error) => {
            let place = table.place("file");
            table.wrong(ConfigError::Key(place, Box::new(error)));
            None
        }
    }
}

fn trust(file: &mut Reader<'_>) -> Trust {
    let rules: Vec<Option<Rule>> = file.each("trust", rule);
    let mut rules: Vec<Rule> = rules.into_iter().flatten().collect();
    for (number, rule) in rules.iter_mut().enumerate() {
        rule.name = format!("trust[{number}]");
    }
    let Some(policy) = file.text("trust_policy").map(PathBuf::from) else {
        return Trust::of(rules);
    };
    if !policy.is_absolute() {
        let place = file.place("trust_policy");
        file.wrong(ConfigError::RelativePath(place, policy));
        return Trust::of(rules);
    }
    Trust::open(Some(policy), rules).unwrap_or_else(|wrong| {
        for mistake in wrong {
            file.wrong(mistake.into());
        }
        Trust::of(Vec::new())
    })
}

fn rule(table: &mut Reader<'_>) -> Option<Rule> {
    let file = table.required("key");
    let repository = table.required("repository");
    let source = table.text("source_namespace").unwrap_or_else(|| "*".to_owned());
    let target = table.text("target_namespace");
    if !repository.is_empty() && !is_repository(&repository) {
        let place = table.place("repository");
        let wanted = "HOST[:PORT]/NAME, without a scheme, a tag or a slash at its end";
        table.wrong(ConfigError::Bounds(place, wanted, repository.clone()));
    }
    if file.is_empty() {
        return None;
    }
    match PublicKey::from_file(Path::new(&file)) {
        Ok(key) => Some(Rule::of_key(String::new(), key, &repository, &source, target.as_deref())),
        Err(error) => {
            let place = table.place("key");
            table.wrong(ConfigError::Key(place, Box::new(error)));
            None
        }
    }
}

/// Tells of names that are there more than once.
fn once<'a>(file: &mut Reader<'_>, place: &str, names: impl Iterator<Item = &'a str>) {
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            file.wrong(ConfigError::Twice(place.to_owned(), name.to_owned()));
        }
    }
}

/// Whether there can be repositories that are called so; `*` stands for anything.
fn is_repository(pattern: &str) -> bool {
    let name = pattern.split_once('/').map(|(_host, name)| name);
    let is_name =
        |name: &str| !name.is_empty() && !name.ends_with('/') && !name.contains([':', '@']);
    let may_be = name.map_or_else(|| pattern.contains('*'), is_name);
    may_be && !pattern.contains(char::is_whitespace) && !pattern.contains(SCHEME_END)
}

fn callers(file: &mut Reader<'_>) -> Rules {
    Rules::new(file.each("caller", access::caller).into_iter().flatten().collect())
}

fn metrics(file: &mut Reader<'_>) -> Option<Address> {
    let text = file.text("metrics")?;
    let address = Address::parse(&text);
    if address.is_none() {
        let place = file.place("metrics");
        file.wrong(ConfigError::Bounds(place, "IP:PORT or unix:PATH", text));
    }
    address
}

fn log_format(file: &mut Reader<'_>) -> Option<LogFormat> {
    let text = file.text("log_format")?;
    match &*text {
        "text" => Some(LogFormat::Text),
        "json" => Some(LogFormat::Json),
        _ => {
            let place = file.place("log_format");
            file.wrong(ConfigError::Bounds(place, "text or json", text));
            None
        }
    }
}

fn pause_deadline(file: &mut Reader<'_>) -> Duration {
    let wanted = "a time like \"60s\", from 1s to 1h";
    file.time("pause_deadline", wanted, PAUSE_DEADLINE_MAX).unwrap_or(PAUSE_DEADLINE)
}

fn restore_stall(file: &mut Reader<'_>) -> Duration {
    let wanted = "a time like \"30m\", from 1s to 24h";
    file.time("restore_stall", wanted, RESTORE_STALL_MAX).unwrap_or(RESTORE_STALL)
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
