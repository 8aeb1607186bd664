//! The TCP connections of a container's processes around a dump that keeps them (`--tcp keep`).
//!
//! CRIU puts each of their sockets into the kernel's repair mode while it dumps ([`repair`]), and one
//! that is killed leaves them there: readers are denied, and nothing is sent. Whoever lets the container
//! run on puts them right first, by the note that was left before the dump.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;

use fs_err as fs;
use rustix::net::sockopt::{set_socket_reuseaddr, socket_protocol, socket_reuseaddr};
use rustix::net::{getpeername, getsockname, ipproto};
use rustix::process::{ForeignRawFd, Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::cgroup::Freezer;
use crate::{network, process};

mod repair;

/// Descriptors that are looked at, of all processes together: as the preflight.
const FILES_MAX: usize = 100_000;

/// The note, in an operation's directory.
const NOTE: &str = "connections";

/// In the same place, when the container ends with its checkpoint.
const ENDS: &str = "connections-end";

/// Local and remote address of a connection.
pub(crate) type Ends = (SocketAddr, SocketAddr);

/// One end of a connection, which a process has open.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Of the socket.
    number: u64,
    pub(crate) ends: Ends,
    socket: OwnedFd,
}

/// Returns the connections that processes have open.
pub(crate) fn of(pids: &[u32]) -> Vec<Connection> {
    let (mut found, mut seen, mut left) = (Vec::new(), BTreeSet::new(), FILES_MAX);
    for pid in pids {
        let id = i32::try_from(*pid).ok().and_then(Pid::from_raw);
        // What ends meanwhile has no connections.
        let Some(Ok(process)) = id.map(|id| pidfd_open(id, PidfdFlags::empty())) else { continue };
        let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for file in files.filter_map(Result::ok).take(left) {
            left -= 1;
            let Some(number) = socket(&file.path()).filter(|number| seen.insert(*number)) else {
                continue;
            };
            let place = file.file_name().to_str().and_then(|place| place.parse().ok());
            let taken = place.map(|place| connection(&process, place, number));
            found.extend(taken.and_then(Result::ok).flatten());
        }
    }
    if left == 0 {
        tracing::warn!("not all descriptors of a container were looked at: it has too many");
    }
    found
}

