//! Asks the node's agent for a checkpoint, and tells it how the restore went.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use kybernate_packager::agent_api as api;
use kybernate_packager::agent_api::agent_client::AgentClient;
use kybernate_packager::unix_socket;
use kybernate_spec::chain;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::bundle::Bundle;
use super::settings::Settings;
use crate::restore::noted::Note;

/// How long the agent may take: it judges, which has a limit of its own, and copies captured mounts
/// from where they are staged. When we do not wait any more it takes them away again.
pub(crate) const CLAIM_LIMIT: Duration = Duration::from_mins(1);

/// How long it may take to note that a container runs.
const SETTLE_LIMIT: Duration = Duration::from_secs(3);

/// How long it may take to take away what was prepared for a restore that failed.
const END_LIMIT: Duration = Duration::from_secs(30);

/// What the agent says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The dump lies there, judged.
    Restore(Box<Dump>),
    /// The container has been restored before and starts afresh now; why.
    Fresh(String),
}

/// Where CRIU finds things.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Dump {
    pub(super) images: PathBuf,
    pub(super) work: PathBuf,
    pub(super) criu_config: String,
    pub(super) limit: Duration,
    /// The file that says that this container was restored.
    pub(super) note: PathBuf,
    /// Permissions that the root directory had.
    pub(super) root_mode: Option<u32>,
}

impl Dump {
    /// Returns what says that the container was restored.
    pub(super) fn note(&self) -> Note {
        let operation = self.work.file_name().unwrap_or_default();
        Note { file: self.note.clone(), operation: operation.to_string_lossy().into_owned() }
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClaimError {
    /// A rule refused.
    #[error("refused ({rule}): {reason}")]
    Refused {
        /// Which kind of rule.
        rule: String,
        /// What it said.
        reason: String,
    },
    /// It cannot be restored now.
    #[error("{0}")]
    Failed(String),
    /// It cannot be restored, and nor is it to start afresh.
    #[error(transparent)]
    Final(Box<Self>),
    /// There is no answer yet.
    #[error("the agent did not answer within {} s", .0.as_secs())]
    Late(Duration),
    /// The bundle has none.
    #[error("failed to find the root file system")]
    Root(#[source] io::Error),
    /// The agent cannot be reached.
    #[error("failed to reach the agent at {0:?}")]
    Unreachable(PathBuf, #[source] io::Error),
}

/// Who is created, as containerd calls it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    pub(super) namespace: &'a str,
    pub(super) container: &'a str,
}

/// Asks for a checkpoint for the container of a bundle.
pub(super) fn claim(
    settings: &Settings,
    subject: Subject<'_>,
    reference: &str,
    bundle: &Bundle,
) -> Result<Answer, ClaimError> {
    let request = api::ClaimRequest {
        containerd_namespace: subject.namespace.to_owned(),
        container: subject.container.to_owned(),
        reference: reference.to_owned(),
        spec_json: bundle.text().to_vec(),
        root: bundle.root().map_err(ClaimError::Root)?.display().to_string(),
        restored: settings.restored.display().to_string(),
    };
    let answer = call(settings, CLAIM_LIMIT, async |mut agent| agent.claim(request).await)?;
    if !answer.fresh_because.is_empty() {
        return Ok(Answer::Fresh(answer.fresh_because));
    }
    Ok(Answer::Restore(Box::new(Dump {
        images: answer.images.into(),
        work: answer.work.into(),
        criu_config: answer.criu_config,
        limit: Duration::from_secs(answer.limit_seconds.into()),
        note: answer.note.into(),
        root_mode: answer.root_mode,
    })))
}

/// Tells how it went: `problem` is empty when the container runs; else nothing of the restore is left when
/// this returns. Returns why the agent has ended it, when it has.
pub(super) fn settle(
    settings: &Settings,
    subject: Subject<'_>,
    problem: &str,
) -> Result<Option<String>, ClaimError> {
    let request = api::SettleRequest {
        containerd_namespace: subject.namespace.to_owned(),
        container: subject.container.to_owned(),
        problem: problem.to_owned(),
    };
    let limit = if problem.is_empty() { SETTLE_LIMIT } else { END_LIMIT };
    let answer = call(settings, limit, async |mut agent| agent.settle(request).await)?;
    Ok(Some(answer.cancelled).filter(|why| !why.is_empty()))
}

/// Makes one call. The wrapper has no runtime of its own but for these.
fn call<T>(
    settings: &Settings,
    limit: Duration,
    with: impl AsyncFnOnce(AgentClient<Channel>) -> Result<tonic::Response<T>, tonic::Status>,
) -> Result<T, ClaimError> {
    let socket = settings.agent_socket.clone();
    let unreachable = |error| ClaimError::Unreachable(socket.clone(), error);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(unreachable)?;
    let answered = runtime.block_on(async {
        let path = socket.clone();
        let connector = service_fn(move |_| {
            let path = path.clone();
            async move { unix_socket::connect(&path).await.map(TokioIo::new) }
        });
        // The address is never looked at: the socket is the address.
        let endpoint = Endpoint::from_static("http://agent.local");
        let asked = async {
            let channel = endpoint.connect_with_connector(connector).await;
            let channel = channel.map_err(|error| unreachable(io::Error::other(error)))?;
            with(AgentClient::new(channel)).await.map_err(|status| refused(&status))
        };
        tokio::time::timeout(limit, asked).await
    });
    Ok(answered.map_err(|_elapsed| ClaimError::Late(limit))??.into_inner())
}

fn refused(status: &tonic::Status) -> ClaimError {
    let reason = status.message().to_owned();
    let error = match status.metadata().get(api::REFUSED_BY).and_then(|rule| rule.to_str().ok()) {
        Some(rule) => ClaimError::Refused { rule: rule.to_owned(), reason },
        None if status.code() == Code::Unimplemented => {
            ClaimError::Failed("the agent of this node is older than kybernate-runc".to_owned())
        }
        None if reason.is_empty() => ClaimError::Failed(chain(status).to_string()),
        None => ClaimError::Failed(reason),
    };
    if status.metadata().contains_key(api::NEVER_FRESH) {
        ClaimError::Final(Box::new(error))
    } else {
        error
    }
}

#[cfg(test)]
mod tests {
    use fs_err as fs;
    use rustix::fs::Uid;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

    use super::*;

    /// Where it says that the dump lies, CRIU would read, as root. Whose a socket is counts when it is
    /// made to listen.
    #[test]
    fn an_agent_of_another_user_is_not_believed() {
        let scratch = tempfile::tempdir().unwrap();
        let socket = scratch.path().join("agent.sock");
        let path = socket.clone();
        let listener = std::thread::spawn(move || {
            let nobody = Uid::from_raw(65_534);
            let kind = SocketType::STREAM;
            let listener = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
            rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
            // Of this thread alone, which ends.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            rustix::net::listen(&listener, 8).unwrap();
            listener
        });
        let _listener = listener.join().unwrap();
        let settings = Settings { agent_socket: socket, ..Settings::default() };
        let subject = Subject { namespace: "k8s.io", container: "main" };
        fs::write(scratch.path().join("config.json"), r#"{ "root": { "path": "/" } }"#).unwrap();
        let bundle = Bundle::read(scratch.path()).unwrap();
        let refused = claim(&settings, subject, "host/name@sha256:0", &bundle).unwrap_err();
        let told = chain(&refused).to_string();
        assert!(told.contains("is user 65534, and neither root nor you"), "{told}");
    }
}
