//! `kyb watch`

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use kybernate_packager::agent_api::{
    GetOperationRequest, ListRequest, Operation, OperationState, TagState,
};

use super::Failure;
use super::agent::{AgentSocket, outcome, refused, times, unknown};
use super::identifier::identifier;
use super::ps;
use crate::terminal::Terminal;

/// Watch an operation of this node's agent until it ends, or all of them, whoever asked for them.
///
/// It ends as the command would that asked for the operation: with 0 when that is done, 1 when it
/// failed or was cancelled, 2 when a rule refused it. With --json the operation is printed as it ended,
/// however it did. Ctrl-C ends the watching, and the operation goes on.
///
/// Without an operation, those that are under way are shown and each that begins: a line for each step
/// and each end, until Ctrl-C; with --json a document in a line for each change.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    kyb watch 019aa6e3c0de5f3759df   # as kyb ps lists it\n  \
    kyb watch --json | jq -r 'select(.state == \"failed\") | .error'")]
pub(super) struct Watch {
    /// The operation's id; none means all of them.
    #[arg(value_name = "OPERATION", value_parser = identifier)]
    operation: Option<String>,
    #[command(flatten)]
    agent: AgentSocket,
}

impl Watch {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        match self.operation.clone() {
            Some(operation) => self.one(terminal, operation).await,
            None => self.all(terminal).await,
        }
    }

    /// Shows all of them; those that had ended before are no news.
    async fn all(self, terminal: &Terminal) -> Result<(), Failure> {
        let mut client = self.agent.connect().await?;
        let request = ListRequest { operations_only: true, ..ListRequest::default() };
        let before = client.list(request).await.map_err(refused)?.into_inner().operations;
        let ended = before.iter().filter(|one| one.state() != OperationState::Running);
        let mut told: BTreeMap<String, String> =
            ended.map(|one| (one.id.clone(), line(one))).collect();
        if !terminal.is_json() {
            let head = ps::row(&["OPERATION", "CONTAINER", "KIND", "STATE", "STEP"]);
            terminal.print_line(&(), &head).map_err(Failure::failed)?;
        }
        self.agent
            .watch_all(|one| {
                let line = line(one);
                // Bytes are news for scripts only.
                let is_under_way = one.state() == OperationState::Running;
                let is_news = told.get(&one.id) != Some(&line);
                if !(is_news || terminal.is_json() && is_under_way) {
                    return Ok(());
                }
                let printed = terminal.print_line(&ps::operation(one), &line);
                told.insert(one.id.clone(), line);
                printed.map_err(Failure::failed)
            })
            .await
    }

    async fn one(self, terminal: &Terminal, operation: String) -> Result<(), Failure> {
        let mut client = self.agent.connect().await?;
        let request = GetOperationRequest { operation_id: operation };
        let found = client.get_operation(request).await.map_err(unknown)?;
        let ended = self.agent.end_of(terminal, found.into_inner(), None).await?;
        if terminal.is_json() {
            let mut facts = ps::operation(&ended);
            if let Some(facts) = facts.as_object_mut() {
                facts.insert("base".to_owned(), none_if_empty(&ended.base).into());
                facts.insert("pausedMicroseconds".to_owned(), ended.paused_microseconds.into());
                facts.insert("timesMicroseconds".to_owned(), times(&ended));
                facts.insert("warnings".to_owned(), ended.warnings.clone().into());
            }
            terminal.print(&facts, "").map_err(Failure::failed)?;
            // It has been told.
            let told =
                |failure: Failure| Failure::Answered(failure.code(), "it is not done".into());
            return outcome(ended).map(drop).map_err(told);
        }
        let text = text(&ended);
        outcome(ended)?;
        terminal.print(&(), &text).map_err(Failure::failed)
    }
}

/// Says how an operation is, in a line.
fn line(one: &Operation) -> String {
    let last = match one.state() {
        OperationState::Running if one.waits_for.is_empty() => one.step.clone(),
        OperationState::Running => ps::step(one),
        _ => one.error.clone(),
    };
    ps::row(&[&one.id, &one.container, &ps::kind(one), &ps::shown_state(one), &last])
}

/// Says what a finished operation has come to.
fn text(done: &Operation) -> String {
    let mut text = format!("{} {} is done", ps::kind(done), done.id);
    let mut line = |name: &str, value: &str| {
        if !value.is_empty() {
            // Writing to a string does not fail.
            let _written = write!(text, "\n  {name:<10} {value}");
        }
    };
    line("container", &done.container);
    line("reference", &done.reference);
    line("digest", &done.digest);
    line("base", &done.base);
    line("image", &done.image);
    if done.tag() == TagState::AwaitsSigner {
        line("tag", "not written: whoever asked for it signs and tags it");
    }
    if done.paused_microseconds > 0 {
        let paused = Duration::from_micros(done.paused_microseconds);
        line("paused", &format!("{:.2} s", paused.as_secs_f64()));
    }
    text
}

fn none_if_empty(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}
