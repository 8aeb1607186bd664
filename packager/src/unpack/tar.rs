//! A dump as members of a tar file.
//!
//! Where each member begins follows from the sizes in the page index. So pages go from their chunks
//! straight to where the tar has them: nothing is copied on the way, and zero pages stay holes.
//! Whoever restores from it tells CRIU nothing, and so the one image that wants that is another one here.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use fs_err as fs;
use kybernate_spec::Reason;
use tar::Header;

use super::pages::OutputFile;
use super::plan::PlannedFile;
use super::{Limits, UnpackError, fetch_into, plan, unpack_images};
use crate::artifact::Checkpoint;
use crate::criu::cgroups::{CGROUPS, restorable};
use crate::pack::upload::blocking;
use crate::progress::Progress;
use crate::store::Store;

/// Members of a tar begin and end on these.
pub(crate) const BLOCK_BYTES: u64 = 512;

/// Where a dump goes.
#[derive(Clone, Debug)]
pub(crate) struct TarTarget {
    /// The file. Nothing is in it from `position` on.
    pub(crate) file: Arc<fs::File>,
    /// Where the first header goes.
    pub(crate) position: u64,
    /// What comes before the names: nothing, or a directory and `/`.
    pub(crate) prefix: &'static str,
}

/// Unpacks a whole checkpoint into members of a tar and returns where the last one ends, padding
/// counted; the two blocks that end a tar are not written. `scratch` is an empty directory for the
/// small files.
pub(crate) async fn unpack_to_tar(
    store: &Store,
    checkpoint: &Checkpoint,
    scratch: &Path,
    target: TarTarget,
    limits: Limits,
    progress: &Progress,
) -> Result<u64, UnpackError> {
    let images = scratch.join("images");
    fs::create_dir(&images).map_err(|error| UnpackError::Io("make a directory", error))?;
    unpack_images(store, checkpoint, &images, progress).await?;
    progress.expect(checkpoint.shards.iter().map(|shard| shard.size).sum());
    let plan = plan(|_| true, store, checkpoint, &images, limits, progress).await?;
    let files = plan.files.clone();
    let laid = blocking(move || lay_out(&images, &files, target)).await;
    let (files, end) = laid.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            let text = "the pack of images and the page index have a file of one name";
            UnpackError::Contradiction(Reason::FileTwice, text.to_owned())
        }
        _ => UnpackError::Io("write the tar", error),
    })?;
    fetch_into(&plan, &files, store, checkpoint, progress).await?;
    Ok(end)
}

/// Returns how many bytes the content of a member takes with its padding.
pub(crate) const fn padded(length: u64) -> u64 {
    length.div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES)
}

/// Describes a regular file that only its owner can read. No time and no owner of this machine
/// gets in.
pub(crate) fn tar_header(name: &str, length: u64) -> io::Result<Header> {
    let mut header = Header::new_gnu();
    header.set_path(name)?;
    header.set_size(length);
    header.set_mode(0o600);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_cksum();
    Ok(header)
}

/// The files that pages are written to.
type Files = Arc<[Option<OutputFile>]>;

/// Writes all headers and the small files; what is left are the pages.
fn lay_out(images: &Path, bulk: &[PlannedFile], target: TarTarget) -> io::Result<(Files, u64)> {
    let mut small = Vec::new();
    for entry in fs::read_dir(images)? {
        small.push(entry?.file_name().to_string_lossy().into_owned());
    }
    // Equal checkpoints give equal tars.
    small.sort_unstable();
    let out = target.file.file();
    let mut position = target.position;
    for name in &small {
        let mut content = fs::read(images.join(name))?;
        if name == CGROUPS
            && let Some(restorable) = restorable(&content).map_err(io::Error::other)?
        {
            content = restorable;
        }
        let length = crate::checked::length(&content);
        let header = tar_header(&format!("{}{name}", target.prefix), length)?;
        out.write_all_at(header.as_bytes(), position)?;
        out.write_all_at(&content, position.saturating_add(BLOCK_BYTES))?;
        position = after(position, length)?;
    }
    let mut files = Vec::new();
    for planned in bulk {
        if small.binary_search(&planned.name).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let header = tar_header(&format!("{}{}", target.prefix, planned.name), planned.length)?;
        out.write_all_at(header.as_bytes(), position)?;
        let base = position.saturating_add(BLOCK_BYTES);
        let file = Arc::clone(&target.file);
        files.push(Some(OutputFile { file, base, length: planned.length }));
        position = after(position, planned.length)?;
    }
    target.file.set_len(position)?;
    Ok((files.into(), position))
}

/// Returns where the next header goes.
fn after(position: u64, length: u64) -> io::Result<u64> {
    let end = position.checked_add(BLOCK_BYTES).and_then(|begin| begin.checked_add(padded(length)));
    end.ok_or_else(|| io::ErrorKind::FileTooLarge.into())
}
