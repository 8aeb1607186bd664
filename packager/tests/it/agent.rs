//! `kyb` and an agent that does as it is told.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures::stream::{self, Stream, StreamExt};
use kybernate_packager::agent_api::agent_server::{Agent, AgentServer};
use kybernate_packager::agent_api::{
    CancelRequest, CheckpointRequest, ClaimRequest, ClaimResponse, Container, EvictRequest,
    EvictResponse, Finding, GetNodeRequest, GetOperationRequest, ListRequest, ListResponse, Node,
    NodeTier, Operation, OperationState, PreflightRequest, PreflightResponse, Progress,
    ProvideRequest, REFUSED_BY, ReportTaggedRequest, RestoreRequest, ResumeRequest, SettleRequest,
    SettleResponse, Severity, StageRequest, StagedCheckpoint, StepTime, SuspendRequest, Suspension,
    TagState, TcpPolicy, Tier, WatchRequest,
};
use kybernate_packager::key::PublicKey;
use kybernate_packager::verify::verify_signature;
use kybernate_spec::checkpoint::NodeFacts;
use rustix::process::Signal;
use tokio::net::UnixListener;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use crate::artifact::{checkpoint, noise};
use crate::kyb::{Ran, kyb, signal_child_with, terminate_child_with};
use crate::proxy::Proxy;
use crate::registry::{Registry, open};

mod network;
mod places;
mod watching;

/// What the agent answers, and what it was asked.
#[derive(Debug, Default)]
struct Script {
    keys: Vec<String>,
    end: Operation,
    checkpoints: Mutex<Vec<CheckpointRequest>>,
    restores: Mutex<Vec<RestoreRequest>>,
    stages: Mutex<Vec<StageRequest>>,
    provides: Mutex<Vec<ProvideRequest>>,
    watches: Mutex<usize>,
    tagged: Mutex<Vec<String>>,
    cancels: Mutex<Vec<String>>,
    wait: Option<Wait>,
    watched: Notify,
    cancelled: watch::Sender<bool>,
}

/// When an operation ends that does not end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    ForCancel,
    ForEver,
}

/// An agent that was started for one test.
struct Scripted {
    socket: PathBuf,
    script: Arc<Script>,
    // Aborted when dropped.
    _serving: JoinSet<()>,
}

struct Fake(Arc<Script>);

impl Scripted {
    fn start(directory: &Path, script: Script) -> Self {
        let socket = directory.join("agent.sock");
        let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
        let script = Arc::new(script);
        let service = AgentServer::new(Fake(Arc::clone(&script)));
        let mut serving = JoinSet::new();
        serving.spawn(async {
            let server = tonic::transport::Server::builder().add_service(service);
            server.serve_with_incoming(incoming).await.unwrap();
        });
        Self { socket, script, _serving: serving }
    }
}

fn staged() -> StagedCheckpoint {
    StagedCheckpoint {
        digest: format!("sha256:{}", "a".repeat(64)),
        references: vec!["localhost:5000/job:v1".to_owned()],
        bytes: 1 << 20,
        tier: Tier::Ram.into(),
        pinned: true,
        used_at: "2026-01-01T00:00:00Z".to_owned(),
    }
}

fn began() -> Operation {
    Operation {
        id: "op-1".to_owned(),
        state: OperationState::Running.into(),
        ..Operation::default()
    }
}

#[tonic::async_trait]
impl Agent for Fake {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<Operation, Status>> + Send>>;

    async fn checkpoint(
        &self,
        request: Request<CheckpointRequest>,
    ) -> Result<Response<Operation>, Status> {
        let request = request.into_inner();
        if request.container == "absent" {
            return Err(Status::not_found("there is no container \"absent\""));
        }
        if request.container == "odd" {
            let mut status = Status::failed_precondition("it has a device open");
            status.metadata_mut().insert(REFUSED_BY, "compatibility".parse().unwrap());
            return Err(status);
        }
        self.0.checkpoints.lock().unwrap().push(request);
        Ok(Response::new(began()))
    }

