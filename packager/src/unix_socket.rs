//! Sockets of this machine, and whose they are.

use std::io;
use std::path::Path;

use tokio::net::UnixStream;

/// Connects to a service of this machine, which must be root's or that of the user who asks.
///
/// What it answers is believed, by root too. A socket may lie where others can make one, as below
/// `/tmp`, and then anyone can be there first while the service is not.
pub async fn connect(path: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path).await?;
    let owner = stream.peer_cred()?.uid();
    if owner == 0 || owner == rustix::process::geteuid().as_raw() {
        return Ok(stream);
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("whoever listens there is user {owner}, and neither root nor you"),
    ))
}
