//! A file that lies in pieces of others.
//!
//! Who writes a tar need not copy what lies somewhere already: it says where, and whoever reads gets
//! one piece after the other.

use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err as fs;

/// One file's content, in pieces. Cheap to clone where there are few.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pieces {
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    path: Arc<Path>,
    from: u64,
    /// `None`: until the end of the file.
    bytes: Option<u64>,
}

/// Reads pieces as one file.
#[derive(Debug)]
pub struct PiecesReader {
    parts: Vec<Part>,
    /// Where the next byte is read, within all of them.
    at: u64,
    bytes: u64,
}

/// A piece that can be read.
#[derive(Debug)]
struct Part {
    file: Arc<fs::File>,
    from: u64,
    /// Where it begins and ends, within all of them.
    begin: u64,
    end: u64,
}

impl Pieces {
    /// Adds so many bytes of a file, after what is there.
    pub fn push(&mut self, path: &Arc<Path>, from: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        if let Some(last) = self.pieces.last_mut()
            && let Some(known) = &mut last.bytes
            && last.path == *path
            && last.from.checked_add(*known) == Some(from)
        {
            *known = known.saturating_add(bytes);
            return;
        }
        self.pieces.push(Piece { path: Arc::clone(path), from, bytes: Some(bytes) });
    }

    /// Returns the file of the first piece, which is what a message names.
    pub(super) fn path(&self) -> PathBuf {
        self.pieces.first().map(|piece| piece.path.to_path_buf()).unwrap_or_default()
    }

    /// Opens the files; an error when one is not there.
    pub fn open(&self) -> io::Result<PiecesReader> {
        let mut opened: Vec<(&Arc<Path>, Arc<fs::File>)> = Vec::new();
        let (mut parts, mut begin) = (Vec::with_capacity(self.pieces.len()), 0_u64);
        for Piece { path, from, bytes } in &self.pieces {
            let known = opened.iter().find(|(name, _)| *name == path);
            let file = if let Some((_, file)) = known {
                Arc::clone(file)
            } else {
                let file = Arc::new(fs::File::open(&**path)?);
                opened.push((path, Arc::clone(&file)));
                file
            };
            let bytes = match bytes {
                Some(bytes) => *bytes,
                None => file.metadata()?.len().saturating_sub(*from),
            };
            let end = begin.checked_add(bytes).ok_or(io::ErrorKind::FileTooLarge)?;
            parts.push(Part { file, from: *from, begin, end });
            begin = end;
        }
        Ok(PiecesReader { parts, at: 0, bytes: begin })
    }
}

impl From<PathBuf> for Pieces {
    /// A whole file.
    fn from(path: PathBuf) -> Self {
        Self { pieces: vec![Piece { path: path.into(), from: 0, bytes: None }] }
    }
}

impl PiecesReader {
    /// Returns how many bytes there are.
    pub const fn length(&self) -> u64 {
        self.bytes
    }
}

impl Read for PiecesReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let next = self.parts.partition_point(|part| part.end <= self.at);
        let Some(part) = self.parts.get(next) else { return Ok(0) };
        let within = self.at.saturating_sub(part.begin);
        let left = usize::try_from(part.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let length = left.min(buffer.len());
        let buffer = buffer.get_mut(..length).unwrap_or_default();
        let read = part.file.file().read_at(buffer, part.from.saturating_add(within))?;
        if read == 0 && length > 0 {
            let text = format!("{} is shorter than it was", part.file.path().display());
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        self.at = self.at.saturating_add(u64::try_from(read).map_err(io::Error::other)?);
        Ok(read)
    }
}

impl Seek for PiecesReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.bytes.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_as_one_file() {
        let scratch = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str| -> Arc<Path> {
            let path = scratch.path().join(name);
            fs::write(&path, content).unwrap();
            path.into()
        };
        let (one, two) = (file("one", "0123456789"), file("two", "abcdef"));
        let mut pieces = Pieces::default();
        pieces.push(&one, 0, 3);
        pieces.push(&one, 3, 1);
        pieces.push(&two, 2, 0);
        pieces.push(&two, 2, 3);
        pieces.push(&one, 9, 1);
        assert_eq!(pieces.pieces.len(), 3);

        let mut reader = pieces.open().unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!((&*text, reader.length()), ("0123cde9", 8));
        reader.seek(SeekFrom::End(-3)).unwrap();
        reader.seek(SeekFrom::Current(-1)).unwrap();
        text.clear();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "cde9");
        reader.seek(SeekFrom::Current(-9)).unwrap_err();
        reader.seek(SeekFrom::Start(99)).unwrap();
        assert_eq!(reader.read(&mut [0; 4]).unwrap(), 0);
    }

    #[test]
    fn a_file_that_lost_its_end_is_told() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("short");
        fs::write(&path, "abc").unwrap();
        assert_eq!(Pieces::from(path.clone()).open().unwrap().length(), 3);
        let mut pieces = Pieces::default();
        pieces.push(&path.into(), 1, 4);
        let error = pieces.open().unwrap().read_to_end(&mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("short is shorter"), "{error}");
    }
}
