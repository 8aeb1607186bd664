//! A container's network, and CRIU's lock on it. While it dumps or restores, rules of its own in the
//! container's network namespace drop every packet; a CRIU that is killed leaves them behind ([`unlock`],
//! [`unlock_given`], and [`unlock_each`] in the node's own). The agent has a lock of its own ([`hold()`]).

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use fs_err as fs;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

mod hold;
mod single;

pub(crate) use self::hold::{HOLD, hand_over, hold, let_go};
pub(crate) use self::single::unlock_each;
use crate::process;

/// Bound of one call; each takes a few milliseconds.
const CALL_LIMIT: Duration = Duration::from_secs(5);

/// The two that CRIU locks with when it is not told otherwise (`criu/net.c`).
const IPTABLES: [&str; 2] = ["iptables", "ip6tables"];

/// `RTM_NEWLINK`, and `NLM_F_REQUEST | NLM_F_ACK`.
const NEW_LINK: u16 = 16;
const REQUEST_ACK: u16 = 5;
/// `NLMSG_ERROR`, which is the answer also when all is well.
const ERROR: u16 = 2;
/// The number of the loopback device in every network namespace, and `IFF_UP`.
const LOOPBACK: u32 = 1;
const UP: u32 = 1;
/// `nlmsghdr`, the error, and the request that it is about.
const ANSWER: usize = 16 + 4 + 32;

/// How many jumps to CRIU's chain are taken away: a container may add some of its own all the time.
const JUMPS_MAX: u32 = 64;

/// How iptables ends when it did not get its lock in time (`RESOURCE_PROBLEM`).
const LOCKED: i32 = 4;

/// How the table is called that CRIU locks with after `network-lock nftables`.
const TABLE: &str = "CRIU-";

/// Returns the network namespace of a process.
pub(crate) fn of(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/ns/net"))
}

/// Returns the network namespace that a specification gives to its container.
pub(crate) fn given(spec: &Value) -> Option<PathBuf> {
    let mut namespaces = spec.pointer("/linux/namespaces")?.as_array()?.iter();
    let network = namespaces.find(|one| one["type"] == "network")?;
    network["path"].as_str().filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Removes the lock that a restore has left in the network namespace that its container was given, and
/// that outlives it: runc has CRIU lock each one as the dump was locked (`setEmptyNsMask`). Nothing when
/// that is gone, or is the node's own, which CRIU does not lock so. Two locks cannot be told apart: that
/// of a dump of another container there is removed too.
pub(crate) async fn unlock_given(net: &Path) -> io::Result<()> {
    if process::is_the_nodes(net) { Ok(()) } else { unlock(net).await }
}

/// Removes the lock from a network namespace, if it is there. Where a tool is not installed, CRIU had
/// none to lock with either.
pub(crate) async fn unlock(net: &Path) -> io::Result<()> {
    for tool in IPTABLES {
        match call(net, &[tool, "-w", "2", "-n", "-L", "CRIU"]).await {
            Ok(_) => {}
            // Somebody else is at the rules, and nothing is known.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error),
            Err(_) => continue,
        }
        tracing::warn!(?net, tool, "removing the network lock of a CRIU that did not end well");
        for chain in ["INPUT", "OUTPUT"] {
            // One for each CRIU that was killed, and none for one that was about to end.
            for _ in 0..JUMPS_MAX {
                if call(net, &[tool, "-w", "2", "-D", chain, "-j", "CRIU"]).await.is_err() {
                    break;
                }
            }
        }
        call(net, &[tool, "-w", "2", "-F", "CRIU"]).await?;
        if let Err(error) = call(net, &[tool, "-w", "2", "-X", "CRIU"]).await {
            // Whoever else leads there is let through by now.
            tracing::warn!(?net, tool, %error, "an empty chain of CRIU's stays");
        }
    }
    let tables = call(net, &["nft", "list", "tables", "inet"]).await.unwrap_or_default();
    let named = tables.lines().filter_map(|line| line.strip_prefix("table inet "));
    for table in named.filter(|name| is_table(name, TABLE)) {
        tracing::warn!(?net, table, "removing the network lock of a CRIU that did not end well");
        call(net, &["nft", "delete", "table", "inet", table]).await?;
    }
    Ok(())
}

/// Whether a table is called as ours or CRIU's are. A container may call its own whatever it likes, and
/// nft reads its arguments as commands.
fn is_table(name: &str, mark: &str) -> bool {
    let rest = name.strip_prefix(mark);
    rest.is_some_and(|rest| rest.bytes().all(|sign| sign.is_ascii_alphanumeric() || sign == b'-'))
}

/// Brings up the loopback device in the network namespace of `pid`: in one that CRIU makes anew it is
/// down (measured with 4.2.1), although it was up when it was dumped.
pub(crate) async fn loopback(pid: u32) -> io::Result<()> {
    let net = of(pid);
    let set = tokio::task::spawn_blocking(move || within(&net, set_loopback));
    set.await.map_err(io::Error::other)?
}

/// Does something in the network namespace at `net`, as /proc/PID/ns/net.
pub(crate) fn within<T: Send + 'static>(
    net: &Path,
    what: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let namespace = OwnedFd::from(fs::File::open(net)?.into_parts().0);
    // A thread of its own: it ends in that namespace, and so nobody else is moved.
    let thread = std::thread::spawn(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        what()
    });
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread broke off")))
}

