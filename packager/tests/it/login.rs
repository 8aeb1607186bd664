//! `kyb login` and `kyb logout`.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;

use tempfile::TempDir;

use crate::hostile::{Scripted, reply};
use crate::kyb::{Ran, kyb_fed};
use crate::registry::Registry;

/// Lets the user `kyb` in by a token, and nobody in without.
const BEARER: &str = "[access]\nhtpasswd = \"DIR/users\"\nchallenge = \"bearer\"\n";

/// Runs `kyb` with something on its standard input.
async fn fed(scratch: &TempDir, input: &str, line: &str) -> Ran {
    let path = format!("{}:/usr/bin:/bin", scratch.path().display());
    let file = scratch.path().join("stdin");
    fs_err::write(&file, input).unwrap();
    let input = Stdio::from(fs_err::File::open(file).unwrap().into_file());
    kyb_fed(scratch.path(), &[("PATH", OsStr::new(&path))], input, line.split(' ')).await
}

async fn log_in(scratch: &TempDir, password: &str, address: &str) -> Ran {
    let line = format!("login {address} --username kyb --password-stdin");
    let ran = fed(scratch, password, &line).await;
    let password = password.trim();
    assert!(!ran.out.contains(password) && !ran.told.contains(password), "{ran:?}");
    ran
}

fn config(scratch: &Path) -> String {
    fs_err::read_to_string(scratch.join(".docker/config.json")).unwrap_or_default()
}

