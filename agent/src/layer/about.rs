//! What an entry of a layer says of itself.

use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Gid, Mode, Uid};
use tar::{Entry, Header};

use super::LayerError;

/// Records of one entry that are read, as many as others read.
pub(crate) const RECORDS_BYTES_MAX: u64 = 1 << 20;

/// Records that hold an extended attribute begin so.
pub(crate) const ATTRIBUTE_RECORD: &str = "SCHILY.xattr.";

/// What is made, and how.
#[derive(Debug)]
pub(super) struct About {
    /// Below the root; it leads nowhere else.
    pub(super) path: PathBuf,
    /// Of a link.
    pub(super) target: Option<Vec<u8>>,
    pub(super) owner: (Uid, Gid),
    pub(super) mode: Mode,
    /// When it was changed, since 1970.
    pub(super) seconds: i64,
    /// Bytes of its content.
    pub(super) size: u64,
    pub(super) attributes: Vec<(String, Vec<u8>)>,
}

/// The records before an entry (pax, "Extended Header").
#[derive(Debug, Default)]
pub(super) struct Records {
    path: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    attributes: Vec<(String, Vec<u8>)>,
}

impl Records {
    /// Reads them: those that our own captures have, and no others.
    pub(super) fn read(entry: &mut Entry<'_, impl Read>) -> Result<Self, LayerError> {
        if entry.size() > RECORDS_BYTES_MAX {
            return Err(LayerError::Unknown("very long records"));
        }
        let mut text = Vec::new();
        entry.read_to_end(&mut text).map_err(LayerError::Read)?;
        let mut records = Self::default();
        for record in read_records(&text) {
            let (key, value) = record.map_err(LayerError::Read)?;
            match key {
                "path" => records.path = Some(value.to_vec()),
                "linkpath" => records.target = Some(value.to_vec()),
                _ => match key.strip_prefix(ATTRIBUTE_RECORD).filter(|name| is_attribute(name)) {
                    Some(name) => records.attributes.push((name.to_owned(), value.to_vec())),
                    None => {
                        return Err(LayerError::Unknown("a record that the agent does not know"));
                    }
                },
            }
        }
        Ok(records)
    }
}

/// Key and value.
type Record<'a> = (&'a str, &'a [u8]);

/// Reads the content of an extended header, up to what is malformed.
pub(crate) fn read_records(text: &[u8]) -> impl Iterator<Item = io::Result<Record<'_>>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some((read, after)) = record(rest) else {
            rest = &[];
            return Some(Err(strange()));
        };
        rest = after;
        Some(Ok(read))
    })
}

/// Reads the first record, as `LENGTH KEY=VALUE` and a line feed, and returns what is behind it. The
/// library's reader ends a record at its first line feed, and a value may have one.
fn record(text: &[u8]) -> Option<(Record<'_>, &[u8])> {
    let space = text.iter().position(|byte| *byte == b' ')?;
    let (length, _) = text.split_at_checked(space)?;
    let length: usize = std::str::from_utf8(length).ok()?.parse().ok()?;
    let (record, after) = text.split_at_checked(length)?;
    let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    let (key, value) = record.split_at_checked(equals)?;
    Some(((std::str::from_utf8(key).ok()?, value.strip_prefix(b"=")?), after))
}

fn strange() -> io::Error {
    io::Error::other("the records of an entry are malformed")
}

impl About {
    /// Understands an entry and the records before it.
    pub(super) fn of(
        entry: &Entry<'_, impl Read>,
        records: Option<Records>,
    ) -> Result<Self, LayerError> {
        let Records { path, target, attributes } = records.unwrap_or_default();
        let header = entry.header();
        if !is_ours(header) {
            return Err(LayerError::Unknown("a header of another form"));
        }
        let path = path.unwrap_or_else(|| header.path_bytes().into_owned());
        let path = place(&path).ok_or(LayerError::Unknown("a path that leads elsewhere"))?;
        let target = target.or_else(|| Some(header.link_name_bytes()?.into_owned()));
        let id = |id: io::Result<u64>| {
            let id = id.map_err(LayerError::Read)?;
            // The last one means nobody (chown(2)).
            let id = u32::try_from(id).ok().filter(|id| *id != u32::MAX);
            id.ok_or(LayerError::Unknown("an owner that Linux does not know"))
        };
        let owner = (Uid::from_raw(id(header.uid())?), Gid::from_raw(id(header.gid())?));
        let mode = header.mode().map_err(LayerError::Read)?;
        let seconds = header.mtime().map_err(LayerError::Read)?;
        let seconds =
            i64::try_from(seconds).map_err(|_far| LayerError::Unknown("a strange time"))?;
        let mode = Mode::from_raw_mode(mode & 0o7777);
        Ok(Self { path, target, owner, mode, seconds, size: entry.size(), attributes })
    }
}

/// Whether a header has the form that captures write: others are read differently by different readers.
fn is_ours(header: &Header) -> bool {
    let Some(ustar) = header.as_ustar() else { return false };
    let [kind] = ustar.typeflag;
    let sized = header.entry_size().is_ok_and(|size| kind == b'0' || size == 0);
    let [first, ..] = ustar.prefix;
    (b'0'..=b'6').contains(&kind)
        && sized
        && ustar.version == *b"00"
        && first == 0
        && ustar.pad == [0; 12]
}

/// Returns a path below the root as the names on the way; `None` when it leads elsewhere, or nowhere.
pub(super) fn place(path: &[u8]) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;
    let path = Path::new(std::ffi::OsStr::from_bytes(path));
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => found.push(name),
            Component::CurDir => {}
            Component::RootDir | Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    (!found.as_os_str().is_empty()).then_some(found)
}

/// What new files in a directory get: it is set when all that was in it is there.
pub(crate) const DEFAULT_ACL: &str = "system.posix_acl_default";

/// Whether an attribute is one that a file of a container has, and not overlayfs.
pub(crate) fn is_attribute(name: &str) -> bool {
    (name.starts_with("user.") && !name.starts_with("user.overlay."))
        || name == "security.capability"
        || name.starts_with("system.posix_acl_")
}