    async fn restore(
        &self,
        request: Request<RestoreRequest>,
    ) -> Result<Response<Operation>, Status> {
        self.0.restores.lock().unwrap().push(request.into_inner());
        Ok(Response::new(began()))
    }

    async fn stage(&self, request: Request<StageRequest>) -> Result<Response<Operation>, Status> {
        self.0.stages.lock().unwrap().push(request.into_inner());
        Ok(Response::new(began()))
    }

    async fn provide(
        &self,
        request: Request<ProvideRequest>,
    ) -> Result<Response<Operation>, Status> {
        self.0.provides.lock().unwrap().push(request.into_inner());
        Ok(Response::new(began()))
    }

    async fn evict(
        &self,
        request: Request<EvictRequest>,
    ) -> Result<Response<EvictResponse>, Status> {
        let request = request.into_inner();
        if request.tier() == Tier::Nvme {
            return Err(Status::not_found(format!("{} is not staged here", request.reference)));
        }
        let staged = StagedCheckpoint { references: vec![request.reference], ..staged() };
        Ok(Response::new(EvictResponse { evicted: vec![staged] }))
    }

    async fn suspend(
        &self,
        request: Request<SuspendRequest>,
    ) -> Result<Response<Operation>, Status> {
        if request.into_inner().container == "theirs" {
            return Err(Status::failed_precondition("it was paused by somebody else"));
        }
        Ok(Response::new(began()))
    }

    async fn resume(&self, _: Request<ResumeRequest>) -> Result<Response<Operation>, Status> {
        let suspension = Some(Suspension { already: true, ..Suspension::default() });
        let state = OperationState::Done.into();
        Ok(Response::new(Operation { state, suspension, ..began() }))
    }

    async fn get_node(&self, _: Request<GetNodeRequest>) -> Result<Response<Node>, Status> {
        let facts = NodeFacts { kernel: "6.12-told".to_owned(), ..NodeFacts::default() };
        Ok(Response::new(Node {
            sign_keys: self.0.keys.clone(),
            facts_json: serde_json::to_string(&facts).unwrap(),
            problems: vec!["no CRIU at all".to_owned()],
            tiers: vec![NodeTier {
                tier: Tier::Ram.into(),
                directory: "/run/ram".to_owned(),
                budget_bytes: 2 << 30,
                used_bytes: 1 << 20,
                staged: vec![staged()],
            }],
            ..Node::default()
        }))
    }

    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        let container = Container {
            id: "job".to_owned(),
            containerd_namespace: "default".to_owned(),
            status: "running".to_owned(),
            pid: 42,
            ..Container::default()
        };
        let operations = vec![self.0.end.clone()];
        Ok(Response::new(ListResponse {
            containers: vec![container],
            operations,
            ..ListResponse::default()
        }))
    }

    /// The first watch breaks off after half of the news, as when the agent restarts.
    async fn watch(
        &self,
        request: Request<WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        assert_eq!(request.into_inner().operation_id, "op-1");
        let mut watches = self.0.watches.lock().unwrap();
        *watches += 1;
        let half = Operation {
            step: "dump".to_owned(),
            progress: Some(Progress { bytes_done: 1, bytes_total: 2, percent: Some(50) }),
            times: vec![StepTime { step: "preflight".to_owned(), microseconds: 1500 }],
            ..began()
        };
        let end = Operation { id: "op-1".to_owned(), ..self.0.end.clone() };
        self.0.watched.notify_one();
        if let Some(wait) = self.0.wait {
            let script = Arc::clone(&self.0);
            let end = stream::once(async move {
                if wait == Wait::ForEver {
                    std::future::pending::<()>().await;
                }
                // A watch that was dropped must not swallow the news.
                script.cancelled.subscribe().wait_for(|asked| *asked).await.unwrap();
                Ok(Operation { id: "op-1".to_owned(), ..script.end.clone() })
            });
            return Ok(Response::new(stream::iter([Ok(began())]).chain(end).boxed()));
        }
        let news = if *watches == 1 { vec![Ok(half)] } else { vec![Ok(half), Ok(end)] };
        Ok(Response::new(stream::iter(news).boxed()))
    }

    async fn preflight(
        &self,
        request: Request<PreflightRequest>,
    ) -> Result<Response<PreflightResponse>, Status> {
        let request = request.into_inner();
        let severity =
            if request.tcp() == TcpPolicy::Keep { Severity::Warn } else { Severity::Refuse };
        let finding = Finding {
            id: "tcp-established".to_owned(),
            severity: severity.into(),
            subject: "127.0.0.1:1 to 127.0.0.1:2".to_owned(),
            reason: "it talks".to_owned(),
            remedy: "hang up".to_owned(),
        };
        Ok(Response::new(PreflightResponse { findings: vec![finding] }))
    }

    async fn get_operation(
        &self,
        request: Request<GetOperationRequest>,
    ) -> Result<Response<Operation>, Status> {
        match &*request.into_inner().operation_id {
            "op-1" => Ok(Response::new(began())),
            "over" => Ok(Response::new(Operation { id: "over".to_owned(), ..self.0.end.clone() })),
            id => Err(Status::not_found(format!("there is no operation {id:?}"))),
        }
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<Operation>, Status> {
        let id = request.into_inner().operation_id;
        if id == "late" {
            return Err(Status::failed_precondition("operation late cannot be cancelled any more"));
        }
        if id == "nobody" {
            return Err(Status::not_found(format!("there is no operation {id:?}")));
        }
        self.0.cancels.lock().unwrap().push(id);
        self.0.cancelled.send_replace(true);
        Ok(Response::new(Operation { cancelling: true, ..began() }))
    }

    async fn claim(&self, _: Request<ClaimRequest>) -> Result<Response<ClaimResponse>, Status> {
        Err(Status::unimplemented("kybernate-runc's alone"))
    }

    async fn settle(&self, _: Request<SettleRequest>) -> Result<Response<SettleResponse>, Status> {
        Err(Status::unimplemented("kybernate-runc's alone"))
    }

    async fn report_tagged(
        &self,
        request: Request<ReportTaggedRequest>,
    ) -> Result<Response<Operation>, Status> {
        self.0.tagged.lock().unwrap().push(request.into_inner().operation_id);
        Ok(Response::new(self.0.end.clone()))
    }
}

