//! A SIMULATION of `libcuda.so.1` and `libnvidia-ml.so.1`: no GPU, no CUDA, only the state machine of
//! the driver's checkpoint calls as NVIDIA documents it, and its failures as they were seen.
//!
//! Which GPUs there are, and what goes wrong, is in files beside this library; how far a process is,
//! in a file of the process's own, which therefore goes where its files go, as GPU state goes where
//! its memory goes:
//!
//! ```text
//! DIR/libkybernate-gpu-simulation.so
//! DIR/gpus        lines: UUID bytes MODEL-WITHOUT-BLANKS   (none: no such file)
//! DIR/faults      lines: CALL CODE|hang                    as "lock 600", "restore hang"
//! DIR/calls       what was called: lines "CALL PID"
//! DIR/driver      versions of driver and CUDA, as "615.10 13040"   (580.105.08 13000: no such file)
//! DIR/memory-UUID-PID            what a process has on a GPU
//! /proc/PID/cwd/gpu-simulation   STATE UUID,… BYTES [KEPT]  the process uses CUDA
//! /proc/PID/cwd/gpu-memory-UUID  what it has on a GPU while that is in its own memory
//! ```
//!
//! Whoever changes a file puts another one in its place, since it is read at any time; who changes the
//! state of a process holds a lock (`flock`) on that process's directory from the look to the change.
//! A fault `wait` holds a call up for as long as it is written there. KEPT says where GPU memory is that
//! is on no GPU: `host`, or the sizes for whoever keeps it. A call for a process that is stopped or
//! frozen does not return, as with the real driver. Compiled by `rustc --crate-type cdylib`; used in
//! tests only.
#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

mod storage;

const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NOT_INITIALIZED: c_int = 3;
const INVALID_DEVICE: c_int = 101;
const OPERATING_SYSTEM: c_int = 304;
const ILLEGAL_STATE: c_int = 401;
const UNKNOWN: c_int = 999;

const RUNNING: c_int = 0;
const LOCKED: c_int = 1;
const CHECKPOINTED: c_int = 2;
const CHECKPOINTING: c_int = 4;
const RESTORING: c_int = 5;

/// Where this library lies.
fn place() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let ours = maps.lines().find(|line| line.ends_with("libkybernate-gpu-simulation.so"));
    let path = ours.and_then(|line| line.find('/').map(|at| PathBuf::from(&line[at..])));
    path.and_then(|path| path.parent().map(PathBuf::from)).unwrap_or_default()
}

struct Gpu {
    uuid: String,
    bytes: u64,
    model: String,
}

fn gpus() -> Vec<Gpu> {
    let text = fs::read_to_string(place().join("gpus")).unwrap_or_default();
    let gpu = |line: &str| {
        let mut cells = line.split_whitespace();
        let uuid = cells.next()?.to_owned();
        Some(Gpu { uuid, bytes: cells.next()?.parse().ok()?, model: cells.next()?.to_owned() })
    };
    text.lines().filter_map(gpu).collect()
}

/// Versions of the driver and of CUDA.
fn version() -> (String, c_int) {
    let text = fs::read_to_string(place().join("driver")).unwrap_or_default();
    let read = text
        .trim()
        .split_once(' ')
        .and_then(|(driver, cuda)| Some((driver.to_owned(), cuda.parse().ok()?)));
    read.unwrap_or_else(|| ("580.105.08".to_owned(), 13000))
}

/// Where GPU memory is that is on no GPU.
#[derive(Clone, PartialEq)]
enum Kept {
    Nowhere,
    Host,
    /// With whoever asked for it: so many bytes on each GPU.
    Elsewhere(Vec<usize>),
}

/// Where what a process has on a GPU is.
fn memory(uuid: &str, pid: c_int) -> PathBuf {
    place().join(format!("memory-{uuid}-{pid}"))
}

/// A process that uses the simulation.
struct Process {
    state: c_int,
    uuids: Vec<String>,
    bytes: u64,
    kept: Kept,
}

