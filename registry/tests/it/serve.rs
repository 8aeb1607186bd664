//! The program: usage, the line it prints, logs, and how it ends.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;

use kybernate_registry::store::Store;
use kybernate_spec::Digest;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::harness::{blob_path, noise, wait_until};
use crate::process::{Process, command};

const MIB: usize = 1 << 20;

#[tokio::test]
async fn wrong_usage_is_told_at_once_with_code_64() {
    let wrong = ["serve", "--root", "/dev/null", "--listen", "nowhere", "--log-format", "xml"];
    let output = command(&wrong).output().await.unwrap();
    assert_eq!(output.status.code(), Some(64));
    let told = String::from_utf8(output.stderr).unwrap();
    for option in ["--root", "--listen", "--log-format"] {
        assert!(told.contains(option), "{told}");
    }
    let output = command(&["serve", "--no-such-option"]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(64));
    let output = command(&["serve", "--help"]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(0));
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(told.contains("KYBERNATE_REGISTRY_ROOT") && told.contains("Example"), "{told}");
}

#[tokio::test]
async fn help_shows_what_a_command_takes_and_nothing_else() {
    let help = async |arguments: &[&str]| {
        let output = command(arguments).output().await.unwrap();
        assert_eq!(output.status.code(), Some(0));
        let told = String::from_utf8(output.stdout).unwrap();
        assert!(told.contains("Example") && told.contains("  kybernate-registry "), "{told}");
        told
    };
    for (arguments, takes, leaves) in [
        (
            &["--help"][..],
            &["serve", "gc", "scrub", "reindex", "verify", "schema"][..],
            &["--log-format"][..],
        ),
        (&["serve", "--help"], &["--listen", "--gc-grace", "--notify-endpoint"], &["--dry-run"]),
        (&["gc", "--help"], &["--root", "--gc-grace", "--dry-run"], &["--listen", "--scrub-rate"]),
        (&["scrub", "--help"], &["--root", "--scrub-rate"], &["--listen", "--gc-grace"]),
        (&["reindex", "--help"], &["--root"], &["--listen", "--gc-grace"]),
        (&["verify", "--help"], &["FILE"], &["--root"]),
        (&["schema", "--help"], &[], &["--root"]),
    ] {
        let told = help(arguments).await;
        for word in takes {
            assert!(told.contains(word), "{arguments:?} {word} {told}");
        }
        for word in leaves {
            assert!(!told.contains(word), "{arguments:?} {word} {told}");
        }
    }
    // What a server is told in the environment is no reason to refuse.
    let root = tempfile::tempdir().unwrap();
    drop(Store::open(root.path()).unwrap());
    let mut gc = command(&["gc", "--root", root.path().to_str().unwrap()]);
    let output = gc.env("KYBERNATE_REGISTRY_LISTEN", "127.0.0.1:0").output().await.unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

#[tokio::test]
async fn what_is_no_store_is_left_alone_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let (empty, foreign) = (directory.path().join("empty"), directory.path().join("foreign"));
    let missing = directory.path().join("missing");
    fs_err::create_dir(&empty).unwrap();
    fs_err::create_dir(&foreign).unwrap();
    fs_err::write(foreign.join("precious"), "").unwrap();
    for command_name in ["gc", "scrub", "reindex"] {
        for (root, found) in
            [(&empty, "it is empty"), (&foreign, "\"precious\""), (&missing, "cannot be listed")]
        {
            let path = root.to_str().unwrap();
            let output = command(&[command_name, "--root", path]).output().await.unwrap();
            assert_eq!(output.status.code(), Some(64), "{output:?}");
            let told = String::from_utf8(output.stderr).unwrap();
            for word in [path, found, "is no store", "kybernate-registry.json", "`serve`"] {
                assert!(told.contains(word), "{word}: {told}");
            }
            assert_eq!(told.lines().count(), 1, "{told}");
        }
    }
    assert_eq!(fs_err::read_dir(&empty).unwrap().count(), 0);
    assert_eq!(fs_err::read_dir(&foreign).unwrap().count(), 1);
    assert!(!missing.exists());
    let serve = ["serve", "--listen", "127.0.0.1:0", "--root", foreign.to_str().unwrap()];
    let output = command(&serve).output().await.unwrap();
    assert_eq!(output.status.code(), Some(64), "{output:?}");
}

