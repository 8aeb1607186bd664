//! containerd, over its gRPC API; 1.7 and 2.x alike.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use containerd_client::services::v1::containers_client::ContainersClient;
use containerd_client::services::v1::namespaces_client::NamespacesClient;
use containerd_client::services::v1::version_client::VersionClient;
use containerd_client::services::v1::{
    Container, CreateContainerRequest, DeleteContainerRequest, GetContainerRequest,
    ListContainersRequest, ListNamespacesRequest,
};
use hyper_util::rt::TokioIo;
use kybernate_packager::unix_socket;
use tokio::task::JoinError;
use tokio_util::task::TaskTracker;
use tonic::Request;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

mod content;
#[cfg(test)]
pub(crate) mod fake;
mod image;
mod options;
mod plugin;
mod snapshot;
mod task;

pub(crate) use self::content::{ContentSource, WriteContentError};
pub(crate) use self::image::{Collect, Image};
pub(crate) use self::options::{RuntimeOptions, SPEC_TYPE};
pub(crate) use self::snapshot::Mount;
pub(crate) use self::task::{TaskState, TaskStatus};

/// Bound of the calls that only look something up or flip a switch. A loaded containerd answers
/// within seconds; one that does not within this time is broken.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Largest message containerd sends: a container with a long specification is some 100 KiB, a read
/// of content 1 MiB.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// A connection to containerd. It is made with the first call and again whenever it broke.
#[derive(Clone, Debug)]
pub struct Containerd {
    channel: Channel,
    address: Arc<Path>,
}

/// One of containerd's namespaces.
#[derive(Clone, Debug)]
pub struct Namespace {
    containerd: Containerd,
    name: Arc<str>,
    lease: Option<Arc<str>>,
    /// Knows of each call that makes something, until it is answered.
    making: Option<TaskTracker>,
}

/// Why containerd did not do something.
#[derive(Debug, thiserror::Error)]
#[error("containerd failed to {operation} {subject:?}")]
pub struct RuntimeError {
    /// What was asked, as "pause container".
    pub operation: &'static str,
    /// Of what.
    pub subject: String,
    /// What happened.
    #[source]
    pub kind: RuntimeErrorKind,
}

/// What happened to a request.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeErrorKind {
    /// There is no such thing.
    #[error("not found: {0}")]
    NotFound(String),
    /// The name is taken.
    #[error("it exists already")]
    AlreadyExists,
    /// containerd does not answer.
    #[error("containerd does not answer at {0:?}: {1}")]
    Unreachable(PathBuf, String),
    /// It took too long.
    #[error("no answer in time")]
    Timeout,
    /// Its answer makes no sense.
    #[error("unexpected answer: {0}")]
    Answer(&'static str),
    /// Anything else, in containerd's words.
    #[error("{0}")]
    Said(String),
}

impl Containerd {
    /// Prepares a connection to the socket at `address`.
    pub fn at(address: &Path) -> Self {
        let path: Arc<Path> = address.into();
        let target = Arc::clone(&path);
        // The address is not used: the connector goes to the socket whatever it says.
        let endpoint = Endpoint::from(Uri::from_static("http://containerd"));
        let channel = endpoint.connect_with_connector_lazy(service_fn(move |_| {
            let target = Arc::clone(&target);
            async move { unix_socket::connect(&target).await.map(TokioIo::new) }
        }));
        Self { channel, address: path }
    }

    /// Returns one of its namespaces.
    pub fn namespace(&self, name: &str) -> Namespace {
        Namespace { containerd: self.clone(), name: name.into(), lease: None, making: None }
    }

    /// Returns containerd's version.
    pub async fn version(&self) -> Result<String, RuntimeError> {
        let mut request = Request::new(());
        request.set_timeout(CALL_TIMEOUT);
        let answer = VersionClient::new(self.channel.clone()).version(request).await;
        let answer = answer.map_err(|status| self.error("ask", "version", status))?;
        Ok(answer.into_inner().version)
    }

    /// Returns the names of all namespaces.
    pub async fn namespaces(&self) -> Result<Vec<String>, RuntimeError> {
        let mut request = Request::new(ListNamespacesRequest::default());
        request.set_timeout(CALL_TIMEOUT);
        let answer = NamespacesClient::new(self.channel.clone()).list(request).await;
        let answer = answer.map_err(|status| self.error("list", "namespaces", status))?;
        Ok(answer.into_inner().namespaces.into_iter().map(|namespace| namespace.name).collect())
    }

    fn error(&self, operation: &'static str, subject: &str, status: tonic::Status) -> RuntimeError {
        use tonic::Code;
        let message = status.message().to_owned();
        // It ended before it answered. What it was asked for may be done.
        let broken = std::error::Error::source(&status)
            .filter(|source| source.is::<tonic::transport::Error>())
            .map(|broken| kybernate_spec::chain(broken).to_string());
        let address = || self.address.to_path_buf();
        let kind = match status.code() {
            Code::NotFound => RuntimeErrorKind::NotFound(message),
            Code::AlreadyExists => RuntimeErrorKind::AlreadyExists,
            Code::Unavailable => RuntimeErrorKind::Unreachable(address(), message),
            Code::DeadlineExceeded | Code::Cancelled => RuntimeErrorKind::Timeout,
            _ => match broken {
                Some(broken) => RuntimeErrorKind::Unreachable(address(), broken),
                None => RuntimeErrorKind::Said(message),
            },
        };
        RuntimeError { operation, subject: subject.to_owned(), kind }
    }
}

