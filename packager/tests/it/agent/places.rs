//! What stays on the node: staged checkpoints and suspended containers.

use kybernate_packager::agent_api::{Operation, OperationState, SuspendedPart, Suspension, Tier};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::Uid;

use super::{Script, Scripted, staged};
use crate::kyb::kyb;

#[tokio::test]
async fn a_checkpoint_is_staged_and_evicted() {
    let scratch = tempfile::tempdir().unwrap();
    let end = Operation {
        state: OperationState::Done.into(),
        digest: staged().digest,
        tier: Tier::Ram.into(),
        ..Operation::default()
    };
    let agent = Scripted::start(scratch.path(), Script { end, ..Script::default() });
    let socket = agent.socket.to_str().unwrap();
    let line = ["stage", "localhost:1/a/b:v1", "--tier=ram", "--json", "--agent-socket", socket];
    let told = kyb(scratch.path(), line).await.json();
    assert_eq!((&told["tier"], &told["digest"]), (&"ram".into(), &staged().digest.into()));
    let asked = agent.script.stages.lock().unwrap().remove(0);
    assert_eq!((&*asked.reference, asked.tier()), ("localhost:1/a/b:v1", Tier::Ram));
    assert_eq!(asked.containerd_namespace, "default");
    let line = ["stage", "localhost:1/a/b:v1", "--agent-socket", socket];
    kyb(scratch.path(), line).await.ended(64, "--tier");

    // A restore says where its dump was.
    let line = ["restore", "localhost:1/a/b:v1", "--agent-socket", socket];
    let told = kyb(scratch.path(), line).await;
    assert!(told.out.contains("the dump was ready in ram"), "{told:?}");

    let digest = staged().digest;
    let line = ["evict", &*digest, "--json", "--agent-socket", socket];
    let told = kyb(scratch.path(), line).await.json();
    assert_eq!(told["evicted"][0]["references"][0], staged().digest);
    let line = ["evict", "localhost:1/a/b:v1", "--tier=nvme", "--agent-socket", socket];
    kyb(scratch.path(), line).await.ended(1, "is not staged here");
    let line = ["evict", "no reference", "--agent-socket", socket];
    kyb(scratch.path(), line).await.ended(64, "no reference");
}

#[tokio::test]
async fn a_checkpoint_is_provided_to_containerd() {
    let scratch = tempfile::tempdir().unwrap();
    let end = Operation {
        state: OperationState::Done.into(),
        digest: staged().digest,
        image: "localhost:1/a/b:v1-containerd".to_owned(),
        warnings: vec!["it holds file locks".to_owned()],
        ..Operation::default()
    };
    let agent = Scripted::start(scratch.path(), Script { end, ..Script::default() });
    let socket = agent.socket.to_str().unwrap();
    let line = ["provide", "localhost:1/a/b:v1", "--agent-socket", socket];
    let told = kyb(scratch.path(), line).await;
    let restore = "ctr container restore --rw --live NAME localhost:1/a/b:v1-containerd";
    assert!(told.out.contains(restore), "{told:?}");
    assert!(told.told.contains("warning: it holds file locks"), "{told:?}");
    let line = ["provide", "localhost:1/a/b:v1", "--json", "--namespace=k8s.io", "--name=x.io/b"];
    let more = ["--allow-mount=/srv:/data:ro", "--allow-cap=CAP_KILL", "--agent-socket", socket];
    let told = kyb(scratch.path(), [&line[..], &more].concat()).await.json();
    assert_eq!(told["image"], "localhost:1/a/b:v1-containerd");
    let asked = agent.script.provides.lock().unwrap().split_off(0);
    assert_eq!((&*asked[0].image, &*asked[0].containerd_namespace), ("", "default"));
    assert_eq!((&*asked[1].image, &*asked[1].containerd_namespace), ("x.io/b", "k8s.io"));
    let allow = asked[1].allow.as_ref().unwrap();
    assert_eq!((&*allow.capabilities[0], allow.mounts[0].read_only), ("CAP_KILL", true));
    let line = ["provide", "oci:a:v1", "--agent-socket", socket];
    kyb(scratch.path(), line).await.ended(64, "not from layouts");
}

#[tokio::test]
async fn a_node_shows_its_facts_and_its_tiers() {
    let scratch = tempfile::tempdir().unwrap();
    let agent = Scripted::start(scratch.path(), Script::default());
    let socket = agent.socket.to_str().unwrap();
    let json = kyb(scratch.path(), ["node", "--json", "--agent-socket", socket]).await.json();
    assert_eq!(json["facts"]["kernel"], "6.12-told");
    assert_eq!(json["tiers"][0]["tier"], "ram");
    assert_eq!(json["tiers"][0]["budgetBytes"], 2_u64 << 30);
    assert_eq!(json["tiers"][0]["staged"][0]["pinned"], true);
    let told = kyb(scratch.path(), ["node", "--agent-socket", socket]).await;
    for part in ["1.00 MiB of 2.00 GiB used", "localhost:5000/job:v1", "in use", "6.12-told"] {
        assert!(told.out.contains(part), "{part} is missing in {told:?}");
    }
}

#[tokio::test]
async fn a_container_is_suspended_and_resumed() {
    let scratch = tempfile::tempdir().unwrap();
    let since = "2026-01-01T00:00:00Z".to_owned();
    let suspension =
        Some(Suspension { parts: vec![SuspendedPart::Cpu.into()], since, already: false });
    let state = OperationState::Done.into();
    let end = Operation { state, suspension, ..Operation::default() };
    let agent = Scripted::start(scratch.path(), Script { end, ..Script::default() });
    let socket = agent.socket.to_str().unwrap();
    let line = ["suspend", "job", "--json", "--agent-socket", socket];
    let told = kyb(scratch.path(), line).await.json();
    assert_eq!((&told["suspended"][0], &told["already"]), (&"cpu".into(), &false.into()));
    assert_eq!(told["since"], "2026-01-01T00:00:00Z");
    let told = kyb(scratch.path(), ["resume", "job", "--agent-socket", socket]).await;
    assert!(told.out.contains("job runs already"), "{told:?}");
    let line = ["suspend", "theirs", "--agent-socket", socket];
    kyb(scratch.path(), line).await.ended(1, "paused by somebody else");
}

/// A socket of somebody else's is not believed. Whose it is counts when it is made to listen.
#[tokio::test]
async fn an_agent_of_another_user_is_told_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("agent.sock");
    let path = socket.clone();
    let listener = std::thread::spawn(move || {
        let nobody = Uid::from_raw(65_534);
        let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        // Of this thread alone, which ends.
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        listener
    });
    let _listener = listener.join().unwrap();
    let line = ["ps", "--agent-socket", socket.to_str().unwrap()];
    kyb(scratch.path(), line).await.ended(1, "is user 65534, and neither root nor you");
}
