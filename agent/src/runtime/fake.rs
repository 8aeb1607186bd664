//! A containerd of our own for tests: it answers as it is told, on a socket of its own.

use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::http::{Request, Response};
use futures::FutureExt as _;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::app::App;
use crate::config::ServeArgs;
use crate::tasks::Tasks;

/// Bytes of a message's head in gRPC: whether it is compressed, and its length.
const HEAD: usize = 5;

/// The containerd, and a place for an agent.
#[derive(Debug)]
pub(crate) struct Fake {
    directory: TempDir,
    asked: Arc<Mutex<Vec<String>>>,
    _tasks: Tasks,
}

impl Fake {
    /// Starts one that answers by `answer`: to a method like `Containers/Get` and its message.
    pub(crate) fn start(
        answer: impl Fn(&str, &[u8]) -> Result<Vec<u8>, Status> + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("containerd.sock")).unwrap();
        let (asked, answer) = (Arc::<Mutex<Vec<String>>>::default(), Arc::new(answer));
        let noted = Arc::clone(&asked);
        let reply = move |request: Request<Body>| {
            let (noted, answer) = (Arc::clone(&noted), Arc::clone(&answer));
            async move {
                let path = request.uri().path().to_owned();
                let method = path.rsplit(['/', '.']).take(2).collect::<Vec<_>>();
                let method = [method[1], method[0]].join("/");
                let message = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
                noted.lock().unwrap().push(method.clone());
                respond(answer(&method, message.get(HEAD..).unwrap_or_default()))
            }
        };
        let routes = Routes::from(axum::Router::new().fallback(reply));
        let tasks = Tasks::default();
        tasks.spawn(|_| {
            let incoming = UnixListenerStream::new(listener);
            Server::builder().add_routes(routes).serve_with_incoming(incoming).map(|_ended| ())
        });
        Self { directory, asked, _tasks: tasks }
    }

    /// Returns an agent that talks to it.
    pub(crate) fn app(&self) -> Arc<App> {
        let root = self.directory.path();
        let file = root.join("agent.toml");
        fs_err::write(&file, format!("[staging]\ntmpfs = {:?}\n", root.join("run/stage"))).unwrap();
        let args = ServeArgs {
            config: Some(file),
            root: Some(root.join("root")),
            containerd: Some(root.join("containerd.sock")),
            ..ServeArgs::default()
        };
        App::new(args.validate().unwrap()).unwrap()
    }

    /// Returns which methods were called.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn respond(answer: Result<Vec<u8>, Status>) -> Response<Body> {
    match answer {
        Ok(message) => {
            let mut bytes = vec![0];
            bytes.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
            bytes.extend(message);
            let body = Body::from(Bytes::from(bytes));
            // Where there is no more than one message, the status may come before it.
            let head = Response::builder().header("content-type", "application/grpc");
            head.header("grpc-status", "0").body(body).unwrap()
        }
        Err(status) => status.into_http(),
    }
}
