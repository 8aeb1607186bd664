//! Docker's `config.json`, where credentials for registries are kept. [`remote`](crate::remote) reads
//! it through `docker_credential`, which does not write; here they are put in and taken out.
//!
//! What else is in the file stays. It appears whole or not at all, readable by its owner alone. Where
//! it names a credential helper, secrets go to that program, and the file has only the registry's name.

use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use docker_credential::{CredentialRetrievalError, DockerCredential};
use fs_err as fs;
use kybernate_spec::document;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

/// The key Docker uses for its own registry.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";

/// Largest file read. Real ones have a few KiB.
const BYTES_MAX: u64 = 1 << 20;

/// Longest wait for a helper: one that asks for a keychain's password waits for a person.
const HELPER_LIMIT: Duration = Duration::from_mins(2);

/// Longest wait for a helper's answer: one that asks a cloud for a password takes seconds, one that
/// waits for a keychain to be unlocked takes for ever.
const ASK_LIMIT: Duration = Duration::from_secs(30);

/// Longest answer of a helper: those of clouds are tokens of a few KiB.
const ANSWER_BYTES_MAX: u64 = 128 << 10;

/// Docker's `config.json`, there or not.
#[derive(Clone, Debug)]
pub struct DockerConfig {
    path: PathBuf,
}

/// Where credentials went to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Into the file itself, as base64: whoever reads the file has them.
    File,
    /// To this credential helper.
    Helper(String),
}

/// Why credentials could not be kept or removed. Says nothing that a helper said: that may hold
/// secrets.
#[derive(Debug, thiserror::Error)]
pub enum DockerConfigError {
    /// The file could not be read or written.
    #[error("failed to {operation} {path:?}")]
    File {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What happened.
        #[source]
        source: io::Error,
    },
    /// The file is none of Docker's.
    #[error("{path:?} is no configuration of Docker's: {what}; nothing was changed")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The name of a user has a colon, which ends the name where it is kept with the password.
    #[error("a user's name cannot have a colon")]
    User,
    /// A helper could not be run, or did not do it.
    #[error("the credential helper {program:?} that Docker's configuration names failed: {what}")]
    Helper {
        /// The program.
        program: String,
        /// What happened.
        what: String,
    },
}

type Document = Map<String, Value>;

impl DockerConfig {
    /// Refers to the file where Docker looks for it; `None` when the environment names no place.
    pub fn of_environment() -> Option<Self> {
        let set = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let directory = set("DOCKER_CONFIG").or_else(|| Some(set("HOME")?.join(".docker")));
        Some(Self::at(directory?.join("config.json")))
    }

    /// Refers to a file.
    pub const fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Returns the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps credentials for a registry, in place of those that are there. Not cancellation-safe where
    /// a helper is run.
    pub async fn keep(
        &self,
        registry: &str,
        user: &str,
        password: &str,
    ) -> Result<Kept, DockerConfigError> {
        if user.contains(':') {
            return Err(DockerConfigError::User);
        }
        let server = server(registry);
        let (kept, entry) = match self.helper_for(&server).await? {
            Some(helper) => {
                let told = json!({ "ServerURL": server, "Username": user, "Secret": password });
                run(&helper, "store", told.to_string().as_bytes()).await?;
                (Kept::Helper(helper), json!({}))
            }
            None => (Kept::File, json!({ "auth": STANDARD.encode(format!("{user}:{password}")) })),
        };
        let (config, registry) = (self.clone(), registry.to_owned());
        self.aside(move || {
            config.change(|document| {
                let auths = document.entry("auths").or_insert_with(|| json!({}));
                let auths = auths.as_object_mut().ok_or("its \"auths\" is no object")?;
                auths.retain(|key, _| !is_for(key, &registry));
                auths.insert(server, entry);
                Ok(())
            })
        })
        .await?;
        Ok(kept)
    }

    /// Removes the credentials for a registry. Returns whether there were any in the file; a helper
    /// does not tell.
    pub async fn forget(&self, registry: &str) -> Result<bool, DockerConfigError> {
        let server = server(registry);
        if let Some(helper) = self.helper_for(&server).await? {
            run(&helper, "erase", server.as_bytes()).await?;
        }
        let (config, registry) = (self.clone(), registry.to_owned());
        self.aside(move || {
            let document = config.read()?;
            let auths = document.get("auths").and_then(Value::as_object);
            let known = auths.is_some_and(|auths| auths.keys().any(|key| is_for(key, &registry)));
            if known {
                config.change(|document| {
                    if let Some(auths) = document.get_mut("auths").and_then(Value::as_object_mut) {
                        auths.retain(|key, _| !is_for(key, &registry));
                    }
                    Ok(())
                })?;
            }
            Ok(known)
        })
        .await
    }

