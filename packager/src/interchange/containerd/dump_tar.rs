//! A dump directory as the tar that containerd keeps, read in order: nothing is written for it.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};
use std::vec;

use bytes::Bytes;
use fs_err as fs;
use kybernate_spec::Descriptor;

use super::CRIU;
use crate::checked;
use crate::pack::upload::HashingWriter;
use crate::unpack::{BLOCK_BYTES, padded, tar_header};

/// Bytes hashed before that is told.
const PIECE_BYTES: u64 = 1 << 20;
/// Two blocks of zeros end a tar.
const END_BYTES: u64 = 2 * BLOCK_BYTES;

/// A dump directory as a tar: its regular files by name, without a time or an owner, so that equal
/// dumps are equal tars. Nobody may write there meanwhile.
#[derive(Clone, Debug)]
pub struct DumpTar {
    directory: PathBuf,
    /// Names and lengths.
    files: Vec<(String, u64)>,
    /// What is in the place of some, by their names.
    instead: BTreeMap<String, Bytes>,
}

/// Reads a [`DumpTar`] from its beginning. What was read is right only if it ends without an error.
pub struct TarReader {
    directory: PathBuf,
    files: vec::IntoIter<(String, u64)>,
    instead: BTreeMap<String, Bytes>,
    /// What is read now; none before the first file, and after the last.
    part: Option<Box<dyn Read + Send>>,
    ended: bool,
}

/// A file that must be as long as it was.
struct Exactly {
    file: io::Take<fs::File>,
}

impl DumpTar {
    /// Looks at a directory. Anything in it but a regular file is an error. Blocks.
    pub fn of(directory: &Path) -> io::Result<Self> {
        let mut files = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let (found, path) = (entry.metadata()?, entry.path());
            let name = entry.file_name().into_string().ok().filter(|_| found.is_file());
            let name = name.ok_or_else(|| {
                let text = format!("{} is no regular file", path.display());
                io::Error::new(io::ErrorKind::InvalidData, text)
            })?;
            files.push((name, found.len()));
        }
        files.sort_unstable();
        Ok(Self { directory: directory.to_owned(), files, instead: BTreeMap::new() })
    }

    /// Has `content` in the place of a file's. What is not there stays away.
    #[must_use]
    pub fn with(mut self, name: &str, content: Vec<u8>) -> Self {
        for (_, length) in self.files.iter_mut().filter(|(found, _)| found == name) {
            *length = checked::length(&content);
        }
        self.instead.insert(name.to_owned(), content.into());
        self
    }

    /// Returns how long the tar is.
    pub fn bytes(&self) -> u64 {
        let sizes = self.files.iter();
        let sizes = sizes.map(|(_, length)| BLOCK_BYTES.saturating_add(padded(*length)));
        sizes.fold(END_BYTES, u64::saturating_add)
    }

    /// Reads it from its beginning.
    pub fn reader(&self) -> TarReader {
        let (directory, files) = (self.directory.clone(), self.files.clone().into_iter());
        TarReader { directory, files, instead: self.instead.clone(), part: None, ended: false }
    }

    /// Reads it whole for its digest; `advance` is told how many bytes each step has read, and can
    /// end it. Blocks.
    pub fn describe(
        &self,
        mut advance: impl FnMut(u64) -> io::Result<()>,
    ) -> io::Result<Descriptor> {
        let mut reader = self.reader();
        let mut sink = HashingWriter::new(io::sink());
        loop {
            let read = io::copy(&mut (&mut reader).take(PIECE_BYTES), &mut sink)?;
            if read == 0 {
                return Ok(sink.describe(CRIU));
            }
            advance(read)?;
        }
    }
}

