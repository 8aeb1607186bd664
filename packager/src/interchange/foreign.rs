//! Tars that others made.
//!
//! A tar can name any path, link to anything, and announce any size. Here it is a list of regular
//! files with plain relative names, each at most once; anything else in it is a reason to refuse the
//! whole. Nothing is extracted by its name: the caller decides what a name stands for.

use std::collections::BTreeSet;
use std::io::{self, Read};

use tar::{EntryType, Header, PaxExtensions};

use crate::unpack::BLOCK_BYTES;

/// Most members: a dozen files per process, for thousands of processes.
const MEMBERS_MAX: u32 = 1 << 20;
/// Most bytes of what goes before a header and extends it. A path has 4,096 bytes at most.
const EXTENSION_BYTES_MAX: u64 = 64 << 10;
/// Longest name: what Linux takes as a path.
const NAME_BYTES_MAX: usize = 4096;

/// Most characters told of what is no header.
const TOLD_CHARS_MAX: usize = 80;

/// Why something foreign was refused.
#[derive(Debug, thiserror::Error)]
pub enum ForeignError {
    /// It ends too early, or reading it failed.
    #[error("it ends early or cannot be read")]
    Io(#[from] io::Error),
    /// A header is none.
    #[error("it is no tar, or it is damaged: {0}")]
    Header(String),
    /// A member has a name that leads elsewhere, or that is no name.
    #[error("a member is called {0:?}")]
    Name(String),
    /// A member is a link, a device, or whatever else is no file.
    #[error("{name:?} is no regular file, but {kind}")]
    Kind {
        /// The member.
        name: String,
        /// What it is.
        kind: &'static str,
    },
    /// Two members have one name.
    #[error("{0:?} comes twice")]
    Twice(String),
    /// A member is larger than what it stands for may be.
    #[error("{name:?} has {bytes} bytes, at most {limit} are accepted")]
    TooLarge {
        /// The member.
        name: String,
        /// Bytes it announces.
        bytes: u64,
        /// Bytes accepted.
        limit: u64,
    },
    /// More members than anything has.
    #[error("it has more than {MEMBERS_MAX} members")]
    TooMany,
    /// It is whole, but something in it is not as the format wants it.
    #[error("{0}")]
    Content(String),
}

/// What a member is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Its name: components between slashes, no `.`, no `..`, none empty.
    pub(crate) name: String,
    /// Bytes of its content.
    pub(crate) bytes: u64,
    /// Where in the input the content begins.
    pub(crate) offset: u64,
}

/// Reads a tar in order.
#[derive(Debug)]
pub(crate) struct Members<R> {
    input: R,
    position: u64,
    /// Bytes of the member's content, and of its padding, that were not read yet.
    content: u64,
    padding: u64,
    names: BTreeSet<String>,
    count: u32,
    kinds: Kinds,
    /// The one symbolic link that there may be, and where it leads when it was there.
    link: Option<(&'static str, Option<String>)>,
    /// Where the last member ends, padding counted.
    end: u64,
}

/// What members may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kinds {
    /// Regular files, each once.
    Files,
    /// Whatever a layer has.
    Layer,
}

/// What extends the next header.
#[derive(Default)]
struct Extension {
    name: Option<Vec<u8>>,
    bytes: Option<u64>,
}

impl<R: Read> Members<R> {
    /// Begins to read.
    pub(crate) const fn new(input: R) -> Self {
        Self {
            input,
            position: 0,
            content: 0,
            padding: 0,
            names: BTreeSet::new(),
            count: 0,
            kinds: Kinds::Files,
            link: None,
            end: 0,
        }
    }

    /// Begins to read a layer: only its names, sizes and its end are looked at.
    pub(crate) fn of_layer(input: R) -> Self {
        Self { kinds: Kinds::Layer, ..Self::new(input) }
    }

    /// Takes note of a symbolic link of this name instead of refusing it. Nobody follows it.
    #[must_use]
    pub(crate) fn noting_link(self, name: &'static str) -> Self {
        Self { link: Some((name, None)), ..self }
    }

    /// Returns where the link that was to be noted leads, when there was one.
    pub(crate) fn noted_link(&self) -> Option<&str> {
        self.link.as_ref().and_then(|(_, target)| target.as_deref())
    }

