//! What lies on this node, as something containerd's content store is filled from.

use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::StreamExt as _;
use kybernate_packager::progress::Progress;
use kybernate_packager::store::{BlobSource, BlobStream, StoreError, StoreErrorKind};
use kybernate_spec::Descriptor;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Bytes of a piece: what a message to containerd holds.
const PIECE_BYTES: usize = 1 << 20;

/// Pieces read ahead.
const PIECES_AHEAD: usize = 4;

/// Opens what is read.
type Opens = dyn Fn() -> io::Result<Box<dyn Read + Send>> + Send + Sync;

/// Something that can be read from its beginning, piece by piece.
pub(super) struct Local {
    opens: Arc<Opens>,
    progress: Progress,
}

impl Local {
    /// Reads what `opens` gives, and counts it.
    pub(super) fn new<R: Read + Send + 'static>(
        opens: impl Fn() -> io::Result<R> + Send + Sync + 'static,
        progress: &Progress,
    ) -> Self {
        let boxed = move || {
            let reader: Box<dyn Read + Send> = Box::new(opens()?);
            Ok(reader)
        };
        Self { opens: Arc::new(boxed), progress: progress.clone() }
    }
}

impl BlobSource for Local {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        let (opens, progress) = (Arc::clone(&self.opens), self.progress.clone());
        let subject = descriptor.digest.to_string();
        Box::pin(async move {
            let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
            // It ends with the stream: what is sent to nobody is an error.
            drop(tokio::task::spawn_blocking(move || {
                let read = send(&*opens, &sender, &progress);
                let error = |error| StoreError {
                    operation: "read",
                    subject,
                    kind: StoreErrorKind::Io(error),
                };
                if let Err(kind) = read {
                    sender.blocking_send(Err(error(kind))).unwrap_or_default();
                }
            }));
            Ok(ReceiverStream::new(receiver).boxed())
        })
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Local")
    }
}

/// Sends all there is, until nobody wants more.
fn send(
    opens: &Opens,
    sender: &mpsc::Sender<Result<Bytes, StoreError>>,
    progress: &Progress,
) -> io::Result<()> {
    let mut reader = opens()?;
    loop {
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        let limit = u64::try_from(PIECE_BYTES).map_err(io::Error::other)?;
        let read = (&mut reader).take(limit).read_to_end(&mut piece)?;
        if read == 0 || sender.blocking_send(Ok(piece.into())).is_err() {
            return Ok(());
        }
        progress.advance(u64::try_from(read).map_err(io::Error::other)?);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::TryStreamExt as _;

    #[tokio::test]
    async fn everything_comes_in_order_and_is_counted() {
        let content: Vec<u8> = (0..PIECE_BYTES * 2 + 7).map(|n| n.to_le_bytes()[1]).collect();
        let (progress, given) = (Progress::default(), content.clone());
        let local = Local::new(move || Ok(io::Cursor::new(given.clone())), &progress);
        let descriptor = Descriptor::of("text/plain", &content);
        for round in 1..=2 {
            let stream = local.open(&descriptor).await.unwrap();
            let parts: Vec<Bytes> = stream.try_collect().await.unwrap();
            assert_eq!(parts.concat(), content);
            assert_eq!(progress.snapshot().done, descriptor.size * round);
        }
    }

    #[tokio::test]
    async fn what_cannot_be_read_ends_with_the_reason() {
        let fails = || Err::<io::Empty, _>(io::Error::other("gone"));
        let local = Local::new(fails, &Progress::default());
        let descriptor = Descriptor::of("text/plain", b"");
        let error = local.open(&descriptor).await.unwrap().try_collect::<Vec<_>>().await;
        let StoreErrorKind::Io(error) = error.unwrap_err().kind else { panic!("another error") };
        assert_eq!(error.to_string(), "gone");
    }
}