#[tokio::test]
async fn a_key_file_is_used_by_kyb_and_the_tag_comes_last() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = tempfile::tempdir().unwrap();
    assert_eq!(kyb(scratch.path(), ["keygen", "ours"]).await.code, 0);
    let location = registry.at("a/b:v1");
    let store = open(&location).await;
    let index = checkpoint(&store, &[noise(1000, 1)]).await;
    let end = Operation {
        state: OperationState::Done.into(),
        digest: index.digest.to_string(),
        ..Operation::default()
    };
    let agent = Scripted::start(scratch.path(), Script { end, ..Script::default() });
    let ran = kyb(
        scratch.path(),
        [
            "checkpoint",
            "job",
            &location.to_string(),
            "--sign-key=ours.key",
            "--stop",
            "--json",
            "--agent-socket",
            agent.socket.to_str().unwrap(),
        ],
    )
    .await;
    assert_eq!(ran.json()["digest"], index.digest.to_string());
    assert!(ran.told.contains("preflight: 0.00 s"), "{ran:?}");
    assert_eq!(*agent.script.watches.lock().unwrap(), 2, "a broken watch is begun again");
    let asked = agent.script.checkpoints.lock().unwrap().remove(0);
    assert_eq!((&*asked.sign_key, asked.unsigned, asked.pause_deadline_seconds), ("", false, 0));
    assert_eq!(store.resolve(&location).await.unwrap().descriptor.digest, index.digest);
    let public = PublicKey::from_file(&scratch.path().join("ours.pub")).unwrap();
    verify_signature(&store, &index.digest, &[public]).await.unwrap();
    assert_eq!(*agent.script.tagged.lock().unwrap(), ["op-1"]);
}

