//! Stops a CRIU at one of its calls, so that a test finds it there. The dynamic linker loads this before the
//! C library (`LD_PRELOAD`), and CRIU's calls of `ptrace(2)` and `wait4(2)` come here first.
//!
//! A file says where: `CONTINUED CALLS`, behind the CALLS-th call after it had a process go on for the
//! CONTINUED-th time. It has another name when CRIU stops.

use std::ffi::{c_char, c_int, c_long, c_void};
use std::fs;
use std::sync::Mutex;

const WHERE: &str = "/run/criu-stops";
const STOPPED: &str = "/run/criu-stopped";

const CONT: c_long = 7;
const SEIZE: c_long = 0x4206;
const SIGSTOP: c_int = 19;
/// The next library's.
const NEXT: *mut c_void = -1_isize as *mut c_void;

/// What CRIU has called since it had the first process.
static CALLED: Mutex<Option<Called>> = Mutex::new(None);

#[derive(Clone, Copy, Default)]
struct Called {
    continued: u32,
    /// After that.
    calls: u32,
}

// SAFETY: the C library has these (`dlsym(3)`, `raise(3)`, `errno(3)`).
unsafe extern "C" {
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn raise(signal: c_int) -> c_int;
    fn __errno_location() -> *mut c_int;
}

type Ptrace = extern "C" fn(c_long, c_int, *mut c_void, *mut c_void) -> c_long;
type Wait4 = extern "C" fn(c_int, *mut c_int, c_int, *mut c_void) -> c_int;

/// `ptrace(2)`; what it takes beyond its first argument is in registers, however many CRIU gives.
// SAFETY: the C library's comes behind this one, which is what is wanted.
#[unsafe(no_mangle)]
pub extern "C" fn ptrace(
    request: c_long,
    pid: c_int,
    address: *mut c_void,
    data: *mut c_void,
) -> c_long {
    // SAFETY: the next one of this name is the C library's, with these arguments.
    let call: Ptrace = unsafe { std::mem::transmute(dlsym(NEXT, c"ptrace".as_ptr())) };
    let answer = call(request, pid, address, data);
    called(|called| match request {
        SEIZE if called.is_none() => *called = Some(Called::default()),
        CONT => {
            if let Some(Called { continued, calls }) = called {
                (*continued, *calls) = (*continued + 1, 0);
            }
        }
        _ => another(called),
    });
    answer
}

/// `wait4(2)`.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn wait4(
    pid: c_int,
    status: *mut c_int,
    options: c_int,
    usage: *mut c_void,
) -> c_int {
    // SAFETY: as above.
    let call: Wait4 = unsafe { std::mem::transmute(dlsym(NEXT, c"wait4".as_ptr())) };
    let answer = call(pid, status, options, usage);
    called(another);
    answer
}

fn another(called: &mut Option<Called>) {
    if let Some(called) = called {
        called.calls += 1;
    }
}

/// Counts a call, and stops where that was the one.
fn called(count: impl FnOnce(&mut Option<Called>)) {
    // SAFETY: a thread's own.
    let errno = unsafe { *__errno_location() };
    let called = CALLED.lock().map(|mut called| {
        count(&mut called);
        *called
    });
    if let Ok(Some(Called { continued, calls })) = called
        && fs::read_to_string(WHERE).is_ok_and(|text| text == format!("{continued} {calls}"))
        && fs::rename(WHERE, STOPPED).is_ok()
    {
        // SAFETY: whoever has put the file there lets it go on.
        unsafe { raise(SIGSTOP) };
    }
    // SAFETY: as above.
    unsafe { *__errno_location() = errno };
}
