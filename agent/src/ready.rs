//! Tells the service manager when we serve, as systemd's `sd_notify(3)` does, so that nobody who waits
//! for us comes too early.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells whoever is in `NOTIFY_SOCKET`; without one nobody waits.
pub(crate) fn tell() -> io::Result<()> {
    std::env::var_os("NOTIFY_SOCKET").map_or(Ok(()), |socket| send(&socket))
}

fn send(socket: &OsStr) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(at: &UnixDatagram) -> Vec<u8> {
        let mut words = [0; 64];
        let length = at.recv(&mut words).unwrap();
        words[..length].to_vec()
    }

    #[test]
    fn a_manager_hears_it_at_a_path_and_at_an_abstract_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str()).unwrap();
        assert_eq!(heard(&manager), b"READY=1");

        let name = format!("kybernate-ready-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        send(OsStr::new(&format!("@{name}"))).unwrap();
        assert_eq!(heard(&manager), b"READY=1");
    }

    #[test]
    fn a_manager_that_is_gone_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        assert!(send(directory.path().join("notify").as_os_str()).is_err());
    }
}
