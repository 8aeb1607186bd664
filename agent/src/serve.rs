//! The agent's life: recover what an earlier one left, serve, and leave nothing paused.

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_packager::agent_api::agent_server::AgentServer;
use sd_notify::NotifyState;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::api::Service;
use crate::app::App;
use crate::config::Config;
use crate::criu_config::{self, RESTORED};
use crate::door::Door;
use crate::operations::{OperationsError, is_id};
use crate::staging::StagingError;
use crate::suspend::{self, LedgerError};
use crate::{health, local, metrics, private, reload, rescue, restore, stage, undo};

/// How long operations may take to clean up at the end.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(30);

/// Why the agent does not serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A directory or file of the agent's cannot be used.
    #[error("failed to prepare {0:?}")]
    Prepare(PathBuf, #[source] io::Error),
    /// Another agent uses the same directory.
    #[error(
        "another agent runs on {0:?}: give this one a root, a socket and a staging.tmpfs of its own"
    )]
    Locked(PathBuf),
    /// What is staged cannot be kept.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// What is suspended cannot be kept.
    #[error(transparent)]
    Suspended(#[from] LedgerError),
    /// The operations cannot be kept.
    #[error(transparent)]
    Operations(#[from] OperationsError),
    /// The socket cannot be served.
    #[error("failed to listen on {0:?}")]
    Listen(PathBuf, #[source] io::Error),
    /// The figures cannot be served.
    #[error("failed to serve metrics on {0:?}")]
    Metrics(metrics::Address, #[source] io::Error),
    /// Callers from the network cannot be served.
    #[error("failed to listen on {0}")]
    Network(SocketAddr, #[source] io::Error),
    /// Signals cannot be received.
    #[error("failed to wait for signals")]
    Signals(#[source] io::Error),
    /// Serving ended by itself.
    #[error("failed to serve")]
    Serve(#[source] tonic::transport::Error),
    /// Operations did not end in time.
    #[error("some operations did not end in time")]
    Hung,
}

/// Serves until SIGTERM or SIGINT.
pub async fn serve(config: Config) -> Result<(), ServeError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::Signals)?;
    let hangup = signal(SignalKind::hangup()).map_err(ServeError::Signals)?;
    let socket = config.socket.clone();
    let _locks = prepare(&config)?;
    // Nothing of what follows is as urgent, and any of it may fail.
    rescue::first(&config.operations(), &config.containerd, rescue::FIRST_LIMIT).await;
    let staging = &config.staging;
    for directory in [&config.disk_stage(), &staging.tmpfs] {
        let claimed = private::claim_own(directory, is_id);
        claimed.map_err(|error| ServeError::Prepare(directory.clone(), error))?;
    }
    stage::mount(staging).map_err(|error| ServeError::Prepare(staging.tmpfs.clone(), error))?;
    let app = App::new(config)?;
    undo::recover(&app).await;
    suspend::recover(&app).await;
    restore::sweep(&app).await;
    app.config.trust.follow(&app.tasks, &app.operations.metrics);
    if let Some(address) = &app.config.metrics {
        let (figures, pages) = (app.operations.metrics.clone(), health::routes(&app));
        let served = metrics::serve(address, figures, pages, &app.tasks).await;
        served.map_err(|error| ServeError::Metrics(address.clone(), error))?;
    }
    let door = open_door(&app).await?;
    let mask = 0o777 & !reload::socket_mode(&app);
    let listener =
        listen(&socket, mask).map_err(|error| ServeError::Listen(socket.clone(), error))?;
    reload::follow(&app, hangup);
    tracing::info!(?socket, node = app.config.node, "serving");
    if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
        tracing::warn!(%error, "failed to tell the service manager");
    }
    let over = CancellationToken::new();
    let stopping = Arc::clone(&app);
    let end = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("shutting down");
        stopping.tasks.shut_down(SHUTDOWN_GRACE).await;
    };
    let local = Server::builder()
        .add_service(AgentServer::new(Service::new(Arc::clone(&app))))
        .serve_with_incoming_shutdown(local::admit(listener, Arc::clone(&app.config.callers)), end);
    let guarded = over.clone().drop_guard();
    let local = async move {
        let _over = guarded;
        local.await
    };
    let remote = async {
        match door {
            Some(door) => door.serve(&app, over).await.inspect_err(|error| {
                tracing::error!(%error, "callers from the network are not served any more");
            }),
            None => Ok(()),
        }
    };
    let (served, by_network) = tokio::join!(local, remote);
    // Gone already when another agent was quicker to clean up.
    fs::remove_file(&socket).unwrap_or_default();
    served.and(by_network).map_err(ServeError::Serve)?;
    if app.tasks.shut_down(Duration::ZERO).await { Ok(()) } else { Err(ServeError::Hung) }
}

/// Makes the agent's directories and makes sure, before anything in them is touched, that no other
/// agent uses them; that holds as long as what is returned.
fn prepare(config: &Config) -> Result<[OwnedFd; 2], ServeError> {
    let wrong = |path: &Path| {
        let path = path.to_owned();
        move |error| ServeError::Prepare(path, error)
    };
    let (root, volumes, criu_config) = (&config.root, config.volumes(), config.criu_config());
    let records = [root.clone(), config.operations(), config.suspended()];
    for directory in records.into_iter().chain([config.restored(), config.criu_configs()]) {
        private::claim_records(&directory).map_err(wrong(&directory))?;
    }
    let path = root.join("agent.lock");
    let mut options = fs::OpenOptions::new();
    let lock = options.create(true).write(true).truncate(false).mode(0o600).open(&path);
    let lock = hold(lock.map_err(wrong(&path))?, root)?;
    // What runs beside the root has files of running containers, and a dump under way.
    for directory in [&volumes, &config.disk_volumes()] {
        private::claim_records(directory).map_err(wrong(directory))?;
    }
    let directory = fs::File::open(&volumes).map_err(wrong(&volumes))?;
    let beside = hold(directory, &volumes)?;
    if std::os::unix::net::UnixStream::connect(&config.socket).is_ok() {
        return Err(ServeError::Locked(config.socket.clone()));
    }
    let yard = config.cgroup_yard();
    criu_config::make_yard(&yard).map_err(wrong(&yard))?;
    let written = fs::File::create(&criu_config);
    let written = written.and_then(|mut file| file.write_all(RESTORED.as_bytes()));
    written.map_err(wrong(&criu_config))?;
    Ok([lock, beside])
}

/// Takes the lock that `file` is for `place`.
fn hold(file: fs::File, place: &Path) -> Result<OwnedFd, ServeError> {
    let lock = OwnedFd::from(file.into_parts().0);
    match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ServeError::Locked(place.to_owned())),
        Err(error) => Err(ServeError::Prepare(place.to_owned(), error.into())),
    }
}

/// Listens to the network, where the configuration says so.
async fn open_door(app: &App) -> Result<Option<Door>, ServeError> {
    let Some(network) = &app.config.network else { return Ok(None) };
    let wrong = |error| ServeError::Network(network.listen, error);
    let door = Door::open(network).await.map_err(wrong)?;
    let address = door.address().map_err(wrong)?;
    tracing::info!(%address, "callers from the network come in with a certificate");
    Ok(Some(door))
}

/// Listens on a socket that only those can use whom `mask` leaves, from its first moment on.
fn listen(socket: &Path, mask: u32) -> io::Result<UnixListener> {
    private::free_socket(socket)?;
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(mask));
    let listener = UnixListener::bind(socket);
    rustix::process::umask(before);
    listener
}
