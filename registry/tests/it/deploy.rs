//! What is shipped for those who deploy.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed step here is a failed test")]

use std::path::{Path, PathBuf};

use kybernate_registry::config::Config;
use serde_json::{Value, json};
use tokio::process::Command;

use self::example::{Choice, example, uncommented};
use crate::process::{Process, command};

mod example;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn shipped(name: &str) -> String {
    fs_err::read_to_string(repository("deploy/registry").join(name)).unwrap()
}

/// Reads the example with some of its settings uncommented.
fn read(choice: Choice) -> Config {
    let text = uncommented(&shipped("example.toml"), choice);
    let wrong = |wrong| panic!("{wrong:#?}\ngive what it is about `#[schemars(example = …)]`");
    Config::read(Path::new("example.toml"), &text).unwrap_or_else(wrong)
}

/// Returns the example with everything set.
pub(crate) fn every_setting() -> String {
    uncommented(&shipped("example.toml"), Choice::Everything)
}

#[test]
fn the_example_lists_every_setting() {
    let generated = example(&Config::schema());
    let path = repository("deploy/registry/example.toml");
    if std::env::var_os("UPDATE").is_some() {
        fs_err::write(&path, &generated).unwrap();
    }
    let committed = shipped("example.toml");
    assert_eq!(committed, generated, "run `UPDATE=1 cargo test` and commit {}", path.display());
}

#[test]
fn the_example_states_the_defaults() {
    let set = |config: &Config| serde_json::to_value(config).unwrap();
    assert_eq!(set(&read(Choice::Nothing)), set(&Config::default()));
    assert_eq!(set(&read(Choice::Defaults)), set(&Config::default()));
    let all = set(&read(Choice::Everything));
    let default = set(&Config::default());
    assert_ne!(all["quota"]["rule"], default["quota"]["rule"]);
    assert_ne!(all["metrics"]["listen"], default["metrics"]["listen"]);
    assert_eq!(all["gc"], default["gc"]);
}

#[tokio::test]
async fn the_example_is_a_good_configuration() {
    let example = repository("deploy/registry/example.toml");
    let output = command(&["verify", example.to_str().unwrap()]).output().await.unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

/// Returns a unit's setting.
fn set<'a>(unit: &'a str, key: &str) -> &'a str {
    let mut lines = unit.lines();
    lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap_or_default()
}

#[tokio::test]
async fn the_unit_is_well_formed_and_has_few_privileges() {
    let text = shipped("kybernate-registry.service");
    let directory = tempfile::tempdir().unwrap();
    let unit = directory.path().join("kybernate-registry.service");
    // Where the program is here, since systemd looks whether it is there.
    let program = env!("CARGO_BIN_EXE_kybernate-registry");
    fs_err::write(&unit, text.replace("/usr/bin/kybernate-registry", program)).unwrap();
    // 20 means 2.0 of 10: "OK", where a unit without any restriction has 9.6.
    for arguments in [&["verify"][..], &["security", "--offline=true", "--threshold=20"]] {
        let mut analyze = Command::new("systemd-analyze");
        match analyze.args(arguments).arg(&unit).output().await {
            Ok(output) => assert!(output.status.success(), "{arguments:?} {output:?}"),
            Err(error) => eprintln!("SKIPPED: no systemd-analyze ({error})"),
        }
    }
}

#[test]
fn the_unit_and_the_program_agree() {
    let unit = shipped("kybernate-registry.service");
    let config = Config::default();
    let file = "/etc/kybernate/registry.toml";
    let program = "/usr/bin/kybernate-registry";
    // systemd starts it again and again where anything before it fails, whatever the exit code.
    assert_eq!(set(&unit, "ExecStartPre"), "");
    assert_eq!(set(&unit, "ExecStart"), format!("{program} serve --config {file}"));
    assert_eq!(set(&unit, "Type"), "notify");
    let state = Path::new("/var/lib").join(set(&unit, "StateDirectory"));
    assert_eq!(state, config.root);
    let stop = set(&unit, "TimeoutStopSec").strip_suffix('s').unwrap().parse::<u64>().unwrap();
    assert!(stop > config.connections.drain.0.as_secs(), "it is killed while it drains");
}

