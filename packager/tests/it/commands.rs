//! `kyb`, as people run it.

use kybernate_spec::{Descriptor, Manifest, media_type};
use tempfile::TempDir;

use crate::dump::dump;
use crate::kyb::{Ran, kyb, terminate_child_with};
use crate::proxy::Proxy;
use crate::registry::{Registry, nobodys_address, open};

/// A scratch directory with a dump and two key pairs, `ours` and `other`.
async fn scene() -> TempDir {
    let scratch = tempfile::tempdir().unwrap();
    dump(scratch.path(), 600);
    for prefix in ["ours", "other"] {
        assert_eq!(kyb(scratch.path(), ["keygen", prefix]).await.code, 0);
    }
    scratch
}

async fn run(scratch: &TempDir, line: &str) -> Ran {
    kyb(scratch.path(), line.split(' ')).await
}

#[tokio::test]
async fn a_dump_goes_in_and_comes_out_again() {
    for registry in Registry::all() {
        let scratch = scene().await;
        let at = format!("{}/a/b:v1", registry.address());
        let packed = run(&scratch, &format!("pack dump {at} --sign-key ours.key --json")).await;
        let digest = packed.json()["digest"].as_str().unwrap().to_owned();
        assert!(packed.told.contains("pack:"), "{packed:?}");

        let verified = run(&scratch, &format!("verify {at} --key ours.pub --deep --json")).await;
        assert_eq!(verified.json()["digest"], digest.as_str());
        assert!(verified.json()["bytesRead"].as_u64().unwrap() > 600 * 4096);

        let inspected = run(&scratch, &format!("inspect {at} --json")).await.json();
        assert_eq!(inspected["unverifiedSignatures"].as_array().unwrap().len(), 1);
        assert_eq!(inspected["config"]["sizes"]["processes"], 1);
        let told = run(&scratch, &format!("inspect {at}")).await.out;
        assert!(told.contains("not verified here") && told.contains("without facts"), "{told}");

        let copied = run(&scratch, &format!("copy {at} oci:layout --json")).await.json();
        assert_eq!((&copied["digest"], &copied["tag"]), (&digest.into(), &"v1".into()));
        let again = run(&scratch, &format!("copy oci:layout:v1 {}/c/d", registry.address())).await;
        assert_eq!(again.code, 0, "{again:?}");

        let at = format!("{}/c/d:v1", registry.address());
        let unpacked = run(&scratch, &format!("unpack {at} out --key ours.pub --json")).await;
        assert_eq!(unpacked.json()["directory"], "out");
        let read = |name: &str| fs_err::read(scratch.path().join(name)).unwrap();
        assert!(read("out/pages-1.img") == read("dump/pages-1.img"), "the pages differ");
    }
}

#[tokio::test]
async fn what_a_rule_refuses_ends_with_2() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = scene().await;
    let at = format!("{}/a/b:v1", registry.address());
    assert_eq!(run(&scratch, &format!("pack dump {at}")).await.code, 0);
    let unsigned = run(&scratch, &format!("verify {at} --key ours.pub")).await;
    unsigned.ended(2, "refused (signature): ");
    assert!(unsigned.told.contains("is not signed"), "{unsigned:?}");

    let signed = run(&scratch, &format!("sign {at} --key other.key")).await;
    assert_eq!(signed.code, 0, "{signed:?}");
    let other = run(&scratch, &format!("unpack {at} out --key ours.pub")).await;
    other.ended(2, "by none of the trusted keys");
    assert!(!scratch.path().join("out").exists());

    change_a_shard(&registry).await;
    let changed = run(&scratch, &format!("verify {at} --key other.pub --deep")).await;
    changed.ended(2, "refused (integrity): ");
    let changed = run(&scratch, &format!("unpack {at} out --insecure-no-signature")).await;
    changed.ended(2, "refused (integrity): ");
    let told = run(&scratch, &format!("unpack {at} out --insecure-no-signature --json")).await;
    told.ended(2, "refused (integrity): ");
    let told: serde_json::Value = serde_json::from_str(&told.out).unwrap();
    assert_eq!(told["error"]["rule"], "integrity");
    assert_eq!(told["error"]["reason"], "chunk-hash");
    assert!(!scratch.path().join("out").exists());
}

