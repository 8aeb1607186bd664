//! Whom the unix sockets of a network namespace are connected to: `sock_diag(7)`, which is the only
//! one to tell.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

use crate::network::within;

/// `SOCK_DIAG_BY_FAMILY`, also the type of answers.
const BY_FAMILY: u16 = 20;
/// `NLMSG_ERROR` and `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const FLAGS: u16 = 0x301;
/// `UDIAG_SHOW_PEER`, and the attribute that comes of it.
const SHOW_PEER: u32 = 4;
const PEER: u16 = 2;
/// Lengths of `nlmsghdr`, `unix_diag_msg` and `rtattr`.
const HEADER: usize = 16;
const MESSAGE: usize = 16;
const ATTRIBUTE: usize = 4;
/// What the kernel puts into one message at most.
const BUFFER: usize = 64 << 10;

/// Returns the numbers of both ends of each connected unix socket, in the network namespace at
/// `net`, as /proc/PID/ns/net.
pub(super) fn peers(net: &Path) -> io::Result<BTreeMap<u64, u64>> {
    within(net, ask)
}

fn ask() -> io::Result<BTreeMap<u64, u64>> {
    let protocol = Some(netlink::SOCK_DIAG);
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, protocol)?;
    send(&socket, &request(), SendFlags::empty())?;
    let mut found = BTreeMap::new();
    let mut buffer = vec![0; BUFFER];
    loop {
        let (length, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        if !take(buffer.get(..length).unwrap_or_default(), &mut found)? {
            return Ok(found);
        }
    }
}

/// `nlmsghdr`, then `unix_diag_req` for all states.
fn request() -> Vec<u8> {
    let words =
        |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
    let mut bytes = words(&[40]);
    bytes.extend(BY_FAMILY.to_ne_bytes());
    bytes.extend(FLAGS.to_ne_bytes());
    bytes.extend(words(&[1, 0]));
    // AF_UNIX, no protocol, padding.
    bytes.extend([1, 0, 0, 0]);
    bytes.extend(words(&[u32::MAX, 0, SHOW_PEER, 0, 0]));
    bytes
}

/// Takes the answers out of one datagram. Returns whether there is more to come.
fn take(mut bytes: &[u8], found: &mut BTreeMap<u64, u64>) -> io::Result<bool> {
    while let (Some(length), Some(kind)) = (word(bytes, 0), half(bytes, 4)) {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let message = bytes.get(HEADER..length).unwrap_or_default();
        match kind {
            DONE => return Ok(false),
            ERROR => return Err(io::Error::other("the kernel does not tell of unix sockets")),
            BY_FAMILY => {
                let own = word(message, 4).unwrap_or_default();
                if let Some(peer) = peer(message.get(MESSAGE..).unwrap_or_default()) {
                    found.insert(own.into(), peer.into());
                }
            }
            _ => {}
        }
        bytes = bytes.get(length.next_multiple_of(4).max(HEADER)..).unwrap_or_default();
    }
    Ok(true)
}

fn peer(mut attributes: &[u8]) -> Option<u32> {
    while let (Some(length), Some(kind)) = (half(attributes, 0), half(attributes, 2)) {
        if kind == PEER {
            // 0 is one that has not been accepted.
            return word(attributes, ATTRIBUTE).filter(|peer| *peer != 0);
        }
        let next = usize::from(length).next_multiple_of(4).max(ATTRIBUTE);
        attributes = attributes.get(next..).unwrap_or_default();
    }
    None
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn both_ends_of_a_pair_are_found() {
        let (one, other) = UnixStream::pair().unwrap();
        let number = |socket: &UnixStream| rustix::fs::fstat(socket).unwrap().st_ino;
        let found = ask().unwrap();
        assert_eq!(found.get(&number(&one)), Some(&number(&other)));
        assert_eq!(found.get(&number(&other)), Some(&number(&one)));
    }

    #[test]
    fn answers_that_are_cut_are_no_answers() {
        let mut found = BTreeMap::new();
        let mut message = request();
        for length in 0..message.len() {
            assert!(take(&message[..length], &mut found).unwrap());
        }
        message[4] = 3;
        assert!(!take(&message, &mut found).unwrap());
        assert!(found.is_empty());
    }
}
