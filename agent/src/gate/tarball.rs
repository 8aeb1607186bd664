//! A tar as GNU tar writes one by itself (`tar --create .`), block by block. Whoever reads another form may
//! see another entry than GNU tar makes of it, as root: so there is no other form here. Numbers are octal
//! to their last digit, what has no content has no size, no name goes on behind a zero, and nothing is
//! behind the end. (GNU tar 1.35, "Basic Tar Format" and "Storing Sparse Files", and `src/tar.h`.)

use std::io::{self, Read};

use crate::layer::is_at_its_end;

const BLOCK: usize = 512;

/// Magic and version of GNU's own form.
const MAGIC: &[u8] = b"ustar  \0";

/// A path with more bytes than the kernel takes is none.
const LONG_MAX: u64 = 1 << 14;

/// Parts of a file with holes that its header has, and that each block behind that has.
const PARTS: usize = 4;
const MORE_PARTS: usize = 21;
const PART_BYTES: usize = 24;

/// What an entry makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Symlink,
    /// One more name of a file.
    Link,
    Other,
}

/// An entry.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) kind: Kind,
    /// From the root of what was written: `/` and names. Empty for that itself.
    pub(super) path: Vec<u8>,
    /// As it was said.
    pub(super) target: Vec<u8>,
}

/// Why it is not read.
#[derive(Debug)]
pub(super) enum Wrong {
    /// It has something that GNU tar does not write, or nobody is to have.
    Has(&'static str),
    Torn(io::Error),
}

impl From<io::Error> for Wrong {
    fn from(error: io::Error) -> Self {
        Self::Torn(error)
    }
}

struct Header([u8; BLOCK]);

/// Reads all entries.
pub(super) fn each(
    tar: &mut impl Read,
    mut take: impl FnMut(Entry) -> Result<(), Wrong>,
) -> Result<(), Wrong> {
    let (mut long_path, mut long_target) = (None, None);
    loop {
        let header = Header(block(tar)?);
        if header.0.iter().all(|byte| *byte == 0) {
            if long_path.is_some() || long_target.is_some() {
                return Err(Wrong::Has("a name of nothing"));
            }
            let is_end = is_at_its_end(tar)?;
            return if is_end { Ok(()) } else { Err(Wrong::Has("something behind its end")) };
        }
        header.check()?;
        let (letter, size) = (header.letter(), header.size()?);
        if matches!(letter, b'L' | b'K') {
            let long = if letter == b'L' { &mut long_path } else { &mut long_target };
            if long.replace(long_name(tar, size)?).is_some() {
                return Err(Wrong::Has("two names of one file"));
            }
            continue;
        }
        let path = long_path.take().map_or_else(|| header.text(0, 100), Ok)?;
        let target = long_target.take().map_or_else(|| header.text(157, 100), Ok)?;
        let kind = match letter {
            b'2' => Kind::Symlink,
            b'1' => Kind::Link,
            _ => Kind::Other,
        };
        match letter {
            b'S' => header.parts(tar, size)?,
            b'0' => {}
            b'1'..=b'6' if size == 0 => {}
            _ => return Err(Wrong::Has("entries that tar does not write there")),
        }
        let path = below(&path, letter == b'5')?;
        take(Entry { kind, path, target })?;
        pass_over(tar, size)?;
    }
}

/// Returns a path from the root on.
pub(super) fn below(path: &[u8], is_directory: bool) -> Result<Vec<u8>, Wrong> {
    let out = Wrong::Has("a path that is not below its root");
    let Some(rest) = path.strip_prefix(b".") else { return Err(out) };
    let rest = if is_directory { rest.strip_suffix(b"/") } else { Some(rest) };
    let Some(rest) = rest else { return Err(out) };
    let is_name = |name: &[u8]| !matches!(name, b"" | b"." | b"..");
    let mut names = rest.split(|byte| *byte == b'/');
    let is_plain = names.next() == Some(b"") && names.all(is_name);
    if is_plain && (is_directory || !rest.is_empty()) { Ok(rest.to_vec()) } else { Err(out) }
}

impl Header {
    fn at(&self, from: usize, length: usize) -> &[u8] {
        self.0.get(from..from + length).unwrap_or_default()
    }

    fn letter(&self) -> u8 {
        self.0.get(156).copied().unwrap_or_default()
    }

    fn check(&self) -> Result<(), Wrong> {
        let sum: u64 = self.0.iter().map(|byte| u64::from(*byte)).sum();
        let own: u64 = self.at(148, 8).iter().map(|byte| u64::from(*byte)).sum();
        let told = format!("{:06o}\0 ", sum - own + 8 * u64::from(b' '));
        if self.at(257, 8) != MAGIC || self.at(148, 8) != told.as_bytes() {
            return Err(Wrong::Has("a header that tar does not write there"));
        }
        Ok(())
    }

