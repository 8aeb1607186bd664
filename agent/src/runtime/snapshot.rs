//! Snapshots: the root file systems of containers.

use std::collections::HashMap;

use containerd_client::services::v1::ApplyRequest;
use containerd_client::services::v1::diff_client::DiffClient;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{
    CommitSnapshotRequest, MountsRequest, PrepareSnapshotRequest, RemoveSnapshotRequest,
    StatSnapshotRequest,
};
use containerd_client::types;
use kybernate_spec::{Descriptor, Digest};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::image::to_containerd;
use super::{Namespace, RuntimeError, RuntimeErrorKind};

/// A mount that makes up a root file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mount {
    /// Type of file system.
    pub(crate) kind: String,
    pub(crate) source: String,
    pub(crate) target: String,
    pub(crate) options: Vec<String>,
}

impl Mount {
    /// Returns the directories that it is made of, the highest first.
    pub(crate) fn directories(&self) -> impl Iterator<Item = &str> {
        let lower = self.option("lowerdir").into_iter().flat_map(|dirs| dirs.split(':'));
        let bound = Some(&*self.source).filter(|_| self.kind == "bind");
        self.option("upperdir").into_iter().chain(lower).chain(bound)
    }

    /// Returns the value of an option like `upperdir=…`.
    pub(crate) fn option(&self, name: &str) -> Option<&str> {
        self.options.iter().find_map(|option| option.strip_prefix(name)?.strip_prefix('='))
    }
}

impl From<types::Mount> for Mount {
    fn from(mount: types::Mount) -> Self {
        let types::Mount { r#type: kind, source, target, options } = mount;
        Self { kind, source, target, options }
    }
}

impl From<Mount> for types::Mount {
    fn from(mount: Mount) -> Self {
        let Mount { kind, source, target, options } = mount;
        Self { r#type: kind, source, target, options }
    }
}

impl Namespace {
    /// Returns the mounts of a snapshot.
    pub(crate) async fn mounts(
        &self,
        snapshotter: &str,
        key: &str,
    ) -> Result<Vec<Mount>, RuntimeError> {
        let message = MountsRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        let answer = self.snapshots().mounts(self.quick(message)).await;
        let answer = answer.map_err(|s| self.error("find the mounts of snapshot", key, s))?;
        Ok(answer.into_inner().mounts.into_iter().map(Mount::from).collect())
    }

    /// Whether there is such a snapshot.
    pub(crate) async fn has_snapshot(
        &self,
        snapshotter: &str,
        key: &str,
    ) -> Result<bool, RuntimeError> {
        let message =
            StatSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        match self.snapshots().stat(self.quick(message)).await {
            Ok(_) => Ok(true),
            Err(status) if status.code() == Code::NotFound => Ok(false),
            Err(status) => Err(self.error("look at snapshot", key, status)),
        }
    }

    /// Makes a writable snapshot on top of `parent`.
    pub(crate) async fn prepare(
        &self,
        snapshotter: &str,
        key: &str,
        parent: Option<&Digest>,
    ) -> Result<Vec<Mount>, RuntimeError> {
        let message = PrepareSnapshotRequest {
            snapshotter: snapshotter.to_owned(),
            key: key.to_owned(),
            parent: parent.map(ToString::to_string).unwrap_or_default(),
            labels: HashMap::new(),
        };
        let (mut snapshots, requests) =
            (self.snapshots(), [self.quick(message.clone()), self.quick(message)]);
        let prepared = async move {
            let [first, again] = requests;
            match snapshots.prepare(first).await {
                Err(status) if is_in_the_way(&status) => snapshots.prepare(again).await,
                answer => answer,
            }
        };
        let answer = self.make(prepared).await;
        let answer = answer.map_err(|s| self.error("prepare snapshot", key, s))?;
        Ok(answer.into_inner().mounts.into_iter().map(Mount::from).collect())
    }

