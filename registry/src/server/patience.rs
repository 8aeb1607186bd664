//! A connection that ends when the client reads nothing for too long.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use crate::metrics::ConnectionMetrics;

/// Wraps a stream whose writes may wait only so long.
#[derive(Debug)]
pub(super) struct Patience {
    stream: TcpStream,
    /// How long a client may leave a reply unread.
    unread_max: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    metrics: ConnectionMetrics,
}

impl Patience {
    pub(super) fn new(
        stream: TcpStream,
        unread_max: Duration,
        metrics: &ConnectionMetrics,
    ) -> Self {
        metrics.open.inc();
        Self { stream, unread_max, waiting: None, metrics: metrics.clone() }
    }

    /// Turns a write that has waited too long into an error.
    fn limit(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = written {
            let bytes = written.as_ref().map_or(0, |bytes| *bytes);
            self.metrics.sent.inc_by(u64::try_from(bytes).unwrap_or(0));
            let written = Poll::Ready(written);
            self.waiting = None;
            return written;
        }
        let until = Instant::now() + self.unread_max;
        let until = || Box::pin(tokio::time::sleep_until(until));
        ready!(self.waiting.get_or_insert_with(until).as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
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
