//! Operations that somebody else has asked for.

use std::sync::Arc;

use kybernate_packager::agent_api::{Operation, OperationKind, OperationState, StepTime};
use rustix::process::Signal;

use super::{Script, Scripted, Wait, cancelled, staged};
use crate::kyb::{Ran, kyb, signal_child_with};

fn done() -> Operation {
    Operation {
        kind: OperationKind::Checkpoint.into(),
        state: OperationState::Done.into(),
        container: "job".to_owned(),
        digest: staged().digest,
        paused_microseconds: 250_000,
        times: vec![StepTime { step: "preflight".to_owned(), microseconds: 1500 }],
        ..Operation::default()
    }
}

/// Watches an operation of an agent, of which each that ends ends as `end` does.
async fn watched(end: Operation, line: &[&str]) -> Ran {
    let scratch = tempfile::tempdir().unwrap();
    let agent = Scripted::start(scratch.path(), Script { end, ..Script::default() });
    let socket = ["--agent-socket", agent.socket.to_str().unwrap()];
    let line = ["watch"].iter().chain(line).chain(&socket);
    kyb(scratch.path(), line.copied().collect::<Vec<_>>()).await
}

#[tokio::test]
async fn somebody_elses_operation_is_watched_to_its_end() {
    let ran = watched(done(), &["op-1"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    for part in ["checkpoint op-1 is done", "job", &staged().digest, "0.25 s"] {
        assert!(ran.out.contains(part), "{part} is missing in {ran:?}");
    }
    // A line for each step, once, also across a watch that breaks off.
    assert_eq!(ran.told.matches("preflight: 0.00 s").count(), 1, "{ran:?}");
    let told = watched(done(), &["op-1", "--json"]).await.json();
    assert_eq!((&told["id"], &told["state"]), (&"op-1".into(), &"done".into()), "{told}");
    assert_eq!(told["timesMicroseconds"]["preflight"], 1500, "{told}");
    assert_eq!(told["pausedMicroseconds"], 250_000, "{told}");
    // One that is over is told at once.
    let ran = watched(done(), &["over"]).await;
    assert!(ran.code == 0 && ran.out.contains("checkpoint over is done"), "{ran:?}");
}

#[tokio::test]
async fn whoever_waits_for_an_agent_that_is_gone_is_told_so() {
    let scratch = tempfile::tempdir().unwrap();
    let agent = Scripted::start(scratch.path(), Script::default());
    let (socket, script) = (agent.socket.clone(), Arc::clone(&agent.script));
    let line = ["watch", "op-1", "--agent-socket", socket.to_str().unwrap()];
    let mut running = std::pin::pin!(kyb(scratch.path(), line));
    tokio::select! {
        done = &mut running => panic!("it did not wait: {done:?}"),
        // This watch breaks off, and nobody is there for the next one.
        () = script.watched.notified() => drop(agent),
    }
    let ran = running.await;
    ran.ended(1, "operation op-1 may still be under way: `kyb watch op-1` tells");
    assert_eq!(ran.told.matches("the agent does not answer").count(), 1, "{ran:?}");
}

#[tokio::test]
async fn an_agent_that_hangs_is_not_waited_for() {
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("agent.sock");
    // Whoever connects waits for somebody to accept.
    let _hangs = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let line = ["stage", "localhost:1/a/b", "--tier=ram", "--agent-socket"];
    let line = line.into_iter().chain([socket.to_str().unwrap()]);
    let ran = kyb(scratch.path(), line).await;
    ran.ended(1, "lost the agent");
}

#[tokio::test]
async fn it_ends_as_the_command_that_asked_for_it() {
    let error = "it keeps CAP_SYS_ADMIN".to_owned();
    let refused_by = "identity".to_owned();
    let refused = Operation {
        state: OperationState::Refused.into(),
        error: error.clone(),
        refused_by,
        ..done()
    };
    let failed = Operation { state: OperationState::Failed.into(), error, ..done() };
    let ends = [
        (refused, 2, "refused", "refused (identity): it keeps CAP_SYS_ADMIN"),
        (failed, 1, "failed", "it keeps CAP_SYS_ADMIN"),
        (cancelled(), 1, "cancelled", "it was cancelled; the source runs"),
    ];
    for (end, code, state, text) in ends {
        for id in ["op-1", "over"] {
            watched(end.clone(), &[id]).await.ended(code, text);
            let ran = watched(end.clone(), &[id, "--json"]).await;
            assert_eq!(ran.code, code, "{ran:?}");
            let told: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
            assert_eq!((&told["id"], &told["state"]), (&id.into(), &state.into()), "{ran:?}");
            assert_eq!(told["error"], end.error, "{ran:?}");
        }
    }
}

#[tokio::test]
async fn an_unknown_operation_says_where_the_known_ones_are() {
    let ran = watched(done(), &["nobody"]).await;
    ran.ended(1, "there is no operation \"nobody\": `kyb ps --operations` lists");
    let scratch = tempfile::tempdir().unwrap();
    let agent = Scripted::start(scratch.path(), Script::default());
    let socket = agent.socket.to_str().unwrap();
    let ran = kyb(scratch.path(), ["cancel", "nobody", "--agent-socket", socket]).await;
    ran.ended(1, "there is no operation \"nobody\": `kyb ps --operations` lists");
    watched(done(), &["no id"]).await.ended(64, "no id");
}

#[tokio::test]
async fn an_agent_that_is_not_there_is_told_from_one_that_has_ended() {
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("agent.sock");
    let ask = || kyb(scratch.path(), ["ps", "--agent-socket", socket.to_str().unwrap()]);
    ask().await.ended(1, "there is no such socket: does kybernate-agent run");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    ask().await.ended(1, "nobody listens there: does kybernate-agent still run?");
}

#[tokio::test]
async fn who_only_watches_cancels_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let wait = Some(Wait::ForEver);
    let agent = Scripted::start(scratch.path(), Script { wait, ..Script::default() });
    let socket = agent.socket.to_str().unwrap();
    let mut running =
        std::pin::pin!(kyb(scratch.path(), ["watch", "op-1", "--agent-socket", socket]));
    tokio::select! {
        done = &mut running => panic!("it did not wait: {done:?}"),
        () = agent.script.watched.notified() => signal_child_with(socket, Signal::INT),
    }
    assert_ne!(running.await.code, 0);
    assert!(agent.script.cancels.lock().unwrap().is_empty());
}