    fn size(&self) -> Result<u64, Wrong> {
        number(self.at(124, 12))
    }

    /// Returns a text that ends where its field does, or at zeros.
    fn text(&self, from: usize, length: usize) -> Result<Vec<u8>, Wrong> {
        let field = self.at(from, length);
        let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
        let (text, rest) = field.split_at(end);
        if rest.iter().any(|byte| *byte != 0) {
            return Err(Wrong::Has("a name that goes on behind its end"));
        }
        Ok(text.to_vec())
    }

    /// Reads which parts a file with holes has: as many bytes as its content, in whole blocks.
    fn parts(&self, tar: &mut impl Read, size: u64) -> Result<(), Wrong> {
        let mut sizes = Vec::new();
        let mut goes_on = list(self.at(386, PARTS * PART_BYTES), self.at(482, 1), &mut sizes)?;
        while goes_on {
            let more = Self(block(tar)?);
            let had = sizes.len();
            let parts = more.at(0, MORE_PARTS * PART_BYTES);
            goes_on = list(parts, more.at(504, 1), &mut sizes)?;
            if sizes.len() == had {
                return Err(Wrong::Has("holes that tar does not write there"));
            }
        }
        let (last, whole) = sizes.split_last().map_or((0, &[][..]), |(last, whole)| (*last, whole));
        // Nothing follows what ends in the middle of a block, but what is empty.
        let odd = whole.iter().position(|size| size % 512 != 0);
        let is_last = odd.is_none_or(|odd| last == 0 && odd + 1 == whole.len());
        let sum = sizes.iter().try_fold(0_u64, |sum, size| sum.checked_add(*size));
        if is_last && sum == Some(size) {
            return Ok(());
        }
        Err(Wrong::Has("holes that tar does not write there"))
    }
}

/// Reads a list of parts. Returns whether another one follows: a list that is not full is the last.
fn list(parts: &[u8], extended: &[u8], sizes: &mut Vec<u64>) -> Result<bool, Wrong> {
    let mut is_full = true;
    for part in parts.chunks(PART_BYTES) {
        let (offset, size) = part.split_at(PART_BYTES / 2);
        if part.iter().all(|byte| *byte == 0) {
            is_full = false;
        } else if is_full {
            number(offset)?;
            sizes.push(number(size)?);
        } else {
            return Err(Wrong::Has("holes that tar does not write there"));
        }
    }
    match extended {
        [0] => Ok(false),
        [1] if is_full => Ok(true),
        _ => Err(Wrong::Has("holes that tar does not write there")),
    }
}

/// Reads a number of eleven octal digits, or a larger one as GNU tar writes it.
fn number(field: &[u8]) -> Result<u64, Wrong> {
    let wrong = Wrong::Has("a number that tar does not write there");
    if let [0x80, 0, 0, 0, value @ ..] = field {
        return value.try_into().map(u64::from_be_bytes).map_err(|_length| wrong);
    }
    match field.split_last() {
        Some((0, digits)) if digits.iter().all(|digit| (b'0'..=b'7').contains(digit)) => {
            Ok(digits.iter().fold(0, |sum, digit| sum * 8 + u64::from(digit - b'0')))
        }
        _ => Err(wrong),
    }
}

fn long_name(tar: &mut impl Read, size: u64) -> Result<Vec<u8>, Wrong> {
    let wrong = Wrong::Has("a name that tar does not write there");
    if size > LONG_MAX {
        return Err(wrong);
    }
    let mut name = Vec::new();
    tar.by_ref().take(size).read_to_end(&mut name)?;
    let is_whole = u64::try_from(name.len()).is_ok_and(|length| length == size);
    if !is_whole || name.pop() != Some(0) || name.contains(&0) {
        return Err(wrong);
    }
    pad(tar, size)?;
    Ok(name)
}

fn block(tar: &mut impl Read) -> io::Result<[u8; BLOCK]> {
    let mut block = [0; BLOCK];
    tar.read_exact(&mut block)?;
    Ok(block)
}

/// Passes over content, which ends with a block.
fn pass_over(tar: &mut impl Read, size: u64) -> Result<(), Wrong> {
    if io::copy(&mut tar.by_ref().take(size), &mut io::sink())? != size {
        return Err(Wrong::Torn(io::ErrorKind::UnexpectedEof.into()));
    }
    pad(tar, size)
}

fn pad(tar: &mut impl Read, size: u64) -> Result<(), Wrong> {
    let left = size.next_multiple_of(512) - size;
    if io::copy(&mut tar.by_ref().take(left), &mut io::sink())? != left {
        return Err(Wrong::Torn(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(())
}
