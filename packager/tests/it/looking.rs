//! `kyb diff`, `ls`, `tree` and `rm`, and what shells and manuals know.

use std::io::{Seek as _, SeekFrom, Write as _};

use serde_json::Value;

use crate::dump::dump;
use crate::kyb::{Ran, kyb};
use crate::registry::Registry;

const PAGES: usize = 3000;

async fn run(scratch: &tempfile::TempDir, line: &str) -> Ran {
    kyb(scratch.path(), line.split(' ')).await
}

/// Overwrites one page.
fn write(scratch: &tempfile::TempDir, page: u64, byte: u8) {
    let path = scratch.path().join("dump/pages-1.img");
    let mut pages = fs_err::OpenOptions::new().write(true).open(path).unwrap();
    pages.seek(SeekFrom::Start(page * 4096)).unwrap();
    pages.write_all(&[byte; 4096]).unwrap();
}

/// Packs `v1`, signed, then changes three pages, zeroes one, and packs `v2`.
async fn two(scratch: &tempfile::TempDir, at: &str, options: [&str; 2]) -> [Value; 2] {
    dump(scratch.path(), PAGES);
    assert_eq!(run(scratch, "keygen ours").await.code, 0);
    let line = format!("pack dump {at}:v1 --sign-key ours.key --json {}", options[0]);
    let first = run(scratch, line.trim()).await.json();
    for page in [5, 6, 2500] {
        write(scratch, page, 7);
    }
    write(scratch, 9, 0);
    let line = format!("pack dump {at}:v2 --json {}", options[1]);
    [first, run(scratch, line.trim()).await.json()]
}

fn pages(difference: &Value) -> [u64; 4] {
    let count = |name: &str| difference["pages"][name].as_u64().unwrap();
    [count("changed"), count("zeroed"), count("unchanged"), count("unknown")]
}

#[tokio::test]
async fn a_difference_is_the_same_however_it_is_found() {
    for registry in Registry::all() {
        let rest = u64::try_from(PAGES).unwrap() - 4;
        for (name, options, fetched) in [
            ("plain", ["", ""], 2 * 3000 * 4096),
            ("hashes", ["--page-hashes", "--page-hashes"], 3000 * 32),
            ("one", ["--page-hashes", ""], 3000 * (16 + 4096)),
        ] {
            let scratch = tempfile::tempdir().unwrap();
            let at = format!("{}/diff/{name}", registry.address());
            two(&scratch, &at, options).await;
            let line = format!("diff {at}:v1 {at}:v2 --json");
            let ran = run(&scratch, &line).await;
            let found = ran.json();
            assert_eq!(pages(&found), [3, 1, rest, 0], "{name}");
            let process = &found["processes"][0];
            assert_eq!(process["regions"][0]["pages"], found["pages"], "{name}");
            // The zero page takes no room, and a chunk without pages that are asked for is left.
            let bytes = found["fetchedBytes"].as_u64().unwrap();
            assert!(bytes <= fetched && bytes * 2 > fetched, "{name}: {bytes}");
            assert!(ran.told.contains("fetching "), "{ran:?}");
            let blind = run(&scratch, &format!("{line} --no-fetch")).await.json();
            assert_eq!(pages(&blind), [0, 1, 0, rest + 3], "{name}");
        }
    }
}

#[tokio::test]
async fn what_is_stored_once_is_not_fetched() {
    let scratch = tempfile::tempdir().unwrap();
    two(&scratch, "oci:layout", ["", "--base oci:layout:v1"]).await;
    // One chunk of the base holds pages 0 to 1023, another 2048 to 2999; the new pages are in one.
    let found = run(&scratch, "diff oci:layout:v1 oci:layout:v2 --json").await.json();
    assert_eq!(pages(&found), [3, 1, u64::try_from(PAGES).unwrap() - 4, 0]);
    assert_eq!(found["based"], true);
    assert!(found["fetchedBytes"].as_u64().unwrap() < 3 * (4 << 20), "{found}");
    let same = run(&scratch, "diff oci:layout:v1 oci:layout:v1").await;
    assert!(same.out.contains("differing   0 pages") && same.told.is_empty(), "{same:?}");
    let told = run(&scratch, "diff oci:layout:v1 oci:layout:v2").await;
    assert!(told.out.contains("PROCESSES") && told.out.contains("4 pages"), "{told:?}");
}

