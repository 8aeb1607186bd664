//! This node's agent.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use hyper_util::rt::TokioIo;
use kybernate_packager::agent_api::agent_client::AgentClient;
use kybernate_packager::agent_api::{
    AGENT_SOCKET, CancelRequest, Operation, OperationState, PreflightResponse, REFUSED_BY,
    StepTime, WatchRequest,
};
use kybernate_packager::progress::Snapshot;
use kybernate_packager::trace_parent::TraceParent;
use kybernate_packager::unix_socket;
use prost::Message as _;
use tonic::metadata::AsciiMetadataValue;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tower::service_fn;

use self::limit::{Limit, overdue};
use self::network::NetworkAgent;
use super::preflight::Obstacles;
use super::{Failure, Rule};
use crate::interrupt::Claim;
use crate::terminal::{Display, Terminal, say};

mod limit;
mod network;

/// How often a broken watch is begun again without news between: an agent restarts in seconds, and
/// its operations go on.
const BREAKS_MAX: u32 = 30;

/// After how many of them that is told: one that restarts is back by then.
const BREAKS_TOLD: u32 = 3;

/// Pause between those.
const PAUSE: Duration = Duration::from_secs(1);

/// How often the agent is asked whether it is there while something is asked of it, and how long it may take
/// to say so. One on a machine that is busy answers within a second.
const ALIVE_INTERVAL: Duration = Duration::from_secs(10);
const ALIVE_LIMIT: Duration = Duration::from_secs(20);

/// A connection to the agent, over which it learns what trace we are a part of.
pub(super) type Client = AgentClient<InterceptedService<Channel, fn(Request<()>) -> Traced>>;
/// A call with the trace it is a part of.
type Traced = Result<Request<()>, Status>;

/// How to reach the agent.
#[derive(Clone, Debug, Args)]
pub(super) struct AgentSocket {
    /// The agent's socket.
    #[arg(long, value_name = "PATH", env = "KYBERNATE_AGENT_SOCKET", default_value = AGENT_SOCKET)]
    agent_socket: PathBuf,
    #[command(flatten)]
    network: NetworkAgent,
}

impl AgentSocket {
    /// Whether there is a socket, or another machine was named; what answers is found out by [`Self::connect`].
    pub(super) fn is_there(&self) -> bool {
        self.network.is_named() || self.agent_socket.exists()
    }

    /// Connects to the agent.
    pub(super) async fn connect(&self) -> Result<Client, Failure> {
        if let Some(channel) = self.network.connect().await? {
            return Ok(AgentClient::with_interceptor(channel, traced));
        }
        let path = self.agent_socket.clone();
        let connector = service_fn(move |_| {
            let path = path.clone();
            async move { unix_socket::connect(&path).await.map(TokioIo::new) }
        });
        // The address is never looked at: the socket is the address.
        let endpoint = kept_alive(Endpoint::from_static("http://agent.local"));
        let channel = endpoint.connect_with_connector(connector).await.map_err(|error| {
            let path = self.agent_socket.display();
            Failure::failed(format!("failed to reach the agent at {path}: {}", unreached(&error)))
        })?;
        Ok(AgentClient::with_interceptor(channel, traced))
    }

    /// Shows an operation until it ends. Ctrl-C cancels it; the second one leaves it to the agent.
    pub(super) async fn follow(
        &self,
        terminal: &Terminal,
        begun: Operation,
    ) -> Result<Operation, Failure> {
        let interrupts = terminal.interrupts().claim();
        outcome(self.end_of(terminal, begun, Some(interrupts)).await?)
    }

