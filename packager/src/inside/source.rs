//! A directory of images, read within bounds.

use std::collections::BTreeSet;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_spec::chain;

use super::Problem;
use crate::criu::{ImageError, ImageReader, Magic};

/// Largest record decoded: a process with half a million mappings. What comes out of a record has
/// up to thirty times its bytes.
const RECORD_BYTES_MAX: u32 = 32 << 20;

/// Most records read of one image, and most entries shown of one kind: as many as the kernel has
/// open files for one process by default.
pub(super) const ENTRIES_MAX: usize = 1 << 20;

/// Most bytes of what one record can show any number of times: open files and mappings with their
/// paths. Enough for a million of usual ones.
const SHOWN_BYTES_MAX: usize = 256 << 20;

/// Most problems told. What is broken everywhere is broken.
const PROBLEMS_MAX: usize = 100;

/// Images in a directory.
#[derive(Debug)]
pub(super) struct Source {
    directory: PathBuf,
    names: BTreeSet<String>,
    problems: Vec<Problem>,
    shown_bytes_left: usize,
}

/// One image, to be read record by record.
pub(super) struct Records {
    reader: ImageReader<BufReader<fs::File>>,
    read: usize,
}

/// Why the rest of an image is not shown.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("it has more than {ENTRIES_MAX} entries: the rest is left out")]
    TooMany,
}

impl Source {
    pub(super) fn open(directory: &Path) -> io::Result<Self> {
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(directory)? {
            names.insert(entry?.file_name().to_string_lossy().into_owned());
        }
        Ok(Self {
            directory: directory.to_owned(),
            names,
            problems: Vec::new(),
            shown_bytes_left: SHOWN_BYTES_MAX,
        })
    }

    /// Hands each record of an image to `take`. An image that is not there has none.
    pub(super) fn each<M: prost::Message + Default>(
        &mut self,
        name: &str,
        magic: Magic,
        mut take: impl FnMut(M),
    ) {
        self.records(name, magic, |records| {
            while let Some(message) = records.next()? {
                take(message);
            }
            Ok(())
        });
    }

    /// Returns the first record of an image.
    pub(super) fn one<M: prost::Message + Default>(
        &mut self,
        name: &str,
        magic: Magic,
    ) -> Option<M> {
        let mut found = None;
        self.records(name, magic, |records| {
            found = records.next()?;
            Ok(())
        });
        found
    }

    /// Reads an image, if it is there; what goes wrong is noted.
    pub(super) fn records(
        &mut self,
        name: &str,
        magic: Magic,
        read: impl FnOnce(&mut Records) -> Result<(), RecordError>,
    ) {
        if !self.names.contains(name) {
            return;
        }
        let open = || {
            let file = BufReader::new(fs::File::open(self.directory.join(name))?);
            let reader = ImageReader::new(file, magic)?.with_limit(RECORD_BYTES_MAX);
            Ok::<_, ImageError>(Records { reader, read: 0 })
        };
        let done = open().map_err(RecordError::from).and_then(|mut records| read(&mut records));
        if let Err(error) = done {
            self.problem(name, chain(&error).to_string());
        }
    }

    /// Returns the images `PREFIX-N.img`, with N as it is written.
    pub(super) fn numbered(&self, prefix: &str) -> Vec<(String, String)> {
        let number = |name: &String| {
            let stem = name.strip_suffix(".img")?;
            Some(stem.strip_prefix(prefix)?.strip_prefix('-')?.to_owned())
        };
        let own = |number: &String| !number.contains('-');
        let names = self.names.iter();
        names.filter_map(|name| Some((name.clone(), number(name).filter(own)?))).collect()
    }

    /// Whether there is an image of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Whether something of so many bytes may be shown too. When not, nothing further is.
    pub(super) fn affords(&mut self, image: &str, bytes: usize) -> bool {
        if self.shown_bytes_left == 0 {
            return false;
        }
        self.shown_bytes_left = self.shown_bytes_left.saturating_sub(bytes);
        if self.shown_bytes_left == 0 {
            self.problem(image, "there is more than is shown: the rest is left out");
        }
        true
    }

    /// Notes that something is wrong.
    pub(super) fn problem(&mut self, image: &str, message: impl Into<String>) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(Problem { image: image.to_owned(), message: message.into() });
        }
    }

    /// Returns what was wrong.
    pub(super) fn problems(self) -> Vec<Problem> {
        self.problems
    }
}

impl Records {
    /// Returns the next record, or `None` at the end.
    pub(super) fn next<M: prost::Message + Default>(&mut self) -> Result<Option<M>, RecordError> {
        if self.read == ENTRIES_MAX {
            return Err(RecordError::TooMany);
        }
        self.read += 1;
        Ok(self.reader.next_message()?)
    }

    /// Leaves bytes out that are no record.
    pub(super) fn skip(&mut self, bytes: u64) -> Result<(), RecordError> {
        Ok(self.reader.skip(bytes)?)
    }
}
