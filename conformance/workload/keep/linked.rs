//! Files that are held by names which were deleted: a semaphore with a name, of which the C library has
//! mapped a name of its own; a file that has another name; one of the image, which has none.

use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use super::Failure;
use super::peer::Peer;

/// The semaphore, and where it is.
pub(super) const SEMAPHORE: &CStr = c"/keep";
const SEMAPHORE_FILE: &str = "/dev/shm/sem.keep";

/// The names of a file; it is open by the first.
const FIRST: &str = "/dev/shm/keep.first";
const SECOND: &str = "/dev/shm/keep.second";

/// A small file of the image.
const OF_IMAGE: &str = "/etc/os-release";

pub(super) struct Linked {
    file: File,
    of_image: File,
    text: String,
}

impl Linked {
    pub(super) fn new() -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(FIRST)?;
        fs::hard_link(FIRST, SECOND)?;
        fs::remove_file(FIRST)?;
        let of_image = File::open(OF_IMAGE)?;
        let text = io::read_to_string(&of_image)?;
        fs::remove_file(OF_IMAGE)?;
        Ok(Self { file, of_image, text })
    }

    /// What is written to the one shows in the other.
    pub(super) fn tick(&self, count: u64, peer: &Peer) -> Result<(), Failure> {
        self.file.write_all_at(&count.to_le_bytes(), 0)?;
        if fs::read(SECOND)? != count.to_le_bytes() {
            return Err("the file is not what is open any more".into());
        }
        let value = || Ok(fs::read(SEMAPHORE_FILE)?.first().copied());
        let (before, posted) = (value()?, peer.while_posted(value)?);
        if (before, posted) != (Some(0), Some(1)) {
            let text = format!("the semaphore's file is not what is mapped: {before:?} {posted:?}");
            return Err(text.into());
        }
        let mut text = vec![0; self.text.len()];
        self.of_image.read_exact_at(&mut text, 0)?;
        if text != self.text.as_bytes() || fs::exists(OF_IMAGE)? {
            return Err("the file of the image is another one".into());
        }
        Ok(())
    }
}