#[tokio::test]
async fn a_taken_address_is_told_before_anything_is_made() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("store");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let root_path = root.to_str().unwrap();
    let own = ["serve", "--root", root_path, "--listen", &taken];
    let metrics =
        ["serve", "--root", root_path, "--listen", "127.0.0.1:0", "--metrics-listen", &taken];
    for arguments in [&own[..], &metrics] {
        let output = command(arguments).output().await.unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains(&taken) && told.contains("failed to listen"), "{told}");
        assert!(!root.exists());
    }
}

#[tokio::test]
async fn corruption_is_logged_and_secrets_are_not() {
    let root = tempfile::tempdir().unwrap();
    let process =
        Process::start(root.path(), &["--log-format", "json", "--log-filter", "debug"]).await;
    let remote = process.remote.clone();
    let content = noise(2 * MIB, 1);
    let upload = remote.begin("a").await;
    remote.patch(&upload, 0, &content[..1000]).await;
    remote.patch(&upload, 0, &content[..1000]).await.refused(416, "BLOB_UPLOAD_INVALID");
    remote.get(&upload).await;
    let digest = Digest::of(&content);
    assert_eq!(remote.put(&upload, &digest, content[1000..].to_vec()).await.status, 201);
    let file = OpenOptions::new().write(true).open(blob_path(root.path(), &digest)).unwrap();
    file.write_all_at(&[content[5] ^ 1], 5).unwrap();
    remote.blob("a", &digest).await.refused(404, "BLOB_UNKNOWN");
    drop(remote);

    let log = String::from_utf8(process.terminate().await.stderr).unwrap();
    let secret = upload.rsplit_once('/').unwrap().1;
    assert!(!log.contains(secret), "{log}");
    let told = |line: &&str| line.contains("corrupt") && line.contains(digest.hex());
    let line = log.lines().find(told).unwrap();
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!(line["level"], "ERROR");
    assert_eq!(line["blob.digest"], digest.to_string());
}

