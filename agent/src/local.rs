//! Who comes in by the socket. A rule opens that to everybody of the machine ([`crate::reload`]), also to
//! those whom no rule names: what they hold of the agent is bounded, so that nobody takes what others need.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures::{Stream, StreamExt as _};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::Connected;

use crate::access::Callers;
use crate::patience::Pauses;

/// Connections of one user whom a rule names, and of all together whom none does. One more is closed. Root
/// has as many as it wants: containerd's runtimes and `kyb` are root's.
const CONNECTIONS_MAX: usize = 64;

/// A connection, and its place among those of its user.
#[derive(Debug)]
pub(crate) struct Admitted {
    stream: UnixStream,
    _place: Option<OwnedSemaphorePermit>,
}

/// The places that are left.
#[derive(Debug)]
struct Places {
    callers: Arc<Callers>,
    /// Of each user whom a rule has named.
    known: Mutex<BTreeMap<u32, Arc<Semaphore>>>,
    strangers: Arc<Semaphore>,
}

/// Accepts connections for ever.
pub(crate) fn admit(
    listener: UnixListener,
    callers: Arc<Callers>,
) -> impl Stream<Item = io::Result<Admitted>> {
    let places = Places {
        callers,
        known: Mutex::default(),
        strangers: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
    };
    let begin = (UnixListenerStream::new(listener), places, Pauses::default());
    futures::stream::unfold(begin, |(mut incoming, places, mut pauses)| async move {
        loop {
            let accepted = match incoming.next().await? {
                Ok(stream) => {
                    pauses = Pauses::default();
                    places.admit(stream)
                }
                Err(error) => {
                    // Out of descriptors, or of memory: those that are there end, and free some.
                    tracing::warn!(%error, "a connection was not accepted");
                    pauses.pause().await;
                    None
                }
            };
            if let Some(admitted) = accepted {
                return Some((Ok(admitted), (incoming, places, pauses)));
            }
        }
    })
}

impl Places {
    /// Gives a connection its place; nothing when its user has no more.
    fn admit(&self, stream: UnixStream) -> Option<Admitted> {
        let uid = stream.peer_cred().ok()?.uid();
        if uid == 0 {
            return Some(Admitted { stream, _place: None });
        }
        let Ok(place) = self.of(uid).try_acquire_owned() else {
            tracing::debug!(uid, "a connection too many was closed");
            return None;
        };
        Some(Admitted { stream, _place: Some(place) })
    }

    fn of(&self, uid: u32) -> Arc<Semaphore> {
        if !self.callers.current().names(uid) {
            return Arc::clone(&self.strangers);
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(uid).or_insert_with(|| Arc::new(Semaphore::new(CONNECTIONS_MAX))))
    }
}

impl Connected for Admitted {
    type ConnectInfo = <UnixStream as Connected>::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Admitted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Admitted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