    /// Finds the credentials for a registry, by the name that it has in the file: its own helper's,
    /// the file's, the helper's for all. A helper is killed when it has not answered in time.
    pub(crate) async fn credentials(
        &self,
        server: &str,
    ) -> Result<Option<DockerCredential>, DockerConfigError> {
        let (config, name) = (self.clone(), server.to_owned());
        let (helpers, kept) = self
            .aside(move || {
                let document = config.read()?;
                Ok((config.helpers(&document, &name)?, config.kept(document, &name)?))
            })
            .await?;
        let helper = match (helpers, kept) {
            (Helpers { own: Some(helper), .. }, _) | (Helpers { all: Some(helper), .. }, None) => {
                helper
            }
            (_, kept) => return Ok(kept),
        };
        ask(&helper, server).await.map(Some)
    }

    /// Runs `work` where blocking is allowed.
    async fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, DockerConfigError> + Send + 'static,
    ) -> Result<T, DockerConfigError> {
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|aborted| self.failed("use", aborted.into()))?
    }

    async fn helper_for(&self, server: &str) -> Result<Option<String>, DockerConfigError> {
        let (config, server) = (self.clone(), server.to_owned());
        self.aside(move || config.helper(&server)).await
    }

    /// Returns the helper for a registry, the one of its own before the one for all.
    fn helper(&self, server: &str) -> Result<Option<String>, DockerConfigError> {
        let Helpers { own, all } = self.helpers(&self.read()?, server)?;
        Ok(own.or(all))
    }

    fn helpers(&self, document: &Document, server: &str) -> Result<Helpers, DockerConfigError> {
        let named = |value: Option<&Value>| match value.and_then(Value::as_str) {
            None | Some("") => Ok(None),
            Some(name) if name.contains('/') => {
                Err(self.malformed(format!("a credential helper cannot be called {name:?}")))
            }
            Some(name) => Ok(Some(name.to_owned())),
        };
        let own = document.get("credHelpers").and_then(|helpers| helpers.get(server));
        let own = named(own)?;
        let all = if own.is_none() { named(document.get("credsStore"))? } else { None };
        Ok(Helpers { own, all })
    }

    /// Returns what the file itself has for a registry.
    fn kept(
        &self,
        mut document: Document,
        server: &str,
    ) -> Result<Option<DockerCredential>, DockerConfigError> {
        // Helpers are run by us: with limits.
        document.retain(|name, _| name == "auths");
        let text = Value::Object(document).to_string();
        match docker_credential::get_credential_from_reader(text.as_bytes(), server) {
            Ok(found) => Ok(Some(found)),
            Err(CredentialRetrievalError::NoCredentialConfigured) => Ok(None),
            // Neither error quotes what is there.
            Err(error) => Err(self.malformed(format!("what it has for {server}: {error}"))),
        }
    }

    fn read(&self) -> Result<Document, DockerConfigError> {
        let mut content = Vec::new();
        let read =
            open(&self.path).and_then(|file| file.take(BYTES_MAX + 1).read_to_end(&mut content));
        match read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Document::new()),
            Err(source) => return Err(self.failed("read", source)),
            Ok(_) if u64::try_from(content.len()).unwrap_or(u64::MAX) > BYTES_MAX => {
                return Err(self.malformed("it has more than 1 MiB".to_owned()));
            }
            Ok(_) => {}
        }
        if content.iter().all(u8::is_ascii_whitespace) {
            return Ok(Document::new());
        }
        // The error names a place and never what is there.
        document::parse(&content).map_err(|error| {
            self.malformed(format!("line {}, column {}", error.line(), error.column()))
        })
    }

    /// Writes the file anew with a change.
    fn change(
        &self,
        change: impl FnOnce(&mut Document) -> Result<(), &'static str>,
    ) -> Result<(), DockerConfigError> {
        let write = |source| self.failed("write", source);
        // A link is followed, as Docker does: the file is often kept elsewhere.
        let path = match fs::canonicalize(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.path.clone(),
            other => other.map_err(write)?,
        };
        let directory = path.parent().unwrap_or(Path::new("."));
        make_private(directory).map_err(write)?;
        // Two of us at once do not lose each other's change.
        let lock = fs::File::open(directory).map_err(write)?;
        rustix::fs::flock(lock.file(), rustix::fs::FlockOperation::LockExclusive)
            .map_err(|error| write(error.into()))?;
        let mut document = self.read()?;
        change(&mut document).map_err(|what| self.malformed(what.to_owned()))?;
        let mut text = serde_json::to_string_pretty(&document)
            .map_err(|error| write(io::Error::other(error)))?;
        text.push('\n');
        // Made for its owner alone.
        let mut file = tempfile::NamedTempFile::new_in(directory).map_err(write)?;
        file.write_all(text.as_bytes()).map_err(write)?;
        file.as_file().sync_all().map_err(write)?;
        file.persist(&path).map_err(|error| write(error.error))?;
        lock.sync_all().map_err(write)
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> DockerConfigError {
        DockerConfigError::File { operation, path: self.path.clone(), source }
    }

    fn malformed(&self, what: String) -> DockerConfigError {
        DockerConfigError::Malformed { path: self.path.clone(), what }
    }
}