#[tokio::test]
async fn an_interrupted_unpack_leaves_nothing() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = scene().await;
    let at = format!("{}/a/b:v1", registry.address());
    assert_eq!(run(&scratch, &format!("pack dump {at}")).await.code, 0);
    // The pages stop coming when most of them are there.
    let proxy = Proxy::stalling(registry.address(), 2 << 20).await;
    let at = proxy.at("a/b:v1").to_string();
    let unpack = kyb(scratch.path(), ["unpack", &at, "new/out", "--insecure-no-signature"]);
    let mut unpack = std::pin::pin!(unpack);
    tokio::select! {
        done = &mut unpack => panic!("it got through: {done:?}"),
        () = proxy.stalled() => {}
    }
    let made = || {
        let entries = fs_err::read_dir(scratch.path().join("new")).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>()
    };
    assert!(!made().is_empty(), "it has not begun");
    terminate_child_with(&at);
    unpack.await.ended(1, "terminated");
    assert!(made().is_empty(), "{:?}", made());
}

#[tokio::test]
async fn what_goes_wrong_ends_with_1_and_says_what() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = scene().await;
    let at = format!("{}/a/b:v1", registry.address());
    run(&scratch, &format!("inspect {at}")).await.ended(1, &at);
    run(&scratch, &format!("pack nowhere {at}")).await.ended(1, "nowhere");
    run(&scratch, "inspect oci:nowhere:v1").await.ended(1, "oci:nowhere:v1");
    run(&scratch, "keygen ours").await.ended(1, "keys are never replaced");
    run(&scratch, &format!("verify {at} --key absent.pub")).await.ended(1, "absent.pub");
    run(&scratch, &format!("sign {at} --key ours.pub")).await.ended(1, "ours.pub");
    run(&scratch, "ps --agent-socket ./absent.sock").await.ended(1, "./absent.sock");
    let (_taken, away) = nobodys_address();
    run(&scratch, &format!("pack dump {away}/a/b:v1")).await.ended(1, &away.to_string());
}

#[tokio::test]
async fn wrong_usage_ends_with_64() {
    let scratch = tempfile::tempdir().unwrap();
    for line in [
        "nonsense",
        "pack",
        "pack dump just-a-name",
        "unpack localhost:1/a/b:v1 out",
        "verify localhost:1/a/b:v1",
        "restore localhost:1/a/b:v1 --allow-mount relative:/x",
        "restore localhost:1/a/b:v1 --allow-host-namespace user",
        "restore localhost:1/a/b:v1 --name=",
        "restore localhost:1/a/b:v1 --namespace a/b",
        "checkpoint job localhost:1/a/b:v1 --namespace -x",
        "checkpoint job localhost:1/a/b:v1 --sign-key=",
        "checkpoint .. localhost:1/a/b:v1",
        "ps --namespace=",
        "checkpoint job oci:somewhere:v1",
        "rm localhost:1/a/b",
        "ls localhost:1/a/b:v1",
        "completion nonsense",
        "checkpoint job localhost:1/a/b:v1 --unsigned --sign-key x",
        "copy localhost:1/a/b:v1 localhost:1/c/d@sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    ] {
        run(&scratch, line).await.ended(64, "");
    }
}