#[tokio::test]
async fn a_service_manager_is_told_when_it_serves() {
    let root = tempfile::tempdir().unwrap();
    let (store, socket) = (root.path().join("store"), root.path().join("notify"));
    let manager = tokio::net::UnixDatagram::bind(&socket).unwrap();
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0"]);
    serve.arg("--root").arg(store).env("NOTIFY_SOCKET", &socket);
    let process = Process::of(serve).await;
    let mut told = [0; 64];
    let length = manager.recv(&mut told).await.unwrap();
    assert_eq!(told[..length].trim_ascii_end(), b"READY=1");
    process.kill().await;
}

/// Returns what follows a word of a Dockerfile, each time it is there.
fn instructions<'a>(dockerfile: &'a str, word: &str) -> Vec<&'a str> {
    let lines = dockerfile.lines().filter_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    lines.map(str::trim).collect()
}

fn version(text: &str) -> Vec<u32> {
    text.split('.').map(|part| part.parse().unwrap()).collect()
}

#[test]
fn the_image_is_built_of_what_is_here() {
    let dockerfile = shipped("Dockerfile");
    let workspace = fs_err::read_to_string(repository("Cargo.toml")).unwrap();
    let workspace: toml::Table = toml::from_str(&workspace).unwrap();
    let from = instructions(&dockerfile, "FROM");
    let compiler = from[0].split_once("rust:").unwrap().1.split('-').next().unwrap();
    let needed = workspace["workspace"]["package"]["rust-version"].as_str().unwrap();
    assert!(version(compiler) >= version(needed), "{compiler} is older than {needed}");
    // Both stages have the same C library.
    assert!(from[0].contains("trixie") && from[1].contains("debian13"), "{from:?}");
    // cargo reads the manifests of all members, whichever it builds.
    let ignored = shipped("Dockerfile.dockerignore");
    assert_eq!(ignored.lines().collect::<Vec<_>>(), ["**/target", ".git"]);
    assert_eq!(instructions(&dockerfile, "COPY")[0], ". .");
    assert!(dockerfile.contains("--locked -p kybernate-registry"));
}

/// What the image runs by default, run here: it serves where the image says, in its volume.
#[tokio::test]
async fn the_image_runs_what_it_says() {
    let dockerfile = shipped("Dockerfile");
    let words = |text: &str| serde_json::from_str::<Vec<String>>(text).unwrap();
    let entry = words(instructions(&dockerfile, "ENTRYPOINT")[0]);
    let copied = format!("--from=build /out{0} {0}", entry[0]);
    assert!(instructions(&dockerfile, "COPY").contains(&&*copied), "{copied}");
    assert_eq!(json!(instructions(&dockerfile, "VOLUME")), json!([Config::default().root]));
    let user = instructions(&dockerfile, "USER")[0].split_once(':').unwrap();
    // A number, so that Kubernetes can see that it is not root.
    assert!(user.0.parse::<u32>().unwrap() > 0 && user.0 == user.1);
    let (name, address) = instructions(&dockerfile, "ENV")[0].split_once('=').unwrap();
    let port = address.rsplit_once(':').unwrap().1;
    assert_eq!(instructions(&dockerfile, "EXPOSE"), [port]);

    let root = tempfile::tempdir().unwrap();
    let default = words(instructions(&dockerfile, "CMD")[0]);
    let default: Vec<&str> = default.iter().map(String::as_str).collect();
    let mut serve = command(&default);
    let address = address.replace("0.0.0.0", "127.0.0.1").replace(port, "0");
    serve.env(name, address).env("KYBERNATE_REGISTRY_ROOT", root.path());
    let process = Process::of(serve).await;
    assert_eq!(process.remote.get("/v2/").await.json(), Value::Object(serde_json::Map::new()));
    process.kill().await;
}
