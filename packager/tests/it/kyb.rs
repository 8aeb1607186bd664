//! The built `kyb`.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Output, Stdio};

use rustix::process::Signal;
use tokio::process::Command;

/// What a run of `kyb` did.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) told: String,
}

/// Runs `kyb` without a terminal, with the password `secret`.
pub(crate) async fn kyb<A: AsRef<OsStr>>(
    directory: &Path,
    arguments: impl IntoIterator<Item = A>,
) -> Ran {
    kyb_trusting(directory, None, arguments).await
}

/// Runs `kyb` as [`kyb`] does; certificates of no authority but `trusted` are accepted.
pub(crate) async fn kyb_trusting<A: AsRef<OsStr>>(
    directory: &Path,
    trusted: Option<&Path>,
    arguments: impl IntoIterator<Item = A>,
) -> Ran {
    let variables = trusted.map(|file| ("SSL_CERT_FILE", file.as_os_str()));
    kyb_with(directory, variables.as_slice(), arguments).await
}

/// Runs `kyb` as [`kyb`] does, with more in its environment.
pub(crate) async fn kyb_with<A: AsRef<OsStr>>(
    directory: &Path,
    variables: &[(&str, &OsStr)],
    arguments: impl IntoIterator<Item = A>,
) -> Ran {
    kyb_fed(directory, variables, Stdio::null(), arguments).await
}

/// Runs `kyb` as [`kyb_with`] does, with something to read.
pub(crate) async fn kyb_fed<A: AsRef<OsStr>>(
    directory: &Path,
    variables: &[(&str, &OsStr)],
    input: Stdio,
    arguments: impl IntoIterator<Item = A>,
) -> Ran {
    let output: Output = Command::new(env!("CARGO_BIN_EXE_kyb"))
        .args(arguments)
        .current_dir(directory)
        .env("COSIGN_PASSWORD", "secret")
        .env("HOME", directory)
        .env("COLUMNS", "100")
        .env_remove("XDG_CACHE_HOME")
        .env_remove("KYB_LOG")
        .env_remove("TRACEPARENT")
        .env_remove("DOCKER_CONFIG")
        .env_remove("KYBERNATE_AGENT_SOCKET")
        .env_remove("KYB_AGENT")
        .env_remove("KYB_PLAIN_HTTP")
        .env_remove("SSL_CERT_DIR")
        .env_remove("SSL_CERT_FILE")
        .envs(variables.iter().copied())
        .stdin(input)
        .kill_on_drop(true)
        .output()
        .await
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code().unwrap(), out: text(output.stdout), told: text(output.stderr) }
}

impl Ran {
    /// Returns the JSON it printed, when it succeeded.
    pub(crate) fn json(&self) -> serde_json::Value {
        assert_eq!(self.code, 0, "{self:?}");
        serde_json::from_str(&self.out).unwrap()
    }

    /// Fails unless it ended with `code` and said `why`.
    pub(crate) fn ended(&self, code: i32, why: &str) {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.told.contains(why), "{self:?}");
        assert!(!self.told.contains("secret") && !self.out.contains("secret"), "{self:?}");
    }
}

/// Waits until something is so, half a minute at most.
pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !so() {
        assert!(begun.elapsed() < std::time::Duration::from_secs(30), "{what} in vain");
        std::thread::yield_now();
    }
}

/// Asks the child of this process that has `argument` to end.
pub(crate) fn terminate_child_with(argument: &str) {
    signal_child_with(argument, Signal::TERM);
}

/// Sends a signal to a `kyb` that runs with this argument.
pub(crate) fn signal_child_with(argument: &str, signal: Signal) {
    let this = std::process::id().to_string();
    let is_it = |pid: &str| {
        let read = |name: &str| fs_err::read_to_string(format!("/proc/{pid}/{name}"));
        let parent =
            read("status").is_ok_and(|status| status.contains(&format!("PPid:\t{this}\n")));
        parent && read("cmdline").is_ok_and(|line| line.contains(argument))
    };
    let pid = fs_err::read_dir("/proc")
        .unwrap()
        .find_map(|entry| entry.unwrap().file_name().into_string().ok().filter(|pid| is_it(pid)))
        .unwrap();
    let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}
