//! The registries that are compared, each on a directory of its own.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use fs_err as fs;

use super::super::meter::processor_of_process;
use super::wire::Wire;
use crate::command::wait_until;
use crate::process::Service;

/// How long a start may take.
const START_TIMEOUT: Duration = Duration::from_mins(1);

/// A program that serves a directory.
#[derive(Clone, Debug)]
pub(in crate::bench) struct Program {
    /// Its name in the table.
    pub(in crate::bench) name: String,
    path: PathBuf,
    ours: bool,
}

/// One that runs.
#[derive(Debug)]
pub(in crate::bench) struct Server {
    /// Where it listens.
    pub(in crate::bench) address: SocketAddr,
    /// From its start to its first answer.
    pub(super) started: Duration,
    pid: u32,
    service: Service,
}

impl Program {
    /// Returns ours, Debian's docker-registry, and distribution where it was built.
    pub(in crate::bench) fn all(bin: &Path, cache: &Path) -> Vec<Self> {
        let ours = bin.join("kybernate-registry");
        let program = |name: &str, path: PathBuf, ours| Self { name: name.to_owned(), path, ours };
        let mut all = vec![program("kybernate", ours, true)];
        let debian = PathBuf::from("/usr/bin/docker-registry");
        if debian.exists() {
            all.push(program("docker-registry 2.8.2", debian, false));
        }
        let distribution = cache.join("tools/bin/distribution-v3.1.2");
        if distribution.exists() {
            all.push(program("distribution 3.1.2", distribution, false));
        }
        all
    }

    /// Whether it is the one that the others are compared with.
    pub(in crate::bench) const fn is_ours(&self) -> bool {
        self.ours
    }

    /// Starts it on `root` and waits until it answers.
    pub(in crate::bench) fn start(&self, root: &Path) -> anyhow::Result<Server> {
        fs::create_dir_all(root)?;
        let address = free_address()?;
        let log = fs::File::create(root.with_extension("log"))?;
        let mut command = Command::new(&self.path);
        command.stdin(Stdio::null()).stderr(log.into_file());
        if self.ours {
            command.args(["serve", "--log", "warn", "--listen", &address.to_string(), "--root"]);
            command.arg(root);
        } else {
            let file = root.with_extension("yml");
            fs::write(&file, configuration(root, address))?;
            command.arg("serve").arg(file).env("OTEL_TRACES_EXPORTER", "none");
        }
        let began = Instant::now();
        let mut service = Service::start(&mut command)?;
        if self.ours {
            // The others say nothing; they are asked every few milliseconds.
            service.wait_for_line("listening on ")?;
        }
        let answers =
            || Wire::connect(address).is_ok_and(|mut wire| wire.ask("GET", "/v2/").is_ok());
        ensure!(wait_until(START_TIMEOUT, answers), "{} does not answer", self.name);
        let started = began.elapsed();
        Ok(Server { address, started, pid: service.process()?.pid, service })
    }
}

impl Server {
    /// Processor time so far.
    pub(super) fn processor(&self) -> anyhow::Result<Duration> {
        processor_of_process(self.pid)
    }

    /// The most memory it had resident since [`Server::forget_memory`], in MiB.
    pub(super) fn memory(&self) -> anyhow::Result<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let text = line.context("no VmHWM")?.trim().trim_end_matches(" kB");
        Ok(text.parse::<f64>()? / 1024.0)
    }

    /// Counts memory from here on.
    pub(super) fn forget_memory(&self) -> io::Result<()> {
        fs::write(format!("/proc/{}/clear_refs", self.pid), "5")
    }

    pub(in crate::bench) fn stop(self) -> io::Result<()> {
        self.service.stop()
    }
}

fn configuration(root: &Path, address: SocketAddr) -> String {
    let root = root.display();
    format!(
        "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n\
         http: {{addr: \"{address}\"}}\n\
         storage: {{filesystem: {{rootdirectory: \"{root}\"}}, delete: {{enabled: true}}}}\n"
    )
}

fn free_address() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}
