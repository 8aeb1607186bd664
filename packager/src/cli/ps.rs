//! `kyb ps`

use std::fmt::Write as _;

use clap::{Args, ValueEnum};
use kybernate_packager::agent_api::{Container, ListRequest, Operation, OperationState, TagState};
use serde_json::{Value, json};

use super::Failure;
use super::agent::{AgentSocket, refused};
use super::identifier::identifier;
use super::node::tier;
use super::stage::word;
use crate::terminal::Terminal;

/// List the containers of this node and what the agent is doing.
///
/// A checkpoint that is "untagged" is pushed, and whoever asked for it with a key file of their own
/// has not reported that it is signed and tagged.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  kyb ps --namespace k8s.io")]
pub(super) struct Ps {
    /// Only this namespace of containerd.
    #[arg(long, value_parser = identifier)]
    namespace: Option<String>,
    /// Only this container, and its operations.
    #[arg(long, value_parser = identifier)]
    container: Option<String>,
    /// Only operations; containerd is not asked.
    #[arg(long)]
    operations: bool,
    /// Only operations in this state; may be given more than once.
    #[arg(long = "state", value_name = "STATE")]
    states: Vec<State>,
    #[command(flatten)]
    agent: AgentSocket,
}

/// How an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum State {
    Running,
    Done,
    Failed,
    Refused,
    Cancelled,
}

impl From<State> for OperationState {
    fn from(state: State) -> Self {
        match state {
            State::Running => Self::Running,
            State::Done => Self::Done,
            State::Failed => Self::Failed,
            State::Refused => Self::Refused,
            State::Cancelled => Self::Cancelled,
        }
    }
}

impl Ps {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let mut client = self.agent.connect().await?;
        let states = self.states.into_iter().map(|state| OperationState::from(state).into());
        let request = ListRequest {
            containerd_namespace: self.namespace.unwrap_or_default(),
            container: self.container.unwrap_or_default(),
            operations_only: self.operations,
            states: states.collect(),
        };
        let list = client.list(request).await.map_err(refused)?.into_inner();
        let facts = json!({
            "containersProblem": Some(&list.containers_problem).filter(|text| !text.is_empty()),
            "containers": list.containers.iter().map(container).collect::<Vec<_>>(),
            "operations": list.operations.iter().map(operation).collect::<Vec<_>>(),
            "tiers": list.tiers.iter().map(tier).collect::<Vec<_>>(),
        });
        let mut text = String::new();
        if !self.operations {
            text.push_str(&row(&["CONTAINER", "NAMESPACE", "STATUS", "PID", "IMAGE"]));
        }
        for one in &list.containers {
            let pid = one.pid.to_string();
            let shown = if one.suspended_since.is_empty() { &*one.status } else { "suspended" };
            text.push_str(&row(&[&one.id, &one.containerd_namespace, shown, &pid, &one.image]));
        }
        if !list.containers_problem.is_empty() {
            text = format!("containers are not known: {}\n", list.containers_problem);
        }
        if !list.operations.is_empty() {
            if !self.operations {
                text.push('\n');
            }
            let titles =
                ["OPERATION", "STARTED", "KIND", "CONTAINER", "STATE", "STEP", "REFERENCE"];
            text.push_str(&operation_row(&titles));
        }
        for one in &list.operations {
            let (kind, state, step) = (kind(one), shown_state(one), step(one));
            // To the second.
            let started = one.started_at.split('.').next().unwrap_or_default();
            let cells = [&one.id, started, &kind, &one.container, &state, &step, &name_of(one)];
            text.push_str(&operation_row(&cells));
        }
        terminal.print(&facts, &text).map_err(Failure::failed)
    }
}

fn container(one: &Container) -> Value {
    json!({
        "id": one.id,
        "namespace": one.containerd_namespace,
        "image": one.image,
        "status": one.status,
        "pid": one.pid,
        "restoredFrom": one.restored_from,
        "suspendedSince": Some(&one.suspended_since).filter(|since| !since.is_empty()),
    })
}

/// Returns an operation as JSON has it.
pub(super) fn operation(one: &Operation) -> Value {
    json!({
        "id": one.id,
        "container": one.container,
        "namespace": one.containerd_namespace,
        "reference": one.reference,
        "state": state(one),
        "kind": kind(one),
        "tier": word(one.tier()),
        "image": Some(&one.image).filter(|name| !name.is_empty()),
        "step": one.step,
        "waitsFor": Some(&one.waits_for).filter(|what| !what.is_empty()),
        "progress": progress(one),
        "cancelling": one.cancelling,
        "undone": one.undone,
        "digest": one.digest,
        "tagged": match one.tag() {
            TagState::Unspecified => None,
            TagState::Tagged => Some(true),
            TagState::AwaitsSigner => Some(false),
        },
        "error": one.error,
        "refusedBy": one.refused_by,
        "startedAt": one.started_at,
        "finishedAt": one.finished_at,
        "deadline": one.deadline,
    })
}

/// Returns the word for what an operation does.
pub(super) fn kind(one: &Operation) -> String {
    let name = one.kind().as_str_name();
    name.trim_start_matches("OPERATION_KIND_").to_lowercase()
}

fn progress(one: &Operation) -> Value {
    let progress = one.progress.unwrap_or_default();
    json!({
        "bytesDone": progress.bytes_done,
        "bytesTotal": progress.bytes_total,
        "percent": progress.percent,
    })
}

/// Returns the step under way and how much of it is done.
pub(super) fn step(one: &Operation) -> String {
    if !one.waits_for.is_empty() {
        return format!("{}, waits for {}", one.step, one.waits_for);
    }
    match one.progress.unwrap_or_default().percent {
        Some(percent) => format!("{} {percent}%", one.step),
        None => one.step.clone(),
    }
}

/// Returns what an operation's checkpoint is found by: its digest while no tag is written.
fn name_of(one: &Operation) -> String {
    match one.tag() {
        TagState::AwaitsSigner => {
            format!("{} (pushed as {}, waits for its signer)", one.reference, one.digest)
        }
        _ => one.reference.clone(),
    }
}

fn state(one: &Operation) -> String {
    let name = one.state().as_str_name();
    name.trim_start_matches("OPERATION_STATE_").to_lowercase()
}

/// Returns its state, or what people should know of it instead.
pub(super) fn shown_state(one: &Operation) -> String {
    match one.tag() {
        TagState::AwaitsSigner => "untagged".to_owned(),
        _ if one.cancelling => "cancelling".to_owned(),
        _ => state(one),
    }
}

pub(super) fn row(cells: &[&str; 5]) -> String {
    let [first, second, third, fourth, last] = cells;
    let mut text = String::new();
    // Writing to a string does not fail.
    let _written = writeln!(text, "{first:<24} {second:<16} {third:<10} {fourth:<12} {last}");
    text
}

fn operation_row([id, started, kind, container, state, step, last]: &[&str; 7]) -> String {
    format!("{id:<20} {started:<19} {kind:<10} {container:<16} {state:<10} {step:<12} {last}\n")
}