#[tokio::test]
async fn a_push_that_has_begun_may_finish_while_the_server_ends() {
    let root = tempfile::tempdir().unwrap();
    let process = Process::start(root.path(), &[]).await;
    let content = noise(MIB, 2);
    let digest = Digest::of(&content);
    let address = process.remote.url.strip_prefix("http://").unwrap().to_owned();
    let mut stream = TcpStream::connect(&address).await.unwrap();
    let head = format!(
        "POST /v2/a/blobs/uploads/?digest={digest} HTTP/1.1\r\nHost: r\r\nContent-Length: {MIB}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&content[..1000]).await.unwrap();
    let uploads = root.path().join("uploads");
    let begun = async || std::fs::read_dir(&uploads).unwrap().count() == 1;
    wait_until("the push has begun", begun).await;

    let finishing = async {
        let refused = async || TcpStream::connect(&address).await.is_err();
        wait_until("nothing new is accepted", refused).await;
        stream.write_all(&content[1000..]).await.unwrap();
        let mut reply = vec![0; 12];
        stream.read_exact(&mut reply).await.unwrap();
        assert_eq!(reply, b"HTTP/1.1 201");
    };
    let (output, ()) = futures::future::join(process.terminate(), finishing).await;
    assert_eq!(output.status.code(), Some(0));

    let process = Process::start(root.path(), &[]).await;
    assert!(process.remote.blob("a", &digest).await.body == content);
    process.kill().await;
}

#[tokio::test]
async fn a_configuration_is_verified_before_it_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("registry.toml");
    let path = file.to_str().unwrap();
    fs_err::write(&file, "listen = 5\n[log]\nformat = \"json\"\nfromat = \"text\"\n").unwrap();
    for arguments in [&["verify", path][..], &["serve", "--config", path]] {
        let output = command(arguments).output().await.unwrap();
        assert_eq!(output.status.code(), Some(64), "{output:?}");
        let told = String::from_utf8(output.stderr).unwrap();
        let lines: Vec<_> = told.lines().collect();
        assert_eq!(lines.len(), 2, "{told}");
        assert!(lines[0].starts_with(&format!("{path}:1:10: listen: ")), "{told}");
        assert!(lines[1].starts_with(&format!("{path}:4:1: log.fromat: ")), "{told}");
    }
    fs_err::write(&file, "[log]\nformat = \"json\"\n").unwrap();
    let output = command(&["verify", path]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let output = command(&["verify", "/no/such/file"]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    let output = command(&["schema"]).output().await.unwrap();
    let schema: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(schema["properties"]["log"]["properties"]["format"]["default"], "text");
}

#[tokio::test]
async fn what_is_hardly_meant_is_told_and_served() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("registry.toml");
    let users = directory.path().join("htpasswd");
    fs_err::write(&users, "").unwrap();
    let verified = async |text: &str| {
        fs_err::write(&file, text).unwrap();
        let output = command(&["verify", file.to_str().unwrap()]).output().await.unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let short = verified("[gc]\ngrace = \"0s\"\nuntagged = \"1m\"\n").await;
    let lines: Vec<_> = short.lines().collect();
    assert_eq!(lines.len(), 2, "{short}");
    assert!(lines[0].starts_with("warning: gc.grace: after 0s "), "{short}");
    assert!(lines[1].starts_with("warning: gc.untagged: after 1m "), "{short}");
    assert_eq!(verified("[gc]\nenabled = false\ngrace = \"0s\"\n").await, "");
    assert_eq!(verified("[gc]\nkeep_untagged = true\nuntagged = \"0s\"\n").await, "");

    let access = format!("[access]\nhtpasswd = {users:?}\n");
    for (listen, warns) in [
        ("0.0.0.0:5000", true),
        ("registry.example.com:5000", true),
        ("127.0.0.1:5000", false),
        ("[::1]:5000", false),
        ("localhost:5000", false),
    ] {
        let told = verified(&format!("listen = \"{listen}\"\n{access}")).await;
        assert_eq!(told.contains("without TLS"), warns, "{listen} {told}");
    }
    let serve = ["serve", "--listen", "127.0.0.1:0", "--gc-grace", "0s"];
    let mut serve = command(&serve);
    serve.arg("--root").arg(directory.path().join("store"));
    let process = Process::of(serve).await;
    let log = String::from_utf8(process.terminate().await.stderr).unwrap();
    assert!(log.contains("WARN") && log.contains("gc.grace"), "{log}");
}

#[tokio::test]
async fn the_environment_is_above_the_file_and_below_the_options() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("registry.toml");
    fs_err::write(&file, "listen = \"127.0.0.1:1\"\n[log]\nformat = \"json\"\n").unwrap();
    let mut serve = command(&["serve", "--log-filter", "debug"]);
    serve.env("KYBERNATE_REGISTRY_CONFIG", &file);
    serve.env("KYBERNATE_REGISTRY_ROOT", root.path().join("store"));
    serve.env("KYBERNATE_REGISTRY_LISTEN", "127.0.0.1:0");
    serve.env("KYBERNATE_REGISTRY_LOG_FILTER", "off");
    let process = Process::of(serve).await;
    process.remote.get("/v2/").await;
    let log = String::from_utf8(process.terminate().await.stderr).unwrap();
    for line in log.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap();
    }
    assert!(log.contains("answered"), "{log}");
    let mut serve = command(&["serve"]);
    serve.env("KYBERNATE_REGISTRY_LISTN", "127.0.0.1:0");
    let output = serve.output().await.unwrap();
    assert_eq!(output.status.code(), Some(64), "{output:?}");
}
