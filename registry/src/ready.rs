//! Tells the service manager when we serve, as systemd's `sd_notify(3)` does, so that nobody who waits
//! for us comes too early.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells whoever is in `NOTIFY_SOCKET`; without one nobody waits.
pub fn tell() -> io::Result<()> {
    std::env::var_os("NOTIFY_SOCKET").map_or(Ok(()), |socket| send(&socket))
}

fn send(socket: &OsStr) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address).map(drop)
}