impl Process {
    fn of(pid: c_int) -> Result<Self, c_int> {
        if fs::metadata(format!("/proc/{pid}")).is_err() {
            return Err(OPERATING_SYSTEM);
        }
        let text = fs::read_to_string(Self::file(pid)).map_err(|_| NOT_INITIALIZED)?;
        let mut cells = text.split_whitespace();
        // Not a code that is said of who uses no GPU: this is a mistake of the test's.
        let state = cells.next().and_then(|cell| cell.parse().ok()).ok_or(UNKNOWN)?;
        let uuids = cells.next().ok_or(UNKNOWN)?.split(',').map(str::to_owned).collect();
        let bytes = cells.next().and_then(|cell| cell.parse().ok()).ok_or(UNKNOWN)?;
        let kept = match cells.next() {
            None if state == CHECKPOINTED => Kept::Host,
            None => Kept::Nowhere,
            Some("host") => Kept::Host,
            Some(sizes) => {
                let sizes: Result<_, _> = sizes.split(',').map(str::parse).collect();
                Kept::Elsewhere(sizes.map_err(|_| UNKNOWN)?)
            }
        };
        Ok(Self { state, uuids, bytes, kept })
    }

    fn file(pid: c_int) -> String {
        format!("/proc/{pid}/cwd/gpu-simulation")
    }

    /// Keeps everybody else from changing a process for as long as the file is held.
    fn hold(pid: c_int) -> Result<fs::File, c_int> {
        let held = fs::File::open(format!("/proc/{pid}/cwd"));
        let held = held.and_then(|held| held.lock().map(|()| held));
        held.map_err(|_| OPERATING_SYSTEM)
    }

    /// Writes it down. It has to be held.
    fn keep(&self, pid: c_int) -> Result<(), c_int> {
        let kept = match &self.kept {
            Kept::Nowhere => String::new(),
            Kept::Host => " host".to_owned(),
            Kept::Elsewhere(sizes) => {
                let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
                format!(" {}", sizes.join(","))
            }
        };
        let text = format!("{} {} {}{kept}\n", self.state, self.uuids.join(","), self.bytes);
        // At once: somebody may ask how far it is.
        let new = format!("{}.new", Self::file(pid));
        let kept = fs::write(&new, text).and_then(|()| fs::rename(&new, Self::file(pid)));
        kept.map_err(|_| OPERATING_SYSTEM)
    }
}

impl Process {
    /// Changes GPUs. Pairs have to name all that were used.
    fn moves(&mut self, pairs: &[(String, String)]) -> Result<(), c_int> {
        for uuid in self.uuids.iter_mut().filter(|_| !pairs.is_empty()) {
            let pair = pairs.iter().find(|(old, _)| old == uuid).ok_or(INVALID_VALUE)?;
            uuid.clone_from(&pair.1);
        }
        Ok(())
    }

    /// Whether its GPUs are there and have room.
    fn fits(&self) -> Result<(), c_int> {
        for uuid in &self.uuids {
            let gpus = gpus();
            let gpu = gpus.iter().find(|gpu| gpu.uuid == *uuid).ok_or(INVALID_DEVICE)?;
            if gpu.bytes.saturating_sub(used(uuid)) < self.bytes {
                return Err(OUT_OF_MEMORY);
            }
        }
        Ok(())
    }

    /// Moves what is in its own memory to its GPUs, or the other way. There may be nothing.
    fn carry(&self, pid: c_int, was: &[String], to_host: bool) {
        for (old, new) in was.iter().zip(&self.uuids) {
            let (own, on) = (format!("/proc/{pid}/cwd/gpu-memory-{old}"), memory(new, pid));
            let content = if to_host { fs::read(&on) } else { fs::read(&own) };
            let Ok(content) = content else { continue };
            let (from, to) = if to_host { (on, own.into()) } else { (own.into(), on) };
            if fs::write(to, content).is_ok() {
                let _ = fs::remove_file::<PathBuf>(from);
            }
        }
    }
}

fn hang() -> ! {
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}