#[tokio::test]
async fn credentials_are_kept_once_the_registry_has_taken_them() {
    let ours = Registry::ours_with(BEARER, &[]);
    for registry in [Registry::docker_with_password(), ours].into_iter().flatten() {
        let scratch = tempfile::tempdir().unwrap();
        crate::dump::dump(scratch.path(), 3);
        let address = registry.address();
        let at = registry.at("a/b:v1");
        let wrong = log_in(&scratch, "pass-word-2", address).await;
        wrong.ended(1, "not authorised");
        assert_eq!(config(scratch.path()), "");

        let right = log_in(&scratch, "pass-word-1\n", address).await;
        assert!(right.code == 0 && right.out.contains("as kyb"), "{right:?}");
        let kept = config(scratch.path());
        assert!(kept.contains(address) && !kept.contains("pass-word"), "{kept}");
        let path = scratch.path().join(".docker/config.json");
        assert_eq!(fs_err::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        let packed = fed(&scratch, "", &format!("pack dump {at}")).await;
        assert_eq!(packed.code, 0, "{packed:?}");

        let out = fed(&scratch, "", &format!("logout {address} --json")).await.json();
        assert_eq!(out["removed"], true);
        let again = fed(&scratch, "", &format!("logout {address}")).await;
        assert!(again.code == 0 && again.out.starts_with("not logged in"), "{again:?}");
        fed(&scratch, "", &format!("inspect {at}")).await.ended(1, "not authorised");
    }
}

#[tokio::test]
async fn a_token_is_asked_for_without_naming_a_repository() {
    let server = Scripted::start(|here, head| {
        if head.starts_with("get /token") {
            assert!(!head.contains("scope"), "{head}");
            return reply("200 OK", "", r#"{"token":"let-me-in"}"#);
        }
        if head.contains("authorization: bearer let-me-in") {
            return reply("200 OK", "", "");
        }
        let wanted =
            format!("WWW-Authenticate: Bearer realm=\"http://{here}/token\",service=\"s\"\r\n");
        reply("401 Unauthorized", &wanted, "")
    })
    .await;
    let scratch = tempfile::tempdir().unwrap();
    let told = log_in(&scratch, "pass-word-1", &server.address).await;
    assert_eq!(told.code, 0, "{told:?}");
    assert_eq!(server.asked("get /token"), 1);
}

#[tokio::test]
async fn a_registry_that_asks_nobody_proves_nothing() {
    let server = Scripted::start(|_, _| reply("200 OK", "", "")).await;
    let scratch = tempfile::tempdir().unwrap();
    let line = format!("login {} --username kyb --password-stdin --json", server.address);
    let told = fed(&scratch, "pass-word-1", &line).await.json();
    assert_eq!(told["proven"], false);
}

#[tokio::test]
async fn a_credential_helper_gets_the_secret_and_the_file_does_not() {
    let Some(registry) = Registry::docker_with_password() else { return };
    let scratch = tempfile::tempdir().unwrap();
    crate::dump::dump(scratch.path(), 3);
    // Keeps one entry beside itself; what it says must not be shown.
    let helper = scratch.path().join("docker-credential-beside");
    let program = "#!/bin/sh\nset -e\ncase $1 in\nstore) cat > \"$0.kept\" ;;\n\
                   get) cat > /dev/null; cat \"$0.kept\" ;;\nerase) rm \"$0.kept\" ;;\nesac\n";
    fs_err::write(&helper, program).unwrap();
    fs_err::set_permissions(&helper, std::fs::Permissions::from_mode(0o755)).unwrap();
    fs_err::create_dir(scratch.path().join(".docker")).unwrap();
    let file = scratch.path().join(".docker/config.json");
    fs_err::write(&file, r#"{"credsStore": "beside", "psFormat": "p"}"#).unwrap();

    let told = log_in(&scratch, "pass-word-1", registry.address()).await;
    assert!(told.code == 0 && told.out.contains("docker-credential-beside"), "{told:?}");
    let kept = scratch.path().join("docker-credential-beside.kept");
    let given: serde_json::Value = serde_json::from_slice(&fs_err::read(&kept).unwrap()).unwrap();
    let expected = serde_json::json!({
        "ServerURL": registry.address(), "Username": "kyb", "Secret": "pass-word-1"
    });
    assert_eq!(given, expected);
    let expected = serde_json::json!({
        "auths": { registry.address(): {} }, "credsStore": "beside", "psFormat": "p"
    });
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&config(scratch.path())).unwrap(),
        expected
    );
    let packed = fed(&scratch, "", &format!("pack dump {}", registry.at("a/b:v1"))).await;
    assert_eq!(packed.code, 0, "{packed:?}");
    let out = fed(&scratch, "", &format!("logout {}", registry.address())).await;
    assert!(out.code == 0 && !kept.exists(), "{out:?}");

    fs_err::write(&helper, "#!/bin/sh\ncat; exit 3\n").unwrap();
    let failed = log_in(&scratch, "pass-word-1", registry.address()).await;
    failed.ended(1, "docker-credential-beside\" that Docker's configuration names failed");
}

#[tokio::test]
async fn a_helper_that_does_not_stop_talking_is_ended() {
    let server = Scripted::start(|_, _| reply("200 OK", "", "")).await;
    let scratch = tempfile::tempdir().unwrap();
    let helper = scratch.path().join("docker-credential-chatty");
    let program = "#!/bin/sh\necho $$ > \"$0.pid\"\nexec yes pass-word-1\n";
    fs_err::write(&helper, program).unwrap();
    fs_err::set_permissions(&helper, std::fs::Permissions::from_mode(0o755)).unwrap();
    fs_err::create_dir(scratch.path().join(".docker")).unwrap();
    let file = scratch.path().join(".docker/config.json");
    fs_err::write(&file, r#"{"credsStore": "chatty"}"#).unwrap();

    let line = format!("inspect {}/a/b:v1 --facts-only", server.address);
    let ran = fed(&scratch, "", &line).await;
    assert!(ran.told.contains("docker-credential-chatty"), "{ran:?}");
    assert!(ran.told.contains("more than any credentials"), "{ran:?}");
    assert!(!ran.told.contains("pass-word-1"), "{ran:?}");
    let pid = fs_err::read_to_string(helper.with_extension("pid")).unwrap();
    let line = format!("/proc/{}/cmdline", pid.trim());
    crate::kyb::until("the helper ends", || {
        !fs_err::read_to_string(&line).is_ok_and(|line| line.contains("pass-word-1"))
    });
}

#[tokio::test]
async fn a_password_is_never_an_argument() {
    let scratch = tempfile::tempdir().unwrap();
    fed(&scratch, "x", "login localhost:1 --username kyb").await.ended(64, "--password-stdin");
    fed(&scratch, "x", "login localhost:1 --password-stdin").await.ended(64, "--username");
    fed(&scratch, "", "login localhost:1 --username kyb --password-stdin")
        .await
        .ended(64, "the password is empty");
    fed(&scratch, "x", "login localhost:1/a --username kyb")
        .await
        .ended(64, "no host of a registry");
    fed(&scratch, "x", "login localhost:1 --password x").await.ended(64, "");
    assert!(!scratch.path().join(".docker").exists());
}
