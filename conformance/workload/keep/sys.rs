//! The few functions of the C library that the standard one does not have. All types and numbers
//! are Linux's and glibc's on 64-bit machines.

use std::ffi::{CStr, c_int, c_long, c_short, c_uint, c_ushort, c_void};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// `F_SETLK` and `F_OFD_SETLK`.
pub(super) const SET_LOCK: c_int = 6;
pub(super) const SET_DESCRIPTION_LOCK: c_int = 37;
/// `F_WRLCK`.
const WRITE_LOCK: c_short = 1;
/// `SIGALRM`.
pub(super) const SIGALRM: c_int = 14;
/// A signal for real-time use: glibc keeps the first two for itself.
pub(super) const SIGTIMER: c_int = 40;
/// `PROT_READ | PROT_WRITE`.
const READ_WRITE: c_int = 3;
/// `MAP_SHARED`, and `MAP_ANONYMOUS`.
const SHARED: c_int = 1;
const ANONYMOUS: c_int = 0x20;
/// `MAP_PRIVATE`, and `MAP_HUGETLB`.
const ALONE: c_int = 2;
const HUGE: c_int = 0x4_0000;
/// `IPC_PRIVATE`, `IPC_CREAT | 0600`, `IPC_RMID`, `SETVAL`.
const PRIVATE: c_int = 0;
const CREATE: c_int = 0o1600;
const SET_VALUE: c_int = 16;
/// `O_CREAT | O_EXCL`.
const CREATE_ALONE: c_int = 0o300;
/// `CLOCK_MONOTONIC`.
const MONOTONIC: c_int = 1;
/// `EFD_NONBLOCK`, `SFD_NONBLOCK`, `TFD_NONBLOCK`: one number.
const NONBLOCK: c_int = 0o4000;
/// `EPOLL_CTL_ADD`, `EPOLLIN`.
const ADD: c_int = 1;
const IN: u32 = 1;

