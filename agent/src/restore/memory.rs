//! Hands CRIU the memory of a dump as it comes from the registry.
//!
//! CRIU reads memory from files in its directory, each from the beginning to the end. A file system
//! of the agent's own (FUSE) has these files: whoever reads there waits for the chunks, which are
//! proven before a byte of them is handed out, and they go from the agent's buffers right into the
//! processes' memory. So it is not written first, but for some that comes before CRIU reads it
//! (`spec/decisions/0054`, `0055`).
//! The file system is there for one restore, is read-only, and only root can look into it.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fs_err as fs;
use fuser::{
    BackgroundSession, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyOpen, Request, Session,
};
use kybernate_packager::unpack::UnpackError;
use kybernate_packager::unpack::on_demand::{OnDemand, PagesFile, PagesReader, READ_BYTES_MAX};
use kybernate_spec::chain;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::stage::{self, MEMORY};

/// Where the kernel's end of a file system of ours is opened.
const DEVICE: &str = "/dev/fuse";

/// Nothing changes while it is mounted.
const VALID: Duration = Duration::from_hours(1);

/// Most readers at once. CRIU opens each of a few files some times.
const READERS_MAX: usize = 64;

/// The inode of the directory with the files.
const ROOT: INodeNo = INodeNo::ROOT;

/// The first file's inode.
const FIRST: u64 = 2;

/// A dump's memory, mounted for CRIU. Dropped, it is gone, and whoever still reads gets an error.
#[derive(Debug)]
pub(super) struct Memory {
    pages: Arc<OnDemand>,
    directory: PathBuf,
    _session: BackgroundSession,
}

/// Whether this kernel and this process can have such a file system.
pub(super) fn is_possible() -> bool {
    fs::OpenOptions::new().read(true).write(true).open(DEVICE).is_ok()
}

impl Memory {
    /// Mounts it in an operation's directory, and has the files of `images` lead there. Blocks.
    pub(super) fn mount(
        pages: Arc<OnDemand>,
        operation: &Path,
        images: &Path,
        runtime: Handle,
    ) -> io::Result<Self> {
        let directory = operation.join(MEMORY);
        let files = pages.files().to_vec();
        let names: Vec<String> = files.iter().map(|file| file.name.clone()).collect();
        let served = Directory {
            pages: Arc::clone(&pages),
            files,
            readers: Mutex::default(),
            next: AtomicU64::new(1),
            reads: Mutex::default(),
            runtime,
        };
        let mut config = fuser::Config::default();
        config.mount_options = vec![
            MountOption::RO,
            MountOption::NoSuid,
            MountOption::NoDev,
            MountOption::NoExec,
            MountOption::FSName("kybernate-memory".to_owned()),
        ];
        let session = Session::new(served, &directory, &config)?.spawn()?;
        let memory = Self { pages, directory, _session: session };
        let link =
            |name: &String| symlink(Path::new("..").join(MEMORY).join(name), images.join(name));
        if let Err(error) = names.iter().try_for_each(link) {
            // They would be in the way of the files themselves.
            for name in &names {
                fs::remove_file(images.join(name)).ok();
            }
            return Err(error);
        }
        Ok(memory)
    }

    /// Begins to fetch what CRIU will read. What comes before that lies in an operation's directory.
    pub(super) fn begin(&self, operation: &Path) {
        self.pages.begin(operation);
    }

    /// Returns about how many bytes come while it is read.
    pub(super) fn bytes(&self) -> u64 {
        self.pages.bytes()
    }

    /// Returns why something could not be read, once.
    pub(super) fn failure(&self) -> Option<UnpackError> {
        self.pages.failure()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(error) = stage::unmount(&self.directory) {
            let directory = &self.directory;
            tracing::warn!(error = %chain(&error), ?directory, "failed to unmount a dump's memory");
        }
    }
}

/// The file system: one directory with files of pages.
struct Directory {
    pages: Arc<OnDemand>,
    files: Vec<PagesFile>,
    // These are held for a look only, never across an `.await`.
    readers: Mutex<HashMap<u64, Arc<PagesReader>>>,
    reads: Mutex<JoinSet<()>>,
    next: AtomicU64,
    runtime: Handle,
}

impl Directory {
    fn file(&self, inode: INodeNo) -> Option<&PagesFile> {
        let number = usize::try_from(inode.0.checked_sub(FIRST)?).ok()?;
        self.files.get(number)
    }

    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let file = self.file(inode);
        if file.is_none() && inode != ROOT {
            return None;
        }
        let size = file.map_or(0, |file| file.length);
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if file.is_some() { FileType::RegularFile } else { FileType::Directory },
            perm: if file.is_some() { 0o400 } else { 0o500 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for Directory {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let refused = |_| io::Error::other("the kernel refuses reads of 1 MiB");
        config.set_max_write(READ_BYTES_MAX).map_err(refused)?;
        // A kernel without it reads less at once.
        config.add_capabilities(InitFlags::FUSE_MAX_PAGES).ok();
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let numbered = (FIRST..).zip(&self.files);
        let found = numbered.filter(|_| parent == ROOT).find(|(_, file)| *file.name == *name);
        match found.and_then(|(number, _)| self.attributes(INodeNo(number))) {
            Some(attributes) => reply.entry(&VALID, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&VALID, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let Some(Ok(reader)) = self.file(inode).map(|file| self.pages.read(file)) else {
            return reply.error(Errno::ENOENT);
        };
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let mut readers = lock(&self.readers);
        if readers.len() >= READERS_MAX {
            return reply.error(Errno::EMFILE);
        }
        readers.insert(handle, Arc::new(reader));
        // Right into the memory of whoever reads: what is read is read once.
        reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(reader) = lock(&self.readers).get(&handle.0).cloned() else {
            return reply.error(Errno::EBADF);
        };
        // Most often it is there already: then nobody else needs to be woken.
        if let Some(content) = reader.at_once(offset, size) {
            return answer(reply, Some(&content));
        }
        let mut reads = lock(&self.reads);
        while reads.try_join_next().is_some() {}
        let read = async move {
            let content = reader.at(offset, size).await.ok();
            answer(reply, content.as_deref());
        };
        reads.spawn_on(read, &self.runtime);
    }

    fn release(
        &self,
        _request: &Request,
        _inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        lock(&self.readers).remove(&handle.0);
        reply.ok();
    }
}

/// Answers a read. CRIU asks for no more than there should be, and without an error it asks again and
/// again for what is missing.
fn answer(reply: ReplyData, content: Option<&[u8]>) {
    match content.filter(|content| !content.is_empty()) {
        Some(content) => reply.data(content),
        None => reply.error(Errno::EIO),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
