//! Custom storage, as CUDA 13.4 documents it: what a process has on a GPU is mapped into whoever asks,
//! who copies it and says so. Copies are done when their stream is waited for, and not before: who
//! reads too early reads what was there.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use super::*;

const INVALID_CONTEXT: c_int = 201;

/// What fresh GPU memory holds.
const FRESH: u8 = 0xdb;

static STATE: Mutex<State> = Mutex::new(State {
    initialized: false,
    retained: Vec::new(),
    current: 0,
    streams: Vec::new(),
    buffers: BTreeMap::new(),
    operation: None,
});

struct State {
    initialized: bool,
    retained: Vec<c_int>,
    /// The device of the context that is current, one more than its number.
    current: usize,
    streams: Vec<Stream>,
    buffers: BTreeMap<usize, usize>,
    operation: Option<Operation>,
}

/// A stream of a GPU, with the copies that nobody has waited for.
struct Stream {
    device: usize,
    copies: Vec<Copy>,
}

struct Copy {
    to: usize,
    from: usize,
    bytes: usize,
}

struct Operation {
    pid: c_int,
    restores: bool,
    process: Process,
    memory: Vec<Vec<u8>>,
}

#[repr(C)]
struct DeviceData {
    address: u64,
    size: usize,
    stream: usize,
}

#[repr(C)]
struct StorageInfo {
    handle: usize,
    devices: *mut DeviceData,
    count: c_uint,
}

#[repr(C)]
pub struct CheckpointArgs {
    storage: *mut *mut StorageInfo,
    reserved: [u8; 56],
}

#[repr(C)]
pub struct StorageRestoreArgs {
    pairs: *const [[u8; 16]; 2],
    count: c_uint,
    padding: c_uint,
    storage: *mut *mut StorageInfo,
    reserved: [u8; 40],
}

fn state() -> std::sync::MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn initialized() {
    state().initialized = true;
}

impl State {
    /// Whoever asks must have retained the contexts of all GPUs that are used.
    fn has_contexts(&self, uuids: &[String]) -> Result<(), c_int> {
        let gpus = gpus();
        let retained = |uuid: &String| {
            let device = gpus.iter().position(|gpu| gpu.uuid == *uuid);
            device.is_some_and(|device| self.retained.contains(&(device as c_int)))
        };
        match self.initialized {
            false => Err(NOT_INITIALIZED),
            true if uuids.iter().all(retained) => Ok(()),
            true => Err(INVALID_CONTEXT),
        }
    }

    /// Hands out what is mapped. It stays where it is for as long as this process lives.
    fn map(&mut self, operation: Operation, to: *mut *mut StorageInfo) {
        let gpus = gpus();
        let mut devices = Vec::new();
        // Not in the order of the process's GPUs: nothing says that it is.
        for (uuid, memory) in operation.process.uuids.iter().zip(&operation.memory).rev() {
            let device = gpus.iter().position(|gpu| gpu.uuid == *uuid).unwrap_or_default();
            self.streams.push(Stream { device, copies: Vec::new() });
            let address = memory.as_ptr() as u64;
            devices.push(DeviceData { address, size: memory.len(), stream: self.streams.len() });
        }
        let devices = Vec::leak(devices);
        let info = StorageInfo {
            handle: operation.pid as usize,
            devices: devices.as_mut_ptr(),
            count: devices.len() as c_uint,
        };
        self.operation = Some(operation);
        unsafe { *to = Box::leak(Box::new(info)) };
    }

    fn wait(&mut self, stream: usize) -> Result<(), c_int> {
        let stream = stream.checked_sub(1).and_then(|at| self.streams.get_mut(at));
        for copy in stream.ok_or(INVALID_VALUE)?.copies.drain(..) {
            unsafe { std::ptr::copy(copy.from as *const u8, copy.to as *mut u8, copy.bytes) };
        }
        Ok(())
    }
}

/// Finds the calls that are of 13.4, where the driver is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    to: *mut *mut c_void,
    cuda: c_int,
    _flags: u64,
    status: *mut c_int,
) -> c_int {
    unsafe { (*to, *status) = (std::ptr::null_mut(), 1) };
    if cuda > version().1 {
        return INVALID_VALUE;
    }
    let found = match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"cuCheckpointProcessCheckpoint" => checkpoint as *mut c_void,
        b"cuCheckpointProcessRestore" => restore as *mut c_void,
        b"cuCheckpointOperationComplete" => complete as *mut c_void,
        _ => return 0,
    };
    unsafe { (*to, *status) = (found, 0) };
    0
}

unsafe extern "C" fn checkpoint(pid: c_int, args: *const CheckpointArgs) -> c_int {
    let Some(args) = (unsafe { args.as_ref() }) else {
        return cuCheckpointProcessCheckpoint(pid, std::ptr::null());
    };
    if args.reserved.iter().any(|byte| *byte != 0) {
        return INVALID_VALUE;
    }
    if args.storage.is_null() {
        return cuCheckpointProcessCheckpoint(pid, std::ptr::null());
    }
    done(begin("checkpoint", pid).and_then(|()| {
        let mut state = state();
        let _held = Process::hold(pid)?;
        let mut process = Process::of(pid)?;
        state.has_contexts(&process.uuids)?;
        if process.state != LOCKED || state.operation.is_some() {
            return Err(ILLEGAL_STATE);
        }
        let memory: Vec<Vec<u8>> = process
            .uuids
            .iter()
            .map(|uuid| fs::read(memory(uuid, pid)).unwrap_or_default())
            .collect();
        process.state = CHECKPOINTING;
        process.kept = Kept::Elsewhere(memory.iter().map(Vec::len).collect());
        process.keep(pid)?;
        state.map(Operation { pid, restores: false, process, memory }, args.storage);
        Ok(())
    }))
}