/// Notes a call, and does what the faults say. The driver works in a thread of the process itself: one
/// that gets no processor does not answer.
fn begin(call: &str, pid: c_int) -> Result<(), c_int> {
    if let Ok(mut calls) =
        fs::OpenOptions::new().create(true).append(true).open(place().join("calls"))
    {
        let _ = calls.write_all(format!("{call} {pid}\n").as_bytes());
    }
    let faults = fs::read_to_string(place().join("faults")).unwrap_or_default();
    for line in faults.lines() {
        match line.split_once(' ') {
            Some((what, "hang")) if what == call => hang(),
            Some((what, "wait")) if what == call => {
                while fs::read_to_string(place().join("faults")).is_ok_and(|now| now == faults) {
                    thread::sleep(Duration::from_millis(10));
                }
            }
            Some((what, code)) if what == call => {
                return Err(code.trim().parse().unwrap_or(INVALID_VALUE));
            }
            _ => {}
        }
    }
    if pid > 0 && fs::metadata(Process::file(pid)).is_ok() && is_held_back(pid) {
        hang();
    }
    Ok(())
}

fn is_held_back(pid: c_int) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    if matches!(stat.rsplit(") ").next().and_then(|rest| rest.chars().next()), Some('T' | 't')) {
        return true;
    }
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    groups.lines().any(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next(), parts.next(), parts.next().unwrap_or("/"));
        let (file, frozen) = match controllers {
            Some("") => (format!("/sys/fs/cgroup{path}/cgroup.freeze"), "1"),
            Some("freezer") => (format!("/sys/fs/cgroup/freezer{path}/freezer.state"), "FROZEN"),
            _ => return false,
        };
        fs::read_to_string(file).is_ok_and(|text| text.trim() == frozen)
    })
}