#[tokio::test]
async fn whoever_is_interrupted_before_the_tag_is_told_what_there_is() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = tempfile::tempdir().unwrap();
    assert_eq!(kyb(scratch.path(), ["keygen", "ours"]).await.code, 0);
    let index = checkpoint(&registry.open("a/b").await, &[noise(1000, 1)]).await;
    let end = Operation {
        state: OperationState::Done.into(),
        tag: TagState::AwaitsSigner.into(),
        digest: index.digest.to_string(),
        ..Operation::default()
    };
    let agent = Scripted::start(scratch.path(), Script { end, ..Script::default() });
    // Long enough to find the manifest, not to sign it.
    let proxy = Proxy::stalling(registry.address(), 2000).await;
    let socket = agent.socket.to_str().unwrap();
    let at = proxy.at("a/b:v1").to_string();
    let name = proxy.at("a/b").to_string();
    let line =
        ["checkpoint", "job", &at, "--sign-key=ours.key", "--json", "--agent-socket", socket];
    let mut running = std::pin::pin!(kyb(scratch.path(), line));
    tokio::select! {
        done = &mut running => panic!("it got through: {done:?}"),
        () = proxy.stalled() => terminate_child_with(&at),
    }
    let ran = running.await;
    let there = format!("{name}@{} is its name", index.digest);
    ran.ended(1, &there);
    let told: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert!(told["note"].as_str().unwrap().contains(&there), "{ran:?}");
    assert!(agent.script.tagged.lock().unwrap().is_empty());

    let text = kyb(scratch.path(), ["ps", "--agent-socket", socket]).await;
    assert!(text.out.contains(" untagged ") && text.out.contains(index.digest.hex()), "{text:?}");
    let json = kyb(scratch.path(), ["ps", "--json", "--agent-socket", socket]).await.json();
    assert_eq!(json["operations"][0]["tagged"], false);
}

#[tokio::test]
async fn the_agents_only_key_is_the_default() {
    let scratch = tempfile::tempdir().unwrap();
    let warnings = vec!["hook \"thaw\" ended with exit status: 1".to_owned()];
    let end = Operation { state: OperationState::Done.into(), warnings, ..Operation::default() };
    let keys = vec!["node".to_owned()];
    let agent = Scripted::start(scratch.path(), Script { keys, end, ..Script::default() });
    let line = |extra: &'static str| {
        let socket = agent.socket.to_str().unwrap().to_owned();
        ["checkpoint", "job", "localhost:1/a/b"]
            .into_iter()
            .chain(extra.split(' ').filter(|word| !word.is_empty()))
            .map(ToOwned::to_owned)
            .chain(["--agent-socket".to_owned(), socket])
    };
    assert_eq!(kyb(scratch.path(), line("")).await.code, 0);
    assert_eq!(kyb(scratch.path(), line("--sign-key other")).await.code, 0);
    assert_eq!(kyb(scratch.path(), line("--unsigned")).await.code, 0);
    let ran = kyb(scratch.path(), line("--unsigned --hook a --hook b --pre-copy")).await;
    assert!(ran.code == 0 && ran.told.contains("warning: hook \"thaw\" ended"), "{ran:?}");
    let asked = agent.script.checkpoints.lock().unwrap();
    let signers: Vec<_> = asked.iter().map(|one| (&*one.sign_key, one.unsigned)).collect();
    assert_eq!(signers, [("node", false), ("other", false), ("", true), ("", true)]);
    assert!(asked[2].hooks.is_empty() && !asked[2].pre_copy);
    assert!(asked[3].hooks == ["a", "b"] && asked[3].pre_copy);
    assert_eq!(asked[0].reference, "localhost:1/a/b:latest");
}

#[tokio::test]
async fn facts_are_the_agents_where_there_is_one() {
    let scratch = tempfile::tempdir().unwrap();
    let agent = Scripted::start(scratch.path(), Script::default());
    let socket = agent.socket.to_str().unwrap();
    let told = kyb(scratch.path(), ["facts", "--json", "--agent-socket", socket]).await;
    assert_eq!(told.json()["kernel"], "6.12-told");
    assert!(told.told.contains("no CRIU at all"), "{told:?}");
    let line = ["facts", "--json", "--agent-socket", socket, "--no-agent"];
    let looked = kyb(scratch.path(), line).await;
    assert_ne!(looked.json()["kernel"], "6.12-told");
}

