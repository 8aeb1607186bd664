//! What is in the files of a checkpoint that is staged on a disk, which is proven before each use
//! (`spec/decisions/0083`).

use std::collections::BTreeMap;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use fs_err as fs;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use kybernate_packager::progress::Progress;
use serde::{Deserialize, Serialize};

/// Bytes that have a hash of their own: enough of them for all processors, and no long wait for the end
/// of one when nobody wants it any more.
const STRETCH_BYTES: u64 = 32 << 20;

/// Bytes read at once, by each processor: they stay in its cache. From the page cache, two processors (AMD
/// EPYC) hash 4.1 GB/s so, and 1.9 with 1 MiB, which the allocator maps anew each time.
const READ_BYTES: usize = 64 << 10;

/// How many processors hash, at most.
const PARALLEL_MAX: usize = 8;

/// BLAKE3 hashes of the stretches of files, by the files' paths in the checkpoint's directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Content(BTreeMap<String, Vec<String>>);

/// A part of a file.
#[derive(Clone, Debug)]
struct Stretch {
    path: String,
    offset: u64,
    bytes: u64,
}

impl Content {
    /// Reads files of a directory: their paths in there, and their lengths.
    pub(super) async fn read(
        directory: &Path,
        files: Vec<(String, u64)>,
        progress: &Progress,
    ) -> io::Result<Self> {
        let parallel = std::thread::available_parallelism().map_or(1, usize::from);
        let mut content = BTreeMap::<_, Vec<_>>::new();
        let stretches = files.into_iter().flat_map(|(path, length)| stretches(&path, length));
        let mut hashed = stream::iter(stretches)
            .map(|stretch| {
                let file = directory.join(&stretch.path);
                async move {
                    let Stretch { path, offset, bytes } = stretch;
                    let hash = tokio::task::spawn_blocking(move || hash(&file, offset, bytes));
                    Ok::<_, io::Error>((path, bytes, hash.await??))
                }
            })
            .buffered(parallel.min(PARALLEL_MAX));
        while let Some((path, bytes, hash)) = hashed.try_next().await? {
            progress.advance(bytes);
            content.entry(path).or_default().push(hash.to_hex().to_string());
        }
        Ok(Self(content))
    }

    /// Returns a file that is not the same in another one.
    pub(super) fn difference<'a>(&'a self, other: &'a Self) -> Option<&'a str> {
        let differs = |one: &'a Self, other: &Self| {
            one.0.iter().find(|(path, hashes)| other.0.get(*path) != Some(hashes))
        };
        let found = differs(self, other).or_else(|| differs(other, self));
        found.map(|(path, _)| path.as_str())
    }
}

/// Cuts a file; an empty one is an empty stretch.
fn stretches(path: &str, length: u64) -> Vec<Stretch> {
    let mut stretches = Vec::new();
    let mut offset = 0;
    while offset < length || stretches.is_empty() {
        let bytes = STRETCH_BYTES.min(length - offset);
        stretches.push(Stretch { path: path.to_owned(), offset, bytes });
        offset += bytes;
    }
    stretches
}

/// Hashes a part of a file. What the file has less is no error here: its hash is another one.
fn hash(path: &Path, offset: u64, bytes: u64) -> io::Result<blake3::Hash> {
    let mut file = fs::File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut part = file.take(bytes);
    let (mut hasher, mut buffer) = (blake3::Hasher::new(), vec![0; READ_BYTES]);
    loop {
        match part.read(&mut buffer)? {
            0 => return Ok(hasher.finalize()),
            read => hasher.update(buffer.get(..read).unwrap_or_default()),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(directory: &Path, length: u64) -> Content {
        let files = vec![("a/pages-1.img".to_owned(), length), ("empty.img".to_owned(), 0)];
        Content::read(directory, files, &Progress::default()).await.unwrap()
    }

    #[tokio::test]
    async fn a_bit_anywhere_is_told_by_its_file() {
        let top = tempfile::tempdir().unwrap();
        fs::create_dir(top.path().join("a")).unwrap();
        let path = top.path().join("a/pages-1.img");
        let length = STRETCH_BYTES * 2 + 5;
        let mut pages = vec![7; usize::try_from(length).unwrap()];
        fs::write(&path, &pages).unwrap();
        fs::write(top.path().join("empty.img"), "").unwrap();
        let before = read(top.path(), length).await;
        assert_eq!(before.difference(&read(top.path(), length).await), None);
        assert_eq!(before.0["a/pages-1.img"].len(), 3);
        for place in [0, pages.len() / 2, pages.len() - 1] {
            pages[place] ^= 1;
            fs::write(&path, &pages).unwrap();
            pages[place] ^= 1;
            let after = read(top.path(), length).await;
            assert_eq!(before.difference(&after), Some("a/pages-1.img"), "{place}");
        }
        fs::write(&path, &pages).unwrap();
        assert_eq!(read(top.path(), length).await, before);
        // One that is shorter, one that is there no more, and one that was not.
        fs::write(&path, &pages[1..]).unwrap();
        assert_eq!(before.difference(&read(top.path(), length).await), Some("a/pages-1.img"));
        let none = Content::default();
        assert!(before.difference(&none).is_some() && none.difference(&before).is_some());
    }
}
