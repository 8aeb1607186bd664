//! What this node is, and why it could not take or restore checkpoints.
//!
//! The agent looks through this too, so that `kyb facts` says the same without one.

use std::collections::BTreeSet;
use std::io;
use std::process::Stdio;
use std::time::Duration;

use fs_err as fs;
use kybernate_spec::checkpoint::NodeFacts;
use tokio::process::Command;

mod cpu;
mod devices;
mod gpu;

/// `f_type` of a cgroup v2 mount (statfs(2)).
const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// First kernel with `CAP_CHECKPOINT_RESTORE` and what came with it.
const KERNEL_MIN: [u64; 2] = [5, 9];

/// First CRIU with everything runc asks for (external PID namespaces, cgroup v2, LSM profiles).
const CRIU_MIN: [u64; 2] = [3, 16];

/// Bound of one look at a program. `criu check` takes some 80 ms, nvidia-smi without persistence
/// mode seconds per GPU.
const PROGRAM_LIMIT: Duration = Duration::from_secs(20);

/// Facts, and what stands in the way.
#[derive(Clone, Debug, Default)]
pub struct NodeReport {
    /// What the node is. What could not be found out is empty.
    pub facts: NodeFacts,
    /// Why the node cannot take or restore checkpoints; empty when it can.
    pub problems: Vec<String>,
}

/// Looks at this node. `containerd` is its version, or why it is not known. Each program is
/// waited for at most 20 seconds.
pub async fn look(containerd: Result<String, String>) -> NodeReport {
    let mut problems = Vec::new();
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    if !rustix::process::geteuid().is_root() {
        problems.push("CRIU needs root, and whoever looked is not".to_owned());
    }
    if version(&kernel).as_slice() < KERNEL_MIN.as_slice() {
        let [major, minor] = KERNEL_MIN;
        problems.push(format!("kernel {kernel} is older than {major}.{minor}"));
    }
    // Each on its own: whoever asks waits for the slowest of them.
    let mut gpu_problems = Vec::new();
    let (said, checked, runc, iptables, gpu) = tokio::join!(
        run("criu", &["--version"]),
        run("criu", &["check"]),
        run("runc", &["--version"]),
        run("iptables-restore", &["--version"]),
        gpu::here(&mut gpu_problems),
    );
    let criu = criu(said, checked, &mut problems);
    let runtime = match runc {
        Ok(text) => runtime_version(&text),
        Err(error) => told(&mut problems, "runc cannot be used", &error),
    };
    if let Err(error) = iptables {
        let what = "CRIU cannot lock the network: iptables-restore cannot be used";
        told(&mut problems, what, &error);
    }
    let containerd = containerd.unwrap_or_else(|problem| {
        problems.push(problem);
        String::new()
    });
    problems.extend(gpu_problems);
    let facts = NodeFacts {
        architecture: architecture().to_owned(),
        kernel,
        page_bytes: u32::try_from(rustix::param::page_size()).unwrap_or_default(),
        cgroup: if is_cgroup_v2() { "v2" } else { "v1" }.to_owned(),
        lsm: lsm().to_owned(),
        cpu: cpu::here(),
        criu,
        runtime,
        containerd,
        os: os_name(&fs::read_to_string("/etc/os-release").unwrap_or_default()),
        seccomp: Some(fs::metadata("/proc/sys/kernel/seccomp/actions_avail").is_ok()),
        devices: Some(devices::here()),
        gpu,
    };
    NodeReport { facts, problems }
}

/// Returns the version of the containerd program, for who cannot ask the daemon.
pub async fn containerd_version() -> Result<String, String> {
    match run("containerd", &["--version"]).await {
        Ok(text) => Ok(containerd_word(&text)),
        Err(error) => Err(format!("containerd cannot be used: {}", why(&error))),
    }
}

/// Whether container runtimes use cgroup v2 here: what is mounted at /sys/fs/cgroup decides.
pub fn is_cgroup_v2() -> bool {
    let found = rustix::fs::statfs("/sys/fs/cgroup");
    matches!(found.map(|found| u64::try_from(found.f_type)), Ok(Ok(CGROUP2_MAGIC)))
}

/// Returns the architecture in Go's words.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

/// Reads the leading numbers of a version: `6.18.0-1-amd64` is `[6, 18, 0]`.
pub fn version(text: &str) -> Vec<u64> {
    let number = |part: &str| {
        let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part.get(..end)?.parse().ok()
    };
    text.split('.').map_while(number).collect()
}

/// Returns CRIU's version; notes when there is none, or it is too old, or does not work here.
fn criu(
    said: io::Result<String>,
    checked: io::Result<String>,
    problems: &mut Vec<String>,
) -> String {
    let found = match said {
        Ok(text) => field(&text, "Version:").unwrap_or_default().to_owned(),
        Err(error) => return told(problems, "CRIU cannot be used", &error),
    };
    if version(&found).as_slice() < CRIU_MIN.as_slice() {
        let [major, minor] = CRIU_MIN;
        problems.push(format!("CRIU {found} is older than {major}.{minor}"));
    }
    if let Err(error) = checked {
        told(problems, "CRIU does not work with this kernel (criu check)", &error);
    }
    found
}

fn told(problems: &mut Vec<String>, what: &str, error: &io::Error) -> String {
    problems.push(format!("{what}: {}", why(error)));
    String::new()
}

/// Says why a program cannot be run.
fn why(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "it is not installed, or not in PATH".to_owned(),
        _ => error.to_string(),
    }
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

/// `runc version 1.1.15+ds1` and further lines become `runc 1.1.15+ds1`.
fn runtime_version(text: &str) -> String {
    text.lines().next().unwrap_or_default().replacen(" version ", " ", 1)
}

/// `containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6` becomes `1.7.24~ds1`.
fn containerd_word(text: &str) -> String {
    text.split_whitespace().nth(2).unwrap_or_default().trim_start_matches('v').to_owned()
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

fn os_name(text: &str) -> String {
    field(text, "PRETTY_NAME=").map(|name| name.trim_matches('"').to_owned()).unwrap_or_default()
}

/// Returns what stands after `key` at the beginning of a line.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim)
}

/// Splits a list of words.
fn words(text: &str) -> BTreeSet<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert_eq!(version("6.18.0-1-amd64"), [6, 18, 0]);
        assert!(version("5.10").as_slice() > KERNEL_MIN.as_slice());
        assert!(version("4.19.1").as_slice() < KERNEL_MIN.as_slice());
        assert!(version("").as_slice() < CRIU_MIN.as_slice());
    }

    #[test]
    fn names_are_taken_from_what_programs_print() {
        assert_eq!(runtime_version("runc version 1.1.15+ds1\ncommit: x\n"), "runc 1.1.15+ds1");
        assert_eq!(os_name("NAME=x\nPRETTY_NAME=\"Debian 13\"\n"), "Debian 13");
        let debian = "containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6\n";
        assert_eq!(containerd_word(debian), "1.7.24~ds1");
        let upstream = "containerd github.com/containerd/containerd/v2 v2.1.9 0123abc\n";
        assert_eq!(containerd_word(upstream), "2.1.9");
    }

    #[tokio::test]
    async fn a_node_that_can_do_nothing_says_why() {
        let report = look(Err("nobody is at home".to_owned())).await;
        assert!(report.problems.iter().any(|problem| problem == "nobody is at home"));
        assert!(report.facts.page_bytes >= 4096);
        assert_eq!(report.facts.containerd, "");
    }
}
