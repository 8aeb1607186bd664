//! The other process, and everything that two processes talk by.

use std::ffi::c_int;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process;

use super::Failure;
use super::linked;
use super::memory::Shared;
use super::sys;

/// What the child writes into shared memory when it has seen `count` there.
const fn answer(count: u64) -> u64 {
    !count
}

/// What both have.
struct Links {
    shared: Shared,
    system: c_int,
    posix: *mut sys::Semaphore,
}

pub(super) struct Peer {
    links: Links,
    to: File,
    from: File,
    stream: UnixStream,
    datagrams: UnixDatagram,
}

/// What the other process calls itself: a name may be any bytes.
const NAME: &[u8] = b"pe\xffer";

struct Child {
    links: Links,
    to: File,
    from: File,
    stream: UnixStream,
    datagrams: UnixDatagram,
}

impl Peer {
    /// Starts the other process. To be called while there is one thread.
    /// The semaphore of POSIX has a name, if it is `named`.
    pub(super) fn fork(named: bool) -> Result<Self, Failure> {
        let posix = if named {
            sys::named(linked::SEMAPHORE)?
        } else {
            let posix = sys::share(None, 4096)?.cast();
            sys::prepare(posix)?;
            posix
        };
        let links = Links { shared: Shared::new()?, system: sys::system_semaphore()?, posix };
        let (request, requests) = sys::pipes()?;
        let (reply, replies) = sys::pipes()?;
        let (stream, child_stream) = UnixStream::pair()?;
        let (datagrams, child_datagrams) = UnixDatagram::pair()?;
        if sys::split()? {
            fs::write("/proc/self/comm", NAME)?;
            drop((requests, reply, stream, datagrams));
            let mut child = Child {
                links,
                to: replies.into(),
                from: request.into(),
                stream: child_stream,
                datagrams: child_datagrams,
            };
            let error = child.serve();
            // The other one waits for it in vain, and does not count on.
            drop(writeln!(io::stderr(), "workload: the other process: {error}"));
            process::exit(1);
        }
        Ok(Self { links, to: requests.into(), from: reply.into(), stream, datagrams })
    }

    /// Sends `count` by all ways and checks what comes back.
    pub(super) fn tick(&mut self, count: u64) -> Result<(), Failure> {
        let Links { shared, system, posix } = &self.links;
        if count > 1
            && let Some(kind) = shared.other_than(answer(count - 1))
        {
            return Err(format!("the {kind} shared memory changed").into());
        }
        shared.write(count);
        sys::change(*system, 1)?;
        sys::wait(*posix)?;
        if let Some(kind) = shared.other_than(answer(count)) {
            return Err(format!("the {kind} shared memory is not shared any more").into());
        }
        let (sent, mut got) = (count.to_ne_bytes(), [0; 8]);
        self.to.write_all(&sent)?;
        self.from.read_exact(&mut got)?;
        same("pipe", sent, got)?;
        self.datagrams.send(&sent)?;
        self.datagrams.recv(&mut got)?;
        same("datagram socket", sent, got)
    }

    /// Returns what `look` finds while the semaphore, which nobody uses between two ticks, has 1.
    pub(super) fn while_posted<T>(
        &self,
        look: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        sys::post(self.links.posix)?;
        let found = look();
        sys::wait(self.links.posix)?;
        found
    }

    /// Whether the other process gets a POSIX lock on a file.
    pub(super) fn gets_lock(&mut self, path: &Path) -> Result<bool, Failure> {
        self.stream.write_all(format!("{}\n", path.display()).as_bytes())?;
        let mut got = [0];
        self.stream.read_exact(&mut got)?;
        Ok(got == *b"y")
    }
}

impl Child {
    /// Answers until something is wrong, which it returns.
    fn serve(&mut self) -> io::Error {
        loop {
            if let Err(error) = self.tick() {
                return error;
            }
        }
    }

    fn tick(&mut self) -> io::Result<()> {
        if fs::read("/proc/self/comm")?.strip_suffix(b"\n") != Some(NAME) {
            return Err(io::Error::other("it has another name"));
        }
        let Links { shared, system, posix } = &self.links;
        sys::change(*system, -1)?;
        // Where it is not the same everywhere, the other one sees that there is no answer.
        if let Some(count) = shared.read() {
            shared.write(answer(count));
        }
        sys::post(*posix)?;
        let mut bytes = [0; 8];
        self.from.read_exact(&mut bytes)?;
        self.to.write_all(&bytes)?;
        self.datagrams.recv(&mut bytes)?;
        self.datagrams.send(&bytes)?;
        let path = self.line()?;
        let file = File::options().read(true).write(true).open(path)?;
        let got = sys::lock(file.as_raw_fd(), sys::SET_LOCK).is_ok();
        self.stream.write_all(if got { b"y" } else { b"n" })
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        let mut byte = [0];
        loop {
            self.stream.read_exact(&mut byte)?;
            if byte == *b"\n" {
                return String::from_utf8(line).map_err(io::Error::other);
            }
            line.extend(byte);
        }
    }
}

fn same(way: &str, sent: [u8; 8], got: [u8; 8]) -> Result<(), Failure> {
    if sent == got { Ok(()) } else { Err(format!("the {way} brings something else").into()) }
}
