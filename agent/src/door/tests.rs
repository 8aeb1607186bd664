use std::path::Path;

use fs_err as fs;
use hyper_util::rt::TokioIo;
use kybernate_packager::agent_api as api;
use kybernate_packager::agent_api::agent_client::AgentClient;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, SanType,
};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status};

use super::*;
use crate::config::{Config, ServeArgs};
use crate::operations::Subject;

/// Somebody who signs certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key.
type Proof = (String, String);

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn server(&self) -> Proof {
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        self.sign(params, ExtendedKeyUsagePurpose::ServerAuth)
    }

    fn client(&self, uri: &str) -> Proof {
        let mut params = CertificateParams::new(vec!["client.example".to_owned()]).unwrap();
        params.subject_alt_names.push(SanType::URI(uri.try_into().unwrap()));
        self.sign(params, ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn sign(&self, mut params: CertificateParams, usage: ExtendedKeyUsagePurpose) -> Proof {
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }
}

/// An agent without containerd, on a port of its own.
struct Served {
    app: Arc<App>,
    address: SocketAddr,
    over: CancellationToken,
    serving: JoinSet<()>,
    files: tempfile::TempDir,
}

impl Served {
    /// Lets the authority's clients in, with rights for `spiffe://here/*` in one namespace.
    async fn start(authority: &Authority) -> Self {
        let files = tempfile::tempdir().unwrap();
        let place = |name: &str| files.path().join(name);
        Self::prove(files.path(), authority);
        let text = format!(
            "root = {:?}\n[network]\nlisten = '127.0.0.1:0'\ncertificate = {:?}\nkey = {:?}\n\
             client_ca = {:?}\n[[caller]]\nwho = 'certificate:spiffe://here/*'\n\
             may = ['read', 'suspend']\nnamespaces = ['team']\n",
            place("root"),
            place("tls.crt"),
            place("tls.key"),
            place("ca.pem"),
        );
        fs::write(place("agent.toml"), text).unwrap();
        let args = ServeArgs { config: Some(place("agent.toml")), ..ServeArgs::default() };
        let config: Config = args.validate().unwrap();
        let door = Door::open(config.network.as_ref().unwrap()).await.unwrap();
        let address = door.address().unwrap();
        let (app, over) = (App::new(config).unwrap(), CancellationToken::new());
        let (serves, end) = (Arc::clone(&app), over.clone());
        let mut serving = JoinSet::new();
        serving.spawn(async move { door.serve(&serves, end).await.unwrap() });
        Self { app, address, over, serving, files }
    }

    /// Writes what an agent proves itself with, and whom it lets in.
    fn prove(files: &Path, authority: &Authority) {
        let (certificate, key) = authority.server();
        fs::write(files.join("tls.crt"), certificate).unwrap();
        fs::write(files.join("tls.key"), key).unwrap();
        fs::write(files.join("ca.pem"), authority.0.pem()).unwrap();
    }

    fn client(&self, ca: &Authority, proof: Option<&Proof>) -> AgentClient<Channel> {
        let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca.0.pem()));
        if let Some((certificate, key)) = proof {
            tls = tls.identity(Identity::from_pem(certificate, key));
        }
        let endpoint = Endpoint::from_shared(format!("https://{}", self.address)).unwrap();
        AgentClient::new(endpoint.tls_config(tls).unwrap().connect_lazy())
    }

    async fn node(&self, ca: &Authority, proof: Option<&Proof>) -> Result<api::Node, Status> {
        let mut client = self.client(ca, proof);
        Ok(client.get_node(api::GetNodeRequest {}).await?.into_inner())
    }

    /// Ends, and everything with it.
    async fn end(mut self) {
        self.over.cancel();
        self.serving.join_next().await.unwrap().unwrap();
        assert!(self.app.tasks.shut_down(Duration::from_secs(5)).await);
    }
}

fn list(namespace: &str) -> api::ListRequest {
    api::ListRequest {
        containerd_namespace: namespace.to_owned(),
        operations_only: true,
        ..api::ListRequest::default()
    }
}

