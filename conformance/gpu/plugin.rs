//! A plugin of CRIU's that is called as NVIDIA's and moves nothing: it says in a dump that it is needed,
//! and takes note of the processes that CRIU brings back with it (`criu/include/criu-plugin.h`).

use std::ffi::{c_char, c_int, c_uint};
use std::io::Write as _;

const NAME: &std::ffi::CStr = c"cuda_plugin";
/// Version 0.2.0 of the interface.
const VERSION: c_uint = 2 << 8;
/// As many as CRIU 4.1 has, or fewer: it takes no plugin with more.
const HOOKS: usize = 12;
const RESUME_DEVICES_LATE: usize = 9;
const PAUSE_DEVICES: usize = 10;
/// The stage of a restore.
const RESTORE: c_int = 2;
const ENOTSUP: c_int = 95;

/// Where the processes are noted.
const RESUMED: &str = "/opt/gpu/resumed";

type Hook = extern "C" fn(c_int) -> c_int;

/// `cr_plugin_desc_t`.
#[repr(C)]
pub struct Description {
    name: *const c_char,
    init: extern "C" fn(c_int) -> c_int,
    exit: extern "C" fn(c_int, c_int),
    version: c_uint,
    max_hooks: c_uint,
    hooks: [Option<Hook>; HOOKS],
}

// SAFETY: nobody writes to it, and the name is static.
unsafe impl Sync for Description {}

// SAFETY: CRIU has these (`criu/image.c`).
unsafe extern "C" {
    fn add_inventory_plugin(name: *const c_char) -> c_int;
    fn check_and_remove_inventory_plugin(name: *const c_char, length: usize) -> bool;
}

/// What CRIU looks for.
// SAFETY: nothing else here has this name.
#[unsafe(no_mangle)]
pub static CR_PLUGIN_DESC: Description = {
    let mut hooks: [Option<Hook>; HOOKS] = [None; HOOKS];
    hooks[PAUSE_DEVICES] = Some(pause);
    hooks[RESUME_DEVICES_LATE] = Some(resume);
    Description { name: NAME.as_ptr(), init, exit, version: VERSION, max_hooks: HOOKS as c_uint, hooks }
};

static IS_NEEDED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(true);

extern "C" fn init(stage: c_int) -> c_int {
    if stage == RESTORE {
        // SAFETY: the name is as long as that.
        let is_needed =
            unsafe { check_and_remove_inventory_plugin(NAME.as_ptr(), NAME.count_bytes()) };
        IS_NEEDED.store(is_needed, std::sync::atomic::Ordering::Relaxed);
    }
    0
}

extern "C" fn exit(_stage: c_int, _code: c_int) {}

extern "C" fn pause(_pid: c_int) -> c_int {
    static ADDED: std::sync::Once = std::sync::Once::new();
    // SAFETY: CRIU copies the name.
    ADDED.call_once(|| assert!(unsafe { add_inventory_plugin(NAME.as_ptr()) } == 0));
    0
}

extern "C" fn resume(pid: c_int) -> c_int {
    if !IS_NEEDED.load(std::sync::atomic::Ordering::Relaxed) {
        return -ENOTSUP;
    }
    let file = std::fs::OpenOptions::new().create(true).append(true).open(RESUMED);
    match file.and_then(|mut file| writeln!(file, "{pid}")) {
        Ok(()) => 0,
        Err(_) => -1,
    }
}
