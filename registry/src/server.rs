//! Accepts connections, and at the end lets requests finish.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use kybernate_spec::chain;
use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::crowd::{Business, Crowd};
use self::patience::Patience;
use crate::access::{Access, AccessError, AccessFiles};
use crate::admin;
use crate::api::{Peer, operations, router};
use crate::app::{App, AppState};
use crate::config::{Config, Mistake};
use crate::store::{Store, StoreError};
use crate::tasks::Tasks;
use crate::tls::{Tls, TlsFiles};
use crate::{index, janitor, retention, trace};

mod crowd;
mod patience;

/// How long a failed accept (too many files open) is waited out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long a handshake may take while others wait for a place. One of somebody who means it takes
/// two round trips.
const HANDSHAKE_FAIR: Duration = Duration::from_secs(1);

/// How long a page of figures may take once all else has ended.
const OPERATIONS_GRACE: Duration = Duration::from_secs(1);

/// A registry that serves.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    app: Weak<App>,
    tasks: Tasks,
    /// What is behind the address of figures, which is open until the end.
    operations: Tasks,
    store: Weak<Store>,
}

/// The files that a configuration names, read and not followed yet.
#[derive(Debug)]
pub struct Files {
    access: AccessFiles,
    tls: Option<TlsFiles>,
}

impl Files {
    /// Reads them all and returns everything that is wrong at once. Blocks.
    pub fn read(config: &Config) -> Result<Self, Vec<Mistake>> {
        let (access, tls) = (AccessFiles::read(&config.access), TlsFiles::read(&config.tls));
        match (access, tls, trace::check(&config.trace)) {
            (Ok(access), Ok(tls), Ok(())) => Ok(Self { access, tls }),
            (access, tls, trace) => {
                let wrong = [access.err(), tls.err(), trace.err().map(|wrong| vec![wrong])];
                Err(wrong.into_iter().flatten().flatten().collect())
            }
        }
    }

    /// Says what is good and will not work all the same.
    pub fn doubts(&self) -> Option<String> {
        self.tls.as_ref().and_then(TlsFiles::doubt)
    }
}