#[tokio::test]
async fn only_who_has_a_certificate_of_the_authority_comes_in() {
    let (authority, foreign) = (Authority::new("ours"), Authority::new("foreign"));
    let served = Served::start(&authority).await;
    let here = "spiffe://here/operator";
    assert!(served.node(&authority, None).await.is_err());
    assert!(served.node(&authority, Some(&foreign.client(here))).await.is_err());
    // Nor does a client believe in another's agent.
    assert!(served.node(&foreign, Some(&authority.client(here))).await.is_err());
    // An agent's own certificate is no client's.
    assert!(served.node(&authority, Some(&authority.server())).await.is_err());
    served.node(&authority, Some(&authority.client(here))).await.unwrap();
    served.end().await;
}

/// Whether the other side has closed nothing.
fn is_open(stream: &TcpStream) -> bool {
    use rustix::net::{RecvFlags, recv};
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    recv(stream, &mut [0; 1], flags).is_err_and(|error| error == rustix::io::Errno::AGAIN)
}

#[tokio::test]
async fn who_says_nothing_keeps_nobody_out() {
    let authority = Authority::new("ours");
    let served = Served::start(&authority).await;
    let mut silent = Vec::new();
    for _ in 0..2 * HANDSHAKES_MAX {
        silent.push(TcpStream::connect(served.address).await.unwrap());
    }
    let proof = authority.client("spiffe://here/operator");
    served.node(&authority, Some(&proof)).await.unwrap();
    // Not for their time being over: the last ones are there yet, and not the first.
    assert!(silent.iter().rev().take(HANDSHAKES_MAX / 2).all(is_open));
    silent[0].readable().await.unwrap();
    assert!(!is_open(&silent[0]));
    served.end().await;
}

#[tokio::test]
async fn a_certificate_may_what_a_rule_says_and_no_more() {
    let authority = Authority::new("ours");
    let served = Served::start(&authority).await;
    let stranger = authority.client("spiffe://there/operator");
    let told = served.node(&authority, Some(&stranger)).await.unwrap_err();
    assert_eq!(told.code(), Code::PermissionDenied);

    let operator = authority.client("spiffe://here/ns/x/operator");
    let mut client = served.client(&authority, Some(&operator));
    client.list(list("team")).await.unwrap();
    let suspend = |namespace: &str| api::SuspendRequest {
        container: "web".to_owned(),
        containerd_namespace: namespace.to_owned(),
        timeout_seconds: 0,
    };
    // It is let through, and fails for there is no containerd.
    let told = client.suspend(suspend("team")).await.unwrap_err();
    assert_ne!(told.code(), Code::PermissionDenied, "{told}");
    let checkpoint = api::CheckpointRequest {
        containerd_namespace: "team".to_owned(),
        ..api::CheckpointRequest::default()
    };
    let evict = api::EvictRequest { reference: "r.example/a:1".to_owned(), tier: 0 };
    for refused in [
        client.list(list("bank")).await.unwrap_err(),
        client.suspend(suspend("bank")).await.unwrap_err(),
        client.suspend(suspend("")).await.unwrap_err(),
        client.checkpoint(checkpoint).await.unwrap_err(),
        client.restore(api::RestoreRequest::default()).await.unwrap_err(),
        client.stage(api::StageRequest::default()).await.unwrap_err(),
        client.evict(evict).await.unwrap_err(),
        client.preflight(api::PreflightRequest::default()).await.unwrap_err(),
        client.claim(api::ClaimRequest::default()).await.unwrap_err(),
        client.settle(api::SettleRequest::default()).await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    }
    served.end().await;
}

#[tokio::test]
async fn operations_of_other_namespaces_are_not_there() {
    let authority = Authority::new("ours");
    let served = Served::start(&authority).await;
    let mut ids = Vec::new();
    for namespace in ["team", "bank"] {
        let subject = Subject { namespace: namespace.to_owned(), ..Subject::example() };
        ids.push(served.app.operations.begin(subject).await.unwrap().id().to_owned());
    }
    let operator = authority.client("spiffe://here/operator");
    let mut client = served.client(&authority, Some(&operator));
    let seen = client.list(list("")).await.unwrap().into_inner().operations;
    assert_eq!(seen.iter().map(|one| &*one.id).collect::<Vec<_>>(), [&*ids[0]]);
    for (id, code) in [(&ids[0], Code::PermissionDenied), (&ids[1], Code::NotFound)] {
        let operation_id = id.clone();
        let told = client.cancel(api::CancelRequest { operation_id }).await.unwrap_err();
        assert_eq!(told.code(), code, "{told}");
    }
    let mut all = client.watch(api::WatchRequest::default()).await.unwrap().into_inner();
    assert_eq!(all.message().await.unwrap().unwrap().id, ids[0]);
    let operation_id = ids[1].clone();
    let told = client.watch(api::WatchRequest { operation_id }).await.unwrap_err();
    assert_eq!(told.code(), Code::NotFound);
    drop((all, client));
    served.end().await;
}

