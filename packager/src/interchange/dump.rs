//! CRIU's images out of a foreign tar, and what is compressed out of its compression. Everything
//! here blocks.

use std::io::{self, BufRead as _, BufReader, Read};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_spec::media_type;

use super::foreign::{ForeignError, Member, Members};
use crate::criu::{NameClass, classify};
use crate::unpack::Limits;

/// Bytes copied at a time. Where all of them are zero a hole is left.
const PIECE: usize = 64 << 10;
/// Most bytes of a layer when it is no longer compressed: a few bytes can become any number of them.
const LAYER_BYTES_MAX: u64 = 256 << 30;

/// Makes a file of a dump of the member that was read last; `name` is what the dump calls it. Logs
/// and statistics of the other's run are skipped.
pub(super) fn take<R: Read>(
    members: &mut Members<R>,
    member: &Member,
    name: &str,
    directory: &Path,
) -> Result<(), ForeignError> {
    match classify(name) {
        NameClass::Leftover => Ok(()),
        // Nothing of another format says which GPU that would be of.
        NameClass::Foreign | NameClass::Device => {
            let name = &member.name;
            Err(ForeignError::Content(format!("{name:?} is none of CRIU's images")))
        }
        NameClass::Pages | NameClass::Image => {
            Ok(write(members, &directory.join(name), member.bytes)?)
        }
    }
}

/// Writes `bytes` bytes to a new file that only we can read.
pub(super) fn write(input: &mut impl Read, path: &Path, bytes: u64) -> io::Result<()> {
    let file = create(path)?;
    file.set_len(bytes)?;
    let mut buffer = vec![0; PIECE];
    let mut position = 0;
    while position < bytes {
        let wanted = usize::try_from(bytes - position).unwrap_or(usize::MAX).min(PIECE);
        let piece = buffer.get_mut(..wanted).unwrap_or_default();
        input.read_exact(piece)?;
        if piece.iter().any(|byte| *byte != 0) {
            file.file().write_all_at(piece, position)?;
        }
        position += crate::checked::length(piece);
    }
    Ok(())
}

/// Writes a layer as a plain tar.
pub(super) fn decompress(
    mut input: impl Read,
    kind: &str,
    path: &Path,
) -> Result<(), ForeignError> {
    match kind {
        media_type::OCI_LAYER_GZIP => plain(flate2::read::MultiGzDecoder::new(&mut input), path)?,
        media_type::OCI_LAYER_ZSTD => plain(zstd::Decoder::new(&mut input)?, path)?,
        _ => plain(&mut input, path)?,
    }
    // A stream tells at its end whether it was what its digest says.
    io::copy(&mut input, &mut io::sink())?;
    Ok(())
}

/// Writes a tar as a plain one, however it is compressed.
pub(super) fn decompress_any(input: impl Read, path: &Path) -> Result<(), ForeignError> {
    plain(plain_reader(input)?, path)
}

/// Returns the bytes without their compression, which their first ones tell.
pub(super) fn plain_reader<'a>(input: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut input = BufReader::new(input);
    let most = Limits::default().dump_bytes_max;
    Ok(match input.fill_buf()? {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(input).take(most)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Box::new(zstd::Decoder::with_buffer(input)?.take(most)),
        _ => Box::new(input),
    })
}

/// Looks at what a container had written: a layer, whose links and devices are for whoever applies
/// it, but whose names may not lead elsewhere. Returns where the last member ends.
pub(super) fn check_layer(path: &Path) -> Result<u64, ForeignError> {
    let mut members = Members::of_layer(BufReader::new(fs::File::open(path)?));
    while members.next_file()?.is_some() {}
    Ok(members.end())
}

fn plain(input: impl Read, path: &Path) -> Result<(), ForeignError> {
    let mut file = create(path)?;
    let bytes = io::copy(&mut input.take(LAYER_BYTES_MAX + 1), &mut file)?;
    if bytes > LAYER_BYTES_MAX {
        let name = "the container's layer".to_owned();
        return Err(ForeignError::TooLarge { name, bytes, limit: LAYER_BYTES_MAX });
    }
    Ok(())
}

pub(super) fn create(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    options.open(path)
}
