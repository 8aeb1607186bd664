//! GPU memory in files of its own, by the driver's custom storage: one for each process and GPU, in the
//! directory of the dump. Two buffers take turns: one is copied while the other is read or written.
//!
//! Once the driver has begun a move there is no way back but to its end. So room is taken before,
//! files are opened before, what files cannot take all the same goes back ([`spill`]), and whoever does it does not end in the middle ([`moves`]). Who holds
//! the directory's lock and still finds a process between two states knows that it stays there. Those
//! who bring restored processes share it: each has processes of its own, and all of them only read.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::Duration;

use kybernate_packager::criu::{device_file, device_of};
use kybernate_spec::gpu::uuid;
use rustix::fs::{AtFlags, Dir, FallocateFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

pub(super) mod moves;
mod spill;

use self::spill::Written;

use super::call::{Code, Failure, Storage};
use super::child::{bytes, on};
use super::sys::{Buffer, Contexts, Driver, GpuPair, Operation, Region};
use super::{Pair, Use};
use crate::process;

/// Bytes of one buffer, of which there are two. Others have measured that larger ones gain nothing.
const BUFFER_BYTES: usize = 32 << 20;

/// Moves GPU memory to files and back.
#[derive(Debug)]
pub(super) struct Aside<'a> {
    driver: &'a Driver,
    path: PathBuf,
    /// The directory, locked; `None` when it is gone, and all that was in it.
    directory: Option<OwnedFd>,
    gpus: Vec<[u8; 16]>,
    contexts: OnceCell<Contexts<'a>>,
    reserve: RefCell<Option<Reserve>>,
    look: Duration,
}

/// Room that was taken, and is given back while files grow.
#[derive(Debug)]
struct Reserve {
    file: File,
    bytes: u64,
}

/// Files of one process, by the GPU they are of.
type Files = BTreeMap<String, (File, u64)>;

/// Why memory was not copied.
#[derive(Debug, thiserror::Error)]
enum CopyError {
    #[error("{0} failed: {1}")]
    Driver(&'static str, Code),
    #[error("{0:?}: {1}")]
    File(String, io::Error),
    #[error("on {gpu} the driver wants {wanted} bytes, and there are {there}")]
    Unlike { gpu: String, wanted: u64, there: u64 },
    #[error("{0:?} is no name of a file")]
    Name(String),
}

impl<'a> Aside<'a> {
    /// Waits until nobody else moves memory to or from there, unless both only read for what they have
    /// restored, and begins, unless nobody wants it by then. `gpus` are those whose memory is moved; all when there is none.
    pub(super) fn lock(
        driver: &'a Driver,
        storage: &Storage,
        gpus: &[&str],
    ) -> Result<Self, Failure> {
        moves::patience(storage.patience_ms);
        let path = storage.directory.clone();
        let wrong =
            |error: Errno| Failure::Storage { path: path.clone(), reason: error.to_string() };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut directory = match rustix::fs::open(&path, flags, Mode::empty()) {
            Err(Errno::NOENT) => None,
            opened => Some(opened.map_err(wrong)?),
        };
        if let Some(locked) = &directory {
            let how = if storage.shared {
                FlockOperation::LockShared
            } else {
                FlockOperation::LockExclusive
            };
            let lock = || rustix::fs::flock(locked, how);
            rustix::io::retry_on_intr(lock).map_err(wrong)?;
            if rustix::fs::fstat(locked).map_err(wrong)?.st_nlink == 0 {
                // It was removed while we waited.
                directory = None;
            }
        }
        if moves::is_unwanted(Duration::ZERO) {
            let reason = "nobody waits for it any more".to_owned();
            return Err(Failure::Storage { path, reason });
        }
        let gpus = gpus.iter().map(|gpu| bytes(gpu)).collect::<Result<_, _>>()?;
        let (contexts, reserve) = (OnceCell::new(), RefCell::new(None));
        let look = Duration::from_millis(storage.look_ms);
        Ok(Self { driver, path, directory, gpus, contexts, reserve, look })
    }

    /// Does beforehand whatever may fail or take long: wakes the GPUs, and takes the room.
    pub(super) fn prepare(&self, uses: &[Use]) -> Result<(), Failure> {
        if self.is_gone() {
            return Err(self.wrong("it is not there".to_owned()));
        }
        let sum = uses.iter().fold(0_u64, |sum, one| sum.saturating_add(one.bytes));
        self.make_room(sum)?;
        self.wake()
    }

    /// Wakes the GPUs, and takes what we need of their memory ourselves.
    pub(super) fn wake(&self) -> Result<(), Failure> {
        self.contexts().map(drop)
    }

