//! How a registry is met: over TLS or not, with a token or a password, and what it says then.

use kybernate_spec::Location;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use tempfile::TempDir;

use crate::hostile::{Scripted, TLS, log_in, reply};
use crate::kyb::{kyb, kyb_trusting, kyb_with};
use crate::registry::{Registry, open};

/// Lets the user `kyb` in by a token.
const BEARER: &str = "[access]\nhtpasswd = \"DIR/users\"\nchallenge = \"bearer\"\n";

/// Returns a certificate authority, and what it has signed for loopback: certificate and key.
fn certificates(name: &str) -> (String, String, String) {
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
    let mut params = CertificateParams::new(names).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    (authority.pem(), certificate.pem(), key.serialize_pem())
}

/// A directory with a dump, where the user `kyb` is logged in.
fn home(registry: &Registry) -> TempDir {
    let scratch = tempfile::tempdir().unwrap();
    crate::dump::dump(scratch.path(), 100);
    log_in(scratch.path(), registry.address());
    scratch
}

#[tokio::test]
async fn a_registry_on_loopback_may_speak_tls() {
    let (authority, certificate, key) = certificates("one");
    let config = format!("[tls]\ncertificate = \"DIR/tls.crt\"\nkey = \"DIR/tls.key\"\n{BEARER}");
    let files = [("tls.crt", &*certificate), ("tls.key", &key)];
    let Some(registry) = Registry::ours_with(&config, &files) else { return };
    let scratch = home(&registry);
    let ca = scratch.path().join("ca.crt");
    fs_err::write(&ca, authority).unwrap();
    let at = registry.at("a/b:v1").to_string();
    let packed = kyb_trusting(scratch.path(), Some(&ca), ["pack", "dump", &at]).await;
    assert_eq!(packed.code, 0, "{packed:?}");
    let inspected = kyb_trusting(scratch.path(), Some(&ca), ["inspect", &at]).await;
    assert_eq!(inspected.code, 0, "{inspected:?}");

    // A certificate that nobody vouches for is no reason to do without one, and is told once.
    let (other, _, _) = certificates("other");
    fs_err::write(&ca, other).unwrap();
    let untrusted = kyb_trusting(scratch.path(), Some(&ca), ["inspect", &at]).await;
    untrusted.ended(1, "over https: ");
    untrusted.ended(1, "invalid peer certificate: UnknownIssuer");
    assert_eq!(untrusted.told.matches("UnknownIssuer").count(), 1, "{}", untrusted.told);
    assert!(!untrusted.told.contains("ERROR"), "{}", untrusted.told);

    let plain = kyb_trusting(scratch.path(), Some(&ca), ["inspect", "--plain-http", &at]).await;
    plain.ended(1, "over http:");
}

/// A registry that speaks TLS and one that does not, in one command.
#[tokio::test]
async fn plain_http_may_be_for_one_of_the_registries_that_are_named() {
    let (authority, certificate, key) = certificates("one");
    let config = "[tls]\ncertificate = \"DIR/tls.crt\"\nkey = \"DIR/tls.key\"\n";
    let files = [("tls.crt", &*certificate), ("tls.key", &key)];
    let Some(secure) = Registry::ours_with(config, &files) else { return };
    let Some(plain) = Registry::ours() else { return };
    let scratch = tempfile::tempdir().unwrap();
    crate::dump::dump(scratch.path(), 100);
    let ca = scratch.path().join("ca.crt");
    fs_err::write(&ca, authority).unwrap();
    let [from, to] = [&plain, &secure].map(|registry| registry.at("a/b:v1").to_string());
    let run = async |line: &str| kyb_trusting(scratch.path(), Some(&ca), line.split(' ')).await;
    let one = format!("--plain-http={}", plain.address());
    let packed = run(&format!("pack dump {from} {one}")).await;
    assert_eq!(packed.code, 0, "{packed:?}");
    run(&format!("copy --plain-http {from} {to}")).await.ended(1, "over http:");
    for line in [format!("copy {one} {from} {to}"), format!("copy {to} {from} {one}")] {
        let copied = run(&line).await;
        assert_eq!(copied.code, 0, "{copied:?}");
    }
    let named = [("KYB_PLAIN_HTTP", plain.address().as_ref()), ("SSL_CERT_FILE", ca.as_os_str())];
    let copied = kyb_with(scratch.path(), &named, ["copy", &from, &to]).await;
    assert_eq!(copied.code, 0, "{copied:?}");
    let both = format!("{},{}", plain.address(), secure.address());
    let named = [("KYB_PLAIN_HTTP", both.as_ref()), ("SSL_CERT_FILE", ca.as_os_str())];
    kyb_with(scratch.path(), &named, ["copy", &from, &to]).await.ended(1, "over http:");
}

