//! What a process must be allowed for its sockets. CRIU makes them as root, whoever had them: with one that
//! sees all packets of its network, a process needs no capability for that any more (packet(7), raw(7),
//! netlink(7)).

use super::images::File;

/// CRIU's number of packet sockets among open files.
const PACKETS: i32 = 10;

/// `SOCK_STREAM` and `SOCK_DGRAM`: all others of the internet are raw.
const USUAL: [u32; 2] = [1, 2];

/// Protocols of netlink whose groups anybody may listen to: of routes, of sockets, of `SELinux`, of devices, of
/// RDMA, and the generic one, of which some groups are not for everybody, by numbers that are each kernel's own.
const FOR_ALL: [u32; 6] = [0, 4, 7, 15, 16, 20];

/// `NETLINK_USERSOCK`, by which anybody may send to others, and `NETLINK_AUDIT`.
const USERS: u32 = 2;
const AUDIT: u32 = 9;

/// Returns the capability that is needed to make an open file, if it is such a socket.
pub(super) fn needed(file: &File) -> Option<&'static str> {
    let is_raw = file.inet.is_some_and(|socket| !USUAL.contains(&socket.kind));
    if is_raw || file.kind == PACKETS {
        return Some("CAP_NET_RAW");
    }
    let socket = file.netlink.as_ref()?;
    let listens = socket.groups.iter().any(|groups| *groups != 0);
    let is_sent = (socket.to_port != 0 || socket.to_groups != 0) && socket.protocol != USERS;
    match socket.protocol {
        AUDIT if listens => Some("CAP_AUDIT_READ"),
        protocol if listens && !FOR_ALL.contains(&protocol) || is_sent => Some("CAP_NET_ADMIN"),
        _ => None,
    }
}
