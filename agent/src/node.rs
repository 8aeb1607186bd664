//! What this node is, and why it could not take or restore checkpoints.

use std::collections::BTreeSet;
use std::io;
use std::process::Stdio;
use std::time::Duration;

use fs_err as fs;
use kybernate_spec::chain;
use kybernate_spec::checkpoint::{CpuFacts, NodeFacts};
use tokio::process::Command;
use tokio::time::Instant;

use crate::cgroup;
use crate::process::field;
use crate::runtime::Containerd;

/// First kernel with `CAP_CHECKPOINT_RESTORE` and what came with it.
const KERNEL_MIN: [u64; 2] = [5, 9];

/// First CRIU with everything runc asks for (external PID namespaces, cgroup v2, LSM profiles).
const CRIU_MIN: [u64; 2] = [3, 16];

/// How long facts are believed; programs may be upgraded under us.
const FRESH: Duration = Duration::from_mins(1);

/// Bound of one look at a program. `criu check` takes some 80 ms.
const PROGRAM_LIMIT: Duration = Duration::from_secs(20);

/// Facts, and what stands in the way.
#[derive(Clone, Debug)]
pub(crate) struct NodeReport {
    pub(crate) facts: NodeFacts,
    /// Why the node cannot take or restore checkpoints; empty when it can.
    pub(crate) problems: Vec<String>,
}

/// Keeps the last look.
#[derive(Debug, Default)]
pub(crate) struct NodeCache {
    // Held while looking, so that requests at the same time look once. A tokio mutex because
    // looking awaits programs and containerd.
    last: tokio::sync::Mutex<Option<(Instant, NodeReport)>>,
}

impl NodeCache {
    /// Looks at the node, unless that was done just now and all was well.
    pub(crate) async fn report(&self, containerd: &Containerd) -> NodeReport {
        let mut last = self.last.lock().await;
        if let Some((when, report)) = &*last
            && report.problems.is_empty()
            && when.elapsed() < FRESH
        {
            return report.clone();
        }
        let report = look(containerd).await;
        *last = Some((Instant::now(), report.clone()));
        report
    }
}

async fn look(containerd: &Containerd) -> NodeReport {
    let mut problems = Vec::new();
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    if !rustix::process::geteuid().is_root() {
        problems.push("the agent does not run as root".to_owned());
    }
    if numbers(&kernel).as_slice() < KERNEL_MIN.as_slice() {
        let [major, minor] = KERNEL_MIN;
        problems.push(format!("kernel {kernel} is older than {major}.{minor}"));
    }
    let criu = criu(&mut problems).await;
    let runtime = match run("runc", &["--version"]).await {
        Ok(text) => runtime_version(&text),
        Err(error) => told(&mut problems, "runc cannot be used", &error),
    };
    if let Err(error) = run("iptables-restore", &["--version"]).await {
        let what = "CRIU cannot lock the network: iptables-restore cannot be used";
        told(&mut problems, what, &error);
    }
    let containerd = containerd.version().await.unwrap_or_else(|error| {
        problems.push(chain(&error).to_string());
        String::new()
    });
    let facts = NodeFacts {
        architecture: architecture().to_owned(),
        kernel,
        page_bytes: u32::try_from(rustix::param::page_size()).unwrap_or_default(),
        cgroup: cgroup::Version::here().name().to_owned(),
        lsm: lsm().to_owned(),
        cpu: cpu(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
        criu,
        runtime,
        containerd,
        os: os_name(&fs::read_to_string("/etc/os-release").unwrap_or_default()),
    };
    NodeReport { facts, problems }
}

/// Returns CRIU's version; notes when there is none, or it is too old, or does not work here.
async fn criu(problems: &mut Vec<String>) -> String {
    let version = match run("criu", &["--version"]).await {
        Ok(text) => field(&text, "Version:").unwrap_or_default().to_owned(),
        Err(error) => return told(problems, "CRIU cannot be used", &error),
    };
    if numbers(&version).as_slice() < CRIU_MIN.as_slice() {
        let [major, minor] = CRIU_MIN;
        problems.push(format!("CRIU {version} is older than {major}.{minor}"));
    }
    if let Err(error) = run("criu", &["check"]).await {
        told(problems, "CRIU does not work with this kernel (criu check)", &error);
    }
    version
}

fn told(problems: &mut Vec<String>, what: &str, error: &io::Error) -> String {
    problems.push(format!("{what}: {error}"));
    String::new()
}

/// Runs a program and returns what it printed.
async fn run(program: &str, arguments: &[&str]) -> io::Result<String> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(PROGRAM_LIMIT, command.output()).await??;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    Err(io::Error::other(format!("{}, {last}", output.status)))
}