#[repr(C)]
struct Flock {
    kind: c_short,
    whence: c_short,
    start: i64,
    length: i64,
    pid: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Time {
    seconds: i64,
    fraction: c_long,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Interval {
    every: Time,
    first: Time,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
#[cfg_attr(target_arch = "x86_64", repr(packed))]
struct Event {
    events: u32,
    data: u64,
}

/// `struct sigevent`.
#[repr(C)]
struct SignalEvent {
    value: usize,
    signal: c_int,
    notify: c_int,
    rest: [u64; 6],
}

#[repr(C)]
struct Operation {
    number: c_ushort,
    change: c_short,
    flags: c_short,
}

/// A set of signals: glibc's has 1,024 bits.
#[repr(C)]
pub(super) struct Signals([u64; 16]);

/// `sem_t`.
#[repr(C, align(8))]
pub(super) struct Semaphore([u8; 32]);

unsafe extern "C" {
    fn fcntl(file: c_int, command: c_int, ...) -> c_int;
    fn fork() -> c_int;
    fn mmap(
        place: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn memfd_create(name: *const i8, flags: c_uint) -> c_int;
    fn shmget(key: c_int, length: usize, flags: c_int) -> c_int;
    fn shmat(id: c_int, place: *const c_void, flags: c_int) -> *mut c_void;
    fn semget(key: c_int, count: c_int, flags: c_int) -> c_int;
    fn semctl(id: c_int, number: c_int, command: c_int, ...) -> c_int;
    fn semop(id: c_int, operations: *mut Operation, count: usize) -> c_int;
    fn sem_init(semaphore: *mut Semaphore, shared: c_int, value: c_uint) -> c_int;
    fn sem_open(name: *const i8, flags: c_int, ...) -> *mut Semaphore;
    fn sem_wait(semaphore: *mut Semaphore) -> c_int;
    fn sem_post(semaphore: *mut Semaphore) -> c_int;
    fn pipe(ends: *mut c_int) -> c_int;
    fn sigprocmask(how: c_int, set: *const Signals, old: *mut Signals) -> c_int;
    fn signalfd(file: c_int, set: *const Signals, flags: c_int) -> c_int;
    fn eventfd(value: c_uint, flags: c_int) -> c_int;
    fn timerfd_create(clock: c_int, flags: c_int) -> c_int;
    fn timerfd_settime(
        file: c_int,
        flags: c_int,
        new: *const Interval,
        old: *mut Interval,
    ) -> c_int;
    fn setitimer(which: c_int, new: *const Interval, old: *mut Interval) -> c_int;
    fn timer_create(clock: c_int, event: *mut SignalEvent, timer: *mut *mut c_void) -> c_int;
    fn timer_settime(
        timer: *mut c_void,
        flags: c_int,
        new: *const Interval,
        old: *mut Interval,
    ) -> c_int;
    fn epoll_create1(flags: c_int) -> c_int;
    fn epoll_ctl(epoll: c_int, what: c_int, file: c_int, event: *mut Event) -> c_int;
    fn epoll_wait(epoll: c_int, events: *mut Event, count: c_int, milliseconds: c_int) -> c_int;
}

fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn owned(result: c_int) -> io::Result<OwnedFd> {
    // SAFETY: a new descriptor that nobody else has.
    checked(result).map(|file| unsafe { OwnedFd::from_raw_fd(file) })
}

fn mapped(place: *mut c_void) -> io::Result<*mut c_void> {
    if place.addr() == usize::MAX { Err(io::Error::last_os_error()) } else { Ok(place) }
}

/// Tries to get a lock for writing on all of a file.
pub(super) fn lock(file: RawFd, command: c_int) -> io::Result<()> {
    let mut lock = Flock { kind: WRITE_LOCK, whence: 0, start: 0, length: 0, pid: 0 };
    // SAFETY: the kernel reads the structure that it is given.
    checked(unsafe { fcntl(file, command, &raw mut lock) }).map(drop)
}

/// Returns whether this is the child. To be called while there is one thread.
pub(super) fn split() -> io::Result<bool> {
    // SAFETY: there is one thread, so the child may do what it wants.
    checked(unsafe { fork() }).map(|pid| pid == 0)
}

/// Maps memory that is shared with a child, of a file or of none.
pub(super) fn share(file: Option<RawFd>, length: usize) -> io::Result<*mut c_void> {
    let flags = if file.is_some() { SHARED } else { SHARED | ANONYMOUS };
    let none = std::ptr::null_mut();
    // SAFETY: a new mapping, which stays until the end.
    mapped(unsafe { mmap(none, length, READ_WRITE, flags, file.unwrap_or(-1), 0) })
}

/// Maps huge pages.
pub(super) fn huge(is_shared: bool, length: usize) -> io::Result<*mut c_void> {
    let flags = HUGE | ANONYMOUS | if is_shared { SHARED } else { ALONE };
    // SAFETY: a new mapping, which stays until the end.
    mapped(unsafe { mmap(std::ptr::null_mut(), length, READ_WRITE, flags, -1, 0) })
}

pub(super) fn memory_file() -> io::Result<OwnedFd> {
    // SAFETY: the name ends with a zero.
    owned(unsafe { memfd_create(c"keep".as_ptr().cast(), 0) })
}

/// Maps a segment of System V.
pub(super) fn segment(length: usize) -> io::Result<*mut c_void> {
    // SAFETY: a new segment and a new mapping of it.
    mapped(unsafe { shmat(checked(shmget(PRIVATE, length, CREATE))?, std::ptr::null(), 0) })
}

/// Makes a semaphore of System V with value 0.
pub(super) fn system_semaphore() -> io::Result<c_int> {
    // SAFETY: plain numbers.
    let id = checked(unsafe { semget(PRIVATE, 1, CREATE) })?;
    // SAFETY: plain numbers; the fourth is the value.
    checked(unsafe { semctl(id, 0, SET_VALUE, 0 as c_long) })?;
    Ok(id)
}

pub(super) fn change(id: c_int, by: i16) -> io::Result<()> {
    let mut operation = Operation { number: 0, change: by, flags: 0 };
    again(|| {
        // SAFETY: one operation, which the kernel reads.
        unsafe { semop(id, &raw mut operation, 1) }
    })
}

/// Makes a semaphore of POSIX with value 0 in memory that is shared.
pub(super) fn prepare(semaphore: *mut Semaphore) -> io::Result<()> {
    // SAFETY: the memory is mapped, aligned to a page, and as large.
    checked(unsafe { sem_init(semaphore, 1, 0) }).map(drop)
}

/// Makes a semaphore of POSIX with value 0 and a name. The C library makes it by another name, and deletes
/// that when it is there.
pub(super) fn named(name: &CStr) -> io::Result<*mut Semaphore> {
    let (mode, value): (c_uint, c_uint) = (0o600, 0);
    // SAFETY: the name ends with a zero; mode and value are what a creation wants.
    let semaphore = unsafe { sem_open(name.as_ptr().cast(), CREATE_ALONE, mode, value) };
    if semaphore.is_null() { Err(io::Error::last_os_error()) } else { Ok(semaphore) }
}

pub(super) fn wait(semaphore: *mut Semaphore) -> io::Result<()> {
    again(|| {
        // SAFETY: it was prepared, and stays mapped.
        unsafe { sem_wait(semaphore) }
    })
}

pub(super) fn post(semaphore: *mut Semaphore) -> io::Result<()> {
    // SAFETY: it was prepared, and stays mapped.
    checked(unsafe { sem_post(semaphore) }).map(drop)
}

fn again(mut call: impl FnMut() -> c_int) -> io::Result<()> {
    loop {
        match checked(call()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(drop),
        }
    }
}

/// Returns the end to read from, and the end to write to.
pub(super) fn pipes() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two numbers.
    checked(unsafe { pipe(ends.as_mut_ptr()) })?;
    Ok((owned(ends[0])?, owned(ends[1])?))
}

/// A set with these signals.
pub(super) fn signals(of: &[c_int]) -> Signals {
    let bits = of.iter().fold(0, |bits, signal| bits | 1 << (signal - 1));
    let mut set = [0; 16];
    set[0] = bits;
    Signals(set)
}

pub(super) fn block(set: &Signals) -> io::Result<()> {
    // SAFETY: the set is as large as glibc's.
    checked(unsafe { sigprocmask(0, set, std::ptr::null_mut()) }).map(drop)
}

pub(super) fn signal_file(set: &Signals) -> io::Result<OwnedFd> {
    // SAFETY: the set is as large as glibc's.
    owned(unsafe { signalfd(-1, set, NONBLOCK) })
}

pub(super) fn event_file() -> io::Result<OwnedFd> {
    // SAFETY: plain numbers.
    owned(unsafe { eventfd(0, NONBLOCK) })
}

fn interval(milliseconds: c_long, unit: c_long) -> Interval {
    let every = Time { seconds: 0, fraction: milliseconds * unit };
    Interval { every, first: every }
}

/// A timer that is read like a file.
pub(super) fn timer_file() -> io::Result<OwnedFd> {
    // SAFETY: plain numbers.
    owned(unsafe { timerfd_create(MONOTONIC, NONBLOCK) })
}

/// Has such a timer expire once. One that expires again and again stops when CRIU dumps it after it
/// has expired and before it is read.
pub(super) fn expire(timer: RawFd, milliseconds: c_long) -> io::Result<()> {
    let once = Interval { every: Time::default(), ..interval(milliseconds, 1_000_000) };
    // SAFETY: a structure that the kernel reads.
    checked(unsafe { timerfd_settime(timer, 0, &raw const once, std::ptr::null_mut()) }).map(drop)
}

/// The one timer that every process has: it sends `SIGALRM`.
pub(super) fn alarm(milliseconds: c_long) -> io::Result<()> {
    let every = interval(milliseconds, 1_000);
    // SAFETY: a structure that the kernel reads.
    checked(unsafe { setitimer(0, &raw const every, std::ptr::null_mut()) }).map(drop)
}

/// A timer of POSIX, which sends `signal`.
pub(super) fn timer(milliseconds: c_long, signal: c_int) -> io::Result<()> {
    let mut event = SignalEvent { value: 0, signal, notify: 0, rest: [0; 6] };
    let mut timer = std::ptr::null_mut();
    let every = interval(milliseconds, 1_000_000);
    // SAFETY: structures that the kernel reads, and a place for the timer's name.
    unsafe {
        checked(timer_create(MONOTONIC, &raw mut event, &raw mut timer))?;
        checked(timer_settime(timer, 0, &raw const every, std::ptr::null_mut())).map(drop)
    }
}

pub(super) fn poller() -> io::Result<OwnedFd> {
    // SAFETY: a plain number.
    owned(unsafe { epoll_create1(0) })
}

/// Has `epoll` tell when there is something to read, by `name`.
pub(super) fn watch(epoll: RawFd, file: RawFd, name: u64) -> io::Result<()> {
    let mut event = Event { events: IN, data: name };
    // SAFETY: a structure that the kernel reads.
    checked(unsafe { epoll_ctl(epoll, ADD, file, &raw mut event) }).map(drop)
}

/// Returns the names of what can be read, at the latest after this time.
pub(super) fn poll(epoll: RawFd, milliseconds: c_int) -> io::Result<Vec<u64>> {
    let mut events = [Event::default(); 8];
    // SAFETY: the kernel writes as many structures as there are.
    let count = unsafe { epoll_wait(epoll, events.as_mut_ptr(), 8, milliseconds) };
    let count = match checked(count) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
        other => usize::try_from(other?).unwrap_or_default(),
    };
    Ok(events.iter().take(count).map(|event| event.data).collect())
}