impl TarReader {
    /// Goes on to the next member, or to the end.
    fn next_part(&mut self) -> io::Result<Option<Box<dyn Read + Send>>> {
        if self.ended {
            return Ok(None);
        }
        let Some((name, length)) = self.files.next() else {
            self.ended = true;
            return Ok(Some(Box::new(io::repeat(0).take(END_BYTES))));
        };
        let header = Cursor::new(tar_header(&name, length)?.as_bytes().to_owned());
        let padding = io::repeat(0).take(padded(length) - length);
        if let Some(content) = self.instead.remove(&name) {
            return Ok(Some(Box::new(header.chain(Cursor::new(content)).chain(padding))));
        }
        let file = fs::File::open(self.directory.join(&name))?.take(length);
        Ok(Some(Box::new(header.chain(Exactly { file }).chain(padding))))
    }
}

impl Read for TarReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while !buffer.is_empty() {
            if let Some(part) = &mut self.part {
                let read = part.read(buffer)?;
                if read > 0 {
                    return Ok(read);
                }
            }
            self.part = self.next_part()?;
            if self.part.is_none() {
                return Ok(0);
            }
        }
        Ok(0)
    }
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        if read == 0 && !buffer.is_empty() && self.file.limit() > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(read)
    }
}

impl fmt::Debug for TarReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TarReader").field("directory", &self.directory).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dump() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, length) in [("pages-1.img", 3 << 20), ("core-1.img", 700), ("empty.img", 0)] {
            fs::write(directory.path().join(name), vec![7; length]).unwrap();
        }
        directory
    }

    #[test]
    fn a_tar_holds_what_the_directory_holds() {
        let directory = dump();
        let tar = DumpTar::of(directory.path()).unwrap();
        let mut content = Vec::new();
        tar.reader().read_to_end(&mut content).unwrap();
        assert_eq!(checked::length(&content), tar.bytes());
        let mut told = 0;
        let told_of = |bytes| {
            told += bytes;
            Ok(())
        };
        let described = tar.describe(told_of).unwrap();
        assert_eq!(described, Descriptor::of(CRIU, &content));
        assert_eq!(told, tar.bytes());
        let mut names = Vec::new();
        for entry in tar::Archive::new(&*content).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut found = Vec::new();
            entry.read_to_end(&mut found).unwrap();
            assert_eq!(found, fs::read(directory.path().join(&name)).unwrap(), "{name}");
            names.push(name);
        }
        assert_eq!(names, ["core-1.img", "empty.img", "pages-1.img"]);
        // In the place of a file, and nowhere else.
        let instead = tar.with("core-1.img", vec![9; 600]).with("other.img", vec![1]);
        let mut content = Vec::new();
        instead.reader().read_to_end(&mut content).unwrap();
        assert_eq!(checked::length(&content), instead.bytes());
        let read = |entry: io::Result<tar::Entry<'_, &[u8]>>| {
            let mut entry = entry.unwrap();
            let mut found = Vec::new();
            entry.read_to_end(&mut found).unwrap();
            (entry.path().unwrap().display().to_string(), found.len(), found.first().copied())
        };
        let found: Vec<_> = tar::Archive::new(&*content).entries().unwrap().map(read).collect();
        let expected = [
            ("core-1.img", 600, Some(9)),
            ("empty.img", 0, None),
            ("pages-1.img", 3 << 20, Some(7)),
        ];
        assert_eq!(found, expected.map(|(name, length, first)| (name.to_owned(), length, first)));
        // What was written elsewhere, at another time, is the same.
        let other = dump();
        let again = DumpTar::of(other.path()).unwrap().describe(|_| Ok(())).unwrap();
        assert_eq!(again, described);
    }

    #[test]
    fn a_file_that_shrinks_is_no_tar() {
        let directory = dump();
        let tar = DumpTar::of(directory.path()).unwrap();
        fs::write(directory.path().join("pages-1.img"), "short").unwrap();
        let error = tar.describe(|_| Ok(())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn only_regular_files_are_a_dump() {
        let directory = dump();
        std::os::unix::fs::symlink("/etc", directory.path().join("parent")).unwrap();
        let error = DumpTar::of(directory.path()).unwrap_err();
        assert!(error.to_string().contains("no regular file"), "{error}");
    }
}