unsafe extern "C" fn restore(pid: c_int, args: *const StorageRestoreArgs) -> c_int {
    let Some(args) = (unsafe { args.as_ref() }) else { return INVALID_VALUE };
    if args.padding != 0 || args.reserved.iter().any(|byte| *byte != 0) {
        return INVALID_VALUE;
    }
    let pairs = unsafe { pairs_of(args.pairs, args.count) };
    if args.storage.is_null() {
        return restore_from_host(pid, pairs);
    }
    done(begin("restore", pid).and_then(|()| {
        let mut state = state();
        let _held = Process::hold(pid)?;
        let mut process = Process::of(pid)?;
        let Kept::Elsewhere(sizes) = process.kept.clone() else { return Err(ILLEGAL_STATE) };
        if process.state != CHECKPOINTED || state.operation.is_some() {
            return Err(ILLEGAL_STATE);
        }
        process.moves(&pairs)?;
        state.has_contexts(&process.uuids)?;
        process.fits()?;
        process.state = RESTORING;
        process.keep(pid)?;
        let memory = sizes.into_iter().map(|size| vec![FRESH; size]).collect();
        state.map(Operation { pid, restores: true, process, memory }, args.storage);
        Ok(())
    }))
}

unsafe extern "C" fn complete(handle: usize) -> c_int {
    done(begin("complete", handle as c_int).and_then(|()| {
        let mut state = state();
        let operation = state.operation.take().filter(|operation| operation.pid as usize == handle);
        let mut operation = operation.ok_or(INVALID_VALUE)?;
        for stream in 1..=state.streams.len() {
            state.wait(stream)?;
        }
        let Operation { pid, restores, process, memory: contents } = &mut operation;
        let _held = Process::hold(*pid)?;
        if Process::of(*pid)?.state != process.state {
            return Err(ILLEGAL_STATE);
        }
        for (uuid, content) in process.uuids.iter().zip(contents) {
            let place = memory(uuid, *pid);
            let moved = if *restores { fs::write(place, content) } else { fs::remove_file(place) };
            // A process may have had nothing there.
            moved.or(if *restores { Err(OPERATING_SYSTEM) } else { Ok(()) })?;
        }
        process.state = if *restores { LOCKED } else { CHECKPOINTED };
        if *restores {
            process.kept = Kept::Nowhere;
        }
        process.keep(*pid)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    unsafe { *count = gpus().len() as c_int };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    unsafe { *device = ordinal };
    if (ordinal as usize) < gpus().len() { 0 } else { INVALID_DEVICE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(to: *mut [u8; 16], device: c_int) -> c_int {
    let Some(gpu) = gpus().into_iter().nth(device as usize) else { return INVALID_DEVICE };
    let digits = gpu.uuid.trim_start_matches("GPU-").replace('-', "");
    let Ok(number) = u128::from_str_radix(&digits, 16) else { return INVALID_DEVICE };
    unsafe { *to = number.to_be_bytes() };
    0
}

/// A context is its device's number and one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(to: *mut usize, device: c_int) -> c_int {
    let mut state = state();
    if !state.initialized {
        return NOT_INITIALIZED;
    }
    state.retained.push(device);
    unsafe { *to = device as usize + 1 };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    state().retained.retain(|retained| *retained != device);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    state().current = context;
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(to: *mut c_int) -> c_int {
    let Some(device) = state().current.checked_sub(1) else { return INVALID_CONTEXT };
    unsafe { *to = device as c_int };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCtx(stream: usize, to: *mut usize) -> c_int {
    let state = state();
    let Some(stream) = stream.checked_sub(1).and_then(|at| state.streams.get(at)) else {
        return INVALID_VALUE;
    };
    unsafe { *to = stream.device + 1 };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: usize) -> c_int {
    done(state().wait(stream))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(to: *mut usize, bytes: usize, _flags: c_uint) -> c_int {
    let mut state = state();
    if state.current == 0 {
        return INVALID_CONTEXT;
    }
    let start = Vec::leak(vec![0_u8; bytes]).as_ptr() as usize;
    state.buffers.insert(start, bytes);
    unsafe { *to = start };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(start: usize) -> c_int {
    let Some(bytes) = state().buffers.remove(&start) else { return INVALID_VALUE };
    drop(unsafe { Vec::from_raw_parts(start as *mut u8, bytes, bytes) });
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    let device = state().current.checked_sub(1);
    let Some(gpu) = device.and_then(|device| gpus().into_iter().nth(device)) else {
        return INVALID_CONTEXT;
    };
    let left = gpu.bytes.saturating_sub(used(&gpu.uuid));
    unsafe { (*free, *total) = (left as usize, gpu.bytes as usize) };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, bytes: usize, stream: usize) -> c_int {
    copy("copy-out", Copy { to, from: from as usize, bytes }, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: usize, bytes: usize, stream: usize) -> c_int {
    copy("copy-in", Copy { to: to as usize, from, bytes }, stream)
}

fn copy(call: &str, copy: Copy, stream: usize) -> c_int {
    done(begin(call, 0).and_then(|()| {
        let mut state = state();
        let device = stream.checked_sub(1).and_then(|at| state.streams.get(at)).map(|on| on.device);
        if device.is_none_or(|device| state.current != device + 1) {
            return Err(INVALID_CONTEXT);
        }
        state.streams[stream - 1].copies.push(copy);
        Ok(())
    }))
}