    /// Returns where the last member ends, padding counted.
    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    /// Returns the next regular file; what was not read of the last one is skipped. After the last
    /// one the input has been read to its end.
    pub(crate) fn next_file(&mut self) -> Result<Option<Member>, ForeignError> {
        let mut extension = Extension::default();
        loop {
            self.skip()?;
            self.end = self.position;
            let Some(header) = self.header()? else {
                io::copy(&mut self.input, &mut io::sink())?;
                return Ok(None);
            };
            self.count += 1;
            if self.count > MEMBERS_MAX {
                return Err(ForeignError::TooMany);
            }
            let announced = header.entry_size().map_err(damaged)?;
            let kind = header.entry_type();
            match kind {
                EntryType::XGlobalHeader | EntryType::GNULongLink => {
                    self.small(announced)?;
                    continue;
                }
                EntryType::GNULongName => {
                    let mut name = self.small(announced)?;
                    while name.last() == Some(&0) {
                        name.pop();
                    }
                    extension.name = Some(name);
                    continue;
                }
                EntryType::XHeader => {
                    extended(&self.small(announced)?, &mut extension)?;
                    continue;
                }
                _ => {}
            }
            let bytes = extension.bytes.take().unwrap_or(announced);
            let raw = extension.name.take().unwrap_or_else(|| header.path_bytes().into_owned());
            let is_directory = kind == EntryType::Directory;
            let name = plain(&raw, is_directory)?;
            match kind {
                EntryType::Directory if bytes == 0 => continue,
                EntryType::Regular | EntryType::Continuous => {}
                other if self.kinds == Kinds::Layer && is_of_layers(other) && bytes == 0 => {
                    continue;
                }
                EntryType::Symlink if bytes == 0 && self.note(&name, &header) => continue,
                other => return Err(ForeignError::Kind { name, kind: word(other) }),
            }
            if self.kinds == Kinds::Files && !self.names.insert(name.clone()) {
                return Err(ForeignError::Twice(name));
            }
            self.expect(bytes)?;
            return Ok(Some(Member { name, bytes, offset: self.position }));
        }
    }

    /// Notes a link, if it is the one that is asked for and comes for the first time.
    fn note(&mut self, name: &str, header: &Header) -> bool {
        let Some((wanted, target @ None)) = &mut self.link else { return false };
        let leads = header.link_name_bytes();
        let leads = leads.and_then(|to| str::from_utf8(&to).ok().map(ToOwned::to_owned));
        if name != *wanted || leads.is_none() {
            return false;
        }
        *target = leads;
        true
    }

    /// Reads the whole of the member, which must be small.
    pub(crate) fn small_content(
        &mut self,
        member: &Member,
        limit: u64,
    ) -> Result<Vec<u8>, ForeignError> {
        if member.bytes > limit {
            let (name, bytes) = (member.name.clone(), member.bytes);
            return Err(ForeignError::TooLarge { name, bytes, limit });
        }
        let mut content = Vec::new();
        self.read_to_end(&mut content)?;
        Ok(content)
    }

    /// Reads the next header; `None` at the end of the tar, which two blocks of zeros mark.
    fn header(&mut self) -> Result<Option<Header>, ForeignError> {
        let mut header = Header::new_old();
        match self.block(&mut header)? {
            0 => return Err(ForeignError::Header("its end is missing".to_owned())),
            read if read < BLOCK_BYTES => return Err(early().into()),
            _ => {}
        }
        if header.as_bytes().iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let sum: u32 = (0_usize..).zip(header.as_bytes()).fold(0, |sum, (at, byte)| {
            // The sum itself counts as spaces.
            sum + if (148..156).contains(&at) { 32 } else { u32::from(*byte) }
        });
        if header.cksum().map_err(damaged)? != sum {
            return Err(ForeignError::Header("a checksum does not match".to_owned()));
        }
        Ok(Some(header))
    }

    fn block(&mut self, header: &mut Header) -> io::Result<u64> {
        let block = header.as_mut_bytes();
        let mut filled = 0;
        while let Some(rest) = block.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.input.read(rest) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let read = u64::try_from(filled).map_err(io::Error::other)?;
        self.position = self.position.saturating_add(read);
        Ok(read)
    }

