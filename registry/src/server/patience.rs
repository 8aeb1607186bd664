//! A connection that ends when the client reads nothing for too long, or too little while others wait
//! to be served.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use crate::metrics::ConnectionMetrics;
use crate::places::{Pace, Places};

/// How often it is looked whether others wait.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Wraps a stream whose writes may wait only so long.
#[derive(Debug)]
pub(super) struct Patience {
    stream: TcpStream,
    /// How long a client may leave a reply unread.
    unread_max: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    /// Since when the client has read nothing.
    since: Option<Instant>,
    pace: Pace,
    metrics: ConnectionMetrics,
}

impl Patience {
    pub(super) fn new(
        stream: TcpStream,
        unread_max: Duration,
        metrics: &ConnectionMetrics,
        places: &Places,
    ) -> Self {
        metrics.open.inc();
        let (pace, metrics) = (Pace::new(places), metrics.clone());
        Self { stream, unread_max, waiting: None, since: None, pace, metrics }
    }

    /// Turns a write that has waited too long into an error.
    fn limit(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = written {
            let bytes = written.as_ref().map_or(0, |bytes| *bytes);
            let bytes = u64::try_from(bytes).unwrap_or(0);
            self.metrics.sent.inc_by(bytes);
            self.waiting = None;
            let waited = self.since.take().map(|since| since.elapsed());
            self.pace.moved(waited.unwrap_or_default(), bytes);
            let cut = waited.is_some() && self.pace.is_too_slow(Duration::ZERO);
            return Poll::Ready(if cut { Err(io::ErrorKind::TimedOut.into()) } else { written });
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        loop {
            let waited = since.elapsed();
            if waited >= self.unread_max || self.pace.is_too_slow(waited) {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            let rest = LOOK_EVERY.min(self.unread_max.saturating_sub(waited));
            let look = || Box::pin(tokio::time::sleep_until(Instant::now() + rest));
            ready!(self.waiting.get_or_insert_with(look).as_mut().poll(context));
            self.waiting = None;
        }
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        self.metrics.open.dec();
    }
}

impl AsyncRead for Patience {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let bytes = buffer.filled().len().saturating_sub(before);
        self.metrics.received.inc_by(u64::try_from(bytes).unwrap_or(0));
        read
    }
}

impl AsyncWrite for Patience {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limit(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.limit(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests;
