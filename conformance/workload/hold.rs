//! Holds something that a checkpoint may not be able to take, and sleeps.

use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_void};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use super::Failure;

/// `io_uring_setup` has this number everywhere (`include/uapi/asm-generic/unistd.h`).
const IO_URING_SETUP: c_long = 425;
/// `IN_CREATE`.
const CREATE: c_uint = 0x100;
/// `O_PATH | O_NOFOLLOW`, which differs between architectures.
const ITSELF: c_int = if cfg!(target_arch = "aarch64") { 0o10_100_000 } else { 0o10_400_000 };
/// Length of `io_uring_params`.
const PARAMETERS: usize = 120;

/// Bytes of a line in a mapped file: 20 digits and its end.
const LINE: usize = 21;
/// `PROT_READ | PROT_WRITE`, and `MAP_SHARED`.
const READ_WRITE: c_int = 3;
const SHARED: c_int = 1;
/// `MAP_PRIVATE | MAP_ANONYMOUS`.
const OWN: c_int = 0x22;
/// `MADV_GUARD_INSTALL`, since Linux 6.13.
const GUARD_INSTALL: c_int = 102;
/// Bytes that are held with a guard in the middle, and of that.
const GUARDED: usize = 1 << 20;
const GUARD: usize = 64 << 10;

unsafe extern "C" {
    fn mmap(
        place: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn madvise(place: *mut c_void, length: usize, advice: c_int) -> c_int;
    fn inotify_init() -> c_int;
    fn inotify_add_watch(inotify: c_int, path: *const c_char, mask: c_uint) -> c_int;
    fn syscall(number: c_long, entries: c_uint, parameters: *mut c_void) -> c_long;
}

/// Holds what `kind` says until it is killed.
pub(crate) fn hold(kind: &str, argument: Option<&str>) -> Result<(), Failure> {
    let path = || argument.ok_or("say what to hold");
    match kind {
        "tcp" => {
            let listener = TcpListener::bind("127.0.0.1:4000")?;
            let client = TcpStream::connect("127.0.0.1:4000")?;
            let server = listener.accept()?;
            sleep((listener, client, server))
        }
        "listen" => sleep(TcpListener::bind(path()?)?),
        "files" => {
            let files: Result<Vec<_>, _> = (0..path()?.parse()?).map(|_| fs::File::open("/")).collect();
            sleep(files?)
        }
        "udp" => sleep(UdpSocket::bind(path()?)?),
        "unix" => sleep(UnixStream::connect(path()?)?),
        "lock" => {
            let file = OpenOptions::new().create(true).append(true).open("/hold.lock")?;
            file.lock()?;
            sleep(file)
        }
        "device" => sleep(OpenOptions::new().read(true).write(true).open(path()?)?),
        "map" => map(path()?),
        "guard" => guard(),
        "deleted" => {
            let mut file = OpenOptions::new().create(true).append(true).open("/hold.deleted")?;
            file.write_all(&vec![1; 2 << 20])?;
            fs::remove_file("/hold.deleted")?;
            sleep(file)
        }
        "link" => {
            symlink("/elsewhere", "/hold.link")?;
            sleep(OpenOptions::new().read(true).custom_flags(ITSELF).open("/hold.link")?)
        }
        "inotify" => {
            let path = CString::new(path()?)?;
            // SAFETY: the path ends with a zero and outlives the call.
            let watched = unsafe { inotify_add_watch(inotify_init(), path.as_ptr(), CREATE) };
            sleep(checked(watched.into())?)
        }
        "io-uring" => {
            let mut parameters = [0_u64; PARAMETERS / 8];
            // SAFETY: the kernel reads and writes as many bytes as there are.
            let ring = unsafe { syscall(IO_URING_SETUP, 8, parameters.as_mut_ptr().cast()) };
            sleep(checked(ring)?)
        }
        _ => Err(format!("{kind:?} cannot be held").into()),
    }
}

/// Counts in the first line of a file that is mapped, and says the second one again in the third.
fn map(path: &str) -> Result<(), Failure> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    file.set_len((3 * LINE) as u64)?;
    // SAFETY: a new mapping of a file that is as long, and stays mapped and open until the end.
    let bytes = unsafe {
        let place = mmap(std::ptr::null_mut(), 3 * LINE, READ_WRITE, SHARED, file.as_raw_fd(), 0);
        if place.addr() == usize::MAX {
            return Err(io::Error::last_os_error().into());
        }
        std::slice::from_raw_parts_mut(place.cast::<u8>(), 3 * LINE)
    };
    fs::write("/held", "")?;
    loop {
        let count = String::from_utf8_lossy(&bytes[..LINE]);
        let count: u64 = count.trim_matches(['\0', '\n']).parse().unwrap_or(0);
        bytes[..LINE].copy_from_slice(format!("{:020}\n", count + 1).as_bytes());
        bytes.copy_within(LINE..2 * LINE, 2 * LINE);
        thread::sleep(Duration::from_millis(20));
    }
}

/// Fills memory, and makes guards of some of its pages, as threads of glibc 2.42 do.
fn guard() -> Result<(), Failure> {
    // SAFETY: a new mapping that nothing else knows, and the guards are within it.
    let made = unsafe {
        let place = mmap(std::ptr::null_mut(), GUARDED, READ_WRITE, OWN, -1, 0);
        if place.addr() == usize::MAX {
            return Err(io::Error::last_os_error().into());
        }
        place.cast::<u8>().write_bytes(7, GUARDED);
        madvise(place.byte_add(GUARDED / 2), GUARD, GUARD_INSTALL)
    };
    sleep(checked(made.into())?)
}

fn checked(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Says that it is held, and keeps it.
fn sleep<T>(_held: T) -> Result<(), Failure> {
    fs::write("/held", "")?;
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}