/// Returns what a registry is called in the file.
pub(crate) fn server(registry: &str) -> String {
    match registry {
        "docker.io" | "index.docker.io" | "registry-1.docker.io" => DOCKER_HUB.to_owned(),
        other => other.to_owned(),
    }
}

/// Whether a key of the file is another name of a registry: with a scheme and a path, as old files
/// have it.
fn is_for(key: &str, registry: &str) -> bool {
    let host = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let host = host.split_once('/').map_or(host, |(host, _path)| host);
    server(host) == server(registry)
}

fn make_private(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(directory)
}

/// Opens the file; a pipe in its place is no reason to wait.
fn open(path: &Path) -> io::Result<std::fs::File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// The helpers that are named for a registry.
struct Helpers {
    own: Option<String>,
    all: Option<String>,
}

/// What a helper answers.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Told {
    username: String,
    secret: String,
}

/// Asks a helper for what it keeps.
async fn ask(helper: &str, server: &str) -> Result<DockerCredential, DockerConfigError> {
    let told = run_within(helper, "get", server.as_bytes(), ASK_LIMIT).await?;
    // The error may quote a secret.
    let Ok(Told { username, secret }) = serde_json::from_slice(&told) else {
        return Err(failed(helper, "its answer is no credentials".to_owned()));
    };
    // So helpers say that it is no password.
    if username == "<token>" {
        return Ok(DockerCredential::IdentityToken(secret));
    }
    Ok(DockerCredential::UsernamePassword(username, secret))
}

/// Runs a helper with what it reads. What it writes is dropped: it may quote a secret.
async fn run(helper: &str, action: &str, input: &[u8]) -> Result<(), DockerConfigError> {
    run_within(helper, action, input, HELPER_LIMIT).await.map(drop)
}

/// Runs a helper with what it reads, and returns what it writes. It is killed at the limit, and when
/// nobody waits for it.
async fn run_within(
    helper: &str,
    action: &str,
    input: &[u8],
    limit: Duration,
) -> Result<Vec<u8>, DockerConfigError> {
    let failed = |what: String| failed(helper, what);
    let mut command = Command::new(program(helper));
    command.arg(action).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child =
        command.kill_on_drop(true).spawn().map_err(|error| failed(error.to_string()))?;
    let (input_pipe, output_pipe) = (child.stdin.take(), child.stdout.take());
    let work = async {
        let write = async {
            if let Some(mut pipe) = input_pipe {
                // One that ends without reading says by its exit what it thinks.
                let _broken = pipe.write_all(input).await;
            }
        };
        let read = async {
            let mut told = Vec::new();
            if let Some(pipe) = output_pipe {
                pipe.take(ANSWER_BYTES_MAX + 1).read_to_end(&mut told).await?;
            }
            Ok::<_, io::Error>(told)
        };
        let ((), told) = tokio::join!(write, read);
        let told = told?;
        if u64::try_from(told.len()).map_or(true, |length| length > ANSWER_BYTES_MAX) {
            return Err(io::Error::other("it says more than any credentials have"));
        }
        Ok((child.wait().await?, told))
    };
    match tokio::time::timeout(limit, work).await {
        Err(_elapsed) => Err(failed(format!("no end within {} s", limit.as_secs()))),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Ok(Ok((status, told))) if status.success() => Ok(told),
        Ok(Ok((status, _))) => Err(failed(format!("it ended with {status}"))),
    }
}

fn program(helper: &str) -> String {
    format!("docker-credential-{helper}")
}

