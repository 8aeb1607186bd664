//! What the tests of access control share.

#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::path::{Path, PathBuf};

use http::Method;
use kybernate_registry::config::Config;
use tempfile::TempDir;

use crate::harness::{Remote, Reply, TestRegistry};

/// A registry whose configuration names files in a directory of the test's.
#[derive(Debug)]
pub(crate) struct Guarded {
    pub(crate) registry: TestRegistry,
    pub(crate) files: TempDir,
}

impl Guarded {
    /// Writes files and starts a registry whose configuration `configure` makes of their directory.
    pub(crate) async fn start(files: &[(&str, &str)], configure: impl Fn(&Path) -> Config) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs_err::write(directory.path().join(name), content).unwrap();
        }
        let mut config = configure(directory.path());
        config.root = directory.path().to_owned();
        let root = tempfile::tempdir().unwrap();
        let registry = TestRegistry::start_with(&config, root).await;
        Self { registry, files: directory }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    /// Replaces a file as a careful writer does: at once.
    pub(crate) fn replace(&self, name: &str, content: &str) {
        let next = self.file("next");
        fs_err::write(&next, content).unwrap();
        fs_err::rename(next, self.file(name)).unwrap();
    }
}

/// A configuration with a policy file called `policy.toml`.
pub(crate) fn with_policy(files: &Path) -> Config {
    let mut config = Config::default();
    config.access.policy = Some(files.join("policy.toml"));
    config
}

/// A configuration with a policy and a file of users.
pub(crate) fn with_users(files: &Path) -> Config {
    let mut config = with_policy(files);
    config.access.htpasswd = Some(files.join("htpasswd"));
    config
}

/// The file of users, each with a password.
pub(crate) fn htpasswd(users: &[(&str, &str)]) -> String {
    // The least cost there is: what is tested is not bcrypt.
    let line = |(user, password): &(&str, &str)| {
        format!("{user}:{}\n", bcrypt::hash(password, 4).unwrap())
    };
    users.iter().map(line).collect()
}

/// The header that a name and a password make.
pub(crate) fn basic(user: &str, password: &str) -> String {
    use base64::Engine as _;
    let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
    format!("Basic {encoded}")
}

/// One rule of a policy.
pub(crate) fn rule(repositories: &[&str], subjects: &[&str], actions: &[&str]) -> String {
    format!(
        "[[rule]]\nrepositories = {repositories:?}\nsubjects = {subjects:?}\nactions = {actions:?}\n"
    )
}

/// What a client can tell one reply from another by, all but the time.
pub(crate) fn seen(reply: &Reply) -> String {
    let mut headers: Vec<_> = reply.headers.iter().filter(|(name, _)| *name != "date").collect();
    headers.sort_by_key(|(name, _)| name.as_str());
    format!("{} {headers:?} {}", reply.status, String::from_utf8_lossy(&reply.body))
}

/// Asks for everything that a repository may have, with every method, and returns what is seen.
pub(crate) async fn probe(
    remote: &Remote,
    repository: &str,
    digest: &str,
    headers: &[(&str, &str)],
) -> Vec<String> {
    let mut replies = Vec::new();
    // Every reply carries the request's id, which is all that may differ.
    let headers = &[headers, &[("x-request-id", "probe")]].concat();
    let paths = [
        "tags/list".to_owned(),
        "manifests/v1".to_owned(),
        format!("manifests/{digest}"),
        "manifests/sha256:x".to_owned(),
        format!("blobs/{digest}"),
        "blobs/sha256:x".to_owned(),
        format!("referrers/{digest}"),
        format!("referrers/{digest}?artifactType=a/b&n=1"),
        "blobs/uploads/".to_owned(),
        "blobs/uploads/".to_owned() + &"0".repeat(40),
    ];
    for path in &paths {
        for method in [Method::GET, Method::HEAD, Method::PUT, Method::DELETE, Method::POST] {
            let url = format!("/v2/{repository}/{path}");
            let reply = remote.send(method.clone(), &url, headers, "").await;
            replies.push(format!("{method} {path}: {}", seen(&reply)));
        }
    }
    replies
}