    /// Shows an operation until it ends, however it does. Who has a claim to interruptions cancels
    /// it with the first.
    pub(super) async fn end_of(
        &self,
        terminal: &Terminal,
        begun: Operation,
        mut interrupts: Option<Claim<'_>>,
    ) -> Result<Operation, Failure> {
        let mut display = terminal.display();
        let mut latest = begun;
        let mut breaks = 0;
        let mut cancelled = false;
        let limit = Limit::of(&latest);
        while !ended(&latest) {
            let interrupted = async {
                match &mut interrupts {
                    Some(claim) => claim.next().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                told = self.news(&mut latest, &mut display, &mut breaks) => told?,
                () = interrupted => {
                    if std::mem::replace(&mut cancelled, true) {
                        display.end();
                        return Err(left(&latest));
                    }
                    self.cancel(&latest.id).await;
                }
                () = limit.is_over() => {
                    if let Some(failure) = overdue(&latest) {
                        display.end();
                        return Err(failure);
                    }
                }
            }
        }
        display.update(&snapshot(&latest));
        display.warnings(&latest.warnings);
        display.end();
        Ok(latest)
    }

    /// Shows every operation as it is, then as it changes, also by the agent's next start. Ends when
    /// `show` does not want to go on, or the agent stays away.
    pub(super) async fn watch_all(
        &self,
        mut show: impl FnMut(&Operation) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut breaks = 0;
        loop {
            let watched = async {
                let mut client = self.connect().await?;
                let all = WatchRequest::default();
                client.watch(all).await.map(tonic::Response::into_inner).map_err(refused)
            };
            match watched.await {
                Ok(mut stream) => {
                    while let Ok(Some(operation)) = stream.message().await {
                        breaks = 0;
                        show(&operation)?;
                    }
                }
                // Whoever may not watch will not be let later.
                Err(refused @ Failure::Refused(..)) => return Err(refused),
                Err(away) if breaks == BREAKS_MAX => return Err(away),
                Err(_away) => {}
            }
            breaks += 1;
            pause().await;
        }
    }

    /// Waits for news, or for the agent to come back.
    async fn news(
        &self,
        latest: &mut Operation,
        display: &mut Display,
        breaks: &mut u32,
    ) -> Result<(), Failure> {
        let show = |now: &Operation| {
            display.update(&snapshot(now));
            display.waits_for(&now.waits_for);
            display.warnings(&now.warnings);
        };
        let news = self.watch(latest, show).await;
        *breaks = if news.is_ok_and(|news| news) { 0 } else { *breaks + 1 };
        if ended(latest) {
            return Ok(());
        }
        if *breaks == BREAKS_TOLD {
            display.say("the agent does not answer; waiting for it for up to half a minute");
        }
        if *breaks > BREAKS_MAX {
            let id = &latest.id;
            return Err(Failure::failed(format!(
                "lost the agent; operation {id} may still be under way: `kyb watch {id}` tells, as soon as an \
                 agent runs there again"
            )));
        }
        pause().await;
        Ok(())
    }

    /// Asks the agent to end an operation, and says how that went.
    async fn cancel(&self, id: &str) {
        let asked = async {
            let mut client = self.connect().await?;
            let request = CancelRequest { operation_id: id.to_owned() };
            client.cancel(request).await.map_err(refused)
        };
        match asked.await {
            Ok(_) => say(&format!(
                "cancelling operation {id}; press Ctrl-C again to leave that to the agent"
            )),
            Err(failure) => {
                say(&failure.to_string());
                say("press Ctrl-C again to leave it to the agent");
            }
        }
    }

    /// Watches an operation while the connection holds. Returns whether there was any news.
    async fn watch(
        &self,
        latest: &mut Operation,
        mut show: impl FnMut(&Operation),
    ) -> Result<bool, Failure> {
        let mut client = self.connect().await?;
        let request = WatchRequest { operation_id: latest.id.clone() };
        let mut stream = client.watch(request).await.map_err(refused)?.into_inner();
        let mut news = false;
        while let Some(operation) = stream.message().await.map_err(refused)? {
            news = true;
            *latest = operation;
            show(latest);
        }
        Ok(news)
    }
}

/// Has a connection end when nobody is there any more at its other end, or hangs.
fn kept_alive(endpoint: Endpoint) -> Endpoint {
    endpoint.http2_keep_alive_interval(ALIVE_INTERVAL).keep_alive_timeout(ALIVE_LIMIT)
}

#[expect(clippy::unnecessary_wraps, reason = "an interceptor may refuse, this one does not")]
fn traced(mut request: Request<()>) -> Traced {
    let parent = TraceParent::current();
    let value = parent.and_then(|parent| AsciiMetadataValue::try_from(parent.as_str()).ok());
    if let Some(value) = value {
        request.metadata_mut().insert(TraceParent::HEADER, value);
    }
    Ok(request)
}

/// Tells what a status of the agent means for the exit code.
pub(super) fn refused(status: Status) -> Failure {
    // Only what went wrong on the way has a cause.
    let text = std::error::Error::source(&status).map_or_else(|| status.message().to_owned(), lost);
    let rule = status.metadata().get(REFUSED_BY).and_then(|rule| Rule::named(rule.to_str().ok()?));
    if let Some(rule) = rule {
        // An agent that tells no more than words has no details.
        let details = PreflightResponse::decode(status.details()).unwrap_or_default();
        let obstacles = Obstacles { text, findings: details.findings };
        return Failure::Refused(rule, obstacles.into());
    }
    match status.code() {
        Code::InvalidArgument => Failure::usage(text),
        Code::PermissionDenied => Failure::Refused(Rule::Policy, text.into()),
        _ => Failure::failed(text),
    }
}

/// Tells what a status means of a call about one operation, which may not be there.
pub(super) fn unknown(status: Status) -> Failure {
    match status.code() {
        Code::NotFound => Failure::failed(format!(
            "{}: `kyb ps --operations` lists those that this node's agent knows",
            status.message()
        )),
        _ => refused(status),
    }
}

/// Says why nobody answers at the agent's socket.
fn unreached(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let failure = causes.filter_map(|cause| cause.downcast_ref::<io::Error>()).last();
    let Some(failure) = failure else { return kybernate_spec::chain(error).to_string() };
    match failure.kind() {
        io::ErrorKind::NotFound => "there is no such socket: does kybernate-agent run on this machine, and with \
             this socket (--agent-socket)?"
            .to_owned(),
        io::ErrorKind::ConnectionRefused => {
            "nobody listens there: does kybernate-agent still run? What it was doing goes on when it is started \
             again"
                .to_owned()
        }
        io::ErrorKind::PermissionDenied if failure.raw_os_error().is_some() => {
            format!("{failure}: it is for root, and for users that a [[caller]] of its configuration names")
        }
        _ => failure.to_string(),
    }
}

/// Says that the connection is gone. An agent's refusal of a certificate may come that way: the
/// client's side of TLS 1.3 is through before the agent has looked at it.
fn lost(error: &(dyn std::error::Error + 'static)) -> String {
    let cause = std::iter::successors(Some(error), |error| error.source()).last();
    let cause = cause.map(ToString::to_string).unwrap_or_default();
    format!(
        "lost the agent: {cause}: does kybernate-agent still run? What it was asked for may be done all the \
         same (`kyb ps --operations`). Over the network it also hangs up on who has no certificate that it \
         accepts"
    )
}

/// Writes an operation's times as JSON has them.
pub(super) fn times(operation: &Operation) -> serde_json::Value {
    let time = |time: &StepTime| (time.step.clone(), time.microseconds.into());
    serde_json::Value::Object(operation.times.iter().map(time).collect())
}

fn ended(operation: &Operation) -> bool {
    matches!(
        operation.state(),
        OperationState::Done
            | OperationState::Failed
            | OperationState::Refused
            | OperationState::Cancelled
    )
}

/// What is said to whoever does not want to wait any more.
fn left(operation: &Operation) -> Failure {
    let Operation { id, cancelling, .. } = operation;
    let goes_on = if *cancelling { "is still being cancelled" } else { "goes on" };
    Failure::failed(format!(
        "interrupted; operation {id} {goes_on} at the agent: `kyb ps --operations` shows it"
    ))
}

/// Reads how long an operation may take. The agent counts whole seconds.
pub(super) fn time_out(text: &str) -> Result<u32, String> {
    let time = humantime::parse_duration(text);
    let time = time.map_err(|error| format!("it must be a time like \"10m\": {error}"))?;
    let seconds = u32::try_from(time.as_secs() + u64::from(time.subsec_nanos() > 0)).ok();
    let seconds = seconds.filter(|_| time >= Duration::from_secs(1));
    seconds.ok_or_else(|| "it must be a second at least, and less than a century".to_owned())
}

/// Tells what an operation's end means for the exit code.
pub(super) fn outcome(operation: Operation) -> Result<Operation, Failure> {
    match operation.state() {
        OperationState::Done => Ok(operation),
        OperationState::Refused => {
            let rule = Rule::named(&operation.refused_by).unwrap_or(Rule::Policy);
            Err(Failure::Refused(rule, operation.error.into()))
        }
        OperationState::Cancelled => {
            let Operation { error, undone, .. } = operation;
            Err(Failure::failed([vec![error], undone].concat().join("; ")))
        }
        _ => Err(Failure::failed(operation.error)),
    }
}

/// Looks at an operation as at any other progress.
fn snapshot(operation: &Operation) -> Snapshot {
    let progress = operation.progress.unwrap_or_default();
    let time = |time: &StepTime| (known_step(&time.step), Duration::from_micros(time.microseconds));
    Snapshot {
        step: known_step(&operation.step),
        done: progress.bytes_done,
        total: progress.bytes_total,
        transferred: operation.sizes.map_or(0, |sizes| sizes.transferred_bytes),
        times: operation.times.iter().map(time).collect(),
    }
}

/// Returns the step as the proto file lists it.
fn known_step(step: &str) -> &'static str {
    const STEPS: [&str; 25] = [
        "preflight",
        "copy",
        "gpu",
        "dump",
        "capture",
        "resume",
        "stop",
        "pack",
        "push",
        "sign",
        "tag",
        "resolve",
        "verify",
        "compare",
        "gate",
        "prove",
        "pull",
        "materialise",
        "create",
        "restore",
        "reserve",
        "publish",
        "write",
        "suspend",
        "undo",
    ];
    STEPS.into_iter().find(|known| *known == step).unwrap_or("other")
}

async fn pause() {
    #[expect(clippy::disallowed_methods, reason = "between attempts to reach a restarting agent")]
    tokio::time::sleep(PAUSE).await;
}

#[cfg(test)]
mod tests {
    use super::time_out;

    #[test]
    fn an_operation_has_a_second_at_least() {
        for (text, seconds) in [("1s", 1), ("1500ms", 2), ("10m", 600)] {
            assert_eq!(time_out(text), Ok(seconds));
        }
        for text in ["0s", "1ns", "999ms", "300years", "soon"] {
            assert!(time_out(text).is_err(), "{text}");
        }
    }
}
