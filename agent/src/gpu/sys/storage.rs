//! Custom storage: the driver maps what a process has on its GPUs into ours, we copy it, and say so.
//!
//! ```text
//! LOCKED --checkpoint--> CHECKPOINTING --complete--> CHECKPOINTED
//! CHECKPOINTED --restore--> RESTORING --complete--> LOCKED
//! ```
//!
//! There is no call that gives up between (CUDA 13.4, "CUDA Checkpointing"; drivers 615 and later).

use std::ffi::{c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr::{null, null_mut};

use libloading::Library;

use super::{Code, Driver, GpuPair, check};

/// CUDA whose forms of the calls are asked for: 13.4.
const CUDA: c_int = 13_040;

/// `CU_MEMHOSTALLOC_PORTABLE`: for the GPUs of all contexts.
const PORTABLE: c_uint = 1;

/// `CUcheckpointCustomStoragePerDeviceData`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct DeviceData {
    address: u64,
    size: usize,
    stream: *mut c_void,
}

/// `CUcheckpointCustomStorageInfo`.
#[repr(C)]
#[derive(Debug)]
struct StorageInfo {
    handle: *mut c_void,
    devices: *const DeviceData,
    count: c_uint,
}

/// `CUcheckpointCheckpointArgs`.
#[repr(C)]
#[derive(Debug)]
struct CheckpointArgs {
    storage: *mut *const StorageInfo,
    reserved: [u8; 56],
}

/// `CUcheckpointRestoreArgs`, since CUDA 13.4.
#[repr(C)]
#[derive(Debug)]
struct RestoreArgs {
    pairs: *const GpuPair,
    pairs_count: c_uint,
    padding: c_uint,
    storage: *mut *const StorageInfo,
    reserved: [u8; 40],
}

const _: () = assert!(size_of::<CheckpointArgs>() == 64 && size_of::<RestoreArgs>() == 64);

type Find = unsafe extern "C" fn(*const u8, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;
type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
type Device = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
type Uuid = unsafe extern "C" fn(*mut [u8; 16], c_int) -> c_int;
type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
type WithDevice = unsafe extern "C" fn(c_int) -> c_int;
type WithHandle = unsafe extern "C" fn(*mut c_void) -> c_int;
type StreamContext = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int;
type HostAlloc = unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_int;
type MemoryInfo = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;
type CopyOut = unsafe extern "C" fn(*mut c_void, u64, usize, *mut c_void) -> c_int;
type CopyIn = unsafe extern "C" fn(u64, *const c_void, usize, *mut c_void) -> c_int;

/// What a driver has for custom storage.
#[derive(Debug)]
pub(super) struct Calls {
    checkpoint: unsafe extern "C" fn(c_int, *mut CheckpointArgs) -> c_int,
    restore: unsafe extern "C" fn(c_int, *mut RestoreArgs) -> c_int,
    complete: WithHandle,
    count: Count,
    device: Device,
    uuid: Uuid,
    retain: Retain,
    release: WithDevice,
    set_context: WithHandle,
    context_device: Count,
    stream_context: StreamContext,
    synchronize: WithHandle,
    host_alloc: HostAlloc,
    host_free: WithHandle,
    copy_out: CopyOut,
    copy_in: CopyIn,
    memory_info: MemoryInfo,
}

/// The primary contexts of GPUs, which custom storage wants retained. Given back when dropped.
#[derive(Debug)]
pub(in crate::gpu) struct Contexts<'a> {
    calls: &'a Calls,
    devices: Vec<(c_int, *mut c_void)>,
}

/// What one process has, or is to have, on one GPU, mapped into ours.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Region<'a> {
    /// The GPU here.
    pub(in crate::gpu) gpu: [u8; 16],
    /// How many bytes there are; may be none.
    pub(in crate::gpu) bytes: u64,
    address: u64,
    stream: *mut c_void,
    context: *mut c_void,
    _operation: PhantomData<&'a Calls>,
}

/// A move that the driver has begun and waits to hear the end of. Dropped without
/// [`Operation::complete`], what is moved is lost.
#[derive(Debug)]
pub(in crate::gpu) struct Operation<'a> {
    calls: &'a Calls,
    handle: *mut c_void,
    devices: Vec<DeviceData>,
}

/// Memory of ours that a GPU copies from and to by itself.
#[derive(Debug)]
pub(in crate::gpu) struct Buffer<'a> {
    calls: &'a Calls,
    start: *mut u8,
    bytes: usize,
}

