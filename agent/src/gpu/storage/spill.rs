//! What the files cannot take, once the driver has begun: it has no call that gives up, so the rest is
//! kept in this process's own memory, and goes back to where it came from.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use kybernate_spec::gpu::uuid;

use super::{CopyError, copy_in};
use crate::gpu::sys::{Buffer, Operation};
use crate::process;

/// Memory by its GPU and its place there.
type Pieces = BTreeMap<(String, u64), Vec<u8>>;

/// What was copied of one process.
#[derive(Debug)]
pub(super) struct Written {
    /// Bytes that are not copied yet.
    left: Cell<u64>,
    /// By their GPUs; some may not have been made.
    files: BTreeMap<String, (String, File)>,
    /// What is in no file.
    pieces: RefCell<Pieces>,
    why: RefCell<Option<CopyError>>,
}

impl Written {
    pub(super) const fn nothing_of(bytes: u64) -> Self {
        Self {
            left: Cell::new(bytes),
            files: BTreeMap::new(),
            pieces: RefCell::new(Pieces::new()),
            why: RefCell::new(None),
        }
    }

    pub(super) fn add(&mut self, gpu: String, name: String, file: File) {
        self.files.insert(gpu, (name, file));
    }

    /// Copies nothing more into files, but into memory, where that is there: no more than half of what
    /// can be had, so that nobody is ended for it.
    pub(super) fn give_up(&self, error: CopyError) -> Result<(), CopyError> {
        let available = process::memory_available().unwrap_or_default();
        if self.left.get() > available / 2 {
            return Err(error);
        }
        self.why.replace(Some(error));
        Ok(())
    }

    /// Takes a piece: into its GPU's file with `write`, else into memory.
    pub(super) fn take(
        &self,
        gpu: &str,
        (content, at): (&[u8], u64),
        write: impl FnOnce(&str, &File) -> Result<(), CopyError>,
    ) -> Result<(), CopyError> {
        if let Some((name, file)) = self.files.get(gpu)
            && self.why.borrow().is_none()
            && let Err(error) = write(name, file)
        {
            self.give_up(error)?;
        }
        if self.why.borrow().is_some() {
            self.pieces.borrow_mut().insert((gpu.to_owned(), at), content.to_vec());
        }
        let bytes = u64::try_from(content.len()).unwrap_or(u64::MAX);
        self.left.set(self.left.get().saturating_sub(bytes));
        Ok(())
    }

    /// Returns why not all of it is in files.
    pub(super) fn why(self) -> (Option<CopyError>, Self) {
        let Self { left, files, pieces, why } = self;
        (why.into_inner(), Self { left, files, pieces, why: RefCell::new(None) })
    }

    /// Returns the names of the files.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.values().map(|(name, _)| &**name)
    }

    /// Copies all of it to where it came from.
    pub(super) fn back<'b>(
        &self,
        operation: &'b Operation<'_>,
        mut buffers: [Buffer<'b>; 2],
    ) -> Result<(), CopyError> {
        let regions =
            operation.regions().map_err(|code| CopyError::Driver("cuStreamGetCtx", code))?;
        for region in regions.iter().filter(|region| region.bytes > 0) {
            let gpu = uuid(region.gpu);
            buffers =
                copy_in(operation, region, buffers, |content, at| self.read(&gpu, content, at))?;
        }
        Ok(())
    }

    fn read(&self, gpu: &str, content: &mut [u8], at: u64) -> Result<(), CopyError> {
        let unlike = |there: usize| CopyError::Unlike {
            gpu: gpu.to_owned(),
            wanted: u64::try_from(content.len()).unwrap_or(u64::MAX),
            there: u64::try_from(there).unwrap_or(u64::MAX),
        };
        match self.pieces.borrow().get(&(gpu.to_owned(), at)) {
            Some(piece) if piece.len() == content.len() => content.copy_from_slice(piece),
            Some(piece) => return Err(unlike(piece.len())),
            None => {
                let (name, file) = self.files.get(gpu).ok_or_else(|| unlike(0))?;
                let read = file.read_exact_at(content, at);
                read.map_err(|error| CopyError::File(name.clone(), error))?;
            }
        }
        Ok(())
    }
}
