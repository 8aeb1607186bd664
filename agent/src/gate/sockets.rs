//! What a process must be allowed for its sockets. CRIU makes them as root, whoever had them: with one that
//! sees all packets of its network, a process needs no capability for that any more (packet(7), raw(7),
//! netlink(7)).

use super::images::File;

/// CRIU's number of packet sockets among open files.
const PACKETS: i32 = 10;

/// `SOCK_STREAM` and `SOCK_DGRAM`: all others of the internet are raw.
const USUAL: [u32; 2] = [1, 2];

/// Protocols of netlink whose groups anybody may listen to: of routes, of `SELinux`, of devices, and the
/// generic one, which asks for each group of its own.
const FOR_ALL: [u32; 4] = [0, 7, 15, 16];

/// Returns the capability that is needed to make an open file, if it is such a socket.
pub(super) fn needed(file: &File) -> Option<&'static str> {
    let is_raw = file.inet.is_some_and(|socket| !USUAL.contains(&socket.kind));
    if is_raw || file.kind == PACKETS {
        return Some("CAP_NET_RAW");
    }
    let listens = file.netlink.as_ref().is_some_and(|socket| {
        !FOR_ALL.contains(&socket.protocol) && socket.groups.iter().any(|groups| *groups != 0)
    });
    listens.then_some("CAP_NET_ADMIN")
}
