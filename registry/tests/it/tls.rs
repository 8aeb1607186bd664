//! Encrypted connections, certificates that change, and client certificates.

#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::os::unix::fs::symlink;
use std::path::Path;

use http::Method;
use kybernate_registry::config::Config;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, SanType,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::access::{Guarded, basic, htpasswd, rule};
use crate::harness::{Remote, wait_until};
use crate::process::{Process, command};

/// Somebody who signs certificates.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// Returns a certificate for 127.0.0.1 and its key.
    pub(crate) fn server(&self) -> (String, String) {
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        self.sign(CertificateParams::new(names).unwrap(), ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// Returns a certificate that was good for some years, and its key.
    fn dated(&self, from: i32, until: i32) -> (String, String) {
        let names = vec!["127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        params.not_before = rcgen::date_time_ymd(from, 1, 1);
        params.not_after = rcgen::date_time_ymd(until, 1, 1);
        self.sign(params, ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// Returns a certificate with a common name and a URI, and its key.
    fn client(&self, name: &str, uri: Option<&str>) -> (String, String) {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.subject_alt_names =
            uri.map(|uri| SanType::URI(uri.try_into().unwrap())).into_iter().collect();
        self.sign(params, ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn sign(
        &self,
        mut params: CertificateParams,
        usage: ExtendedKeyUsagePurpose,
    ) -> (String, String) {
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    /// Returns a client that trusts this authority alone, and proves itself with `identity`.
    fn remote(&self, url: &str, identity: Option<&(String, String)>) -> Remote {
        let url = url.replace("http://", "https://");
        let ca = reqwest::Certificate::from_pem(self.pem().as_bytes()).unwrap();
        // No connection is kept, since a certificate is looked at when one is made.
        let mut client =
            reqwest::Client::builder().no_proxy().tls_certs_only([ca]).pool_max_idle_per_host(0);
        if let Some((certificate, key)) = identity {
            let pem = format!("{certificate}{key}");
            client = client.identity(reqwest::Identity::from_pem(pem.as_bytes()).unwrap());
        }
        Remote { url, client: client.build().unwrap() }
    }
}

fn with_tls(files: &Path) -> Config {
    let mut config = Config::default();
    config.tls.certificate = Some(files.join("tls.crt"));
    config.tls.key = Some(files.join("tls.key"));
    config
}

async fn answers(remote: &Remote) -> bool {
    remote.try_send(Method::GET, "/v2/", &[], "").await.is_ok()
}

#[tokio::test]
async fn a_registry_is_served_encrypted_only() {
    let authority = Authority::new("one");
    let (certificate, key) = authority.server();
    let files = [("tls.crt", &*certificate), ("tls.key", &key)];
    let guarded = Guarded::start(&files, with_tls).await;
    let remote = authority.remote(&guarded.registry.url, None);
    let image = remote.push_image("a", "v1", &vec![7; 3 << 20], None).await;
    let reply = remote.get("/v2/a/manifests/v1").await;
    assert_eq!(reply.header("docker-content-digest"), image.digest.to_string());
    assert!(!answers(&Authority::new("other").remote(&guarded.registry.url, None)).await);
    assert!(!answers(&guarded.registry.remote).await, "plain HTTP is answered");
    // HTTP/2 is not offered: for big bodies it is slower.
    let address = guarded.registry.url.strip_prefix("http://").unwrap().to_owned();
    let mut stream = TcpStream::connect(&address).await.unwrap();
    stream.write_all(b"GET /v2/ HTTP/1.1\r\nHost: r\r\n\r\n").await.unwrap();
    let mut reply = Vec::new();
    let read = stream.read_to_end(&mut reply).await;
    assert!(read.is_err() || !reply.starts_with(b"HTTP/"), "{reply:?}");
}

#[tokio::test]
async fn certificates_are_read_again_when_they_change() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let guarded = {
        let (certificate, key) = old.server();
        Guarded::start(&[("tls.crt", &*certificate), ("tls.key", &key)], with_tls).await
    };
    let url = guarded.registry.url.clone();
    let (by_old, by_new) = (old.remote(&url, None), new.remote(&url, None));
    assert!(answers(&by_old).await && !answers(&by_new).await);
    // One after the other: in between they do not fit, and the old ones stay in force.
    let (certificate, key) = new.server();
    guarded.replace("tls.crt", &certificate);
    assert!(answers(&by_old).await);
    guarded.replace("tls.key", &key);
    wait_until("the new certificate is in force", async || answers(&by_new).await).await;
    assert!(!answers(&by_old).await);
}

/// Kubernetes swaps a symbolic link to the directory of all files of a secret.
#[tokio::test]
async fn certificates_behind_a_swapped_link_are_read_again() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let mut sets = Vec::new();
    for authority in [&old, &new] {
        sets.push(authority.server());
    }
    let prepare = |files: &Path| {
        for (name, (certificate, key)) in ["v1", "v2"].iter().zip(&sets) {
            fs_err::create_dir(files.join(name)).unwrap();
            fs_err::write(files.join(name).join("tls.crt"), certificate).unwrap();
            fs_err::write(files.join(name).join("tls.key"), key).unwrap();
        }
        symlink("v1", files.join("..data")).unwrap();
        for name in ["tls.crt", "tls.key"] {
            symlink(Path::new("..data").join(name), files.join(name)).unwrap();
        }
        with_tls(files)
    };
    let guarded = Guarded::start(&[], prepare).await;
    let by_new = new.remote(&guarded.registry.url, None);
    assert!(!answers(&by_new).await && answers(&old.remote(&guarded.registry.url, None)).await);
    symlink("v2", guarded.file("..next")).unwrap();
    fs_err::rename(guarded.file("..next"), guarded.file("..data")).unwrap();
    wait_until("the new certificate is in force", async || answers(&by_new).await).await;
}

/// A new certificate that cannot be used changes nothing, and the log says which file and why.
#[tokio::test]
async fn a_broken_certificate_is_told_and_the_old_one_stays() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let root = tempfile::tempdir().unwrap();
    let [certificate, key, log] = ["tls.crt", "tls.key", "log"].map(|name| root.path().join(name));
    let replace = |path: &Path, text: &str| {
        let next = path.with_extension("next");
        fs_err::write(&next, text).unwrap();
        fs_err::rename(&next, path).unwrap();
    };
    let (first, second) = (old.server(), new.server());
    replace(&certificate, &first.0);
    replace(&key, &first.1);
    let paths = [root.path().join("store"), certificate.clone(), key.clone()];
    let [store, crt, pem] = paths.each_ref().map(|path| path.to_str().unwrap());
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--root", store]);
    serve.args(["--tls-certificate", crt, "--tls-key", pem]);
    serve.stderr(std::fs::File::from(fs_err::File::create(&log).unwrap()));
    let process = Process::of(serve).await;
    let url = process.remote.url.clone();
    let (by_old, by_new) = (old.remote(&url, None), new.remote(&url, None));
    assert!(answers(&by_old).await && !answers(&by_new).await);
    let told = |what: &str| {
        let log = fs_err::read_to_string(&log).unwrap();
        log.lines().any(|line| line.contains("not read again") && line.contains(what))
    };

    replace(&certificate, "not a certificate");
    wait_until("the mistake is told", async || told("there is no certificate (PEM) in it")).await;
    assert!(answers(&by_old).await);
    replace(&certificate, &second.0);
    replace(&key, "not a key");
    wait_until("the mistake is told", async || told("there is no unencrypted private key")).await;
    assert!(answers(&by_old).await);
    fs_err::remove_file(&key).unwrap();
    wait_until("the mistake is told", async || told("cannot be read")).await;
    assert!(answers(&by_old).await && !answers(&by_new).await);
    replace(&key, &second.1);
    wait_until("the new certificate is in force", async || answers(&by_new).await).await;
    assert!(!answers(&by_old).await);

    let log = fs_err::read_to_string(&log).unwrap();
    let secret = [&first.1, &second.1].into_iter().flat_map(|key| key.lines());
    for line in secret.filter(|line| !line.starts_with("-----")) {
        assert!(!log.contains(line), "a private key is in the log");
    }
}

#[tokio::test]
async fn client_certificates_are_subjects() {
    let authority = Authority::new("ours");
    let clients = Authority::new("clients");
    let (certificate, key) = authority.server();
    let policy = rule(&["nodes/*"], &["certificate:node-*"], &["pull", "push"])
        + &rule(&["mesh/*"], &["certificate:spiffe://mesh/ns/prod/*"], &["pull", "push"])
        + &rule(&["team/*"], &["user:alice"], &["pull", "push"]);
    let users = htpasswd(&[("alice", "right")]);
    let ca = clients.pem();
    let files = [
        ("tls.crt", &*certificate),
        ("tls.key", &key),
        ("clients.crt", &ca),
        ("policy.toml", &policy),
        ("htpasswd", &users),
    ];
    let configure = |files: &Path| {
        let mut config = with_tls(files);
        config.tls.client_ca = Some(files.join("clients.crt"));
        config.access.policy = Some(files.join("policy.toml"));
        config.access.htpasswd = Some(files.join("htpasswd"));
        config
    };
    let guarded = Guarded::start(&files, configure).await;
    let url = &guarded.registry.url;
    let node = clients.client("node-7", None);
    let agent = clients.client("agent", Some("spiffe://mesh/ns/prod/sa/agent"));
    let begin = async |remote: &Remote, repository: &str, headers: &[(&str, &str)]| {
        let path = format!("/v2/{repository}/blobs/uploads/");
        remote.send(Method::POST, &path, headers, "").await.status
    };
    let (nobody, node, agent) = (
        authority.remote(url, None),
        authority.remote(url, Some(&node)),
        authority.remote(url, Some(&agent)),
    );
    assert_eq!(begin(&nobody, "nodes/a", &[]).await, 401);
    assert_eq!(begin(&node, "nodes/a", &[]).await, 202);
    assert_eq!(begin(&node, "mesh/a", &[]).await, 403);
    assert_eq!(begin(&agent, "mesh/a", &[]).await, 202);
    assert_eq!(node.get("/v2/mesh/a/tags/list").await.status, 404);
    assert_eq!(node.get("/v2/").await.status, 200);
    // A password adds to what the certificate gives.
    let alice = basic("alice", "right");
    let alice = [("authorization", &*alice)];
    assert_eq!(begin(&node, "team/a", &alice).await, 202);
    assert_eq!(begin(&node, "nodes/a", &alice).await, 202);
    assert_eq!(begin(&nobody, "nodes/a", &alice).await, 403);
    // A certificate of somebody else's is none.
    let forged = Authority::new("clients").client("node-7", None);
    assert!(!answers(&authority.remote(url, Some(&forged))).await);
}

#[tokio::test]
async fn clients_without_a_certificate_can_be_refused() {
    let authority = Authority::new("ours");
    let (certificate, key) = authority.server();
    let ca = authority.pem();
    let files = [("tls.crt", &*certificate), ("tls.key", &key), ("clients.crt", &ca)];
    let configure = |files: &Path| {
        let mut config = with_tls(files);
        config.tls.client_ca = Some(files.join("clients.crt"));
        config.tls.client_required = true;
        config
    };
    let guarded = Guarded::start(&files, configure).await;
    let url = &guarded.registry.url;
    assert!(!answers(&authority.remote(url, None)).await);
    let client = authority.client("anyone", None);
    let remote = authority.remote(url, Some(&client));
    // Without a policy, whoever proves an identity may do everything.
    remote.push("a", b"bytes").await;
}

/// Whoever begins handshakes and goes no further takes their places from nobody.
#[tokio::test]
async fn handshakes_that_do_not_go_on_make_room() {
    let authority = Authority::new("one");
    let (certificate, key) = authority.server();
    let files = [("tls.crt", &*certificate), ("tls.key", &key)];
    let configure = |files: &Path| {
        let mut config = with_tls(files);
        config.connections.max = 8;
        config
    };
    let guarded = Guarded::start(&files, configure).await;
    let address = guarded.registry.url.strip_prefix("http://").unwrap().to_owned();
    let mut silent = Vec::new();
    for number in 0..24 {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        if number % 2 == 0 {
            stream.write_all(&[0x16, 3, 1, 2, 0, 1]).await.unwrap();
        }
        silent.push(stream);
    }
    let remote = authority.remote(&guarded.registry.url, None);
    assert!(answers(&remote).await, "a client that means it finds a place");
    let page = remote.get("/metrics").await;
    let page = String::from_utf8(page.body.to_vec()).unwrap();
    let displaced = page.lines().find_map(|line| {
        line.strip_prefix("kybernate_registry_connections_displaced_total ")?.parse::<u64>().ok()
    });
    assert!(displaced.is_some_and(|displaced| displaced >= 8), "{displaced:?}");
    drop(silent);
}

#[tokio::test]
async fn a_certificate_that_clients_refuse_is_told_and_its_end_is_a_figure() {
    let directory = tempfile::tempdir().unwrap();
    let (root, config) = (directory.path().join("store"), directory.path().join("r.toml"));
    let file = |name: &str| directory.path().join(name);
    let authority = Authority::new("one");
    let place = |(certificate, key): (String, String)| {
        for (name, text) in [("tls.key", key), ("tls.crt", certificate)] {
            fs_err::write(file("new"), text).unwrap();
            fs_err::rename(file("new"), file(name)).unwrap();
        }
    };
    place(authority.dated(2001, 2011));
    let (certificate, key) = (file("tls.crt"), file("tls.key"));
    let tls = format!("[tls]\ncertificate = {certificate:?}\nkey = {key:?}\n");
    fs_err::write(&config, format!("[log]\nformat = \"json\"\n{tls}")).unwrap();
    let config = config.to_str().unwrap();
    let output = command(&["verify", config]).output().await.unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(told.contains("has expired") && told.contains("2011-01-01T00:00:00Z"), "{told}");

    let process = Process::start(&root, &["--config", config]).await;
    // A client that does not look at dates.
    let client = reqwest::Client::builder().no_proxy().tls_danger_accept_invalid_certs(true);
    let url = process.remote.url.replace("http://", "https://");
    let remote = Remote { url, client: client.build().unwrap() };
    let ends = async |year: u64| {
        let page = remote.get("/metrics").await.body;
        let seconds = ((year - 1970) * 365 + (year - 1969) / 4) * 86_400;
        let line =
            format!("kybernate_registry_tls_certificate_not_after_timestamp_seconds {seconds}\n");
        String::from_utf8_lossy(&page).contains(&line)
    };
    assert!(ends(2011).await);
    place(authority.dated(2071, 2081));
    wait_until("the new one is in force", async || ends(2081).await).await;
    drop(remote);
    let log = String::from_utf8(process.terminate().await.stderr).unwrap();
    let warned = |words: [&str; 3]| {
        log.lines()
            .any(|line| line.contains("WARN") && words.iter().all(|word| line.contains(word)))
    };
    assert!(warned(["has expired", "2011-01-01T00:00:00Z", "tls.crt"]), "{log}");
    assert!(warned(["is not good yet", "2071-01-01T00:00:00Z", "tls.crt"]), "{log}");
    // Without encryption there is no figure that an alert could take for an end.
    let process = Process::start(&root, &[]).await;
    let page = process.remote.get("/metrics").await.body;
    let named = |line: &str| line.starts_with("kybernate_registry_tls_certificate");
    assert!(!String::from_utf8_lossy(&page).lines().any(named));
    process.kill().await;
}