#[tokio::test]
async fn repositories_chains_and_their_ends_are_told() {
    for registry in Registry::all() {
        let scratch = tempfile::tempdir().unwrap();
        let at = format!("{}/list/job", registry.address());
        let base = format!("--base {at}:v1 --base-key ours.pub");
        let [first, second] = two(&scratch, &at, ["--page-hashes", &base]).await;

        let listed = run(&scratch, &format!("ls {at} --key ours.pub --json")).await.json();
        let of = |tag: &str| {
            let all = listed["checkpoints"].as_array().unwrap();
            all.iter().find(|one| one["tags"][0] == tag).unwrap().clone()
        };
        assert_eq!(of("v1")["digest"], first["digest"]);
        assert_eq!(of("v1")["signed"]["state"], "verified");
        assert_eq!(of("v2")["signed"]["state"], "no");
        assert_eq!((&of("v2")["generation"], &of("v2")["base"]), (&1.into(), &first["digest"]));
        let told = run(&scratch, &format!("ls {at}")).await.out;
        assert!(told.contains("not verified") && told.contains("v2"), "{told}");

        let tree = run(&scratch, &format!("tree {at}:v2 --json")).await.json();
        assert_eq!(tree["links"][0]["digest"], second["digest"]);
        assert_eq!(tree["links"][1]["digest"], first["digest"]);
        assert_eq!(tree["links"][0]["addedPageBytes"], 3 * 4096);
        assert!(
            tree["links"][0]["sharedPageBytes"].as_u64()
                > tree["links"][0]["addedPageBytes"].as_u64()
        );

        // By its digest it goes with its signature; who was compared with it stands alone.
        let digest = first["digest"].as_str().unwrap();
        let removed = run(&scratch, &format!("rm {at}@{digest} --json")).await.json();
        assert_eq!(removed["referrers"].as_array().unwrap().len(), 1);
        assert_eq!(removed["signatures"], removed["referrers"]);
        run(&scratch, &format!("inspect {at}:v1")).await.ended(1, "not found");
        let tree = run(&scratch, &format!("tree {at}:v2 --json")).await.json();
        assert_eq!(
            (tree["links"].as_array().unwrap().len(), &tree["missing"]),
            (1, &first["digest"])
        );

        // A tag goes alone, where the registry does such a thing.
        let gone = run(&scratch, &format!("rm {at}:v2")).await;
        if gone.code == 0 {
            let digest = second["digest"].as_str().unwrap();
            assert_eq!(run(&scratch, &format!("inspect {at}@{digest}")).await.code, 0);
            run(&scratch, &format!("inspect {at}:v2")).await.ended(1, "not found");
        } else {
            gone.ended(1, "with the digest");
        }
    }
}

#[tokio::test]
async fn a_layout_is_listed_and_emptied() {
    let scratch = tempfile::tempdir().unwrap();
    let [first, _] = two(&scratch, "oci:layout", ["", "--base oci:layout:v1"]).await;
    let tags = |ran: &Value| {
        let all = ran["checkpoints"].as_array().unwrap().iter();
        let mut tags: Vec<_> = all.map(|one| one["tags"][0].as_str().unwrap().to_owned()).collect();
        tags.sort();
        tags
    };
    assert_eq!(tags(&run(&scratch, "ls oci:layout --json").await.json()), ["v1", "v2"]);
    assert_eq!(run(&scratch, "rm oci:layout:v2").await.code, 0);
    assert_eq!(tags(&run(&scratch, "ls oci:layout --json").await.json()), ["v1"]);
    run(&scratch, "rm oci:layout:v2").await.ended(1, "not found");
    let digest = first["digest"].as_str().unwrap();
    let told = run(&scratch, &format!("rm oci:layout@{digest}")).await;
    assert!(told.out.contains("with 1 signatures"), "{told:?}");
    assert_eq!(tags(&run(&scratch, "ls oci:layout --json").await.json()), [""; 0]);
    run(&scratch, "ls oci:nowhere").await.ended(1, "oci:nowhere");
}

#[tokio::test]
async fn shells_and_manuals_know_each_command() {
    let scratch = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(&scratch, &format!("completion {shell}")).await;
        assert!(script.code == 0 && script.out.contains("facts-only"), "{script:?}");
    }
    assert_eq!(run(&scratch, "man pages").await.code, 0);
    for page in ["kyb.1", "kyb-inspect.1", "kyb-diff.1", "kyb-checkpoint.1"] {
        let page = fs_err::read_to_string(scratch.path().join("pages").join(page)).unwrap();
        assert!(page.contains("kyb"), "{page}");
    }
}

#[test]
fn what_is_installed_is_complete() {
    let scratch = tempfile::tempdir().unwrap();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_kyb"));
    let (root, from) = (scratch.path().display(), program.parent().unwrap().display());
    let output = std::process::Command::new("make")
        .args(["-C", concat!(env!("CARGO_MANIFEST_DIR"), "/.."), "install-files", "PROGRAMS=kyb"])
        .args([format!("DESTDIR={root}"), "PREFIX=/usr".to_owned(), format!("FROM={from}")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    for (file, expected) in [
        ("bin/kyb", ""),
        ("share/man/man1/kyb.1", "kyb\\-login(1)"),
        ("share/man/man1/kyb-pack.1", "DUMP_DIR"),
        ("share/bash-completion/completions/kyb", "facts-only"),
        ("share/zsh/site-functions/_kyb", "#compdef kyb"),
        ("share/fish/vendor_completions.d/kyb.fish", "complete -c kyb"),
    ] {
        let content = fs_err::read(scratch.path().join("usr").join(file)).unwrap();
        let content = String::from_utf8_lossy(&content);
        assert!(!content.is_empty() && content.contains(expected), "{file} has no {expected}");
    }
}
