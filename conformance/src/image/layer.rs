//! The image's layers: tars whose bytes depend on nothing but their content.

use std::io::{self, BufRead as _, BufReader, Write};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use fs_err as fs;
use kybernate_spec::{Algorithm, Descriptor, Digest, Hasher, media_type};
use tar::{Builder, EntryType, Header};

/// Directories of the base layer, parents first.
const DIRECTORIES: [(&str, u32); 11] = [
    ("bin/", 0o755),
    ("dev/", 0o755),
    ("etc/", 0o755),
    ("proc/", 0o755),
    ("root/", 0o700),
    ("run/", 0o755),
    ("state/", 0o755),
    ("sys/", 0o755),
    ("tmp/", 0o1777),
    ("var/", 0o755),
    ("var/tmp/", 0o1777),
];

/// Text files of the base layer.
const FILES: [(&str, &str); 3] = [
    ("etc/group", "root:x:0:\n"),
    ("etc/os-release", "ID=kybernate-demo\nNAME=\"Kybernate demo\"\nVERSION_ID=1\n"),
    ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
];

/// What busybox is called as well.
const LINKS: &str = "cat chmod cp date dd df echo env false find free grep head id kill ln ls mkdir \
                     mount mv ps rm sh sha256sum sleep stat tail top true wc";

/// How fast a large layer is compressed: it is written once and read a few times.
const LEVEL: i32 = 1;
/// Files are read in pieces of this length.
const PIECE: usize = 1 << 20;

/// What an image says of a layer.
pub(super) struct Place {
    /// The compressed layer, as the manifest names it.
    pub(super) descriptor: Descriptor,
    /// Digest of the uncompressed tar.
    pub(super) diff_id: Digest,
    /// The layer's line in the history.
    pub(super) created_by: &'static str,
}

/// A layer, held whole: the image is a few MiB.
pub(super) struct Layer {
    pub(super) place: Place,
    /// The bytes that its descriptor describes.
    pub(super) compressed: Vec<u8>,
}

/// Compresses a tar of any size into the file `blob`. Returns the layer's descriptor and the digest
/// of the tar.
pub(super) fn of_tar(tar: &Path, blob: &Path) -> io::Result<(Descriptor, Digest)> {
    let mut encoder = zstd::Encoder::new(fs::File::create(blob)?, LEVEL)?;
    let diff_id = each_piece(tar, |piece| encoder.write_all(piece))?;
    encoder.finish()?;
    let digest = each_piece(blob, |_| Ok(()))?;
    let size = fs::metadata(blob)?.len();
    Ok((Descriptor::new(media_type::OCI_LAYER_ZSTD, digest, size), diff_id))
}

/// Hands a file to `work` piece by piece, and returns its digest.
fn each_piece(file: &Path, mut work: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<Digest> {
    let mut hasher = Hasher::new(Algorithm::Sha256);
    let mut reader = BufReader::with_capacity(PIECE, fs::File::open(file)?);
    loop {
        let piece = reader.fill_buf()?;
        if piece.is_empty() {
            return Ok(hasher.finish());
        }
        hasher.update(piece);
        work(piece)?;
        let length = piece.len();
        reader.consume(length);
    }
}

/// Returns the layer with busybox and the directories every process expects.
pub(super) fn base(busybox: &[u8]) -> io::Result<Layer> {
    let mut tar = Builder::new(Vec::new());
    for (name, mode) in DIRECTORIES {
        append_dir(&mut tar, name, mode)?;
    }
    append_file(&mut tar, "bin/busybox", 0o755, busybox)?;
    for name in LINKS.split_ascii_whitespace() {
        let mut header = header(EntryType::Symlink, 0o777, 0);
        tar.append_link(&mut header, format!("bin/{name}"), "busybox")?;
    }
    // As in Debian's images, where a pod has its token below it.
    tar.append_link(&mut header(EntryType::Symlink, 0o777, 0), "var/run", "/run")?;
    for (name, text) in FILES {
        append_file(&mut tar, name, 0o644, text.as_bytes())?;
    }
    Layer::compress(&tar.into_inner()?, "kybernate-conformance: busybox")
}

/// Returns the layer with nothing but `/workload`.
pub(super) fn workload(program: &[u8]) -> io::Result<Layer> {
    let mut tar = Builder::new(Vec::new());
    append_file(&mut tar, "workload", 0o755, program)?;
    Layer::compress(&tar.into_inner()?, "kybernate-conformance: workload")
}

/// Appends a directory; `name` ends with `/`.
pub(super) fn append_dir(tar: &mut Builder<impl Write>, name: &str, mode: u32) -> io::Result<()> {
    tar.append_data(&mut header(EntryType::Directory, mode, 0), name, io::empty())
}

/// Appends a file.
pub(super) fn append_file(
    tar: &mut Builder<impl Write>,
    name: &str,
    mode: u32,
    content: &[u8],
) -> io::Result<()> {
    let size = u64::try_from(content.len()).map_err(io::Error::other)?;
    tar.append_data(&mut header(EntryType::Regular, mode, size), name, content)
}

impl Layer {
    fn compress(tar: &[u8], created_by: &'static str) -> io::Result<Self> {
        // flate2's header has neither time nor name nor operating system.
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(tar)?;
        let compressed = gzip.finish()?;
        let descriptor = Descriptor::of(media_type::OCI_LAYER_GZIP, &compressed);
        Ok(Self { place: Place { descriptor, diff_id: Digest::of(tar), created_by }, compressed })
    }
}

/// A header with the owner and time of nobody.
fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header
}
