//! A store has one owner at a time, and who comes while another lets go of it waits.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed step here is a failed test")]

use std::path::Path;

use kybernate_registry::store::Store;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};

use crate::process::{Process, command};

fn serve(root: &Path, wait: &str) -> Command {
    let root = root.to_str().unwrap();
    command(&["serve", "--root", root, "--listen", "127.0.0.1:0", "--root-wait", wait])
}

/// Reads what a child logs until it says that it waits.
async fn waits(child: &mut Child) -> Lines<BufReader<ChildStderr>> {
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    while let Some(line) = lines.next_line().await.unwrap() {
        if line.contains("another process has the store") {
            return lines;
        }
    }
    panic!("it ended without waiting: {:?}", child.wait().await);
}

#[tokio::test]
async fn a_second_server_on_a_root_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let first = Process::start(root.path(), &[]).await;
    for (wait, waits) in [("0s", false), ("200ms", true)] {
        let output = serve(root.path(), wait).output().await.unwrap();
        assert_eq!(output.status.code(), Some(1));
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains("already served by another process"), "{told}");
        assert_eq!(told.matches("waiting for it").count(), usize::from(waits), "{told}");
    }
    assert_eq!(first.remote.get("/v2/").await.status, 200);
    first.kill().await;
}

#[tokio::test]
async fn a_server_takes_over_from_one_that_drains_or_is_killed() {
    let root = tempfile::tempdir().unwrap();
    let mut owner = Process::start(root.path(), &[]).await;
    let blob = owner.remote.push("a", b"content").await;
    // Open until the end, so that nobody logs into a closed pipe.
    let mut logs = Vec::new();
    for drains in [true, false] {
        let mut next = serve(root.path(), "30s").spawn().unwrap();
        logs.push(waits(&mut next).await);
        if drains {
            assert_eq!(owner.terminate().await.status.code(), Some(0));
        } else {
            owner.kill().await;
        }
        owner = Process::listening(next).await;
        assert_eq!(owner.remote.head_blob("a", &blob).await, 200);
    }
    owner.kill().await;
}

#[tokio::test]
async fn maintenance_waits_for_who_neither_serves_nor_lets_go() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let path = root.path().to_str().unwrap();
    for name in ["gc", "scrub", "reindex"] {
        let output = command(&[name, "--root", path, "--root-wait", "50ms"]).output().await;
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(1));
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains("its server cannot be reached"), "{told}");
    }
    let mut gc = command(&["gc", "--root", path]).spawn().unwrap();
    let log = waits(&mut gc).await;
    drop(store);
    assert_eq!(gc.wait().await.unwrap().code(), Some(0));
    drop(log);
}