/// Why a registry cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The listener has no address.
    #[error("failed to find out the address")]
    Address(#[source] io::Error),
    /// Files that the configuration names are wrong.
    #[error("{} things are wrong with the files that the configuration names", .0.len())]
    Mistakes(Vec<Mistake>),
    /// Events that are to be told cannot be kept.
    #[error(transparent)]
    Outbox(#[from] crate::notify::OpenError),
    /// What lies in uploads of an earlier process cannot be counted.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Nothing can be told.
    #[error("failed to set up what events are sent with")]
    Notify(#[source] reqwest::Error),
    /// Access control could not be set up.
    #[error(transparent)]
    Access(#[from] AccessError),
}

impl Server {
    /// Serves `store` on `listener` until it is shut down.
    pub fn start(config: &Config, store: Store, listener: TcpListener) -> Result<Self, StartError> {
        let tasks = Tasks::default();
        let address = listener.local_addr().map_err(StartError::Address)?;
        let files = Files::read(config).map_err(StartError::Mistakes)?;
        let access = Access::start(files.access, config, &tasks)?;
        let tls = files.tls.map(|tls| tls.start(&tasks));
        let app = App::new(config.clone(), access, store, tasks.clone())?;
        if app.store.quotas().are_set() {
            app.store.quotas().remember(app.store.uploads_begun()?);
        }
        app.notices.start(&tasks).map_err(StartError::Notify)?;
        if let Some(tls) = &tls {
            tls.report(app.metrics.tls.clone(), &tasks);
        }
        let store = Arc::clone(&app.store);
        tasks.spawn(|cancel| index::keep(store, cancel));
        let retaining = Arc::clone(&app);
        tasks.spawn(|cancel| retention::keep(retaining, cancel));
        let (store, weak) = (Arc::downgrade(&app.store), Arc::downgrade(&app));
        janitor::start(&app);
        admin::start(&app);
        let door = Door { make: router, tls, tasks: tasks.clone() };
        tasks.spawn(|cancel| accept(app, door, listener, cancel));
        Ok(Self { address, app: weak, tasks, operations: Tasks::default(), store })
    }

    /// Serves figures and health on an address of their own, which has its own connections, not
    /// encrypted: probes and scrapers stay on the machine or within the cluster. They are served
    /// until all requests have finished.
    pub fn serve_operations(&self, listener: TcpListener) {
        let tasks = self.operations.clone();
        let door = Door { make: operations, tls: None, tasks };
        if let Some(app) = self.app.upgrade() {
            self.operations.spawn(|cancel| accept(app, door, listener, cancel));
        }
    }

    /// Says that the end comes: `/readyz` answers 503 from now on, everything else goes on.
    pub fn announce_end(&self) {
        if let Some(app) = self.app.upgrade() {
            app.leaving.cancel();
        }
    }

    /// Returns where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether lists are answered from the index, and not from the objects.
    pub fn is_indexed(&self) -> bool {
        self.store.upgrade().is_some_and(|store| store.is_indexed())
    }

    /// Accepts nothing more and waits up to `grace` for requests to finish. Returns whether all did.
    pub async fn shut_down(self, grace: Duration) -> bool {
        self.announce_end();
        let drained = self.tasks.shut_down(grace).await;
        let _last_page_sent = self.operations.shut_down(OPERATIONS_GRACE).await;
        drained
    }
}

/// What is behind an address.
#[derive(Debug, Clone)]
struct Door {
    /// Makes the service of a connection.
    make: fn(AppState, Peer) -> Router,
    tls: Option<Tls>,
    /// Where its connections belong.
    tasks: Tasks,
}

async fn accept(app: AppState, door: Door, listener: TcpListener, cancel: CancellationToken) {
    let crowd = Arc::new(Crowd::new(app.config.connections.max));
    loop {
        let accepted = async {
            let (stream, address) = listener.accept().await?;
            let place = crowd.enter().await?;
            // Replies of a few bytes must not wait for the client's delayed acknowledgement.
            stream.set_nodelay(true)?;
            Ok::<_, io::Error>(((stream, address), place))
        };
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            () = cancel.cancelled() => return,
        };
        match accepted {
            Ok((stream, place)) => {
                let app = Arc::clone(&app);
                let (crowd, door) = (Arc::clone(&crowd), door.clone());
                door.tasks.clone().spawn(|cancel| async move {
                    let _place = place;
                    greet(app, door, stream, (&crowd, cancel)).await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection");
                let _ended = tokio::time::timeout(ACCEPT_PAUSE, cancel.cancelled()).await;
            }
        }
    }
}

/// Begins a connection, encrypted or not.
async fn greet(
    app: AppState,
    door: Door,
    (stream, address): (TcpStream, SocketAddr),
    (crowd, cancel): (&Crowd, CancellationToken),
) {
    let limits = &app.config.connections;
    let (idle_max, unread_max) = (limits.idle.0, limits.unread.0);
    let stream = Patience::new(stream, unread_max, &app.metrics.connections, &app.sending);
    let service = |peer: Peer| (door.make)(Arc::clone(&app), peer);
    let displaced = &app.metrics.connections.displaced;
    let Some(tls) = door.tls else {
        let service = service(Peer { address, encrypted: false, certificate: None });
        return converse(service, (idle_max, displaced), stream, (crowd, cancel)).await;
    };
    let began = Instant::now();
    let mut accepting = std::pin::pin!(tls.accept(stream));
    let accepted = loop {
        tokio::select! {
            accepted = accepting.as_mut() => break accepted,
            () = cancel.cancelled() => return,
            () = crowd.is_full() => if began.elapsed() >= HANDSHAKE_FAIR {
                tracing::debug!(client = %address, "a handshake makes room for another connection");
                displaced.inc();
                return;
            }
        }
    };
    match accepted {
        Ok((stream, certificate)) => {
            let service = service(Peer { address, encrypted: true, certificate });
            converse(service, (idle_max, displaced), stream, (crowd, cancel)).await;
        }
        Err(error) => tracing::debug!(client = %address, %error, "a handshake failed"),
    }
}

async fn converse<S: AsyncRead + AsyncWrite + Unpin>(
    service: Router,
    (idle_max, displaced): (Duration, &Counter),
    stream: S,
    (crowd, cancel): (&Crowd, CancellationToken),
) {
    let (service, business) = (TowerToHyperService::new(service), Business::default());
    let counted = business.clone();
    let service = service_fn(move |request| {
        let (busy, answer) = (counted.begin(), service.call(request));
        async move { answer.await.map(|response| busy.until_sent(response)) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle_max)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let mut draining = false;
    let ended = loop {
        tokio::select! {
            ended = connection.as_mut() => break ended,
            () = cancel.cancelled(), if !draining => {
                connection.as_mut().graceful_shutdown();
                draining = true;
            }
            () = crowd.is_full() => if business.is_none() {
                tracing::debug!("a connection in no request makes room for another");
                displaced.inc();
                return;
            }
        }
    };
    if let Err(error) = ended {
        // Clients hang up in the middle of ranges they have enough of: no reason to worry.
        tracing::debug!(error = %chain(&error), "a connection ended early");
    }
}
