//! CRIU's lock on a container's network. While it dumps, rules of its own in the container's
//! network namespace drop every packet; a CRIU that is killed leaves them behind.

use std::io;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

/// Bound of one call; each takes a few milliseconds.
const CALL_LIMIT: Duration = Duration::from_secs(5);

/// The two that CRIU locks with when it is not told otherwise (`criu/net.c`).
const IPTABLES: [&str; 2] = ["iptables", "ip6tables"];

/// How the table is called that CRIU locks with after `network-lock nftables`.
const TABLE: &str = "CRIU-";

/// Removes the lock from the network namespace of `pid`, if it is there. Where a tool is not
/// installed, CRIU had none to lock with either.
pub(crate) async fn unlock(pid: u32) -> io::Result<()> {
    for tool in IPTABLES {
        if call(pid, &[tool, "-w", "2", "-n", "-L", "CRIU"]).await.is_err() {
            continue;
        }
        tracing::warn!(pid, tool, "removing the network lock of a CRIU that did not end well");
        for chain in ["INPUT", "OUTPUT"] {
            // One for each CRIU that was killed, and none for one that was about to end.
            while call(pid, &[tool, "-w", "2", "-D", chain, "-j", "CRIU"]).await.is_ok() {}
        }
        call(pid, &[tool, "-w", "2", "-F", "CRIU"]).await?;
        call(pid, &[tool, "-w", "2", "-X", "CRIU"]).await?;
    }
    let tables = call(pid, &["nft", "list", "tables", "inet"]).await.unwrap_or_default();
    let named = tables.lines().filter_map(|line| line.strip_prefix("table inet "));
    for table in named.filter(|name| name.starts_with(TABLE)) {
        tracing::warn!(pid, table, "removing the network lock of a CRIU that did not end well");
        call(pid, &["nft", "delete", "table", "inet", table]).await?;
    }
    Ok(())
}

/// Brings up the loopback device in the network namespace of `pid`: in one that CRIU makes anew it is
/// down (measured with 4.2.1), although it was up when it was dumped.
pub(crate) async fn loopback(pid: u32) -> io::Result<()> {
    call(pid, &["ip", "link", "set", "lo", "up"]).await.map(drop)
}

/// Runs a program in the network namespace of `pid` and returns what it printed.
async fn call(pid: u32, words: &[&str]) -> io::Result<String> {
    let mut command = Command::new("nsenter");
    command
        .args(["--target", &pid.to_string(), "--net", "--"])
        .args(words)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(CALL_LIMIT, command.output()).await??;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{words:?} ended with {}: {}", output.status, said.trim())))
}
