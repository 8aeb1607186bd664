//! Where a dump may appear, and what a killed `kyb` leaves.

use std::path::Path;

use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::progress::Progress;
use kybernate_packager::unpack::on_demand::OnDemand;
use kybernate_packager::unpack::{Limits, unpack_images};
use tokio::process::Command;

use crate::dump::dump;
use crate::kyb::{Ran, kyb};
use crate::proxy::Proxy;
use crate::registry::{Registry, open};

/// Packs a dump into `layout` of a new directory.
async fn packed() -> tempfile::TempDir {
    let scratch = tempfile::tempdir().unwrap();
    dump(scratch.path(), 600);
    assert_eq!(kyb(scratch.path(), ["pack", "dump", "oci:layout:v1"]).await.code, 0);
    scratch
}

async fn unpack(from: &Path, directory: &str, layout: &str) -> Ran {
    kyb(from, ["unpack", &format!("oci:{layout}:v1"), directory, "--insecure-no-signature"]).await
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs_err::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn same(one: &Path, other: &Path) {
    assert_eq!(names(one), names(other));
    for name in names(one) {
        let read = |directory: &Path| fs_err::read(directory.join(&name)).unwrap();
        assert!(read(one) == read(other), "{name} differs");
    }
}

#[tokio::test]
async fn memory_is_written_where_a_registry_gives_no_parts() {
    let Some(registry) = Registry::ours() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), 600);
    let packed = kyb(scratch.path(), ["pack", "dump", &registry.at("a/b:v1").to_string()]).await;
    assert_eq!(packed.code, 0, "{packed:?}");
    let proxy = Proxy::without_parts(registry.address()).await;
    for (location, left) in [(registry.at("a/b:v1"), 1), (proxy.at("a/b:v1"), 0)] {
        let store = open(&location).await;
        let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
        let (out, progress) = (tempfile::tempdir().unwrap(), Progress::default());
        unpack_images(&store, &checkpoint, out.path(), &progress).await.unwrap();
        let limits = Limits::default();
        let pages = OnDemand::open(&store, &checkpoint, out.path(), limits, &progress).await;
        assert_eq!(pages.unwrap().files().len(), left, "{location}");
        assert_eq!(out.path().join("pages-1.img").exists(), left == 0);
        if left == 0 {
            same(out.path(), &dump);
        }
    }
}

#[tokio::test]
async fn a_directory_that_is_there_is_filled() {
    let scratch = packed().await;
    let at = |name: &str| scratch.path().join(name);
    for name in ["plain", "here", "behind-a-link"] {
        fs_err::create_dir(at(name)).unwrap();
    }
    std::os::unix::fs::symlink("behind-a-link", at("link")).unwrap();
    fs_err::create_dir(at("here/lost+found")).unwrap();
    for (from, directory, filled) in
        [(".", "plain", "plain"), ("here", ".", "here"), (".", "link", "behind-a-link")]
    {
        let ran = unpack(&at(from), directory, at("layout").to_str().unwrap()).await;
        assert_eq!(ran.code, 0, "{ran:?}");
        if filled == "here" {
            fs_err::remove_dir(at("here/lost+found")).unwrap();
        }
        same(&at(filled), &at("dump"));
    }
    let again = unpack(scratch.path(), "plain", "layout").await;
    again.ended(1, "not empty");
}

#[tokio::test]
async fn a_mount_point_is_filled() {
    let scratch = packed().await;
    fs_err::create_dir(scratch.path().join("mounted")).unwrap();
    let line = "mount -t tmpfs none mounted || exit 77; \
                \"$0\" unpack oci:layout:v1 mounted --insecure-no-signature && \
                cp -r mounted copied && ls -A mounted | wc -l";
    let ran = Command::new("unshare")
        .args(["--mount", "sh", "-c", line, env!("CARGO_BIN_EXE_kyb")])
        .current_dir(scratch.path())
        .output()
        .await
        .unwrap();
    if ran.status.code() == Some(77) || ran.stderr.starts_with(b"unshare: unshare failed") {
        eprintln!("SKIPPED: mounting is not permitted here");
        return;
    }
    assert!(ran.status.success(), "{ran:?}");
    same(&scratch.path().join("copied"), &scratch.path().join("dump"));
}

#[tokio::test]
async fn a_place_that_cannot_be_filled_is_told_before_anything_is_read() {
    let scratch = packed().await;
    std::os::unix::fs::symlink("nowhere", scratch.path().join("dangling")).unwrap();
    fs_err::write(scratch.path().join("file"), "").unwrap();
    // The pages are gone, so whoever reads them first says so.
    fs_err::rename(scratch.path().join("layout"), scratch.path().join("whole")).unwrap();
    copy_without_pages(scratch.path());
    unpack(scratch.path(), "dangling", "layout").await.ended(1, "leads nowhere");
    unpack(scratch.path(), "file", "layout").await.ended(1, "file");
    unpack(scratch.path(), "dump", "layout").await.ended(1, "not empty");
    let left = names(scratch.path());
    assert_eq!(left, ["dangling", "dump", "file", "layout", "whole"], "nothing was begun");
}