/// Asks for the flag `IFF_UP` (rtnetlink(7)). A program that does it takes 3 ms to start and end.
fn set_loopback() -> io::Result<()> {
    // NETLINK_ROUTE is the protocol that has no number of its own.
    let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
    let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
    send(&socket, &request(), SendFlags::empty())?;
    let mut answer = [0; ANSWER];
    let (length, _) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
    let part = |range| answer.get(..length).and_then(|answer: &[u8]| answer.get(range));
    let kind = part(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let error = part(16..20).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, error) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(error)) => Err(io::Error::from_raw_os_error(error.saturating_neg())),
        _ => Err(io::Error::other("the kernel answers something else")),
    }
}

/// `nlmsghdr`, then `ifinfomsg`.
fn request() -> Vec<u8> {
    let mut bytes = Vec::from(32_u32.to_ne_bytes());
    bytes.extend([NEW_LINK, REQUEST_ACK].iter().flat_map(|half| half.to_ne_bytes()));
    // A number and a port, which nobody else uses; any family and type; then the device, its flags
    // and which of them count.
    bytes.extend([1, 0, 0, LOOPBACK, UP, UP].iter().flat_map(|word: &u32| word.to_ne_bytes()));
    bytes
}

/// Runs a program in a network namespace and returns what it printed.
async fn call(net: &Path, words: &[&str]) -> io::Result<String> {
    call_with(net, words, "").await
}

/// The same with something to read.
async fn call_with(net: &Path, words: &[&str], input: &str) -> io::Result<String> {
    let mut command = Command::new("nsenter");
    command
        .args([&format!("--net={}", net.display()), "--"])
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let called = async {
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // One that reads nothing says by its end how it went.
            stdin.write_all(input.as_bytes()).await.unwrap_or_default();
        }
        child.wait_with_output().await
    };
    let output = tokio::time::timeout(CALL_LIMIT, called).await??;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let kind = match output.status.code() {
        Some(LOCKED) => io::ErrorKind::TimedOut,
        _ => io::ErrorKind::Other,
    };
    let told = format!("{words:?} ended with {}: {}", output.status, said.trim());
    Err(io::Error::new(kind, told))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    #[test]
    fn tables_of_containers_are_no_commands() {
        assert!(is_table("CRIU-42", TABLE) && is_table("kybernate-01a2-b", "kybernate-"));
        for name in ["CRIU-1; include \"/etc/shadow\"", "CRIU-1 x", "CRIU", "x-CRIU-1", "CRIU-1\n"]
        {
            assert!(!is_table(name, TABLE), "{name}");
        }
    }

    #[test]
    fn loopback_comes_up_in_a_network_of_its_own() {
        let mut other = std::process::Command::new("unshare");
        let mut other = other
            .args(["--net", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // It is in its own network by the time it answers.
        other.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        other.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let net = PathBuf::from(format!("/proc/{}/ns/net", other.id()));
        let reached =
            || within(&net, || std::net::UdpSocket::bind("127.0.0.1:0")?.connect("127.0.0.1:9"));
        assert_eq!(reached().unwrap_err().raw_os_error(), Some(libc::ENETUNREACH));
        within(&net, set_loopback).unwrap();
        reached().unwrap();
        within(&net, set_loopback).unwrap();
        drop(other.stdin.take());
        assert!(other.wait().unwrap().success());
        let gone = within(&net, || Ok(())).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }
}