/// Returns the number of a socket by its link in `/proc/PID/fd`.
fn socket(link: &Path) -> Option<u64> {
    let target = fs::read_link(link).ok()?;
    target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Takes a descriptor of a process's for a moment; nothing when it is no TCP connection.
fn connection(
    process: &OwnedFd,
    place: ForeignRawFd,
    number: u64,
) -> io::Result<Option<Connection>> {
    let socket = pidfd_getfd(process, place, PidfdGetfdFlags::empty())?;
    if socket_protocol(&socket)? != Some(ipproto::TCP) {
        return Ok(None);
    }
    let Some(remote) = getpeername(&socket)? else { return Ok(None) };
    let ends = (getsockname(&socket)?, remote);
    let ends = (SocketAddr::try_from(ends.0)?, SocketAddr::try_from(ends.1)?);
    Ok(Some(Connection { number, ends, socket }))
}

/// Writes down what a dump that keeps connections changes of them: whether their addresses may be used
/// again. Before that dump, and while the processes are frozen.
pub(crate) fn note(connections: &[Connection], directory: &Path) -> io::Result<()> {
    let reuses = |one: &&Connection| socket_reuseaddr(&one.socket).unwrap_or_default();
    let numbers = connections.iter().filter(reuses).map(|one| format!("{}\n", one.number));
    fs::write(directory.join(NOTE), numbers.collect::<String>())
}

/// Makes connections end without a word to their other ends, however their processes do: they go on
/// elsewhere.
pub(crate) fn silence(connections: &[Connection], directory: &Path) -> io::Result<()> {
    fs::write(directory.join(ENDS), "")?;
    connections.iter().try_for_each(|one| repair::set(&one.socket, true))
}

/// Lets connections go on that were held for the container in a cgroup, which has been restored.
pub(crate) async fn hand_over(cgroup: &str) -> io::Result<()> {
    let cgroup = cgroup.to_owned();
    let found = tokio::task::spawn_blocking(move || {
        let processes = Freezer::at(&cgroup)?.processes()?;
        let ends: Vec<Ends> = of(&processes).into_iter().map(|one| one.ends).collect();
        Ok::<_, io::Error>((processes.first().copied(), ends))
    });
    match found.await.map_err(io::Error::other)?? {
        (Some(pid), ends) if !ends.is_empty() => network::hand_over(pid, &ends).await,
        _ => Ok(()),
    }
}

/// Makes a container that was being dumped one that can be let run: CRIU has ended, and may have been
/// killed in the middle. Its processes are frozen, or should be.
pub(crate) async fn free(pid: u32, freezer: &Freezer, directory: &Path) -> io::Result<()> {
    let (freezer, place) = (freezer.clone(), directory.to_owned());
    let mended = tokio::task::spawn_blocking(move || {
        // Killed, and not dead yet: its connections are to go on elsewhere.
        if place.join(ENDS).exists() && process::is_killed(pid) {
            return Ok(None);
        }
        mend(&freezer, &place)
    });
    let mended = mended.await.map_err(io::Error::other).and_then(|mended| mended);
    let unlocked = network::unlock(&network::of(pid)).await;
    let Some(ends) = mended? else { return unlocked };
    let each = network::unlock_each(pid, &ends).await;
    let operation = directory.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let let_go = network::let_go(pid, operation).await;
    unlocked.and(each).and(let_go)
}

/// Takes sockets out of repair, as CRIU does at its end, in the same order: before the network is
/// unlocked. Their queues and numbers are as they were: nothing was changed but the mode. A dump that
/// kept nothing has left no note, and costs nothing here. Returns which connections there are.
fn mend(freezer: &Freezer, directory: &Path) -> io::Result<Option<Vec<Ends>>> {
    let reusing = match fs::read_to_string(directory.join(NOTE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read?,
    };
    let reusing = reusing.lines().filter_map(|line| line.parse().ok()).collect();
    let found = of(&freezer.processes()?);
    mend_all(&found, &reusing);
    Ok(Some(found.into_iter().map(|one| one.ends).collect()))
}

/// `reusing` has the numbers of those whose addresses may be used again. One that cannot be mended does
/// not keep the rest.
fn mend_all(connections: &[Connection], reusing: &BTreeSet<u64>) {
    for one in connections {
        let mended = repair::is_on(&one.socket).and_then(|is_on| {
            if is_on {
                repair::set(&one.socket, false)?;
                // The kernel does not remember what that was before.
                set_socket_reuseaddr(&one.socket, reusing.contains(&one.number))?;
            }
            Ok(is_on)
        });
        match mended {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!(ends = ?one.ends, "took a connection out of repair, where it was left");
            }
            Err(error) => tracing::error!(ends = ?one.ends, %error, "a connection stays in repair"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;

    use rustix::fs::fstat;

    use super::*;

    #[test]
    fn sockets_that_criu_left_are_as_they_were() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let number = |socket: &TcpStream| fstat(socket).unwrap().st_ino;
        // One that was accepted has it from who listens.
        let (one, other) = (number(&server), number(&client));
        let found = || {
            let mut found = of(&[std::process::id()]);
            found.retain(|found| [one, other].contains(&found.number));
            found
        };
        let before = found();
        assert_eq!(before.len(), 2, "{before:?}");
        let ends = before.iter().find(|found| found.number == other).map(|found| found.ends);
        assert_eq!(ends, Some((client.local_addr().unwrap(), client.peer_addr().unwrap())));
        let directory = tempfile::tempdir().unwrap();
        note(&before, directory.path()).unwrap();
        let noted = fs::read_to_string(directory.path().join(NOTE)).unwrap();
        assert_eq!(noted, format!("{one}\n"));

        client.write_all(b"before").unwrap();
        silence(&before, directory.path()).unwrap();
        let denied = server.read(&mut [0; 6]).unwrap_err();
        assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);
        mend_all(&found(), &BTreeSet::from([one]));
        for (socket, reuses) in [(&server, true), (&client, false)] {
            assert!(!repair::is_on(socket).unwrap());
            assert_eq!(socket_reuseaddr(socket.as_fd()).unwrap(), reuses);
        }
        let mut read = [0; 11];
        client.write_all(b"after").unwrap();
        server.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"beforeafter");
    }

    #[test]
    fn silenced_sockets_end_without_a_word() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let number = fstat(&client).unwrap().st_ino;
        let mut connections = of(&[std::process::id()]);
        connections.retain(|one| one.number == number);
        let directory = tempfile::tempdir().unwrap();
        silence(&connections, directory.path()).unwrap();
        drop((connections, client));
        server.set_nonblocking(true).unwrap();
        assert_eq!(server.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