#[tokio::test]
async fn without_any_key_nothing_is_taken() {
    let scratch = tempfile::tempdir().unwrap();
    let agent = Scripted::start(scratch.path(), Script::default());
    let socket = agent.socket.to_str().unwrap();
    let line = ["checkpoint", "job", "localhost:1/a/b", "--agent-socket", socket];
    kyb(scratch.path(), line).await.ended(64, "--unsigned");
    assert!(agent.script.checkpoints.lock().unwrap().is_empty());
}

#[tokio::test]
async fn what_the_agent_refuses_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let end = Operation {
        state: OperationState::Refused.into(),
        refused_by: "identity".to_owned(),
        error: "it keeps CAP_SYS_ADMIN".to_owned(),
        ..Operation::default()
    };
    let agent = Scripted::start(scratch.path(), Script { end, ..Script::default() });
    let ran = kyb(
        scratch.path(),
        [
            "restore",
            "localhost:1/a/b:v1",
            "--name=copy",
            "--allow-mount=/srv:/data:ro",
            "--allow-cap=CAP_NET_ADMIN",
            "--agent-socket",
            agent.socket.to_str().unwrap(),
        ],
    )
    .await;
    ran.ended(2, "refused (identity): it keeps CAP_SYS_ADMIN");
    let asked = agent.script.restores.lock().unwrap().remove(0);
    let allow = asked.allow.unwrap();
    assert_eq!((&*asked.name, &*allow.capabilities), ("copy", &["CAP_NET_ADMIN".to_owned()][..]));
    let mount = &allow.mounts[0];
    assert_eq!((&*mount.source, &*mount.destination, mount.read_only), ("/srv", "/data", true));
}

#[tokio::test]
async fn what_the_agent_cannot_do_has_failed() {
    let scratch = tempfile::tempdir().unwrap();
    let agent = Scripted::start(scratch.path(), Script::default());
    let socket = agent.socket.to_str().unwrap();
    let line = ["checkpoint", "absent", "localhost:1/a/b", "--unsigned", "--agent-socket", socket];
    kyb(scratch.path(), line).await.ended(1, "there is no container \"absent\"");
}

#[tokio::test]
async fn ps_lists_containers_and_operations() {
    let scratch = tempfile::tempdir().unwrap();
    let end = Operation { state: OperationState::Done.into(), ..began() };
    let agent = Scripted::start(scratch.path(), Script { end, ..Script::default() });
    let socket = agent.socket.to_str().unwrap();
    let text = kyb(scratch.path(), ["ps", "--agent-socket", socket]).await;
    assert!(text.out.contains("job") && text.out.contains("42"), "{text:?}");
    let json = kyb(scratch.path(), ["ps", "--json", "--agent-socket", socket]).await.json();
    assert_eq!(json["containers"][0]["pid"], 42);
    assert_eq!(json["operations"][0]["state"], "done");
}

fn cancelled() -> Operation {
    Operation {
        state: OperationState::Cancelled.into(),
        error: "it was cancelled".to_owned(),
        undone: vec!["the source runs".to_owned()],
        ..began()
    }
}

/// Runs `kyb` and interrupts it when it waits for its operation.
async fn interrupted(line: &[&str]) -> (Ran, Arc<Script>) {
    let scratch = tempfile::tempdir().unwrap();
    let wait = Some(Wait::ForCancel);
    let agent =
        Scripted::start(scratch.path(), Script { wait, end: cancelled(), ..Script::default() });
    let socket = agent.socket.to_str().unwrap();
    let line = line.iter().copied().chain(["--agent-socket", socket, "--timeout=90s"]);
    let mut running = std::pin::pin!(kyb(scratch.path(), line));
    tokio::select! {
        done = &mut running => panic!("it did not wait: {done:?}"),
        () = agent.script.watched.notified() => signal_child_with(socket, Signal::INT),
    }
    (running.await, Arc::clone(&agent.script))
}

