//! containerd's content store: read for the source image, filled for the runnable image.

use std::collections::HashMap;
use std::io;

use bytes::Bytes;
use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::{
    AbortRequest, Info, InfoRequest, ReadContentRequest, UpdateRequest, WriteAction,
    WriteContentRequest,
};
use futures::future::BoxFuture;
use futures::stream::{Fuse, StreamExt as _, TryStreamExt as _};
use kybernate_packager::store::{BlobSource, BlobStream, StoreError, StoreErrorKind};
use kybernate_spec::{Descriptor, Digest};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use super::{MESSAGE_BYTES_MAX, Namespace, RuntimeError, RuntimeErrorKind};

/// Bytes per message of a write: few enough messages, since containerd answers each.
const WRITE_BYTES: usize = 256 << 10;

/// Messages under way per write: enough to keep containerd busy, 1 MiB at most.
const WRITES_IN_FLIGHT: usize = 4;

/// Reads blobs from containerd's content store.
#[derive(Clone, Debug)]
pub(crate) struct ContentSource {
    namespace: Namespace,
}

/// Why a blob did not get into the content store.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteContentError {
    /// It could not be read from where it comes from.
    #[error(transparent)]
    Read(#[from] StoreError),
    /// It could not be written.
    #[error(transparent)]
    Write(#[from] RuntimeError),
}

/// A blob on its way.
#[derive(Debug)]
struct Write<'a> {
    descriptor: &'a Descriptor,
    /// What containerd knows it by until it is whole.
    reference: String,
}

impl ContentSource {
    pub(crate) const fn new(namespace: Namespace) -> Self {
        Self { namespace }
    }
}

impl BlobSource for ContentSource {
    fn open<'a>(
        &'a self,
        descriptor: &'a Descriptor,
    ) -> BoxFuture<'a, Result<BlobStream, StoreError>> {
        Box::pin(self.namespace.read_blob(descriptor))
    }
}

impl Namespace {
    /// Whether the content store has the blob.
    pub(crate) async fn has_content(&self, digest: &Digest) -> Result<bool, RuntimeError> {
        Ok(self.content_labels(digest).await?.is_some())
    }

    /// Returns the labels of a blob, if the content store has it.
    async fn content_labels(
        &self,
        digest: &Digest,
    ) -> Result<Option<HashMap<String, String>>, RuntimeError> {
        let request = self.quick(InfoRequest { digest: digest.to_string() });
        match self.content().info(request).await {
            Ok(answer) => Ok(Some(answer.into_inner().info.unwrap_or_default().labels)),
            Err(status) if status.code() == tonic::Code::NotFound => Ok(None),
            Err(status) => Err(self.error("look for", &digest.to_string(), status)),
        }
    }

    /// Reads a small blob whole and checks it.
    pub(crate) async fn read_small(
        &self,
        descriptor: &Descriptor,
        bytes_max: u64,
    ) -> Result<Bytes, StoreError> {
        let error = |kind| StoreError {
            operation: "read content",
            subject: descriptor.digest.to_string(),
            kind,
        };
        if descriptor.size > bytes_max {
            let (size, limit) = (descriptor.size, bytes_max);
            return Err(error(StoreErrorKind::TooLarge { size, limit }));
        }
        let mut stream = self.read_blob(descriptor).await?;
        let mut content = Vec::new();
        while let Some(bytes) = stream.try_next().await? {
            content.extend_from_slice(&bytes);
        }
        let found = Descriptor::of(&descriptor.media_type, &content);
        if found.digest != descriptor.digest {
            return Err(error(StoreErrorKind::Mismatch(format!("it is {}", found.digest))));
        }
        Ok(content.into())
    }

