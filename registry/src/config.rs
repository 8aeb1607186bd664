//! Configuration, read once and proven before the first socket is opened.
//!
//! A [`Config`] is made of sections. Each is a struct in a file of its own below `config/`, and
//! everything else follows from it: its place in the TOML file, the name in the environment
//! (`[log] format` is `KYBERNATE_REGISTRY_LOG_FORMAT`), the option (`--log-format`), the help, the
//! line in the schema. Options win over the environment, the environment over the file, the file
//! over the defaults.
//!
//! To add a section `NAME`:
//!
//! 1. `config/NAME.rs`: a struct that derives `Debug, Clone, Deserialize, Serialize, JsonSchema`
//!    with `#[serde(default, deny_unknown_fields)]`, has a `Default` of its own and one doc
//!    comment per field, which is what people read in `--help` and in the schema. Times are
//!    [`Period`], sizes [`Size`], sockets [`Address`]; secrets are never values, only paths of
//!    files, opened by whoever uses them.
//! 2. `fn check(&self, mistakes: &mut Mistakes<'_>)`: ranges and contradictions, without input or
//!    output; each names the key that has to change and what to write instead.
//! 3. A field in [`Config`], and a line in `Config::check`.
//!
//! Whatever is an array of tables is given in the environment and as an option as TOML:
//! `KYBERNATE_REGISTRY_X='[{a = 1}]'`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use self::access::{AccessSettings, Challenge, IssuerSettings};
pub use self::connections::Connections;
pub use self::gc::Gc;
pub use self::limits::LimitSettings;
pub use self::log::{AccessLog, Log, LogFormat};
pub use self::metrics::MetricsPage;
pub use self::mistake::{Mistake, Mistakes, Origin, Place};
pub use self::notify::{Notify, NotifyAction, NotifyEndpoint};
pub use self::pattern::Pattern;
pub(crate) use self::pattern::stars_stand_alone;
pub use self::quota::{Quota, QuotaRule};
pub use self::retention::{Retention, RetentionRule};
pub use self::scrub::Scrub;
pub use self::setting::{GcSettings, ReindexSettings, ScrubSettings, Settings};
pub use self::tags::{ImmutableTags, Tags};
pub use self::tls::TlsSettings;
pub use self::trace::{Standard, Trace, TraceProtocol};
pub use self::value::{Address, AddressError, Period, Size};

mod access;
mod connections;
mod document;
mod gc;
mod limits;
mod log;
mod metrics;
mod mistake;
mod notify;
mod pattern;
mod quota;
mod retention;
mod scrub;
mod setting;
mod tags;
mod tls;
mod trace;
mod value;

use self::document::{Document, Sources};
use self::setting::Given;

/// Everything that can be set.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Directory that holds everything; made when it is missing.
    #[schemars(extend("format" = "dir"))]
    pub root: PathBuf,
    /// How long to wait for another process to let go of the root: a server that still drains, or
    /// was killed just now. Its clients are let in and wait meanwhile.
    pub root_wait: Period,
    /// Address to serve on; port 0 takes a free one.
    pub listen: Address,
    /// What is logged, and how.
    pub log: Log,
    /// Limits of connections.
    pub connections: Connections,
    /// Who may do what. While nothing is set here, everybody may do everything.
    pub access: AccessSettings,
    /// Encrypted connections.
    pub tls: TlsSettings,
    /// How much one client may ask for.
    pub limits: LimitSettings,
    /// Garbage collection.
    pub gc: Gc,
    /// Scrubbing.
    pub scrub: Scrub,
    /// Where figures for Prometheus are.
    pub metrics: MetricsPage,
    /// Tags that do not move.
    pub tags: Tags,
    /// How much repositories may hold.
    pub quota: Quota,
    /// Which tags are kept.
    pub retention: Retention,
    /// Who is told what happens.
    pub notify: Notify,
    /// Where spans are sent, for OpenTelemetry.
    pub trace: Trace,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            root: "/var/lib/kybernate-registry".into(),
            // More than `announce` and `drain` of `[connections]` together.
            root_wait: Period(Duration::from_secs(30)),
            listen: Address::loopback(5000),
            log: Log::default(),
            connections: Connections::default(),
            access: AccessSettings::default(),
            tls: TlsSettings::default(),
            limits: LimitSettings::default(),
            gc: Gc::default(),
            scrub: Scrub::default(),
            metrics: MetricsPage::default(),
            tags: Tags::default(),
            quota: Quota::default(),
            retention: Retention::default(),
            notify: Notify::default(),
            trace: Trace::default(),
        }
    }
}