    /// Takes room for so many bytes, unless that is taken already.
    pub(super) fn make_room(&self, bytes: u64) -> Result<(), Failure> {
        if self.reserve.borrow().as_ref().is_some_and(|reserve| reserve.bytes >= bytes) {
            return Ok(());
        }
        // What there was is given back first: it would be taken twice.
        drop(self.reserve.take());
        let reserve = self.reserve(bytes);
        let reserve = reserve.map_err(|error| self.wrong(format!("{bytes} bytes: {error}")))?;
        self.reserve.replace(reserve);
        Ok(())
    }

    /// Returns how many bytes anybody has on the GPUs: what is moved is no more.
    pub(super) fn at_most(&self) -> Result<u64, Failure> {
        let contexts = self.contexts()?;
        on(0, "cuMemGetInfo", |_| contexts.used())
    }

    /// How long a process between two states is looked at.
    pub(super) const fn look(&self) -> Duration {
        self.look
    }

    /// Returns how many bytes there are of each GPU for these processes. An error when there are none at
    /// all of what had some: a move would be begun that cannot end.
    pub(super) fn lengths(&self, pids: &[u32], uses: &[Use]) -> Result<Vec<Use>, Failure> {
        let mut lengths = BTreeMap::new();
        for pid in pids {
            for (gpu, (_, length)) in self.files(inner_of(*pid)?)? {
                let sum: &mut u64 = lengths.entry(gpu).or_default();
                *sum = sum.saturating_add(length);
            }
        }
        if lengths.is_empty() && uses.iter().any(|one| one.bytes > 0) {
            return Err(self.wrong(format!("there is no file of the processes {pids:?}")));
        }
        Ok(lengths.into_iter().map(|(uuid, bytes)| Use { uuid, bytes }).collect())
    }

    /// Moves what a locked process has on its GPUs into files.
    pub(super) fn take(&self, pid: u32) -> Result<(), Failure> {
        let inner = inner_of(pid)?;
        let contexts = self.contexts()?;
        let buffers = buffers(pid, contexts)?;
        let moving = moves::begin(pid)?;
        let operation =
            on(pid, "cuCheckpointProcessCheckpoint", |pid| contexts.begin_checkpoint(pid))?;
        match self.write_all(&operation, inner, buffers).map(Written::why) {
            Ok((Some(why), written)) => Err(self.put_back(pid, (written, why), operation, moving)),
            copied => ended(pid, copied.map(drop), operation, moving),
        }
    }

    /// Brings a move to its end that the files could not take, and has the process get back what it
    /// had. Returns what is to be said of it.
    fn put_back(
        &self,
        pid: u32,
        (written, why): (Written, CopyError),
        operation: Operation<'_>,
        moving: moves::Moving,
    ) -> Failure {
        let back = || {
            let contexts = self.contexts()?;
            on(pid, "cuCheckpointOperationComplete", |_| operation.complete())?;
            let buffers = buffers(pid, contexts)?;
            let call = "cuCheckpointProcessRestore";
            let operation = on(pid, call, |pid| contexts.begin_restore(pid, &[]))?;
            let cut = |error: CopyError| Failure::Cut { pid, reason: error.to_string() };
            written.back(&operation, buffers).map_err(cut)?;
            on(pid, "cuCheckpointOperationComplete", |_| operation.complete())
        };
        let done = back();
        drop(moving);
        if let Err(failure) = done {
            return Failure::Cut { pid, reason: format!("{why}; and back: {failure}") };
        }
        for name in written.names() {
            // What is left of them is in nobody's way but of another try.
            if let Some(directory) = &self.directory {
                rustix::fs::unlinkat(directory, name, AtFlags::empty()).unwrap_or_default();
            }
        }
        self.wrong(format!("{why}; the GPU memory of process {pid} is back on its GPUs"))
    }

    /// Moves what is in files onto the GPUs of a process.
    pub(super) fn bring(
        &self,
        pid: u32,
        pairs: &[Pair],
        mapped: &[GpuPair],
    ) -> Result<(), Failure> {
        let inner = inner_of(pid)?;
        let files = self.files(inner)?;
        let contexts = self.contexts()?;
        let buffers = buffers(pid, contexts)?;
        let moving = moves::begin(pid)?;
        let operation =
            on(pid, "cuCheckpointProcessRestore", |pid| contexts.begin_restore(pid, mapped))?;
        let copied = read_all(&operation, files, pairs, buffers);
        ended(pid, copied, operation, moving)
    }

    /// Whether the files are gone for good.
    pub(super) const fn is_gone(&self) -> bool {
        self.directory.is_none()
    }