    /// Turns a writable snapshot into a read-only one with another name.
    pub(crate) async fn commit(
        &self,
        snapshotter: &str,
        key: &str,
        name: &Digest,
    ) -> Result<(), RuntimeError> {
        let message = CommitSnapshotRequest {
            snapshotter: snapshotter.to_owned(),
            name: name.to_string(),
            key: key.to_owned(),
            labels: HashMap::new(),
        };
        let (mut snapshots, request) = (self.snapshots(), self.quick(message));
        let answer = self.make(async move { snapshots.commit(request).await }).await;
        answer.map_err(|s| self.error("commit snapshot", key, s)).map(drop)
    }

    /// Removes a snapshot.
    pub(crate) async fn remove_snapshot(
        &self,
        snapshotter: &str,
        key: &str,
    ) -> Result<(), RuntimeError> {
        let message =
            RemoveSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
        let answer = self.snapshots().remove(self.quick(message)).await;
        answer.map_err(|s| self.error("remove snapshot", key, s)).map(drop)
    }

    /// Unpacks a layer of the content store into a snapshot's mounts and checks that it is the
    /// one with this digest when uncompressed.
    pub(crate) async fn apply(
        &self,
        layer: &Descriptor,
        mounts: Vec<Mount>,
        diff_id: &Digest,
    ) -> Result<(), RuntimeError> {
        let subject = layer.digest.to_string();
        let request = self.request(ApplyRequest {
            diff: Some(to_containerd(layer)),
            mounts: mounts.into_iter().map(Into::into).collect(),
            ..ApplyRequest::default()
        });
        let answer = DiffClient::new(self.channel()).apply(request).await;
        let answer = answer.map_err(|s| self.error("unpack layer", &subject, s))?;
        let applied = answer.into_inner().applied.unwrap_or_default();
        if applied.digest == diff_id.to_string() {
            return Ok(());
        }
        let kind = RuntimeErrorKind::Answer("the layer is not the one its image's config names");
        Err(RuntimeError { operation: "unpack layer", subject, kind })
    }

    fn snapshots(&self) -> SnapshotsClient<Channel> {
        SnapshotsClient::new(self.channel())
    }
}

/// Whether a snapshot was not made because of a directory that belongs to none. A containerd that was
/// killed after it had made one, and before its database knew, gives the same number again. It removes
/// the directory when it fails by it, so the next time works.
fn is_in_the_way(status: &Status) -> bool {
    status.code() == Code::Unknown && status.message().ends_with("file exists")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use containerd_client::services::v1::snapshots::PrepareSnapshotResponse;
    use prost::Message as _;

    use super::*;
    use crate::runtime::fake::Fake;

    const FILE_EXISTS: &str = "failed to rename: rename snapshots/new-1 snapshots/7: file exists";

    async fn prepare(answers: [Result<(), &'static str>; 2]) -> (Result<(), String>, usize) {
        let next = AtomicUsize::new(0);
        let fake = Fake::start(move |_, _| match answers[next.fetch_add(1, Ordering::Relaxed)] {
            Ok(()) => Ok(PrepareSnapshotResponse::default().encode_to_vec()),
            Err(message) => Err(Status::unknown(message)),
        });
        let namespace = fake.app().containerd.namespace("default");
        let prepared = namespace.prepare("overlayfs", "key", None).await;
        (prepared.map(drop).map_err(|error| error.kind.to_string()), fake.asked().len())
    }

    #[tokio::test]
    async fn a_directory_that_a_killed_containerd_left_is_not_in_the_way_twice() {
        assert_eq!(prepare([Err(FILE_EXISTS), Ok(())]).await, (Ok(()), 2));
        // Then it is something else.
        let failed = Err(FILE_EXISTS.to_owned());
        assert_eq!(prepare([Err(FILE_EXISTS), Err(FILE_EXISTS)]).await, (failed, 2));
        assert_eq!(prepare([Err("no space"), Ok(())]).await, (Err("no space".to_owned()), 1));
    }
}
