//! Sockets: those of a network namespace as /proc lists them, and whom unix sockets talk to.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use super::view::read;

/// States of a TCP socket (`include/net/tcp_states.h`).
const ESTABLISHED: u8 = 1;
const TIME_WAIT: u8 = 6;
const CLOSE: u8 = 7;
const LISTEN: u8 = 10;
const NEW_SYN_RECEIVED: u8 = 12;

/// Where the kernel tells the protocol of a socket, as `TCP` or `AF_VSOCK`.
const PROTOCOL: &str = "system.sockprotoname";

/// The sockets of one or more network namespaces.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    pub(super) tcp: Vec<Tcp>,
    /// Addresses that others are bound to, with their numbers.
    pub(super) bound: Vec<(SocketAddr, u64)>,
    /// Numbers of all internet and packet sockets.
    pub(super) internet: Vec<u64>,
    /// Paths of the unix sockets, by number.
    pub(super) unix: BTreeMap<u64, String>,
}

/// A TCP socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tcp {
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    /// 0 when no process has it: it waits to be accepted, or for its end.
    pub(super) number: u64,
    state: u8,
}

impl Tcp {
    pub(super) const fn listens(&self) -> bool {
        self.state == LISTEN
    }

    /// Whether CRIU takes it for a connection.
    pub(super) const fn is_connected(&self) -> bool {
        !matches!(self.state, LISTEN | CLOSE | TIME_WAIT | NEW_SYN_RECEIVED)
    }

    /// Whether they are the two ends of one connection.
    pub(super) fn is_other_end_of(&self, one: &Self) -> bool {
        (self.local, self.remote) == (one.remote, one.local) && !self.listens()
    }

    /// Whether it is a connection that nobody has accepted yet.
    pub(super) const fn is_in_flight(&self) -> bool {
        self.number == 0 && self.state == ESTABLISHED
    }
}

impl Sockets {
    /// Adds those of a namespace by its `net` directory.
    pub(super) fn add(&mut self, net: &Path) {
        for name in ["tcp", "tcp6"] {
            let text = read(&net.join(name)).unwrap_or_default();
            self.tcp.extend(text.lines().skip(1).filter_map(tcp));
        }
        self.internet.extend(self.tcp.iter().map(|one| one.number));
        for name in ["udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp", "icmp6"] {
            let text = read(&net.join(name)).unwrap_or_default();
            self.bound.extend(text.lines().skip(1).filter_map(datagram));
        }
        self.internet.extend(self.bound.iter().map(|(_, number)| *number));
        let text = read(&net.join("packet")).unwrap_or_default();
        self.internet.extend(text.lines().skip(1).filter_map(|line| column(line, 8)));
        let text = read(&net.join("unix")).unwrap_or_default();
        self.unix.extend(text.lines().skip(1).filter_map(|line| {
            let path = line.split_whitespace().nth(7).unwrap_or_default();
            Some((column(line, 6)?, path.to_owned()))
        }));
    }
}

/// Returns what the kernel calls the protocol of an open socket.
pub(super) fn protocol(link: &Path) -> Option<String> {
    let mut buffer = [0; 64];
    let length = rustix::fs::getxattr(link, PROTOCOL, &mut buffer).ok()?;
    let name = buffer.get(..length)?.split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(name).into_owned())
}

fn column(line: &str, position: usize) -> Option<u64> {
    line.split_whitespace().nth(position)?.parse().ok()
}

/// Reads a line of /proc/net/tcp or tcp6 (`proc_pid_net(5)`).
fn tcp(line: &str) -> Option<Tcp> {
    let mut words = line.split_whitespace();
    let (local, remote) = (words.nth(1)?, words.next()?);
    let state = u8::from_str_radix(words.next()?, 16).ok()?;
    let number = words.nth(5)?.parse().ok()?;
    Some(Tcp { local: address(local)?, remote: address(remote)?, number, state })
}

/// Reads a line of /proc/net/udp and the like.
fn datagram(line: &str) -> Option<(SocketAddr, u64)> {
    Some((address(line.split_whitespace().nth(1)?)?, column(line, 9)?))
}

/// Reads an address: words of 32 bits as this machine has them, in hexadecimal.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let word = u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    let ip: IpAddr = if ip.len() == 8 {
        Ipv4Addr::from(word(0)?).into()
    } else {
        let words = [word(0)?, word(8)?, word(16)?, word(24)?];
        let bytes: [u8; 16] = words.concat().try_into().ok()?;
        Ipv6Addr::from(bytes).to_canonical()
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_both_families() {
        let line = "0: 0100007F:0FA0 0B004D0A:C350 01 0:0 00:0 0 1000 0 4242 1 0 20";
        let read = tcp(line).unwrap();
        assert_eq!(read.local, "127.0.0.1:4000".parse().unwrap());
        assert_eq!(read.remote, "10.77.0.11:50000".parse().unwrap());
        assert!(read.is_connected() && !read.listens() && read.number == 4242);
        let six = address("0000000000000000FFFF00000100007F:0050").unwrap();
        assert_eq!(six, "127.0.0.1:80".parse().unwrap());
        let six = address("00000000000000000000000001000000:0050").unwrap();
        assert_eq!(six, "[::1]:80".parse().unwrap());
        assert_eq!(address("01:02"), None);
    }

    #[test]
    fn sockets_tell_their_protocol() {
        use std::os::fd::AsRawFd as _;
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let link = format!("/proc/self/fd/{}", socket.as_raw_fd());
        assert_eq!(protocol(Path::new(&link)).as_deref(), Some("TCP"));
    }
}