    fn contexts(&self) -> Result<&Contexts<'a>, Failure> {
        if let Some(contexts) = self.contexts.get() {
            return Ok(contexts);
        }
        if !self.driver.has_storage() {
            return Err(Failure::NoStorage);
        }
        on(0, "cuInit", |_| self.driver.init())?;
        let contexts = on(0, "cuDevicePrimaryCtxRetain", |_| self.driver.contexts(&self.gpus))?;
        Ok(self.contexts.get_or_init(|| contexts))
    }

    fn wrong(&self, reason: String) -> Failure {
        Failure::Storage { path: self.path.clone(), reason }
    }

    /// Takes room that nobody else gets then; `None` where the file system has no way to.
    fn reserve(&self, bytes: u64) -> io::Result<Option<Reserve>> {
        let Some(directory) = self.directory.as_ref().filter(|_| bytes > 0) else {
            return Ok(None);
        };
        let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(directory, ".", flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => return Ok(None),
            opened => opened?,
        };
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Err(Errno::OPNOTSUPP) => Ok(None),
            done => done.map(|()| Some(Reserve { file: file.into(), bytes })).map_err(Into::into),
        }
    }

    fn write_all<'b>(
        &self,
        operation: &'b Operation<'_>,
        inner: u32,
        buffers: [Buffer<'b>; 2],
    ) -> Result<Written, CopyError> {
        let regions =
            operation.regions().map_err(|code| CopyError::Driver("cuStreamGetCtx", code))?;
        let bytes = regions.iter().fold(0_u64, |sum, region| sum.saturating_add(region.bytes));
        let (mut buffers, mut written) = (buffers, Written::nothing_of(bytes));
        for region in regions.iter().filter(|region| region.bytes > 0) {
            let gpu = uuid(region.gpu);
            let name = device_file(inner, &gpu).ok_or_else(|| CopyError::Name(gpu.clone()))?;
            match self.create(&name) {
                Ok(file) => written.add(gpu.clone(), name, file),
                Err(error) => written.give_up(CopyError::File(name, error))?,
            }
            buffers = copy_out(operation, region, buffers, |content, at| {
                written.take(&gpu, (content, at), |name, file| {
                    let given = self.give_back(content.len());
                    let done = given.and_then(|()| file.write_all_at(content, at));
                    done.map_err(|error| CopyError::File(name.to_owned(), error))
                })
            })?;
        }
        Ok(written)
    }

    fn create(&self, name: &str) -> io::Result<File> {
        let directory = self.directory.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(directory, name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// Gives back as much of the reserve as is written now.
    fn give_back(&self, bytes: usize) -> io::Result<()> {
        if let Some(reserve) = &mut *self.reserve.borrow_mut() {
            let bytes = u64::try_from(bytes).map_err(io::Error::other)?;
            reserve.bytes = reserve.bytes.saturating_sub(bytes);
            reserve.file.set_len(reserve.bytes)?;
        }
        Ok(())
    }

    /// Opens what was kept of a process.
    fn files(&self, inner: u32) -> Result<Files, Failure> {
        let opened = || {
            let directory = self.directory.as_ref().ok_or(io::ErrorKind::NotFound)?;
            let mut files = Files::new();
            for entry in Dir::read_from(directory)? {
                let entry = entry?;
                let name = entry.file_name();
                let Some((_, gpu)) =
                    name.to_str().ok().and_then(device_of).filter(|(pid, _)| *pid == inner)
                else {
                    continue;
                };
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
                let file = rustix::fs::openat(directory, name, flags, Mode::empty())?;
                let stat = rustix::fs::fstat(&file)?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Err(io::Error::other(format!("{name:?} is no regular file")));
                }
                let length = u64::try_from(stat.st_size).map_err(io::Error::other)?;
                files.insert(gpu, (file.into(), length));
            }
            Ok(files)
        };
        opened().map_err(|error: io::Error| self.wrong(error.to_string()))
    }
}

/// Tells the driver that everything is copied. From here on whatever fails has cut the move short.
fn ended(
    pid: u32,
    copied: Result<(), CopyError>,
    operation: Operation<'_>,
    moving: moves::Moving,
) -> Result<(), Failure> {
    let complete = |()| {
        let done = operation.complete();
        done.map_err(|code| CopyError::Driver("cuCheckpointOperationComplete", code))
    };
    let done = copied.and_then(complete);
    drop(moving);
    done.map_err(|error| Failure::Cut { pid, reason: error.to_string() })
}