/// Returns the architecture in Go's words.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

/// `runc version 1.1.15+ds1` and further lines become `runc 1.1.15+ds1`.
fn runtime_version(text: &str) -> String {
    text.lines().next().unwrap_or_default().replacen(" version ", " ", 1)
}

fn lsm() -> &'static str {
    let apparmor = fs::read_to_string("/sys/module/apparmor/parameters/enabled");
    if fs::metadata("/sys/fs/selinux/enforce").is_ok() {
        "selinux"
    } else if apparmor.is_ok_and(|enabled| enabled.trim() == "Y") {
        "apparmor"
    } else {
        "none"
    }
}

/// Reads the first processor of /proc/cpuinfo: on the machines we know all have the same features.
fn cpu(text: &str) -> CpuFacts {
    let value = |keys: [&str; 2]| {
        text.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            keys.contains(&key.trim()).then(|| value.trim().to_owned())
        })
    };
    let features = value(["flags", "Features"]).unwrap_or_default();
    CpuFacts {
        vendor: value(["vendor_id", "CPU implementer"]).unwrap_or_default(),
        model: value(["model name", "CPU part"]).unwrap_or_default(),
        features: features.split_whitespace().map(str::to_owned).collect::<BTreeSet<_>>(),
    }
}

fn os_name(text: &str) -> String {
    field(text, "PRETTY_NAME=").map(|name| name.trim_matches('"').to_owned()).unwrap_or_default()
}

/// Reads the leading numbers of a version.
pub(crate) fn numbers(text: &str) -> Vec<u64> {
    let number = |part: &str| {
        let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part.get(..end)?.parse().ok()
    };
    text.split('.').map_while(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_processor_speaks_for_all() {
        let text = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: EPYC\n\
                    flags\t\t: fpu avx2 avx\n\nprocessor\t: 1\nflags\t\t: none\n";
        let cpu = cpu(text);
        assert_eq!((&*cpu.vendor, &*cpu.model), ("AuthenticAMD", "EPYC"));
        assert_eq!(cpu.features, ["avx", "avx2", "fpu"].map(str::to_owned).into());
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert_eq!(numbers("6.18.0-1-amd64"), [6, 18, 0]);
        assert!(numbers("5.10").as_slice() > KERNEL_MIN.as_slice());
        assert!(numbers("4.19.1").as_slice() < KERNEL_MIN.as_slice());
        assert!(numbers("").as_slice() < CRIU_MIN.as_slice());
    }

    #[test]
    fn names_are_taken_from_what_programs_print() {
        assert_eq!(runtime_version("runc version 1.1.15+ds1\ncommit: x\n"), "runc 1.1.15+ds1");
        assert_eq!(os_name("NAME=x\nPRETTY_NAME=\"Debian 13\"\n"), "Debian 13");
    }

    #[tokio::test]
    async fn a_node_that_can_do_nothing_says_why() {
        let directory = tempfile::tempdir().unwrap();
        let report = look(&Containerd::at(&directory.path().join("nobody.sock"))).await;
        assert!(report.problems.iter().any(|problem| problem.contains("nobody.sock")));
        assert!(report.facts.page_bytes >= 4096);
    }
}
