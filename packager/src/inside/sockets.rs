//! Sockets: what they speak, with whom, and what is under way.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use schemars::JsonSchema;
use serde::Serialize;

use super::files::shown;
use super::images::files::{File, Inet, TCP_STREAM, TcpStream, Unix};
use super::names;
use super::source::Source;

/// Longest abstract name (unix(7)).
const NAME_BYTES_MAX: usize = 108;

/// A socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Socket {
    /// What it speaks: `tcp`, `tcp6`, `udp`, `udp6`, `unix-stream`, `unix-datagram`,
    /// `unix-seqpacket`, `netlink-…`, `packet`, `raw`, `raw6`, or `other`.
    pub protocol: String,
    /// What it is doing.
    pub state: SocketState,
    /// Its own address: `address:port`, a path, `@name` of an abstract one, or a port of netlink.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local: Option<String>,
    /// The other side's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
    /// Connections that may wait, when it listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backlog: Option<u32>,
    /// Bytes that the other side has not confirmed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub send_queue_bytes: Option<u32>,
    /// Bytes that have arrived and were not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub receive_queue_bytes: Option<u32>,
}

/// What a socket is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SocketState {
    /// It waits for connections.
    Listen,
    /// It is connected.
    Established,
    /// It is being connected.
    Connecting,
    /// It is being closed.
    Closing,
    /// It is not connected: usual where there are no connections.
    Unconnected,
    /// The images do not say.
    Unknown,
}

/// Returns the socket that a file is, if it is one.
pub(super) fn of(source: &mut Source, file: &File) -> Option<Socket> {
    if let Some(inet) = &file.inet {
        return Some(internet(source, inet));
    }
    if let Some(unix) = &file.unix {
        return Some(local(unix));
    }
    let bare = |protocol: String, local| Socket {
        protocol,
        state: SocketState::Unconnected,
        local,
        remote: None,
        backlog: None,
        send_queue_bytes: None,
        receive_queue_bytes: None,
    };
    if let Some(netlink) = &file.netlink {
        let port = (netlink.port != 0).then(|| netlink.port.to_string());
        return Some(bare(format!("netlink-{}", names::netlink(netlink.protocol)), port));
    }
    file.packet.map(|_| bare("packet".to_owned(), None))
}

fn internet(source: &mut Source, of: &Inet) -> Socket {
    let state = state(of.state);
    let is_tcp = of.kind == 1 && matches!(of.protocol, 0 | 6);
    let name = match of.kind {
        1 if is_tcp => "tcp",
        2 if matches!(of.protocol, 0 | 17) => "udp",
        3 => "raw",
        _ => "other",
    };
    let suffix = if of.family == 10 && name != "other" { "6" } else { "" };
    let stream: Option<TcpStream> = if is_tcp && state != SocketState::Listen {
        source.one(&format!("tcp-stream-{:x}.img", of.inode), TCP_STREAM)
    } else {
        None
    };
    let connected = of.remote_port != 0;
    Socket {
        protocol: format!("{name}{suffix}"),
        state,
        local: address(&of.local, of.local_port),
        remote: if connected { address(&of.remote, of.remote_port) } else { None },
        backlog: (state == SocketState::Listen).then_some(of.backlog),
        send_queue_bytes: stream.map(|stream| stream.send_queue),
        receive_queue_bytes: stream.map(|stream| stream.receive_queue),
    }
}

fn local(of: &Unix) -> Socket {
    let kind = match of.kind {
        1 => "stream",
        2 => "datagram",
        5 => "seqpacket",
        _ => "other",
    };
    let state = state(of.state);
    // An abstract name begins with NUL, and other NULs are part of it.
    let bytes = of.name.get(..NAME_BYTES_MAX).unwrap_or(&of.name);
    let name = match bytes {
        [] => None,
        [0, name @ ..] => Some(format!("@{}", String::from_utf8_lossy(name))),
        path => {
            let end = path.iter().position(|byte| *byte == 0).unwrap_or(path.len());
            Some(String::from_utf8_lossy(path.get(..end).unwrap_or_default()).into_owned())
        }
    };
    Socket {
        protocol: format!("unix-{kind}"),
        state,
        local: name.map(|name| shown(&name)),
        remote: (of.peer != 0).then(|| format!("socket {}", of.peer)),
        backlog: (state == SocketState::Listen).then_some(of.backlog),
        send_queue_bytes: None,
        receive_queue_bytes: None,
    }
}

/// Names a state as the kernel numbers it (`net/tcp_states.h`), which all families use.
const fn state(number: u32) -> SocketState {
    match number {
        1 => SocketState::Established,
        2 | 3 => SocketState::Connecting,
        4..=6 | 8 | 9 | 11 => SocketState::Closing,
        7 => SocketState::Unconnected,
        10 => SocketState::Listen,
        _ => SocketState::Unknown,
    }
}

/// Reads an address: one word for IPv4, four for IPv6, each as it lies in memory.
fn address(words: &[u32], port: u32) -> Option<String> {
    let port = u16::try_from(port).ok()?;
    let ip: IpAddr = match words {
        [word] => Ipv4Addr::from(word.to_le_bytes()).into(),
        [a, b, c, d] => {
            let mut bytes = [0; 16];
            let words = [a, b, c, d].into_iter().flat_map(|word| word.to_le_bytes());
            bytes.iter_mut().zip(words).for_each(|(to, from)| *to = from);
            Ipv6Addr::from(bytes).into()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port).to_string())
}