    /// Begins a content of so many bytes.
    fn expect(&mut self, bytes: u64) -> Result<(), ForeignError> {
        let padding = (BLOCK_BYTES - bytes % BLOCK_BYTES) % BLOCK_BYTES;
        let end = self.position.checked_add(bytes).and_then(|end| end.checked_add(padding));
        if end.is_none() {
            return Err(ForeignError::Header(format!("a member announces {bytes} bytes")));
        }
        (self.content, self.padding) = (bytes, padding);
        Ok(())
    }

    /// Reads something that extends a header.
    fn small(&mut self, bytes: u64) -> Result<Vec<u8>, ForeignError> {
        if bytes > EXTENSION_BYTES_MAX {
            return Err(ForeignError::Header(format!("a name has {bytes} bytes")));
        }
        self.expect(bytes)?;
        let mut content = Vec::new();
        self.read_to_end(&mut content)?;
        Ok(content)
    }

    /// Skips what is left of a member.
    fn skip(&mut self) -> io::Result<()> {
        let left = self.content.saturating_add(self.padding);
        let skipped = io::copy(&mut self.input.by_ref().take(left), &mut io::sink())?;
        self.position = self.position.saturating_add(skipped);
        (self.content, self.padding) = (0, 0);
        if skipped == left { Ok(()) } else { Err(early()) }
    }
}

/// The content of the member.
impl<R: Read> Read for Members<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.content == 0 || buffer.is_empty() {
            return Ok(0);
        }
        let most = usize::try_from(self.content).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.input.read(buffer.get_mut(..most).unwrap_or_default())?;
        if read == 0 {
            return Err(early());
        }
        let bytes = u64::try_from(read).map_err(io::Error::other)?;
        self.content = self.content.saturating_sub(bytes);
        self.position = self.position.saturating_add(bytes);
        Ok(read)
    }
}

/// Reads the records of a pax header that matter; others say nothing about what is stored.
fn extended(content: &[u8], extension: &mut Extension) -> Result<(), ForeignError> {
    for record in PaxExtensions::new(content) {
        let record = record.map_err(damaged)?;
        match record.key_bytes() {
            b"path" => extension.name = Some(record.value_bytes().to_vec()),
            b"size" => {
                let text = record.value().ok().and_then(|text| text.parse().ok());
                let wrong = || ForeignError::Header("a size is no number".to_owned());
                extension.bytes = Some(text.ok_or_else(wrong)?);
            }
            // What is stored is not what the file is, but pieces of it.
            key if key.starts_with(b"GNU.sparse.") => {
                return Err(ForeignError::Header("it stores files in pieces".to_owned()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the name without what says nothing, when it stays where it is put.
fn plain(raw: &[u8], is_directory: bool) -> Result<String, ForeignError> {
    let wrong = || ForeignError::Name(String::from_utf8_lossy(raw).into_owned());
    let text = str::from_utf8(raw).map_err(|_not_text| wrong())?;
    let hostile = text.len() > NAME_BYTES_MAX
        || text.starts_with('/')
        || text.chars().any(char::is_control)
        || text.split('/').any(|part| part == "..");
    if hostile {
        return Err(wrong());
    }
    let parts: Vec<&str> =
        text.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    let is_file_name = !parts.is_empty() && !text.ends_with('/') && !text.ends_with("/.");
    if is_directory || is_file_name { Ok(parts.join("/")) } else { Err(wrong()) }
}

const fn is_of_layers(kind: EntryType) -> bool {
    matches!(
        kind,
        EntryType::Link | EntryType::Symlink | EntryType::Char | EntryType::Block | EntryType::Fifo
    )
}

const fn word(kind: EntryType) -> &'static str {
    match kind {
        EntryType::Link => "a hard link",
        EntryType::Symlink => "a symbolic link",
        EntryType::Char | EntryType::Block => "a device",
        EntryType::Fifo => "a pipe",
        EntryType::GNUSparse => "stored in pieces",
        EntryType::Directory => "a directory with content",
        _ => "something else",
    }
}

fn damaged(error: io::Error) -> ForeignError {
    // It may quote the whole header.
    let told = error.to_string();
    let told = told.split(" when getting ").next().unwrap_or_default();
    ForeignError::Header(told.chars().take(TOLD_CHARS_MAX).flat_map(char::escape_debug).collect())
}

fn early() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

#[cfg(test)]
mod tests;
