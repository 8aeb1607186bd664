//! Checkpoints that are compared with one in a registry.

use std::io::{Seek as _, SeekFrom, Write as _};

use crate::dump::dump;
use crate::kyb::{Ran, kyb};
use crate::registry::Registry;

const PAGES: usize = 3000;

/// Changes one byte of one page.
fn change(scratch: &tempfile::TempDir, page: u64) {
    let path = scratch.path().join("dump/pages-1.img");
    let mut pages = fs_err::OpenOptions::new().write(true).open(path).unwrap();
    pages.seek(SeekFrom::Start(page * 4096 + 11)).unwrap();
    pages.write_all(&[0x5a]).unwrap();
}

async fn run(scratch: &tempfile::TempDir, line: &str) -> Ran {
    kyb(scratch.path(), line.split(' ')).await
}

#[tokio::test]
async fn a_registrys_base_is_compared_by_its_page_hashes() {
    for registry in Registry::all() {
        let scratch = tempfile::tempdir().unwrap();
        dump(scratch.path(), PAGES);
        assert_eq!(run(&scratch, "keygen ours").await.code, 0);
        let (first, second) =
            (format!("{}/a/b:v1", registry.address()), format!("{}/c/d:v2", registry.address()));
        let full = format!("pack dump {first} --page-hashes --sign-key ours.key --json");
        let full = run(&scratch, &full).await.json();
        assert_eq!(full["bytesAdded"], PAGES * 4096);

        change(&scratch, 17);
        change(&scratch, 2500);
        let line = format!("pack dump {second} --base {first} --page-hashes --sign-key ours.key");
        let next = run(&scratch, &format!("{line} --json")).await.json();
        assert_eq!(next["bytesAdded"], 2 * 4096);
        assert_eq!(
            (&next["lineage"]["generation"], &next["lineage"]["base"]),
            (&1.into(), &full["digest"])
        );

        // What is a base can be one again, and is whole by itself.
        change(&scratch, 18);
        let third = format!("{}/c/d:v3", registry.address());
        let line = format!("pack dump {third} --base {second} --sign-key ours.key --json");
        let third_facts = run(&scratch, &line).await.json();
        assert_eq!(third_facts["bytesAdded"], 4096);
        let out = run(&scratch, &format!("unpack {third} out --key ours.pub")).await;
        assert_eq!(out.code, 0, "{out:?}");
        let read = |name: &str| fs_err::read(scratch.path().join(name)).unwrap();
        assert!(read("out/pages-1.img") == read("dump/pages-1.img"), "the pages differ");

        // The third has no hashes.
        let blind = format!("pack dump {second} --base {third} --sign-key ours.key");
        run(&scratch, &blind).await.ended(1, "pack it with page hashes, or copy it here");
    }
}

#[tokio::test]
async fn a_base_that_nobody_trusted_signed_is_refused() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = tempfile::tempdir().unwrap();
    dump(scratch.path(), 64);
    for prefix in ["ours", "other"] {
        assert_eq!(run(&scratch, &format!("keygen {prefix}")).await.code, 0);
    }
    let (first, second) =
        (format!("{}/a/b:v1", registry.address()), format!("{}/a/b:v2", registry.address()));
    let packed = run(&scratch, &format!("pack dump {first} --page-hashes")).await;
    assert_eq!(packed.code, 0, "{packed:?}");
    let based = format!("pack dump {second} --base {first}");
    run(&scratch, &based).await.ended(64, "--base-key");
    run(&scratch, &format!("{based} --sign-key ours.key")).await.ended(2, "is not signed");
    assert_eq!(run(&scratch, &format!("sign {first} --key other.key")).await.code, 0);
    run(&scratch, &format!("{based} --sign-key ours.key")).await.ended(2, "none of the trusted");
    for allowed in ["--sign-key ours.key --base-key other.pub", "--insecure-base"] {
        let packed = run(&scratch, &format!("{based} {allowed}")).await;
        assert_eq!(packed.code, 0, "{packed:?}");
    }
}