#[tokio::test]
async fn tls_is_tried_once_and_not_at_all_when_the_user_says_so() {
    let index = r#"{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}"#;
    let server = Scripted::start(move |_, _| reply("200 OK", "", index)).await;
    let location: Location = server.at("a/b:v1");
    let store = open(&location).await;
    for _ in 0..3 {
        store.resolve(&location).await.unwrap();
    }
    assert_eq!((server.asked(TLS), server.asked("get /v2/ ")), (1, 1));
    let scratch = tempfile::tempdir().unwrap();
    let told = kyb(scratch.path(), ["inspect", "--plain-http", &location.to_string()]).await;
    told.ended(1, "is no checkpoint");
    assert_eq!((server.asked(TLS), server.asked("get /v2/ ")), (1, 2));
}

#[tokio::test]
async fn a_copy_within_a_registry_mounts_with_a_token_for_both_repositories() {
    let Some(registry) = Registry::ours_with(BEARER, &[]) else { return };
    let scratch = home(&registry);
    let [from, to] = ["a/b:v1", "c/d:v1"].map(|name| registry.at(name).to_string());
    assert_eq!(kyb(scratch.path(), ["pack", "dump", &from]).await.code, 0);
    let copied = kyb(scratch.path(), ["copy", &from, &to, "--json"]).await.json();
    assert_eq!((&copied["bytesSent"], &copied["blobs"]["sent"]), (&0.into(), &0.into()));
    assert!(copied["blobs"]["mounted"].as_u64() > Some(0), "{copied}");
    assert_eq!(kyb(scratch.path(), ["inspect", &to]).await.code, 0);
}

#[tokio::test]
async fn who_may_not_is_told_so_and_who_is_unknown_is_told_to_log_in() {
    let policy =
        "[[rule]]\nrepositories = [\"**\"]\nsubjects = [\"user:kyb\"]\nactions = [\"pull\"]\n";
    let config = format!("{BEARER}policy = \"DIR/policy.toml\"\n");
    let files = [("policy.toml", policy)];
    let Some(registry) = Registry::ours_with(&config, &files) else { return };
    let scratch = home(&registry);
    let at = registry.at("a/b:v1").to_string();
    let denied = kyb(scratch.path(), ["pack", "dump", &at]).await;
    denied.ended(1, "not allowed: the registry says \"");
    denied.ended(1, "ask for access");
    assert!(!denied.told.contains("not authorised"), "{}", denied.told);
    fs_err::remove_dir_all(scratch.path().join(".docker")).unwrap();
    let stranger = kyb(scratch.path(), ["inspect", &at]).await;
    stranger.ended(1, "not authorised: log in");
}

#[tokio::test]
async fn passwords_do_not_go_to_a_token_server_that_others_can_listen_to() {
    let wanted = "WWW-Authenticate: Bearer realm=\"http://192.0.2.1/token\",service=\"s\"\r\n";
    let server = Scripted::start(move |_, _| reply("401 Unauthorized", wanted, "")).await;
    let scratch = tempfile::tempdir().unwrap();
    log_in(scratch.path(), &server.address);
    let told = kyb(scratch.path(), ["inspect", &server.at("a/b:v1").to_string()]).await;
    told.ended(1, "the token server http://192.0.2.1/token wants plain HTTP");
    assert_eq!(server.asked("authorization:"), 0);
}