impl RuntimeError {
    /// Whether there is no such thing.
    pub const fn is_not_found(&self) -> bool {
        matches!(self.kind, RuntimeErrorKind::NotFound(_))
    }

    /// Whether nobody has answered.
    pub const fn is_away(&self) -> bool {
        matches!(self.kind, RuntimeErrorKind::Unreachable(..) | RuntimeErrorKind::Timeout)
    }

    /// Whether the name is taken.
    pub const fn already_exists(&self) -> bool {
        matches!(self.kind, RuntimeErrorKind::AlreadyExists)
    }
}

impl Namespace {
    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Has `making` know of each call that makes something until it is answered. Such a call goes on
    /// when whoever asked waits no more: what has just been asked for cannot be taken away yet.
    pub(crate) fn followed_by(self, making: TaskTracker) -> Self {
        Self { making: Some(making), ..self }
    }

    /// Returns containerd's state directory, in which its socket is.
    pub(crate) fn state(&self) -> &Path {
        let socket = &*self.containerd.address;
        socket.parent().unwrap_or(socket)
    }

    /// Returns all containers.
    pub(crate) async fn containers(&self) -> Result<Vec<Container>, RuntimeError> {
        let request = self.quick(ListContainersRequest::default());
        let answer = self.container_client().list(request).await;
        let answer = answer.map_err(|status| self.error("list", "containers", status))?;
        Ok(answer.into_inner().containers)
    }

    /// Returns a container.
    pub(crate) async fn container(&self, id: &str) -> Result<Container, RuntimeError> {
        let request = self.quick(GetContainerRequest { id: id.to_owned() });
        let answer = self.container_client().get(request).await;
        let answer = answer.map_err(|status| self.error("find container", id, status))?;
        answer.into_inner().container.ok_or_else(|| empty("find container", id))
    }

    /// Creates a container. It is a record only; nothing runs.
    pub(crate) async fn create_container(&self, container: Container) -> Result<(), RuntimeError> {
        let id = container.id.clone();
        let request = self.quick(CreateContainerRequest { container: Some(container) });
        let mut containers = self.container_client();
        let answer = self.make(async move { containers.create(request).await }).await;
        answer.map_err(|status| self.error("create container", &id, status)).map(drop)
    }

    /// Deletes a container that has no task.
    pub(crate) async fn delete_container(&self, id: &str) -> Result<(), RuntimeError> {
        let request = self.quick(DeleteContainerRequest { id: id.to_owned() });
        let answer = self.container_client().delete(request).await;
        answer.map_err(|status| self.error("delete container", id, status)).map(drop)
    }

    fn container_client(&self) -> ContainersClient<Channel> {
        ContainersClient::new(self.channel()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    fn channel(&self) -> Channel {
        self.containerd.channel.clone()
    }

    /// Waits for the answer to a call that makes something ([`Self::followed_by`]).
    async fn make<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, tonic::Status>> + Send + 'static,
    ) -> Result<T, tonic::Status> {
        let Some(making) = &self.making else { return call.await };
        let ended = |error: JoinError| tonic::Status::cancelled(error.to_string());
        making.spawn(call).await.unwrap_or_else(|error| Err(ended(error)))
    }

    /// A request with the headers containerd wants.
    fn request<M>(&self, message: M) -> Request<M> {
        let mut request = Request::new(message);
        // Names that are no header values exist in no containerd either: it answers that the
        // namespace is missing.
        if let Ok(name) = MetadataValue::try_from(&*self.name) {
            request.metadata_mut().insert("containerd-namespace", name);
        }
        if let Some(Ok(lease)) = self.lease.as_deref().map(MetadataValue::try_from) {
            request.metadata_mut().insert("containerd-lease", lease);
        }
        request
    }

    /// The same for calls that must be answered soon.
    fn quick<M>(&self, message: M) -> Request<M> {
        let mut request = self.request(message);
        request.set_timeout(CALL_TIMEOUT);
        request
    }

    fn error(&self, operation: &'static str, subject: &str, status: tonic::Status) -> RuntimeError {
        self.containerd.error(operation, subject, status)
    }
}

fn empty(operation: &'static str, subject: &str) -> RuntimeError {
    let kind = RuntimeErrorKind::Answer("it is empty");
    RuntimeError { operation, subject: subject.to_owned(), kind }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn one_that_ends_before_it_answers_does_not_answer() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("containerd.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let ends = async {
            let (mut caller, _) = listener.accept().await.unwrap();
            caller.read_exact(&mut [0; 1]).await.unwrap();
        };
        let containerd = Containerd::at(&socket);
        let (asked, ()) = tokio::join!(containerd.version(), ends);
        let error = asked.unwrap_err();
        assert!(error.is_away(), "{error:?}");
    }
}