    /// Writes a blob unless it is there; either way our lease, if there is one, keeps it. containerd
    /// checks its digest.
    pub(crate) async fn write_blob(
        &self,
        descriptor: &Descriptor,
        source: &dyn BlobSource,
    ) -> Result<(), WriteContentError> {
        // Two operations that write one blob do not wait for each other: the quicker one's counts.
        let writer = self.lease.as_deref().unwrap_or("kybernate");
        let write = Write { descriptor, reference: format!("{writer}-{}", descriptor.digest) };
        if self.keep_content(&write).await? {
            return Ok(());
        }
        let stream = source.open(descriptor).await?;
        let (sender, receiver) = mpsc::channel(WRITES_IN_FLIGHT);
        let feeding = feed(sender, stream, &write);
        let (fed, written) = tokio::join!(feeding, self.send(receiver));
        let written = written.and_then(|committed| {
            let unfinished = || tonic::Status::internal("the write was not finished");
            committed.then_some(()).ok_or_else(unfinished)
        });
        let outcome = match (fed, written) {
            (Err(error), _) => Err(error.into()),
            (Ok(()), Err(status)) if status.code() == tonic::Code::AlreadyExists => Ok(()),
            (Ok(()), Err(status)) => {
                Err(self.error("write content", &descriptor.digest.to_string(), status).into())
            }
            (Ok(()), Ok(())) => Ok(()),
        };
        if outcome.is_err() {
            let request = self.quick(AbortRequest { r#ref: write.reference });
            // What is not aborted goes with its lease.
            self.content().abort(request).await.map(drop).unwrap_or_default();
        }
        outcome
    }

    /// Whether the content store has the blob, which our lease keeps from now on. Only to look would
    /// not do: whoever else keeps it may let it go before we refer to it.
    async fn keep_content(&self, write: &Write<'_>) -> Result<bool, RuntimeError> {
        let (sender, receiver) = mpsc::channel(1);
        // The receiver is ours, and has room for it.
        sender.send(write.message(WriteAction::Stat, 0, Vec::new())).await.unwrap_or_default();
        drop(sender);
        match self.send(receiver).await {
            Ok(_) => Ok(false),
            Err(status) if status.code() == tonic::Code::AlreadyExists => Ok(true),
            Err(status) => {
                Err(self.error("look for", &write.descriptor.digest.to_string(), status))
            }
        }
    }

    /// Sets labels of a blob: they tell containerd's garbage collector what belongs to what. Those that
    /// are there already cost no write, for which containerd syncs the disk.
    pub(crate) async fn label_content(
        &self,
        digest: &Digest,
        labels: HashMap<String, String>,
    ) -> Result<(), RuntimeError> {
        let present = self.content_labels(digest).await?.unwrap_or_default();
        if labels.iter().all(|(name, value)| present.get(name) == Some(value)) {
            return Ok(());
        }
        let paths = labels.keys().map(|key| format!("labels.{key}")).collect();
        let info = Info { digest: digest.to_string(), labels, ..Info::default() };
        let update_mask = Some(prost_types::FieldMask { paths });
        let request = self.quick(UpdateRequest { info: Some(info), update_mask });
        let answer = self.content().update(request).await;
        answer.map_err(|s| self.error("label content", &digest.to_string(), s)).map(drop)
    }

    async fn read_blob(&self, descriptor: &Descriptor) -> Result<BlobStream, StoreError> {
        let digest = descriptor.digest.to_string();
        let error =
            move |kind| StoreError { operation: "read content", subject: digest.clone(), kind };
        let found = self.has_content(&descriptor.digest).await;
        match found {
            Ok(true) => {}
            Ok(false) => return Err(error(StoreErrorKind::NotFound)),
            Err(other) => return Err(error(StoreErrorKind::Io(io::Error::other(other)))),
        }
        let message =
            ReadContentRequest { digest: descriptor.digest.to_string(), offset: 0, size: 0 };
        let answer = self.content().read(self.request(message)).await;
        let io = move |status| error(StoreErrorKind::Io(io::Error::other(status)));
        let stream = answer.map_err(&io)?.into_inner();
        Ok(stream.map(move |part| part.map(|part| part.data.into()).map_err(&io)).boxed())
    }

    /// Sends the messages of a write. Returns whether the last one committed it.
    async fn send(
        &self,
        receiver: mpsc::Receiver<WriteContentRequest>,
    ) -> Result<bool, tonic::Status> {
        let requests = self.request(ReceiverStream::new(receiver));
        let mut answers = self.content().write(requests).await?.into_inner();
        let mut committed = false;
        while let Some(answer) = answers.message().await? {
            committed |= answer.action() == WriteAction::Commit;
        }
        Ok(committed)
    }

    fn content(&self) -> ContentClient<Channel> {
        ContentClient::new(self.channel()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }
}

/// Turns a blob into the messages of a write. Ends early when containerd does: it says why.
async fn feed(
    sender: mpsc::Sender<WriteContentRequest>,
    stream: BlobStream,
    write: &Write<'_>,
) -> Result<(), StoreError> {
    let mut offset = 0_i64;
    if sender.send(write.message(WriteAction::Stat, 0, Vec::new())).await.is_err() {
        return Ok(());
    }
    let (mut stream, mut rest) = (stream.fuse(), Bytes::new());
    loop {
        let part = next_part(&mut stream, &mut rest).await?;
        let Some(bytes) = i64::try_from(part.len()).ok().filter(|bytes| *bytes > 0) else { break };
        if sender.send(write.message(WriteAction::Write, offset, part)).await.is_err() {
            return Ok(());
        }
        offset = offset.saturating_add(bytes);
    }
    // When containerd has hung up, its answer tells the reason.
    sender.send(write.message(WriteAction::Commit, offset, Vec::new())).await.unwrap_or_default();
    Ok(())
}

/// Waits for as much of a blob as goes into a message, since containerd answers each of them, and what
/// comes from the network comes in small pieces. It is less only at the end, and then nothing.
async fn next_part(stream: &mut Fuse<BlobStream>, rest: &mut Bytes) -> Result<Vec<u8>, StoreError> {
    let mut part = Vec::with_capacity(WRITE_BYTES);
    while part.len() < WRITE_BYTES {
        if rest.is_empty() {
            let Some(piece) = stream.try_next().await? else { break };
            *rest = piece;
        }
        part.extend_from_slice(&rest.split_to(rest.len().min(WRITE_BYTES - part.len())));
    }
    Ok(part)
}

impl Write<'_> {
    /// Makes one of its messages.
    fn message(&self, action: WriteAction, offset: i64, data: Vec<u8>) -> WriteContentRequest {
        WriteContentRequest {
            action: action.into(),
            r#ref: self.reference.clone(),
            total: i64::try_from(self.descriptor.size).unwrap_or(i64::MAX),
            expected: self.descriptor.digest.to_string(),
            offset,
            data,
            labels: HashMap::new(),
        }
    }
}

impl WriteContentError {
    /// Whether the content is to blame: it is not what its digest says.
    pub(crate) const fn is_integrity(&self) -> bool {
        match self {
            Self::Read(error) => matches!(error.kind, StoreErrorKind::Mismatch(_)),
            Self::Write(error) => matches!(error.kind, RuntimeErrorKind::Answer(_)),
        }
    }
}
