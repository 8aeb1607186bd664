//! Registries that run for one test.

use std::io::{BufRead as _, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use kybernate_packager::store::{ConnectOptions, Store};
use kybernate_spec::Location;
use tempfile::TempDir;
use tokio::net::TcpSocket;

/// Lines of a registry's log read in search of its address.
const LINES_MAX: usize = 200;

/// The user `kyb` with the password `pass-word-1`, as htpasswd has it.
const USER: &str = "kyb:$2b$05$/M8myrSbtZEln8gmnYtA2eq45pWZTU920EiVurqNnmbL.QnZlUuY2\n";

/// A registry on a port of its own, stopped when dropped.
pub(crate) struct Registry {
    child: Child,
    root: TempDir,
    address: String,
}

impl Registry {
    /// Starts Debian's docker-registry 2.8: no list of referrers, so fallback tags.
    pub(crate) fn docker() -> Option<Self> {
        Self::docker_with("")
    }

    /// Starts one that only the user `kyb` with the password `pass-word-1` may use.
    pub(crate) fn docker_with_password() -> Option<Self> {
        Self::docker_with("auth: {htpasswd: {realm: r, path: USERS}}\n")
    }

    fn docker_with(more: &str) -> Option<Self> {
        Self::of_docker(Path::new("/usr/bin/docker-registry"), more)
    }

    /// Starts distribution 3.1, when `make` has built it for the benchmark: it tells how far an
    /// upload is.
    pub(crate) fn distribution() -> Option<Self> {
        let cache = std::env::var_os("KYBERNATE_CACHE").unwrap_or("/var/cache/kybernate".into());
        let tools = Path::new(&cache).join("tools/bin");
        let program = fs_err::read_dir(tools).ok()?.find_map(|entry| {
            let path = entry.ok()?.path();
            path.to_str()?.contains("/distribution-v3.").then_some(path)
        });
        Self::of_docker(&program?, "")
    }

    fn of_docker(program: &Path, more: &str) -> Option<Self> {
        if !program.exists() {
            eprintln!("SKIPPED: {} is not installed", program.display());
            return None;
        }
        let root = tempfile::tempdir().unwrap();
        let data = root.path().join("data");
        let config = root.path().join("config.yml");
        let users = root.path().join("users");
        fs_err::write(&users, USER).unwrap();
        let more = more.replace("USERS", &users.display().to_string());
        let text = format!(
            "version: 0.1\nlog: {{level: info, accesslog: {{disabled: true}}}}\n\
             storage: {{filesystem: {{rootdirectory: {}}}, delete: {{enabled: true}}}}\n\
             http: {{addr: \"127.0.0.1:0\"}}\n{more}",
            data.display()
        );
        fs_err::write(&config, text).unwrap();
        let mut command = Command::new(program);
        command.arg("serve").arg(config).stdout(Stdio::null()).stderr(Stdio::piped());
        Some(Self::start(command, root))
    }

    /// Starts our own registry, when it has been built.
    pub(crate) fn ours() -> Option<Self> {
        Self::ours_with("", &[])
    }

    /// Starts our own with a configuration, in which `DIR/NAME` is one of `files`. `DIR/users` has
    /// the user `kyb` with the password `pass-word-1`.
    pub(crate) fn ours_with(config: &str, files: &[(&str, &str)]) -> Option<Self> {
        let program = Path::new(env!("CARGO_BIN_EXE_kyb")).with_file_name("kybernate-registry");
        if !program.exists() {
            eprintln!("SKIPPED: {} has not been built", program.display());
            return None;
        }
        let root = tempfile::tempdir().unwrap();
        for (name, content) in [("users", USER)].iter().chain(files) {
            fs_err::write(root.path().join(name), content).unwrap();
        }
        let config = config.replace("DIR", &root.path().display().to_string());
        fs_err::write(root.path().join("config.toml"), config).unwrap();
        let mut command = Command::new(program);
        command.args(["serve", "--listen", "127.0.0.1:0", "--root"]).arg(root.path().join("data"));
        command.arg("--config").arg(root.path().join("config.toml"));
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        Some(Self::start(command, root))
    }

    /// Starts every registry there is.
    pub(crate) fn all() -> Vec<Self> {
        [Self::docker(), Self::ours(), Self::distribution()].into_iter().flatten().collect()
    }

    fn start(mut command: Command, root: TempDir) -> Self {
        let mut child = command.stdin(Stdio::null()).spawn().unwrap();
        let pipe: Box<dyn Read + Send> = match (child.stdout.take(), child.stderr.take()) {
            (Some(stdout), _) => Box::new(stdout),
            (None, stderr) => Box::new(stderr.unwrap()),
        };
        let mut told = BufReader::new(pipe);
        let mut seen = String::new();
        let address = (0..LINES_MAX).find_map(|_| {
            let begin = seen.len();
            told.read_line(&mut seen).unwrap();
            listening(seen.get(begin..).unwrap())
        });
        let address = address.unwrap_or_else(|| panic!("it names no address: {seen}"));
        // A registry that cannot write there stops. Ends with the registry.
        std::thread::spawn(move || std::io::copy(&mut told, &mut std::io::sink()));
        Self { child, root, address }
    }

    /// Returns `127.0.0.1:port`.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Returns where the registry keeps its data.
    pub(crate) fn data(&self) -> PathBuf {
        self.root.path().join("data")
    }

    /// Names something in this registry.
    pub(crate) fn at(&self, path: &str) -> Location {
        format!("{}/{path}", self.address).parse().unwrap()
    }

    /// Opens a repository of this registry.
    pub(crate) async fn open(&self, path: &str) -> Store {
        open(&self.at(path)).await
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // It may have died by itself, and then the test has failed already.
        if self.child.kill().is_ok() {
            let _status = self.child.wait();
        }
    }
}

/// Returns an address at which nobody listens, nor will as long as the socket lives that has it.
pub(crate) fn nobodys_address() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// Opens a place with the usual options.
pub(crate) async fn open(location: &Location) -> Store {
    Store::open(location, &ConnectOptions::default()).await.unwrap()
}

/// Finds `127.0.0.1:port` in a line that says where a server listens.
fn listening(line: &str) -> Option<String> {
    let (_, rest) = line.contains("listening").then(|| line.split_once("127.0.0.1:"))??;
    let port: String = rest.chars().take_while(char::is_ascii_digit).collect();
    (!port.is_empty()).then(|| format!("127.0.0.1:{port}"))
}