/// Copies the layout `whole` to `layout` but for the pages.
fn copy_without_pages(directory: &Path) {
    let blobs = directory.join("layout/blobs/sha256");
    fs_err::create_dir_all(&blobs).unwrap();
    for name in ["oci-layout", "index.json"] {
        fs_err::copy(directory.join("whole").join(name), directory.join("layout").join(name))
            .unwrap();
    }
    for blob in fs_err::read_dir(directory.join("whole/blobs/sha256")).unwrap() {
        let blob = blob.unwrap();
        if blob.metadata().unwrap().len() < 1 << 20 {
            fs_err::copy(blob.path(), blobs.join(blob.file_name())).unwrap();
        }
    }
}

#[tokio::test]
async fn the_next_run_removes_what_a_killed_one_left_and_no_more() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = tempfile::tempdir().unwrap();
    dump(scratch.path(), 600);
    let at = registry.at("a/b:v1").to_string();
    assert_eq!(kyb(scratch.path(), ["pack", "dump", &at]).await.code, 0);
    let here = |name: &str| scratch.path().join(name);
    for name in ["filled", "new"] {
        fs_err::create_dir(here(name)).unwrap();
    }
    // Each into its place: an unpack into a directory that is there, one that makes it, a copy.
    let lines: [(&str, [&str; 4]); 3] = [
        ("filled", ["unpack", "REF", "filled", "--insecure-no-signature"]),
        ("new", ["unpack", "REF", "new/out", "--insecure-no-signature"]),
        ("copied", ["copy", "REF", "oci:copied:v1", "--json"]),
    ];
    for (place, line) in lines {
        let proxy = Proxy::stalling(registry.address(), 2 << 20).await;
        let stalled = proxy.at("a/b:v1").to_string();
        let with = |reference: &str| line.map(|word| word.replace("REF", reference));
        {
            let mut first = std::pin::pin!(kyb(scratch.path(), with(&stalled)));
            tokio::select! {
                done = &mut first => panic!("it got through: {done:?}"),
                () = proxy.stalled() => {}
            }
            let begun = || here(place).exists() && !hidden(&here(place)).is_empty();
            crate::kyb::until("something is begun", begun);
            // Beside one that lives: into a place where another can work too.
            if place != "filled" {
                let second = line.map(|word| match word {
                    "REF" => at.clone(),
                    other => other.replace("out", "other").replace(":v1", ":v2"),
                });
                let second = kyb(scratch.path(), second).await;
                assert_eq!(second.code, 0, "{second:?}");
                assert!(!hidden(&here(place)).is_empty(), "what lives was taken for dead");
            }
            // Dropped, and so killed.
        }
        crate::kyb::until("the killed one is gone", || !is_running(&stalled));
        assert!(!hidden(&here(place)).is_empty(), "it was killed");
        let again = kyb(scratch.path(), with(&at)).await;
        assert_eq!(again.code, 0, "{again:?}");
        assert!(hidden(&here(place)).is_empty(), "{:?}", names(&here(place)));
    }
    same(&here("filled"), &here("dump"));
    same(&here("new/out"), &here("dump"));
}

/// Lists what is not finished.
fn hidden(directory: &Path) -> Vec<String> {
    let mut names = names(directory);
    names.retain(|name| name.starts_with('.'));
    names
}

/// Whether a process with this argument runs.
pub(crate) fn is_running(argument: &str) -> bool {
    fs_err::read_dir("/proc").unwrap().any(|entry| {
        let line = entry.unwrap().path().join("cmdline");
        fs_err::read_to_string(line).is_ok_and(|line| line.contains(argument))
    })
}

/// Where few files may be open by default, as everywhere, and the dump has more.
#[tokio::test]
async fn a_dump_of_many_files_is_packed_and_unpacked() {
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), 10);
    for number in 2..150 {
        let pagemap = fs_err::read(dump.join("pagemap-1.img")).unwrap();
        // The head is the first record: the number of the pages file.
        let mut named = pagemap[..8].to_vec();
        named.extend([3, 0, 0, 0, 0x08, 0x80 | (number & 0x7f), number >> 7]);
        let rest = 8 + 4 + usize::from(pagemap[8]);
        named.extend(&pagemap[rest..]);
        fs_err::write(dump.join(format!("pagemap-shmem-{number}.img")), named).unwrap();
        let pages = dump.join(format!("pages-{number}.img"));
        fs_err::copy(dump.join("pages-1.img"), pages).unwrap();
    }
    for line in ["pack dump oci:layout:v1", "unpack oci:layout:v1 out --insecure-no-signature"] {
        let ended = Command::new("sh")
            .args(["-c", "ulimit -S -n 100 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kyb")])
            .args(line.split(' '))
            .current_dir(scratch.path())
            .env("HOME", scratch.path())
            .output()
            .await
            .unwrap();
        assert!(ended.status.success(), "{ended:?}");
    }
    same(&dump, &scratch.path().join("out"));
}
