//! The kernel's repair mode of TCP sockets (`TCP_REPAIR`, tcp(7) does not tell of it; `do_tcp_setsockopt`
//! in `net/ipv4/tcp.c` does): reads are denied, what is written is not sent, and closing tells nobody.
//! CRIU has a socket in it while it copies its state (`soccr.c`).
#![expect(
    unsafe_code,
    reason = "no library has this option: it is read and set here alone, as a number"
)]

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

/// Length of the option's value.
const LENGTH: libc::socklen_t = 4;

/// Whether a TCP socket is in repair.
pub(super) fn is_on(socket: impl AsFd) -> io::Result<bool> {
    let (mut value, mut length): (c_int, _) = (0, LENGTH);
    let place = (&raw mut value).cast::<c_void>();
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `length` bytes to `value`, which has as many.
    let done = unsafe {
        libc::getsockopt(descriptor, libc::IPPROTO_TCP, libc::TCP_REPAIR, place, &raw mut length)
    };
    if done == 0 { Ok(value != 0) } else { Err(io::Error::last_os_error()) }
}

/// Puts a TCP socket into repair or out of it; the kernel wants `CAP_NET_ADMIN` in the socket's network
/// namespace. Out of it as CRIU takes it (`TCP_REPAIR_OFF`): with a probe of the other end's window.
pub(super) fn set(socket: impl AsFd, on: bool) -> io::Result<()> {
    let value = c_int::from(on);
    let place = (&raw const value).cast::<c_void>();
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads `LENGTH` bytes of `value`, which has as many.
    let done =
        unsafe { libc::setsockopt(descriptor, libc::IPPROTO_TCP, libc::TCP_REPAIR, place, LENGTH) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
