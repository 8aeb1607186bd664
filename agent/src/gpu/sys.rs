//! The checkpoint calls of NVIDIA's driver, from a library that is there only where GPUs are.
//!
//! ```text
//! RUNNING --lock--> LOCKED --checkpoint--> CHECKPOINTED --restore--> LOCKED --unlock--> RUNNING
//!                   (a lock that times out leaves RUNNING; FAILED has no way out)
//! ```
//!
//! Each structure is 64 bytes, and what is not set in it is zero (CUDA driver API, "CUDA
//! Checkpointing"; drivers 570 and later). Nothing here is called in the agent's own process.
#![expect(
    unsafe_code,
    reason = "the driver is a C library: its functions are declared and called here, and nowhere else"
)]

use std::ffi::{c_int, c_uint};
use std::path::Path;

use libloading::Library;

mod storage;

use self::storage::Calls;
pub(super) use self::storage::{Buffer, Contexts, Operation, Region};
use super::call::{Code, State};

/// `CUDA_SUCCESS`.
const SUCCESS: c_int = 0;

/// One GPU takes the place of another: `CUcheckpointGpuPair`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct GpuPair {
    pub(super) old: [u8; 16],
    pub(super) new: [u8; 16],
}

/// `CUcheckpointLockArgs`.
#[repr(C)]
#[derive(Debug)]
struct LockArgs {
    timeout_ms: c_uint,
    reserved: [u8; 60],
}

/// `CUcheckpointRestoreArgs`.
#[repr(C)]
#[derive(Debug)]
struct RestoreArgs {
    pairs: *const GpuPair,
    pairs_count: c_uint,
    reserved: [u8; 52],
}

const _: () = assert!(size_of::<LockArgs>() == 64 && size_of::<RestoreArgs>() == 64);

type Init = unsafe extern "C" fn(c_uint) -> c_int;
type GetNumber = unsafe extern "C" fn(c_int, *mut c_int) -> c_int;
type Act<T> = unsafe extern "C" fn(c_int, *const T) -> c_int;

/// The driver's library.
#[derive(Debug)]
pub(super) struct Driver {
    init: Init,
    get_state: GetNumber,
    get_restore_thread: GetNumber,
    lock: Act<LockArgs>,
    checkpoint: Act<()>,
    restore: Act<RestoreArgs>,
    unlock: Act<()>,
    /// Where the driver has them.
    storage: Option<Calls>,
    /// What the functions are in; last, so that it goes last.
    _library: Library,
}

impl Driver {
    /// Loads the library; an error when it is not there, or too old for checkpoints.
    pub(super) fn open(path: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: the code that a library runs when it is loaded is the driver's own, chosen by
        // whoever configures this node, and this process does nothing else meanwhile.
        let library = unsafe { Library::new(path) }?;
        // SAFETY: the types are those of the driver's header for these names, which NVIDIA keeps
        // for the life of a name. The copies are used only while `_library` is held.
        unsafe {
            Ok(Self {
                init: *library.get(b"cuInit\0")?,
                get_state: *library.get(b"cuCheckpointProcessGetState\0")?,
                get_restore_thread: *library.get(b"cuCheckpointProcessGetRestoreThreadId\0")?,
                lock: *library.get(b"cuCheckpointProcessLock\0")?,
                checkpoint: *library.get(b"cuCheckpointProcessCheckpoint\0")?,
                restore: *library.get(b"cuCheckpointProcessRestore\0")?,
                unlock: *library.get(b"cuCheckpointProcessUnlock\0")?,
                storage: Calls::find(&library),
                _library: library,
            })
        }
    }

    /// Wakes the GPUs: without persistence mode nothing can be restored otherwise. Takes seconds.
    pub(super) fn init(&self) -> Result<(), Code> {
        // SAFETY: takes a number, which has to be 0.
        check(unsafe { (self.init)(0) })
    }

    /// Returns how far a process is; an error for one that does not use CUDA.
    pub(super) fn state(&self, pid: c_int) -> Result<State, Code> {
        let mut state = -1;
        // SAFETY: the number that is written to outlives the call.
        check(unsafe { (self.get_state)(pid, &raw mut state) })?;
        Ok(State::of(state))
    }

    /// Returns the thread of a process that does the driver's work for it.
    pub(super) fn restore_thread(&self, pid: c_int) -> Result<c_int, Code> {
        let mut thread = -1;
        // SAFETY: the number that is written to outlives the call.
        check(unsafe { (self.get_restore_thread)(pid, &raw mut thread) })?;
        Ok(thread)
    }

    /// Waits for a process's work on the GPU to end, and lets it begin no other.
    pub(super) fn lock(&self, pid: c_int, timeout_ms: u32) -> Result<(), Code> {
        let args = LockArgs { timeout_ms, reserved: [0; 60] };
        // SAFETY: the structure outlives the call, which only reads it.
        check(unsafe { (self.lock)(pid, &raw const args) })
    }

    /// Moves a locked process's GPU memory into its own memory, and gives its GPUs free.
    pub(super) fn checkpoint(&self, pid: c_int) -> Result<(), Code> {
        // SAFETY: without arguments, which are optional.
        check(unsafe { (self.checkpoint)(pid, std::ptr::null()) })
    }

    /// Moves it back, to other GPUs where `pairs` says so: then it has to name all of them.
    pub(super) fn restore(&self, pid: c_int, pairs: &[GpuPair]) -> Result<(), Code> {
        let Ok(pairs_count) = c_uint::try_from(pairs.len()) else { return Err(Code::INVALID) };
        let first = if pairs.is_empty() { std::ptr::null() } else { pairs.as_ptr() };
        let args = RestoreArgs { pairs: first, pairs_count, reserved: [0; 52] };
        // SAFETY: the structure and the pairs outlive the call, which only reads them.
        check(unsafe { (self.restore)(pid, &raw const args) })
    }

    /// Lets a locked process go on.
    pub(super) fn unlock(&self, pid: c_int) -> Result<(), Code> {
        // SAFETY: without arguments, which are optional.
        check(unsafe { (self.unlock)(pid, std::ptr::null()) })
    }
}

fn check(code: c_int) -> Result<(), Code> {
    if code == SUCCESS { Ok(()) } else { Err(Code(code)) }
}
