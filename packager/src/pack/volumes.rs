//! Pushing captured mounts: tars, cut into parts where they are large.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use fs_err as fs;
use futures::{StreamExt as _, TryStreamExt as _};
use kybernate_spec::page_index::SHARD_BYTES_MAX;
use kybernate_spec::{Descriptor, annotation, media_type};

use super::pieces::Pieces;
use super::upload::{FileSource, HashingWriter, Target, blocking};
use super::{PackError, VolumeCapture};
use crate::copy::PARALLEL;
use crate::wanted::{self, Wanted};

/// Bytes of a part: no blob of ours is larger.
const PART_BYTES: u64 = SHARD_BYTES_MAX;

/// Checks that a file is an uncompressed tar, by its headers.
pub(super) async fn check_tar(tar: Pieces) -> Result<(), PackError> {
    let path = tar.path();
    let checked = blocking(move || read_headers(&tar)).await;
    checked.map_err(|source| PackError::Tar { path, source })
}

/// Stores the captured mounts and returns their layers.
pub(super) async fn push(
    volumes: &[VolumeCapture],
    target: Target<'_>,
) -> Result<Vec<Descriptor>, PackError> {
    let mut layers = Vec::new();
    let mut titles = BTreeSet::new();
    for volume in volumes {
        let unread = |kind| PackError::Io("read a captured mount", kind);
        let path = volume.tar.clone();
        let bytes = blocking(move || Ok(fs::metadata(path)?.len())).await.map_err(unread)?;
        target.progress.expect(bytes);
        let parts = parts(bytes);
        let single = parts.len() == 1;
        let pushed: Vec<Descriptor> = futures::stream::iter(parts)
            .map(|(offset, length)| async move {
                let path = volume.tar.clone();
                let layer =
                    wanted::blocking(move |wanted| hash(&path, offset, length, wanted)).await;
                let layer = layer.map_err(unread)?;
                let source = FileSource { path: volume.tar.clone(), offset };
                target.store(&layer, &source).await?;
                Ok::<_, PackError>(layer)
            })
            .buffered(PARALLEL)
            .try_collect()
            .await?;
        let title = title(&volume.destination, &mut titles);
        layers.extend((0_u32..).zip(pushed).map(|(number, layer)| {
            let layer = layer.with_annotation(annotation::DESTINATION, &volume.destination);
            if single {
                return layer.with_annotation(annotation::TITLE, &title);
            }
            layer
                .with_annotation(annotation::TITLE, format!("{title}.{number:05}"))
                .with_annotation(annotation::PART, number.to_string())
        }));
    }
    Ok(layers)
}

/// Names a volume as a file: no other has that name, though `/a/b` and `/a-b` look alike.
fn title(destination: &str, taken: &mut BTreeSet<String>) -> String {
    let plain = format!("volume{}", destination.replace('/', "-"));
    let mut title = plain.clone();
    let mut number = 2_u32;
    while !taken.insert(title.clone()) {
        title = format!("{plain}~{number}");
        number += 1;
    }
    title
}

/// Cuts a file into parts: where each begins, and how long it is.
fn parts(bytes: u64) -> Vec<(u64, u64)> {
    let mut parts = vec![(0, bytes.min(PART_BYTES))];
    let mut next = PART_BYTES;
    while next < bytes {
        parts.push((next, (bytes - next).min(PART_BYTES)));
        next += PART_BYTES;
    }
    parts
}

fn hash(path: &Path, offset: u64, length: u64, wanted: &Wanted) -> io::Result<Descriptor> {
    let mut file = fs::File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut sink = HashingWriter::new(io::sink());
    io::copy(&mut wanted.reader(file.take(length)), &mut sink)?;
    Ok(sink.describe(media_type::VOLUME))
}

fn read_headers(tar: &Pieces) -> io::Result<()> {
    let wrong = |text: &str| Err(io::Error::new(io::ErrorKind::InvalidData, text));
    let file = tar.open()?;
    let bytes = file.length();
    if bytes == 0 {
        return wrong("it is empty");
    }
    let mut archive = tar::Archive::new(file);
    for entry in archive.entries_with_seek()? {
        let entry = entry?;
        let end = entry.raw_file_position().saturating_add(entry.size());
        if end > bytes {
            return wrong("it ends within a file");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_volumes_are_one_file() {
        let mut taken = BTreeSet::new();
        let titles = ["/a/b", "/a-b", "/a", "/a/-b"].map(|path| title(path, &mut taken));
        assert_eq!(titles, ["volume-a-b", "volume-a-b~2", "volume-a", "volume-a--b"]);
    }

    #[test]
    fn parts_cover_a_file_without_gaps() {
        assert_eq!(parts(0), [(0, 0)]);
        assert_eq!(parts(PART_BYTES), [(0, PART_BYTES)]);
        let three = [(0, PART_BYTES), (PART_BYTES, PART_BYTES), (2 * PART_BYTES, 5)];
        assert_eq!(parts(2 * PART_BYTES + 5), three);
    }

    #[test]
    fn only_a_whole_tar_is_one() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("tar");
        let told = |content: &[u8]| {
            fs::write(&path, content).unwrap();
            read_headers(&path.clone().into()).map_err(|error| error.to_string())
        };
        let mut builder = tar::Builder::new(Vec::new());
        for name in ["a", "b"] {
            let mut header = tar::Header::new_gnu();
            header.set_size(3000);
            builder.append_data(&mut header, name, &[7; 3000][..]).unwrap();
        }
        let whole = builder.into_inner().unwrap();
        told(&whole).unwrap();
        assert!(told(&whole[..5000]).unwrap_err().contains("ends within"));
        assert!(told(&whole[..700]).is_err() && told(b"").is_err() && told(b"no tar").is_err());
        assert!(told(&zstd::encode_all(&*whole, 1).unwrap()).is_err());
        assert!(told(&[b'x'; 4096]).is_err());
        told(&[0; 1024]).unwrap();
    }
}