/// A copy under way, which has its buffer.
#[derive(Debug)]
pub(in crate::gpu) struct Copying<'a> {
    calls: &'a Calls,
    stream: *mut c_void,
    buffer: Option<Buffer<'a>>,
    _operation: PhantomData<&'a Operation<'a>>,
}

impl Calls {
    /// Finds the calls; `None` where the driver is too old for custom storage.
    pub(super) fn find(library: &Library) -> Option<Self> {
        // SAFETY: the types are those of the driver's header for these names, which NVIDIA keeps for
        // the life of a name; the three that changed are asked for in the form of CUDA 13.4. The
        // copies are used only while the library is held.
        unsafe {
            let find: Find = *library.get(b"cuGetProcAddress_v2\0").ok()?;
            let named = |name: &[u8]| {
                let (mut found, mut status) = (null_mut(), 0);
                let code = find(name.as_ptr(), &raw mut found, CUDA, 0, &raw mut status);
                (code == super::SUCCESS && !found.is_null()).then_some(found)
            };
            let complete = named(b"cuCheckpointOperationComplete\0")?;
            let checkpoint = named(b"cuCheckpointProcessCheckpoint\0")?;
            let restore = named(b"cuCheckpointProcessRestore\0")?;
            Some(Self {
                checkpoint: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int, *mut CheckpointArgs) -> c_int,
                >(checkpoint),
                restore: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int, *mut RestoreArgs) -> c_int,
                >(restore),
                complete: std::mem::transmute::<*mut c_void, WithHandle>(complete),
                count: *library.get(b"cuDeviceGetCount\0").ok()?,
                device: *library.get(b"cuDeviceGet\0").ok()?,
                uuid: *library.get(b"cuDeviceGetUuid_v2\0").ok()?,
                retain: *library.get(b"cuDevicePrimaryCtxRetain\0").ok()?,
                release: *library.get(b"cuDevicePrimaryCtxRelease_v2\0").ok()?,
                set_context: *library.get(b"cuCtxSetCurrent\0").ok()?,
                context_device: *library.get(b"cuCtxGetDevice\0").ok()?,
                stream_context: *library.get(b"cuStreamGetCtx\0").ok()?,
                synchronize: *library.get(b"cuStreamSynchronize\0").ok()?,
                host_alloc: *library.get(b"cuMemHostAlloc\0").ok()?,
                host_free: *library.get(b"cuMemFreeHost\0").ok()?,
                copy_out: *library.get(b"cuMemcpyDtoHAsync_v2\0").ok()?,
                copy_in: *library.get(b"cuMemcpyHtoDAsync_v2\0").ok()?,
                memory_info: *library.get(b"cuMemGetInfo_v2\0").ok()?,
            })
        }
    }
}

impl Driver {
    /// Whether the driver has custom storage.
    pub(in crate::gpu) const fn has_storage(&self) -> bool {
        self.storage.is_some()
    }

    /// Retains the primary contexts of these GPUs, of all when none is named. [`Driver::init`] comes
    /// before. Takes seconds.
    pub(in crate::gpu) fn contexts(&self, gpus: &[[u8; 16]]) -> Result<Contexts<'_>, Code> {
        let calls = self.storage.as_ref().ok_or(Code::NOT_SUPPORTED)?;
        let mut contexts = Contexts { calls, devices: Vec::new() };
        let mut count = 0;
        // SAFETY: the number that is written to outlives the call.
        check(unsafe { (calls.count)(&raw mut count) })?;
        for ordinal in 0..count {
            let (mut device, mut uuid, mut context) = (0, [0; 16], null_mut());
            // SAFETY: what is written to outlives the calls, and is of the sizes they write.
            check(unsafe { (calls.device)(&raw mut device, ordinal) })?;
            // SAFETY: as above.
            check(unsafe { (calls.uuid)(&raw mut uuid, device) })?;
            if gpus.is_empty() || gpus.contains(&uuid) {
                // SAFETY: as above; what is retained is released once, when `contexts` is dropped.
                check(unsafe { (calls.retain)(&raw mut context, device) })?;
                contexts.devices.push((device, context));
            }
        }
        if contexts.devices.is_empty() { Err(Code::INVALID_DEVICE) } else { Ok(contexts) }
    }
}