#[tokio::test]
async fn with_json_failures_are_documents_too() {
    let scratch = scene().await;
    assert_eq!(run(&scratch, "pack dump oci:layout:v1").await.code, 0);
    for (line, code, rule, why) in [
        ("inspect oci:nowhere:v1 --json", 1, None, "oci:nowhere:v1"),
        ("verify oci:layout:v1 --key ours.pub --json", 2, Some("signature"), "is not signed"),
        (
            "pack dump oci:layout@sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a --json",
            64,
            None,
            "a digest",
        ),
        ("--json unpack oci:layout:v1 out", 64, None, "--key"),
    ] {
        let ran = run(&scratch, line).await;
        ran.ended(code, why);
        let told: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
        let error = &told["error"];
        assert_eq!((&told["exit"], error["rule"].as_str()), (&code.into(), rule), "{ran:?}");
        assert!(error["message"].as_str().unwrap().contains(why), "{ran:?}");
    }
    assert_eq!(run(&scratch, "inspect oci:nowhere:v1").await.out, "");
}

#[tokio::test]
async fn a_key_without_a_password_is_not_made() {
    let scratch = tempfile::tempdir().unwrap();
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_kyb"))
        .args(["keygen", "new"])
        .current_dir(scratch.path())
        .env_remove("COSIGN_PASSWORD")
        .stdin(std::process::Stdio::null())
        .output()
        .await
        .unwrap();
    assert_eq!(output.status.code(), Some(64));
    assert_eq!(fs_err::read_dir(scratch.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn help_is_as_it_was() {
    let scratch = tempfile::tempdir().unwrap();
    let mut all = run(&scratch, "--help").await.out;
    for command in [
        "checkpoint",
        "preflight",
        "restore",
        "ps",
        "cancel",
        "pack",
        "unpack",
        "copy",
        "inspect",
        "diff",
        "tree",
        "ls",
        "rm",
        "sign",
        "verify",
        "facts",
        "compat",
        "keygen",
        "completion",
        "man",
    ] {
        let help = run(&scratch, &format!("{command} --help")).await;
        assert!(help.code == 0 && help.out.contains("Example:"), "{help:?}");
        all = format!("{all}\n$ kyb {command} --help\n{}", help.out);
    }
    insta::assert_snapshot!(all);
}

/// Changes one byte of a page shard where docker-registry keeps it.
async fn change_a_shard(registry: &Registry) {
    let location = registry.at("a/b:v1");
    let store = open(&location).await;
    let index = store.resolve(&location).await.unwrap();
    let index: kybernate_spec::Index = serde_json::from_slice(&index.content).unwrap();
    let child = store.manifest(&index.manifests[0].digest).await.unwrap();
    let child: Manifest = serde_json::from_slice(&child.content).unwrap();
    let is_shard = |layer: &&Descriptor| layer.media_type == media_type::PAGES;
    let hex = child.layers.iter().find(is_shard).unwrap().digest.hex().to_owned();
    let blobs = registry.data().join("docker/registry/v2/blobs/sha256");
    let path = blobs.join(&hex[..2]).join(&hex).join("data");
    let mut content = fs_err::read(&path).unwrap();
    content[5000] ^= 1;
    fs_err::write(path, content).unwrap();
}

#[tokio::test]
async fn odd_arguments_are_refused_before_anything_is_sent() {
    let scratch = scene().await;
    fs_err::write(scratch.path().join("tar"), "").unwrap();
    let lines = [
        ("pack dump oci:out --volume /a/../x=tar", 64, "without"),
        ("pack dump oci:out --volume /x=/dev/zero", 64, "no regular file"),
        ("pack dump oci:out --volume /x=tar --volume /x=tar", 64, "twice"),
        ("pack dump oci:out --volume /x=tar", 1, "is no uncompressed tar: it is empty"),
        ("pack dump oci:out --facts /dev/zero", 1, "too large"),
        ("verify oci:out --key /dev/zero", 1, "more than"),
        ("checkpoint job localhost/a/b:v1 --pause-deadline 10ms", 64, "from 1s to 1h"),
    ];
    for (line, code, why) in lines {
        run(&scratch, line).await.ended(code, why);
        assert!(!scratch.path().join("out").exists(), "{line}");
    }
}
