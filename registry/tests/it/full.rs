//! A full disk: a clear refusal, nothing harmed, and life goes on once there is room.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a failed step here is a failed test, and a skipped one must be seen"
)]

use std::path::{Path, PathBuf};

use http::Method;
use kybernate_spec::Digest;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};

use crate::harness::{noise, wait_until};
use crate::process::Process;

const MIB: usize = 1 << 20;

/// A small file system of its own, unmounted when the value is dropped.
#[derive(Debug)]
struct SmallDisk {
    at: PathBuf,
}

impl SmallDisk {
    fn mount(at: &Path) -> Option<Self> {
        match mount("tmpfs", at, "tmpfs", MountFlags::empty(), Some(c"size=8m")) {
            Ok(()) => Some(Self { at: at.to_owned() }),
            Err(error) => {
                eprintln!("SKIPPED: a_full_disk_is_told: mounting needs root: {error}");
                None
            }
        }
    }

    fn grow(&self) {
        mount_remount(&self.at, MountFlags::empty(), "size=64m").unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Err(error) = unmount(&self.at, UnmountFlags::DETACH) {
            eprintln!("failed to unmount {}: {error}", self.at.display());
        }
    }
}

#[tokio::test]
async fn a_full_disk_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path()) else { return };
    let root = dir.path().join("store");
    let process = Process::start(&root, &["--log-filter", "off"]).await;
    let remote = process.remote.clone();
    let kept = noise(MIB, 1);
    let kept_digest = remote.push("a", &kept).await;
    let uploads = root.join("uploads");
    let empty = async || std::fs::read_dir(&uploads).unwrap().count() == 0;

    let large = noise(12 * MIB, 2);
    let digest = Digest::of(&large);
    let post = format!("/v2/a/blobs/uploads/?digest={digest}");
    remote.send(Method::POST, &post, &[], large.clone()).await.refused(507, "UNKNOWN");
    wait_until("the upload's file is removed", empty).await;

    let upload = remote.begin("a").await;
    let reply = remote.put(&upload, &digest, large.clone()).await;
    reply.refused(507, "UNKNOWN");
    assert!(String::from_utf8_lossy(&reply.body).contains("full"), "{reply:?}");
    let upload = remote.begin("a").await;
    remote.patch(&upload, 0, &large).await.refused(507, "UNKNOWN");
    remote.get(&upload).await.refused(404, "BLOB_UPLOAD_UNKNOWN");
    wait_until("the upload's file is removed", empty).await;

    // Nothing is harmed: what is there is there, and what fits is taken.
    assert_eq!(remote.head_blob("a", &digest).await, 404);
    assert!(remote.blob("a", &kept_digest).await.body == kept);
    remote.push_image("a", "v1", b"small", None).await;

    // To the last byte: also a manifest is refused cleanly, and its tag stays where it was.
    let before = remote.get("/v2/a/manifests/v1").await.body;
    let filler = dir.path().join("filler");
    let written = fs_err::write(&filler, noise(8 * MIB, 3));
    written.unwrap_err();
    remote.put_manifest("a", "v1", "x/y", noise(MIB, 4)).await.refused(507, "UNKNOWN");
    assert_eq!(remote.get("/v2/a/manifests/v1").await.body, before);
    let temporary = async || std::fs::read_dir(root.join("tmp")).unwrap().count() == 0;
    wait_until("what was not written whole is removed", temporary).await;

    disk.grow();
    assert_eq!(remote.send(Method::POST, &post, &[], large.clone()).await.status, 201);
    assert!(remote.blob("a", &digest).await.body == large);
    process.kill().await;
}