impl Contexts<'_> {
    /// Has the driver map what a locked process has on its GPUs into this process.
    pub(in crate::gpu) fn begin_checkpoint(&self, pid: c_int) -> Result<Operation<'_>, Code> {
        let mut info = null();
        let mut args = CheckpointArgs { storage: &raw mut info, reserved: [0; 56] };
        // SAFETY: the structure, and what it points to, outlive the call.
        check(unsafe { (self.calls.checkpoint)(pid, &raw mut args) })?;
        // SAFETY: what the driver has just written there is its own, and valid until the end is said.
        unsafe { Operation::of(self.calls, info) }
    }

    /// Has the driver map what a process is to have on its GPUs again, onto others where `pairs` says
    /// so: then it has to name all of them.
    pub(in crate::gpu) fn begin_restore(
        &self,
        pid: c_int,
        pairs: &[GpuPair],
    ) -> Result<Operation<'_>, Code> {
        let Ok(pairs_count) = c_uint::try_from(pairs.len()) else { return Err(Code::INVALID) };
        let mut info = null();
        let mut args = RestoreArgs {
            pairs: if pairs.is_empty() { null() } else { pairs.as_ptr() },
            pairs_count,
            padding: 0,
            storage: &raw mut info,
            reserved: [0; 40],
        };
        // SAFETY: the structure, the pairs, and what it points to, outlive the call.
        check(unsafe { (self.calls.restore)(pid, &raw mut args) })?;
        // SAFETY: what the driver has just written there is its own, and valid until the end is said.
        unsafe { Operation::of(self.calls, info) }
    }

    /// Returns how many bytes of the memory of these GPUs somebody has.
    pub(in crate::gpu) fn used(&self) -> Result<u64, Code> {
        let mut sum = 0_u64;
        for (_, context) in &self.devices {
            let (mut free, mut total) = (0, 0);
            // SAFETY: the context is retained as long as `self` lives.
            check(unsafe { (self.calls.set_context)(*context) })?;
            // SAFETY: the numbers that are written to outlive the call.
            check(unsafe { (self.calls.memory_info)(&raw mut free, &raw mut total) })?;
            let used = u64::try_from(total.saturating_sub(free)).unwrap_or(u64::MAX);
            sum = sum.saturating_add(used);
        }
        Ok(sum)
    }

    /// Allocates memory that GPUs copy from and to.
    pub(in crate::gpu) fn buffer(&self, bytes: usize) -> Result<Buffer<'_>, Code> {
        let Some((_, context)) = self.devices.first() else { return Err(Code::INVALID_DEVICE) };
        let mut start = null_mut();
        // SAFETY: the context is retained as long as `self` lives.
        check(unsafe { (self.calls.set_context)(*context) })?;
        // SAFETY: the pointer that is written to outlives the call; what it gets is freed once, when
        // the buffer is dropped.
        check(unsafe { (self.calls.host_alloc)(&raw mut start, bytes, PORTABLE) })?;
        // SAFETY: the driver has allocated so many bytes there, for nobody else.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        Ok(Buffer { calls: self.calls, start: start.cast(), bytes })
    }
}

impl Drop for Contexts<'_> {
    fn drop(&mut self) {
        for (device, _) in &self.devices {
            // SAFETY: it was retained once, by whoever made this.
            let _unheard = unsafe { (self.calls.release)(*device) };
        }
    }
}

impl<'a> Operation<'a> {
    /// Reads what the driver says of a move.
    ///
    /// # Safety
    ///
    /// `info` is null, or what the driver has returned from a call that succeeded.
    unsafe fn of(calls: &'a Calls, info: *const StorageInfo) -> Result<Self, Code> {
        // SAFETY: the driver has filled it in, when it is there.
        let Some(info) = (unsafe { info.as_ref() }) else { return Err(Code::INVALID) };
        let count = usize::try_from(info.count).map_err(|_too_many| Code::INVALID)?;
        if info.handle.is_null() || (count > 0 && info.devices.is_null()) {
            return Err(Code::INVALID);
        }
        let devices = match count {
            0 => Vec::new(),
            // SAFETY: the driver has put so many there, and nobody changes them.
            _ => unsafe { std::slice::from_raw_parts(info.devices, count) }.to_vec(),
        };
        Ok(Self { calls, handle: info.handle, devices })
    }

