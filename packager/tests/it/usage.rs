//! What `kyb` says of its command line, and to those who do not listen to the end.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::kyb::{Ran, kyb};

async fn run(line: &str) -> Ran {
    let scratch = tempfile::tempdir().unwrap();
    kyb(scratch.path(), line.split(' ')).await
}

#[tokio::test]
async fn credentials_on_the_command_line_are_never_repeated() {
    let layout = "oci:layout:v1";
    for at in [
        "https://me:hunter2@r.example.com/a/b:v1",
        "me:hunter2@r.example.com:5000/a/b",
        "https://me:hun/hunter2@r.example.com/a/b",
    ] {
        for line in [
            format!("inspect {at}"),
            format!("copy {at} {layout}"),
            format!("copy {layout} {at} --json"),
            format!("pack dump {at}"),
            format!("pack dump {layout} --base {at} --insecure-base"),
            format!("pack dump {layout} --image {at}"),
            format!("import {at} {layout} --format containerd"),
            format!("import file {at} --format cri"),
            format!("login {at}"),
            format!("logout {at} --json"),
            format!("checkpoint job {at}"),
            format!("restore {at}"),
            format!("stage {at} --tier ram"),
            format!("verify {at} --key a.pub"),
            format!("rm {at}"),
            format!("ls {at}"),
            format!("diff {layout} {at}"),
            format!("ps {at}"),
            format!("ps --agent {at}"),
            format!("inspect {layout} --plain-http={at}"),
            at.to_owned(),
        ] {
            let ran = run(&line).await;
            ran.ended(64, "***@");
            assert!(!format!("{ran:?}").contains("hunter2"), "{line}: {ran:?}");
        }
        run(&format!("inspect {at}")).await.ended(64, "`kyb login r.example.com");
    }
}

#[tokio::test]
async fn help_is_where_people_look_for_it() {
    let all = run("--help").await;
    for line in ["help", "help help", "help --help", "-h", "pack --help", "help pack"] {
        let ran = run(line).await;
        assert!(ran.code == 0 && ran.out.contains("Usage: kyb") && ran.told.is_empty(), "{ran:?}");
    }
    assert_eq!(run("help").await.out, all.out);
    assert_eq!(run("help pack").await.out, run("pack --help").await.out);
    assert!(run("help --help").await.out.contains("Example:"));
    for line in ["--version", "-V"] {
        assert_eq!(run(line).await.out, concat!("kyb ", env!("CARGO_PKG_VERSION"), "\n"));
    }
    for (line, why) in [
        ("inspct oci:x", "'inspect'"),
        ("help inspct", "'inspect'"),
        ("push dump oci:x", "'pack'"),
        ("help pull", "'unpack'"),
        ("list oci:x", "'ls'"),
        ("version", "'kyb --version'"),
        ("copy oci:x oci:y --plain-htp", "'--plain-http'"),
        ("", "Usage: kyb"),
    ] {
        let ran = run(line).await;
        ran.ended(64, why);
        assert_eq!(ran.out, "");
    }
}

/// Runs `kyb` whose output nobody reads: the other end is closed before it begins.
fn unread(directory: &Path, line: &str, told_too: bool) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let error = if told_too { writer.try_clone().unwrap().into() } else { Stdio::piped() };
    Command::new(env!("CARGO_BIN_EXE_kyb"))
        .args(line.split(' '))
        .current_dir(directory)
        .env("HOME", directory)
        .env("COSIGN_PASSWORD", "secret")
        .env("KYB_LOG", "debug")
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(error)
        .output()
        .unwrap()
}

#[tokio::test]
async fn nobody_has_to_read_to_the_end() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path();
    crate::dump::dump(directory, 100);
    assert_eq!(kyb(directory, ["pack", "dump", "oci:l:v1"]).await.code, 0);
    for line in [
        "--help",
        "help pack",
        "pack --help",
        "--version",
        "completion bash",
        "completion zsh --json",
        "facts",
        "facts --json",
        "inspect oci:l:v1",
        "inspect oci:l:v1 --json",
        "inspect oci:l:v1 --facts-only",
        "diff oci:l:v1 oci:l:v1",
        "ls oci:l",
        "tree oci:l:v1",
        "pack dump oci:l:v2",
        "copy oci:l:v1 oci:m:v1",
        "sign oci:l:v1 --key one.key",
        "verify oci:l:v1 --key one.pub",
        "unpack oci:l:v1 out --insecure-no-signature",
        "rm oci:l:v2",
        "keygen two",
        "compat oci:l:v1",
        "man man",
        "logout r.example.com",
    ] {
        if line.starts_with("sign") {
            assert_eq!(kyb(directory, ["keygen", "one"]).await.code, 0);
        }
        let ran = unread(directory, line, false);
        let told = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(141), "{line}: {told}");
        let quiet = !["panick", "error:", "roken pipe"].iter().any(|word| told.contains(word));
        assert!(quiet, "{line}: {told}");
    }
    // What cannot be told ends as it would have, and does not fall over it.
    for (line, code) in [("inspect oci:none", 1), ("inspect oci:none --json", 1), ("nonsense", 64)]
    {
        for told_too in [false, true] {
            let ran = unread(directory, line, told_too);
            assert_eq!(ran.status.code(), Some(code), "{line}: {ran:?}");
        }
    }
}

#[tokio::test]
async fn what_never_comes_is_not_waited_for_after_ctrl_c() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path();
    crate::dump::dump(directory, 1);
    for (name, line) in [
        ("pack.fifo", "pack dump oci:l:v1 --facts pack.fifo"),
        ("import.fifo", "import x oci:l:v1 --format cri --facts import.fifo"),
        ("compat.fifo", "compat oci:l:v1 --facts compat.fifo"),
    ] {
        let fifo = directory.join(name);
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).unwrap();
        let interrupt = async {
            // Opened for writing once somebody reads: it is waiting.
            let opened = tokio::task::spawn_blocking(move || fs_err::File::create(fifo)).await;
            let writer = opened.unwrap().unwrap();
            crate::kyb::terminate_child_with(name);
            writer
        };
        let both = async { tokio::join!(kyb(directory, line.split(' ')), interrupt) };
        let ended = tokio::time::timeout(std::time::Duration::from_secs(30), both).await;
        let (ran, writer) = ended.expect("it waits on");
        ran.ended(1, "terminated");
        drop(writer);
    }
}

#[tokio::test]
async fn output_that_cannot_be_written_is_told_as_such() {
    let full = fs_err::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let ran = Command::new(env!("CARGO_BIN_EXE_kyb"))
        .arg("facts")
        .stdin(Stdio::null())
        .stdout(full.into_parts().0)
        .output()
        .unwrap();
    let told = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(1), "{told}");
    assert!(told.contains("failed to write to stdout"), "{told}");
}