fn done(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// Takes a process from one state to another.
fn step(call: &str, pid: c_int, from: c_int, to: c_int) -> c_int {
    done(begin(call, pid).and_then(|()| {
        let _held = Process::hold(pid)?;
        let mut process = Process::of(pid)?;
        if process.state != from {
            return Err(ILLEGAL_STATE);
        }
        process.state = to;
        process.keep(pid)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    if flags != 0 {
        return INVALID_VALUE;
    }
    storage::initialized();
    done(begin("init", 0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessGetState(pid: c_int, state: *mut c_int) -> c_int {
    done(begin("state", pid).and_then(|()| {
        let process = Process::of(pid)?;
        unsafe { *state = process.state };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessGetRestoreThreadId(
    pid: c_int,
    thread: *mut c_int,
) -> c_int {
    done(begin("thread", pid).and_then(|()| {
        Process::of(pid)?;
        unsafe { *thread = pid };
        Ok(())
    }))
}

/// `CUcheckpointLockArgs`: a number and 60 bytes that must be zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessLock(pid: c_int, args: *const [u32; 16]) -> c_int {
    let args = unsafe { args.as_ref() };
    if args.is_some_and(|args| args[1..].iter().any(|word| *word != 0)) {
        return INVALID_VALUE;
    }
    step("lock", pid, RUNNING, LOCKED)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCheckpointProcessCheckpoint(pid: c_int, _args: *const c_void) -> c_int {
    done(begin("checkpoint", pid).and_then(|()| {
        let _held = Process::hold(pid)?;
        let mut process = Process::of(pid)?;
        if process.state != LOCKED {
            return Err(ILLEGAL_STATE);
        }
        process.carry(pid, &process.uuids.clone(), true);
        (process.state, process.kept) = (CHECKPOINTED, Kept::Host);
        process.keep(pid)
    }))
}

#[repr(C)]
pub struct RestoreArgs {
    pairs: *const [[u8; 16]; 2],
    count: c_uint,
    reserved: [u8; 52],
}

/// A pair for every GPU that was used, or none; each GPU has to be there and have room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessRestore(pid: c_int, args: *const RestoreArgs) -> c_int {
    let Some(args) = (unsafe { args.as_ref() }) else { return restore_from_host(pid, Vec::new()) };
    if args.reserved.iter().any(|byte| *byte != 0) {
        return INVALID_VALUE;
    }
    restore_from_host(pid, unsafe { pairs_of(args.pairs, args.count) })
}

unsafe fn pairs_of(pairs: *const [[u8; 16]; 2], count: c_uint) -> Vec<(String, String)> {
    let pair = |index: usize| {
        let [old, new] = unsafe { *pairs.add(index) };
        (uuid_of(old), uuid_of(new))
    };
    (0..count as usize).map(pair).collect()
}

fn restore_from_host(pid: c_int, pairs: Vec<(String, String)>) -> c_int {
    done(begin("restore", pid).and_then(|()| {
        let _held = Process::hold(pid)?;
        let mut process = Process::of(pid)?;
        if process.state != CHECKPOINTED || process.kept != Kept::Host {
            return Err(ILLEGAL_STATE);
        }
        let was = process.uuids.clone();
        process.moves(&pairs)?;
        process.fits()?;
        process.carry(pid, &was, false);
        (process.state, process.kept) = (LOCKED, Kept::Nowhere);
        process.keep(pid)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCheckpointProcessUnlock(pid: c_int, _args: *const c_void) -> c_int {
    step("unlock", pid, LOCKED, RUNNING)
}

fn uuid_of(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Returns the processes that have memory on a GPU now, and how much.
fn users(uuid: &str) -> Vec<(u32, u64)> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let user = |entry: fs::DirEntry| {
        let pid: c_int = entry.file_name().to_str()?.parse().ok()?;
        // One file is one process's: others that work in its directory are not meant.
        let process = Process::of(pid).ok()?;
        let on = matches!(process.state, RUNNING | LOCKED | CHECKPOINTING | RESTORING);
        (on && process.uuids.iter().any(|used| used == uuid)).then_some((pid as u32, process.bytes))
    };
    entries.filter_map(Result::ok).filter_map(user).collect()
}

fn used(uuid: &str) -> u64 {
    users(uuid).iter().map(|(_, bytes)| bytes).sum()
}

// NVML: devices are numbers, one more than the index.

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    if fs::metadata(place().join("gpus")).is_ok() { done(begin("nvml", 0)) } else { 9 }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_int {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(_code: c_int) -> *const c_char {
    c"simulated".as_ptr()
}

unsafe fn put(text: &str, to: *mut c_char, room: c_uint) -> c_int {
    if text.len() >= room as usize {
        return 7;
    }
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        *to.add(text.len()) = 0;
        debug_assert!(CStr::from_ptr(to).to_bytes().len() == text.len());
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(to: *mut c_char, room: c_uint) -> c_int {
    unsafe { put(&version().0, to, room) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> c_int {
    unsafe { *version = self::version().1 };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) -> c_int {
    unsafe { nvmlSystemGetCudaDriverVersion_v2(version) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_int {
    unsafe { *count = gpus().len() as c_uint };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, to: *mut usize) -> c_int {
    if index as usize >= gpus().len() {
        return 2;
    }
    unsafe { *to = index as usize + 1 };
    0
}

fn gpu(device: usize) -> Option<Gpu> {
    gpus().into_iter().nth(device.checked_sub(1)?)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: usize, to: *mut c_char, room: c_uint) -> c_int {
    gpu(device).map_or(2, |gpu| unsafe { put(&gpu.uuid, to, room) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(device: usize, to: *mut c_char, room: c_uint) -> c_int {
    gpu(device).map_or(2, |gpu| unsafe { put(&gpu.model, to, room) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    _device: usize,
    major: *mut c_int,
    minor: *mut c_int,
) -> c_int {
    unsafe { (*major, *minor) = (9, 0) };
    0
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct Memory {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: usize, to: *mut Memory) -> c_int {
    let Some(gpu) = gpu(device) else { return 2 };
    let used = used(&gpu.uuid);
    let memory = unsafe { &mut *to };
    (memory.total, memory.reserved, memory.used) = (gpu.bytes, 0, used);
    memory.free = gpu.bytes.saturating_sub(used);
    0
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
pub struct ProcessInfo {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: usize,
    count: *mut c_uint,
    to: *mut ProcessInfo,
) -> c_int {
    const TOO_SMALL: c_int = 7;
    let Some(gpu) = gpu(device) else { return 2 };
    let users = users(&gpu.uuid);
    let room = unsafe { *count } as usize;
    unsafe { *count = users.len() as c_uint };
    if users.len() > room {
        return TOO_SMALL;
    }
    for (index, (pid, used)) in users.into_iter().enumerate() {
        let info =
            ProcessInfo { pid, used, gpu_instance: c_uint::MAX, compute_instance: c_uint::MAX };
        unsafe { to.add(index).write(info) };
    }
    0
}