impl Config {
    /// Reads a configuration file, the environment and options, and returns everything that is
    /// wrong at once.
    pub fn load(settings: &Settings) -> Result<Self, Vec<Mistake>> {
        let mut wrong = Settings::unknown(std::env::vars_os().map(|(name, _)| name));
        let mut sources = Sources::default();
        if let Some(path) = settings.file() {
            match fs_err::read_to_string(path) {
                Ok(text) => {
                    sources.add(Origin::File(path.to_owned()), text);
                }
                Err(error) => wrong.push(Mistake::unreadable(path, &error)),
            }
        }
        settings.sources(&mut sources);
        from_sources(&sources, settings.given(), wrong, Self::check)
    }

    /// Reads the text of a configuration file alone, without environment and options; `name` is
    /// what mistakes call it.
    pub fn read(name: &Path, text: &str) -> Result<Self, Vec<Mistake>> {
        read_toml(name, text, Self::check)
    }

    fn check(&self, mistakes: &mut Mistakes<'_>) {
        if self.root.as_os_str().is_empty() {
            mistakes.add("root", "is empty; name the directory that holds everything");
        } else if self.root.exists() && !self.root.is_dir() {
            mistakes.add("root", format!("{} is not a directory; name one", self.root.display()));
        }
        self.root_wait.check(Duration::ZERO..=Duration::from_hours(1), "root_wait", mistakes);
        self.log.check(&mut mistakes.within("log"));
        self.connections.check(&mut mistakes.within("connections"));
        self.access.check(&mut mistakes.within("access"));
        self.tls.check(&mut mistakes.within("tls"));
        self.limits.check(&mut mistakes.within("limits"));
        self.gc.check(&mut mistakes.within("gc"));
        self.scrub.check(&mut mistakes.within("scrub"));
        self.metrics.check(&self.listen, &mut mistakes.within("metrics"));
        self.tags.check(&mut mistakes.within("tags"));
        self.quota.check(&mut mistakes.within("quota"));
        self.retention.check(&mut mistakes.within("retention"));
        self.notify.check(&mut mistakes.within("notify"));
        self.trace.check(&mut mistakes.within("trace"));
    }

    /// Says what is good and is hardly meant.
    pub fn doubts(&self) -> Vec<String> {
        let mut doubts = self.gc.doubts();
        let passwords = self.access.htpasswd.is_some() && self.tls.certificate.is_none();
        if passwords && !self.listen.is_loopback() {
            doubts.push(format!(
                "access.htpasswd: passwords come over {} without TLS; set tls.certificate, or \
                 listen on 127.0.0.1 behind a proxy that has one",
                self.listen
            ));
        }
        doubts
    }

    /// Returns the JSON schema of the configuration.
    pub fn schema() -> serde_json::Value {
        setting::schema()
    }
}

/// Reads another TOML file as this one is read: everything that is wrong at once, with its place.
pub(crate) fn read_toml<T: DeserializeOwned>(
    name: &Path,
    text: &str,
    check: impl FnOnce(&T, &mut Mistakes<'_>),
) -> Result<T, Vec<Mistake>> {
    let mut sources = Sources::default();
    sources.add(Origin::File(name.to_owned()), text.to_owned());
    from_sources(&sources, &[], Vec::new(), check)
}

fn from_sources<T: DeserializeOwned>(
    sources: &Sources,
    given: &[Given],
    mut wrong: Vec<Mistake>,
    check: impl FnOnce(&T, &mut Mistakes<'_>),
) -> Result<T, Vec<Mistake>> {
    let mut document = Document::read(sources, given);
    let read = document.take::<T>();
    let mut found = Vec::new();
    if let Some(read) = &read {
        check(read, &mut Mistakes::new(&mut found));
    }
    wrong.extend(document.finish(found));
    match read {
        Some(read) if wrong.is_empty() => Ok(read),
        _ => Err(wrong),
    }
}

#[cfg(test)]
mod tests;