#[tokio::test]
async fn ctrl_c_cancels_and_waits_for_what_that_comes_to() {
    let (ran, script) = interrupted(&["checkpoint", "job", "localhost:1/a/b", "--unsigned"]).await;
    ran.ended(1, "it was cancelled; the source runs");
    assert!(ran.told.contains("cancelling operation op-1"), "{ran:?}");
    assert_eq!(*script.cancels.lock().unwrap(), ["op-1"]);
    assert_eq!(script.checkpoints.lock().unwrap()[0].timeout_seconds, 90);

    let (ran, script) = interrupted(&["restore", "localhost:1/a/b"]).await;
    ran.ended(1, "it was cancelled; the source runs");
    assert_eq!(script.restores.lock().unwrap()[0].timeout_seconds, 90);
}

#[tokio::test]
async fn the_second_ctrl_c_leaves_it_to_the_agent() {
    let scratch = tempfile::tempdir().unwrap();
    let wait = Some(Wait::ForEver);
    let agent = Scripted::start(scratch.path(), Script { wait, ..Script::default() });
    let socket = agent.socket.to_str().unwrap();
    let line = ["restore", "localhost:1/a/b", "--agent-socket", socket];
    let mut running = std::pin::pin!(kyb(scratch.path(), line));
    let mut asked = agent.script.cancelled.subscribe();
    tokio::select! {
        done = &mut running => panic!("it did not wait: {done:?}"),
        () = agent.script.watched.notified() => signal_child_with(socket, Signal::INT),
    }
    tokio::select! {
        done = &mut running => panic!("it did not wait: {done:?}"),
        asked = asked.wait_for(|asked| *asked) => drop(asked.unwrap()),
    }
    signal_child_with(socket, Signal::INT);
    running.await.ended(1, "operation op-1 goes on at the agent");
    assert_eq!(agent.script.cancels.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn cancel_says_what_was_undone_and_why_it_is_too_late() {
    let scratch = tempfile::tempdir().unwrap();
    let agent = Scripted::start(scratch.path(), Script { end: cancelled(), ..Script::default() });
    let socket = agent.socket.to_str().unwrap();
    let told = kyb(scratch.path(), ["cancel", "op-1", "--agent-socket", socket]).await;
    assert!(told.code == 0 && told.out.contains("the source runs"), "{told:?}");
    let line = ["cancel", "op-1", "--no-wait", "--json", "--agent-socket", socket];
    assert_eq!(kyb(scratch.path(), line).await.json()["state"], "running");
    let late = kyb(scratch.path(), ["cancel", "late", "--agent-socket", socket]).await;
    late.ended(1, "cannot be cancelled any more");
    let wrong = ["ps", "--state", "over", "--agent-socket", socket];
    kyb(scratch.path(), wrong).await.ended(64, "over");
}

#[tokio::test]
async fn preflight_tells_what_stands_in_the_way() {
    let scratch = tempfile::tempdir().unwrap();
    let agent = Scripted::start(scratch.path(), Script::default());
    let socket = agent.socket.to_str().unwrap();
    let line = ["preflight", "job", "--agent-socket", socket];
    let refused = kyb(scratch.path(), line).await;
    refused.ended(2, "job cannot be checkpointed");
    let told = "refuse tcp-established: it talks (127.0.0.1:1 to 127.0.0.1:2); hang up";
    assert!(refused.out.contains(told), "{refused:?}");
    let taken =
        kyb(scratch.path(), [&line[..], &["--tcp", "keep", "--json"]].concat()).await.json();
    assert_eq!(taken["findings"][0]["severity"], "warn");

    let line = ["checkpoint", "odd", "localhost:1/a/b", "--unsigned", "--agent-socket", socket];
    kyb(scratch.path(), line).await.ended(2, "refused (compatibility): it has a device open");
}