fn read_all<'b>(
    operation: &'b Operation<'_>,
    mut files: Files,
    pairs: &[Pair],
    buffers: [Buffer<'b>; 2],
) -> Result<(), CopyError> {
    let regions = operation.regions().map_err(|code| CopyError::Driver("cuStreamGetCtx", code))?;
    let mut found = Vec::new();
    // All of it is known to fit before a byte is copied.
    for region in regions {
        let gpu = uuid(region.gpu);
        let pair = pairs.iter().find(|pair| pair.to == gpu);
        let file = files.remove(pair.map_or(&gpu, |pair| &pair.from));
        let there = file.as_ref().map_or(0, |(_, length)| *length);
        if there != region.bytes {
            return Err(CopyError::Unlike { gpu, wanted: region.bytes, there });
        }
        found.extend(file.map(|(file, _)| (region, gpu, file)));
    }
    if let Some((gpu, (_, there))) = files.into_iter().find(|(_, (_, length))| *length > 0) {
        return Err(CopyError::Unlike { gpu, wanted: 0, there });
    }
    let mut buffers = buffers;
    for (region, gpu, file) in &found {
        buffers = copy_in(operation, region, buffers, |content, at| {
            file.read_exact_at(content, at).map_err(|error| CopyError::File(gpu.clone(), error))
        })?;
    }
    Ok(())
}

/// Copies a region piece by piece: while one is written, the next is copied.
fn copy_out<'b>(
    operation: &'b Operation<'_>,
    region: &Region<'b>,
    [first, second]: [Buffer<'b>; 2],
    write: impl Fn(&[u8], u64) -> Result<(), CopyError>,
) -> Result<[Buffer<'b>; 2], CopyError> {
    let failed = |code| CopyError::Driver("cuMemcpyDtoHAsync", code);
    let copy = |at, bytes, buffer| operation.copy_out(region, at, bytes, buffer).map_err(failed);
    let (mut at, mut bytes) = (0, piece(region, 0));
    let (mut copying, mut spare) = (copy(at, bytes, first)?, second);
    loop {
        let mut full = copying.wait().map_err(failed)?;
        let (from, length) = (at, bytes);
        at = after(at, length);
        bytes = piece(region, at);
        let next = match bytes {
            0 => Err(spare),
            _ => Ok(copy(at, bytes, spare)?),
        };
        write(full.first(length).ok_or_else(|| failed(Code::INVALID))?, from)?;
        moves::copied(length);
        match next {
            Ok(next) => (copying, spare) = (next, full),
            Err(spare) => return Ok([full, spare]),
        }
    }
}

/// Does the same the other way: while one piece is copied, the next is read.
fn copy_in<'b>(
    operation: &'b Operation<'_>,
    region: &Region<'b>,
    [first, second]: [Buffer<'b>; 2],
    read: impl Fn(&mut [u8], u64) -> Result<(), CopyError>,
) -> Result<[Buffer<'b>; 2], CopyError> {
    let failed = |code| CopyError::Driver("cuMemcpyHtoDAsync", code);
    let fill = |mut buffer: Buffer<'b>, at, bytes| {
        read(buffer.first(bytes).ok_or_else(|| failed(Code::INVALID))?, at)?;
        Ok(buffer)
    };
    let (mut at, mut bytes) = (0, piece(region, 0));
    let buffer = fill(first, at, bytes)?;
    let mut copying = operation.copy_in(region, at, bytes, buffer).map_err(failed)?;
    let mut spare = second;
    loop {
        at = after(at, bytes);
        moves::copied(bytes);
        bytes = piece(region, at);
        if bytes == 0 {
            return Ok([copying.wait().map_err(failed)?, spare]);
        }
        let buffer = fill(spare, at, bytes)?;
        spare = copying.wait().map_err(failed)?;
        copying = operation.copy_in(region, at, bytes, buffer).map_err(failed)?;
    }
}

/// Returns how many bytes are copied at once from there on.
fn piece(region: &Region<'_>, at: u64) -> usize {
    let left = region.bytes.saturating_sub(at);
    usize::try_from(left).unwrap_or(usize::MAX).min(BUFFER_BYTES)
}

fn after(at: u64, bytes: usize) -> u64 {
    u64::try_from(bytes).ok().and_then(|bytes| at.checked_add(bytes)).unwrap_or(u64::MAX)
}

fn buffers<'a>(pid: u32, contexts: &'a Contexts<'_>) -> Result<[Buffer<'a>; 2], Failure> {
    let buffer = || on(pid, "cuMemHostAlloc", |_| contexts.buffer(BUFFER_BYTES));
    Ok([buffer()?, buffer()?])
}

/// Returns a process's id in its innermost namespace, which it has wherever it is restored.
fn inner_of(pid: u32) -> Result<u32, Failure> {
    process::inner(pid).ok_or(Failure::Unwanted(pid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_its_innermost_id() {
        assert!(inner_of(std::process::id()).is_ok());
        assert_eq!(inner_of(u32::MAX), Err(Failure::Unwanted(u32::MAX)));
    }
}