    /// Returns what is mapped, and on which GPU each is.
    pub(in crate::gpu) fn regions(&self) -> Result<Vec<Region<'_>>, Code> {
        self.devices.iter().map(|data| self.region(*data)).collect()
    }

    fn region(&self, data: DeviceData) -> Result<Region<'_>, Code> {
        let (calls, mut context, mut device, mut gpu) = (self.calls, null_mut(), 0, [0; 16]);
        // SAFETY: the stream is the driver's own, and lives until the end is said; what is written to
        // outlives the calls.
        check(unsafe { (calls.stream_context)(data.stream, &raw mut context) })?;
        // SAFETY: the context is the stream's.
        check(unsafe { (calls.set_context)(context) })?;
        // SAFETY: what is written to outlives the calls.
        check(unsafe { (calls.context_device)(&raw mut device) })?;
        // SAFETY: as above.
        check(unsafe { (calls.uuid)(&raw mut gpu, device) })?;
        let bytes = u64::try_from(data.size).map_err(|_too_large| Code::INVALID)?;
        let DeviceData { address, stream, .. } = data;
        Ok(Region { gpu, bytes, address, stream, context, _operation: PhantomData })
    }

    /// Begins to copy from a region into a buffer.
    pub(in crate::gpu) fn copy_out<'b>(
        &'b self,
        region: &Region<'b>,
        offset: u64,
        bytes: usize,
        buffer: Buffer<'b>,
    ) -> Result<Copying<'b>, Code> {
        let address = self.ready(region, offset, bytes, &buffer)?;
        // SAFETY: both ends have so many bytes, and the buffer stays untouched until the copy is
        // waited for: `Copying` has it.
        check(unsafe {
            (self.calls.copy_out)(buffer.start.cast(), address, bytes, region.stream)
        })?;
        Ok(Copying::of(self.calls, region, buffer))
    }

    /// Begins to copy from a buffer into a region.
    pub(in crate::gpu) fn copy_in<'b>(
        &'b self,
        region: &Region<'b>,
        offset: u64,
        bytes: usize,
        buffer: Buffer<'b>,
    ) -> Result<Copying<'b>, Code> {
        let address = self.ready(region, offset, bytes, &buffer)?;
        // SAFETY: both ends have so many bytes, and the buffer stays untouched until the copy is
        // waited for: `Copying` has it.
        check(unsafe { (self.calls.copy_in)(address, buffer.start.cast(), bytes, region.stream) })?;
        Ok(Copying::of(self.calls, region, buffer))
    }

    /// Returns the address of bytes in a region, whose context is the current one then.
    fn ready(
        &self,
        region: &Region<'_>,
        offset: u64,
        bytes: usize,
        buffer: &Buffer<'_>,
    ) -> Result<u64, Code> {
        let address = region.place(offset, bytes, buffer)?;
        // SAFETY: the context lives until the end is said.
        check(unsafe { (self.calls.set_context)(region.context) })?;
        Ok(address)
    }

    /// Says that everything is copied. The driver waits for the streams, and unmaps.
    pub(in crate::gpu) fn complete(self) -> Result<(), Code> {
        // SAFETY: the handle is the driver's for this move, and is used once: `self` ends here.
        check(unsafe { (self.calls.complete)(self.handle) })
    }
}

impl Region<'_> {
    /// Returns the address of bytes in it; an error when not all of them are, or the buffer is
    /// smaller.
    fn place(&self, offset: u64, bytes: usize, buffer: &Buffer<'_>) -> Result<u64, Code> {
        let wanted = u64::try_from(bytes).ok().and_then(|bytes| offset.checked_add(bytes));
        let within = wanted.is_some_and(|end| end <= self.bytes) && bytes <= buffer.bytes;
        let address = self.address.checked_add(offset).filter(|_| within);
        address.ok_or(Code::INVALID)
    }
}

impl Buffer<'_> {
    /// Returns the first bytes.
    pub(in crate::gpu) fn first(&mut self, bytes: usize) -> Option<&mut [u8]> {
        // SAFETY: the driver has allocated so many bytes there, all of them written by `buffer`, and
        // no copy is under way: that would have the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }.get_mut(..bytes)
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: it was allocated by the driver, and no copy is under way.
        let _unheard = unsafe { (self.calls.host_free)(self.start.cast()) };
    }
}

impl<'a> Copying<'a> {
    const fn of(calls: &'a Calls, region: &Region<'_>, buffer: Buffer<'a>) -> Self {
        Self { calls, stream: region.stream, buffer: Some(buffer), _operation: PhantomData }
    }

    /// Waits for its end, and returns the buffer.
    pub(in crate::gpu) fn wait(mut self) -> Result<Buffer<'a>, Code> {
        // SAFETY: the stream lives until the end of the move is said, which needs this to be gone.
        check(unsafe { (self.calls.synchronize)(self.stream) })?;
        self.buffer.take().ok_or(Code::INVALID)
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        // SAFETY: as in `wait`.
        if check(unsafe { (self.calls.synchronize)(self.stream) }).is_err() {
            // Who knows whether it is still written to.
            std::mem::forget(buffer);
        }
    }
}