#[tokio::test]
async fn a_rule_that_is_taken_away_counts_for_the_next_call_and_for_open_ones() {
    let authority = Authority::new("ours");
    let served = Served::start(&authority).await;
    let operator = authority.client("spiffe://here/operator");
    let mut client = served.client(&authority, Some(&operator));
    let mut all = client.watch(api::WatchRequest::default()).await.unwrap().into_inner();
    let begin = async |container: &str| {
        let (container, namespace) = (container.to_owned(), "team".to_owned());
        let subject = Subject { container, namespace, ..Subject::example() };
        served.app.operations.begin(subject).await.unwrap();
    };
    begin("first").await;
    assert_eq!(all.message().await.unwrap().unwrap().container, "first");

    let file = served.files.path().join("agent.toml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("spiffe://here/*", "spiffe://gone/*")).unwrap();
    assert!(served.app.config.callers.look(crate::access::Look::IfChanged));
    let told = client.list(list("team")).await.unwrap_err();
    assert_eq!(told.code(), Code::PermissionDenied, "{told}");
    begin("second").await;
    let unseen = tokio::time::timeout(Duration::from_millis(300), all.message()).await;
    assert!(unseen.is_err(), "{unseen:?}");
    fs::write(&file, &text).unwrap();
    assert!(served.app.config.callers.look(crate::access::Look::IfChanged));
    begin("third").await;
    let mut seen = Vec::new();
    while seen.last().is_none_or(|last| last != "third") {
        seen.push(all.message().await.unwrap().unwrap().container);
    }
    client.list(list("team")).await.unwrap();
    let counted = served.app.operations.metrics.page().unwrap();
    let line = counted.lines().find(|line| line.contains("denied_calls_total{")).unwrap();
    assert!(
        line.contains("caller=\"certificate:") && line.ends_with("method=\"List\"} 1"),
        "{line}"
    );
    drop((all, client));
    served.end().await;
}

#[tokio::test]
async fn what_changes_in_the_files_counts_for_the_next_connection() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let served = Served::start(&old).await;
    let (left, joined) = (old.client("spiffe://here/a"), new.client("spiffe://here/a"));
    served.node(&old, Some(&left)).await.unwrap();
    let files = served.files.path();
    // Half a change is none.
    fs::write(files.join("tls.key"), new.server().1).unwrap();
    served.node(&old, Some(&left)).await.unwrap();
    fs::remove_file(files.join("ca.pem")).unwrap();
    served.node(&old, Some(&left)).await.unwrap();
    Served::prove(files, &new);
    served.node(&new, Some(&joined)).await.unwrap();
    assert!(served.node(&new, Some(&left)).await.is_err());
    served.end().await;
}

#[tokio::test]
async fn over_the_socket_the_kernel_says_who_asks() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("agent.sock");
    let args = ServeArgs { root: Some(directory.path().to_owned()), ..ServeArgs::default() };
    let app = App::new(args.validate().unwrap()).unwrap();
    let incoming = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let server = Server::builder().add_service(AgentServer::new(Service::new(app)));
        server.serve_with_incoming(incoming).await.unwrap();
    });
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://agent.local");
    let channel = endpoint.connect_with_connector(connector).await.unwrap();
    let mut client = AgentClient::new(channel);
    let asked = client.get_node(api::GetNodeRequest {}).await.map_err(|status| status.code());
    let claimed = client.claim(api::ClaimRequest::default()).await.unwrap_err().code();
    if rustix::process::geteuid().is_root() {
        asked.unwrap();
        assert_ne!(claimed, Code::PermissionDenied);
    } else {
        assert_eq!(asked.unwrap_err(), Code::PermissionDenied);
        assert_eq!(claimed, Code::PermissionDenied);
    }
}
