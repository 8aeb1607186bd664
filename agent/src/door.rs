//! The API for callers from the network: over TLS, and only for who has a certificate of an authority
//! that the configuration names. What it may do is for [`crate::access`] to say.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kybernate_packager::agent_api::agent_server::AgentServer;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

pub use self::certificates::Mistake;
pub(crate) use self::certificates::{Certificates, Paths};
pub(crate) use self::names::names;
use crate::api::Service;
use crate::app::App;
use crate::config::NetworkConfig;
use crate::patience::Pauses;

mod certificates;
mod names;

/// How long a handshake may take.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// Connections that prove themselves at the same time. For one more, one gives way: of the address with most
/// of them, the one that has taken longest. Who connects from one address and says nothing keeps out nobody
/// who comes from another.
const HANDSHAKES_MAX: usize = 64;
/// Calls of one connection at the same time: an operator's per node, and some that watch.
const CALLS_MAX: u32 = 64;
/// After this, a connection is asked to be made anew, so that an authority which is no longer named
/// does not count for longer.
const CONNECTION_AGE_MAX: Duration = Duration::from_hours(1);
/// What its calls get to end. A watch that is cut is begun again by its client.
const CONNECTION_GRACE: Duration = Duration::from_mins(1);
/// How often a silent connection is asked whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Time for connections to end with the agent.
const LEAVE: Duration = Duration::from_secs(2);

/// Where callers from the network come in.
#[derive(Debug)]
pub(crate) struct Door {
    listener: TcpListener,
    certificates: Arc<Certificates>,
}

impl Door {
    /// Listens. Nobody is answered yet.
    pub(crate) async fn open(config: &NetworkConfig) -> io::Result<Self> {
        let listener = TcpListener::bind(config.listen).await?;
        Ok(Self { listener, certificates: Arc::clone(&config.certificates) })
    }

    /// Returns where it listens.
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `over`.
    pub(crate) async fn serve(
        self,
        app: &Arc<App>,
        over: CancellationToken,
    ) -> Result<(), tonic::transport::Error> {
        let (proven, incoming) = mpsc::channel(1);
        let stop = over.clone();
        app.tasks.spawn(|cancel| async move {
            tokio::select! {
                () = self.admit(proven) => {}
                () = cancel.cancelled() => {}
                () = stop.cancelled() => {}
            }
        });
        let ended = over.clone();
        let served = Server::builder()
            .concurrency_limit_per_connection(usize::try_from(CALLS_MAX).unwrap_or(1))
            .max_concurrent_streams(CALLS_MAX)
            .max_connection_age(CONNECTION_AGE_MAX)
            .max_connection_age_grace(CONNECTION_GRACE)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .add_service(AgentServer::new(Service::new(Arc::clone(app))))
            .serve_with_incoming_shutdown(ReceiverStream::new(incoming), async move {
                ended.cancelled().await;
            });
        tokio::select! {
            served = served => served,
            () = async {
                over.cancelled().await;
                tokio::time::timeout(LEAVE, std::future::pending::<()>()).await.unwrap_or_default();
            } => Ok(()),
        }
    }

    /// Accepts connections and hands on those that have proven themselves.
    async fn admit(self, proven: mpsc::Sender<io::Result<TlsStream<TcpStream>>>) {
        let mut handshakes = tokio::task::JoinSet::new();
        let mut under_way: Vec<UnderWay> = Vec::new();
        let mut pauses = Pauses::default();
        loop {
            let (stream, from) = match self.listener.accept().await {
                Ok(accepted) => {
                    pauses = Pauses::default();
                    accepted
                }
                Err(error) => {
                    // Out of descriptors, or of memory: those that are there end, and free some.
                    tracing::warn!(%error, "a connection was not accepted");
                    pauses.pause().await;
                    continue;
                }
            };
            while handshakes.try_join_next().is_some() {}
            under_way.retain(|one| !one.task.is_finished());
            if under_way.len() >= HANDSHAKES_MAX
                && let Some(place) = gives_way(&under_way)
            {
                under_way.remove(place).token.cancel();
            }
            let (certificates, proven) = (Arc::clone(&self.certificates), proven.clone());
            let token = CancellationToken::new();
            let asked = token.clone();
            let task = handshakes.spawn(async move {
                let shaken = tokio::select! {
                    shaken = handshake(&certificates, stream) => shaken,
                    () = asked.cancelled() => Err(io::Error::other("it gave way to others")),
                };
                match shaken {
                    // Nobody listens any more at the end.
                    Ok(stream) => proven.send(Ok(stream)).await.unwrap_or_default(),
                    Err(error) => tracing::info!(%from, %error, "a connection was refused"),
                }
            });
            under_way.push(UnderWay { address: from.ip(), token, task });
        }
    }
}

/// A connection that proves itself.
struct UnderWay {
    address: IpAddr,
    /// Ends it.
    token: CancellationToken,
    task: AbortHandle,
}

/// Returns which one of those that came one after the other gives way.
fn gives_way(under_way: &[UnderWay]) -> Option<usize> {
    let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for one in under_way {
        *counts.entry(one.address).or_default() += 1;
    }
    let (address, _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    under_way.iter().position(|one| one.address == address)
}

async fn handshake(
    certificates: &Arc<Certificates>,
    stream: TcpStream,
) -> io::Result<TlsStream<TcpStream>> {
    let certificates = Arc::clone(certificates);
    let current = tokio::task::spawn_blocking(move || certificates.current());
    let acceptor = TlsAcceptor::from(current.await.map_err(io::Error::other)?);
    stream.set_nodelay(true)?;
    tokio::time::timeout(HANDSHAKE_TIME_MAX, acceptor.accept(stream)).await?
}

#[cfg(test)]
mod tests;