fn failed(helper: &str, what: String) -> DockerConfigError {
    DockerConfigError::Helper { program: program(helper), what }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn config(content: Option<&str>) -> (tempfile::TempDir, DockerConfig) {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join(".docker/config.json");
        if let Some(content) = content {
            fs::create_dir(path.parent().unwrap()).unwrap();
            fs::write(&path, content).unwrap();
        }
        (home, DockerConfig::at(path))
    }

    fn written(config: &DockerConfig) -> Value {
        serde_json::from_slice(&fs::read(config.path()).unwrap()).unwrap()
    }

    fn reads(config: &DockerConfig, registry: &str) -> Option<(String, String)> {
        let file = fs::File::open(config.path()).unwrap();
        let found = docker_credential::get_credential_from_reader(file, &server(registry));
        match found {
            Ok(DockerCredential::UsernamePassword(user, password)) => Some((user, password)),
            _ => None,
        }
    }

    #[test]
    fn a_pipe_in_place_of_the_file_is_not_waited_for() {
        let (_home, config) = config(Some(""));
        fs::remove_file(config.path()).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, config.path(), mode).unwrap();
        assert!(config.read().unwrap().is_empty());
    }

    #[tokio::test]
    async fn what_is_kept_is_found_again_and_forgotten() {
        let (_home, config) = config(None);
        for registry in ["registry.example.com:5000", "docker.io"] {
            assert_eq!(config.keep(registry, "me", "pass:word é").await.unwrap(), Kept::File);
            let expected = ("me".to_owned(), "pass:word é".to_owned());
            assert_eq!(reads(&config, registry), Some(expected));
        }
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(config.path()), 0o600);
        assert_eq!(mode(config.path().parent().unwrap()), 0o700);
        assert!(config.forget("docker.io").await.unwrap());
        assert!(!config.forget("docker.io").await.unwrap());
        assert_eq!(reads(&config, "docker.io"), None);
        assert!(reads(&config, "registry.example.com:5000").is_some());
    }

    #[tokio::test]
    async fn everything_else_in_the_file_stays() {
        let before = r#"{"psFormat":"x","auths":{"other":{"auth":"YTpi"},"https://r.example/v1/":
            {"auth":"b2xk"}},"plugins":{"a":{"b":"c"}},"n":1}"#;
        let (_home, config) = config(Some(before));
        fs::set_permissions(config.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
        config.keep("r.example", "a", "b").await.unwrap();
        let expected = json!({
            "psFormat": "x", "plugins": { "a": { "b": "c" } }, "n": 1,
            "auths": { "other": { "auth": "YTpi" }, "r.example": { "auth": "YTpi" } },
        });
        assert_eq!(written(&config), expected);
        assert_eq!(fs::metadata(config.path()).unwrap().permissions().mode() & 0o777, 0o600);
        let left = fs::read_dir(config.path().parent().unwrap()).unwrap().count();
        assert_eq!(left, 1, "a temporary file is left");
    }

    #[tokio::test]
    async fn a_link_to_the_file_stays_a_link() {
        let (home, config) = config(Some("{}"));
        let real = home.path().join("real.json");
        fs::rename(config.path(), &real).unwrap();
        symlink(&real, config.path()).unwrap();
        config.keep("r.example", "a", "b").await.unwrap();
        assert!(fs::symlink_metadata(config.path()).unwrap().is_symlink());
        assert!(fs::read_to_string(&real).unwrap().contains("r.example"));
    }

    #[tokio::test]
    async fn a_file_that_is_not_dockers_is_left_alone() {
        let twice = r#"{"auths":{"r":{},"r":{}}}"#;
        for content in ["{", "[]", r#"{"auths":[]}"#, twice, r#"{"credsStore":"../x"}"#] {
            let (_home, config) = config(Some(content));
            let error = config.keep("r.example", "a", "secret").await.unwrap_err();
            assert!(matches!(error, DockerConfigError::Malformed { .. }), "{error}");
            assert_eq!(fs::read_to_string(config.path()).unwrap(), content);
        }
        let (_home, config) = config(None);
        let error = config.keep("r.example", "a:b", "secret").await.unwrap_err();
        assert!(matches!(error, DockerConfigError::User) && !config.path().exists());
    }

    #[tokio::test]
    async fn a_helper_that_is_not_there_is_named() {
        let (_home, config) = config(Some(r#"{"credHelpers":{"r.example":"kyb-none"}}"#));
        let error = config.keep("r.example", "a", "secret").await.unwrap_err();
        assert!(error.to_string().contains("docker-credential-kyb-none"), "{error}");
        assert!(!fs::read_to_string(config.path()).unwrap().contains("auths"));
        // Others do not go through it.
        assert_eq!(config.keep("other.example", "a", "b").await.unwrap(), Kept::File);
    }
}
