//! Figures for Prometheus, and the page they are on.
//!
//! Names are `kybernate_agent_<noun>_<unit>`; labels have few values that we choose, never the name
//! of a container or a reference. Only who was refused is told by name, and not more than a few.

mod denials;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use fs_err as fs;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tokio::net::{TcpListener, UnixListener};

use self::denials::Denials;
use crate::operations::{Kind, Record};
use crate::private;
use crate::staging::Figures;
use crate::tasks::Tasks;

/// What the page is.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A pause is tens of milliseconds for a small container, seconds for many GiB.
const PAUSE_SECONDS: [f64; 10] = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// A step is milliseconds to minutes.
const STEP_SECONDS: [f64; 9] = [0.01, 0.05, 0.25, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0];

/// Where the page is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// An address of the network.
    Tcp(SocketAddr),
    /// A socket in the file system, for its owner only.
    Unix(PathBuf),
}

/// Everything that is counted. All clones count together.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    ended: Family<Ended, Counter>,
    under_way: Family<Of, Gauge>,
    steps: Family<Step, Histogram>,
    transferred: Family<Of, Counter>,
    refused: Family<Reason, Counter>,
    judged: Family<Judged, Counter>,
    policy_reads: Family<PolicyRead, Counter>,
    paused: Histogram,
    guardian_resumes: Counter,
    denied: Denials,
    pub(crate) staging: Figures,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    kind: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Step {
    kind: &'static str,
    step: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Judged {
    kind: &'static str,
    outcome: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PolicyRead {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    kind: &'static str,
    reason: &'static str,
}

impl Default for Metrics {
    fn default() -> Self {
        let step: fn() -> Histogram = || Histogram::new(STEP_SECONDS);
        Self {
            ended: Family::default(),
            under_way: Family::default(),
            steps: Family::new_with_constructor(step),
            transferred: Family::default(),
            refused: Family::default(),
            judged: Family::default(),
            policy_reads: Family::default(),
            paused: Histogram::new(PAUSE_SECONDS),
            guardian_resumes: Counter::default(),
            denied: Denials::default(),
            staging: Figures::default(),
        }
    }
}

impl Metrics {
    /// Counts an operation that begins.
    pub(crate) fn began(&self, kind: Kind) {
        self.under_way.get_or_create(&Of { kind: kind.name() }).inc();
    }

    /// Counts an operation that has ended.
    pub(crate) fn ended(&self, record: &Record) {
        let kind = record.kind.name();
        self.under_way.get_or_create(&Of { kind }).dec();
        self.ended.get_or_create(&Ended { kind, state: record.state.name() }).inc();
        self.transferred.get_or_create(&Of { kind }).inc_by(record.sizes.transferred_bytes);
        for time in &record.times {
            let seconds = Duration::from_micros(time.microseconds).as_secs_f64();
            // Steps are names in the code: few.
            let step = Step { kind, step: time.step.clone() };
            self.steps.get_or_create(&step).observe(seconds);
        }
        if let Some(by) = record.refused_by {
            self.refused(record.kind, by.name());
        }
    }

    /// Counts a request or an operation that a rule refused.
    pub(crate) fn refused(&self, kind: Kind, reason: &'static str) {
        self.refused.get_or_create(&Reason { kind: kind.name(), reason }).inc();
    }

    /// Counts what the node's policy decided about a checkpoint: `signed`, `tolerated`, `not-looked`
    /// or `refused`, and what it objected to, if anything.
    pub(crate) fn judged(&self, kind: Kind, outcome: &'static str, reason: &'static str) {
        self.judged.get_or_create(&Judged { kind: kind.name(), outcome, reason }).inc();
    }

    /// Counts a change of the trust policy's files.
    pub(crate) fn policy_read(&self, good: bool) {
        let outcome = if good { "good" } else { "bad" };
        self.policy_reads.get_or_create(&PolicyRead { outcome }).inc();
    }

    /// Counts how long a source was paused.
    pub(crate) fn paused(&self, time: Duration) {
        self.paused.observe(time.as_secs_f64());
    }

    /// Counts a source that its guardian had to bring back.
    pub(crate) fn guardian_resumed(&self) {
        self.guardian_resumes.inc();
    }

    /// Counts a call that no rule allows.
    pub(crate) fn denied(&self, caller: String, method: &'static str) {
        self.denied.count(caller, method);
    }

    /// Writes all of it in the text format of OpenMetrics.
    pub(crate) fn page(&self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("kybernate_agent");
        let all = &mut registry;
        all.register("operations", "Operations that have ended", self.ended.clone());
        let help = "Operations that have not ended, also while they are undone";
        all.register("operations_under_way", help, self.under_way.clone());
        let help = "How long the steps of ended operations took";
        all.register_with_unit("step", help, Unit::Seconds, self.steps.clone());
        let help = "Bytes sent to or received from registries";
        all.register_with_unit("transferred", help, Unit::Bytes, self.transferred.clone());
        let help = "Requests and operations that a rule refused: a finding of the look before a \
                    checkpoint, or what verifies a restore";
        all.register("refusals", help, self.refused.clone());
        let help = "What the trust policy decided about checkpoints, and what it objected to";
        all.register("trust_decisions", help, self.judged.clone());
        let help = "Changes of the trust policy's files that were read; bad ones do not count";
        all.register("trust_policy_reads", help, self.policy_reads.clone());
        let help = "How long sources were paused";
        all.register_with_unit("paused", help, Unit::Seconds, self.paused.clone());
        let help = "Sources that their guardian brought back";
        all.register("guardian_resumes", help, self.guardian_resumes.clone());
        self.denied.register(all);
        self.staging.register(all);
        let mut page = String::new();
        text::encode(&mut page, &registry)?;
        Ok(page)
    }
}

impl Address {
    /// Reads `IP:PORT`, or `unix:PATH`.
    pub fn parse(text: &str) -> Option<Self> {
        match text.strip_prefix("unix:") {
            Some(path) => Some(Self::Unix(path.into())).filter(|_| path.starts_with('/')),
            None => text.parse().ok().map(Self::Tcp),
        }
    }
}

/// Serves the page, and these others, until the agent ends.
pub(crate) async fn serve(
    address: &Address,
    metrics: Metrics,
    others: Router,
    tasks: &Tasks,
) -> io::Result<()> {
    let page = move || std::future::ready(response(&metrics));
    let router = others.route("/metrics", get(page)).fallback(not_found);
    match address {
        Address::Tcp(address) => {
            let listener = TcpListener::bind(address).await?;
            tracing::info!(address = %listener.local_addr()?, "serving metrics");
            tasks.spawn(|stop| async move {
                let served = axum::serve(listener, router);
                ended(served.with_graceful_shutdown(stop.cancelled_owned()).await);
            });
        }
        Address::Unix(path) => {
            private::free_socket(path)?;
            let listener = UnixListener::bind(path)?;
            fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
            tracing::info!(?path, "serving metrics");
            tasks.spawn(|stop| async move {
                let served = axum::serve(listener, router);
                ended(served.with_graceful_shutdown(stop.cancelled_owned()).await);
            });
        }
    }
    Ok(())
}

fn response(metrics: &Metrics) -> Response {
    match metrics.page() {
        Ok(page) => ([(CONTENT_TYPE, OPENMETRICS)], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn not_found(uri: Uri) -> (StatusCode, String) {
    (StatusCode::NOT_FOUND, format!("{uri} is none of /metrics, /healthz and /readyz\n"))
}

fn ended(served: io::Result<()>) {
    if let Err(error) = served {
        tracing::error!(%error, "metrics are not served any more");
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixStream;

    use super::*;
    use crate::operations::{RefusedBy, State};

    #[test]
    fn an_address_is_of_the_network_or_a_path() {
        let tcp = Address::parse("127.0.0.1:9464");
        assert_eq!(tcp, Some(Address::Tcp(([127, 0, 0, 1], 9464).into())));
        let unix = Address::parse("unix:/run/x.sock");
        assert_eq!(unix, Some(Address::Unix("/run/x.sock".into())));
        for wrong in ["9464", "unix:x.sock", "localhost", ""] {
            assert_eq!(Address::parse(wrong), None, "{wrong}");
        }
    }

    #[tokio::test]
    async fn what_was_counted_is_on_the_page() {
        let metrics = Metrics::default();
        let began = "2026-01-01T00:00:00Z".parse().unwrap();
        for (state, refused_by) in
            [(State::Done, None), (State::Refused, Some(RefusedBy::Signature))]
        {
            metrics.began(Kind::Restore);
            let record = Record::new("x".to_owned(), Kind::Restore, began);
            metrics.ended(&Record { state, refused_by, ..record });
        }
        metrics.began(Kind::Checkpoint);
        metrics.refused(Kind::Checkpoint, "io-uring");
        metrics.judged(Kind::Restore, "tolerated", "not-signed");
        metrics.policy_read(false);
        metrics.paused(Duration::from_millis(120));
        metrics.guardian_resumed();
        metrics.denied("uid:1000".to_owned(), "Restore");

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics.sock");
        let tasks = Tasks::default();
        serve(&Address::Unix(path.clone()), metrics, Router::new(), &tasks).await.unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        let mut stream = UnixStream::connect(&path).await.unwrap();
        let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request).await.unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).await.unwrap();
        assert!(page.starts_with("HTTP/1.1 200") && page.contains(OPENMETRICS), "{page}");
        for line in [
            "kybernate_agent_operations_total{kind=\"restore\",state=\"done\"} 1",
            "kybernate_agent_operations_total{kind=\"restore\",state=\"refused\"} 1",
            "kybernate_agent_operations_under_way{kind=\"checkpoint\"} 1",
            "kybernate_agent_operations_under_way{kind=\"restore\"} 0",
            "kybernate_agent_refusals_total{kind=\"restore\",reason=\"signature\"} 1",
            "kybernate_agent_refusals_total{kind=\"checkpoint\",reason=\"io-uring\"} 1",
            "kybernate_agent_trust_decisions_total{kind=\"restore\",outcome=\"tolerated\",\
             reason=\"not-signed\"} 1",
            "kybernate_agent_trust_policy_reads_total{outcome=\"bad\"} 1",
            "kybernate_agent_paused_seconds_bucket{le=\"0.25\"} 1",
            "kybernate_agent_guardian_resumes_total 1",
            "kybernate_agent_denied_calls_total{caller=\"uid:1000\",method=\"Restore\"} 1",
        ] {
            assert!(page.contains(line), "{line} is missing in\n{page}");
        }
        assert!(tasks.shut_down(Duration::from_secs(5)).await);
    }
}
