//! What an entry of a layer says of itself.

use std::io::Read;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Gid, Mode, Uid};
use tar::{Entry, PaxExtensions};

use super::LayerError;

/// Records of one entry that are read: a hundred attributes of the largest size have less.
const RECORDS_BYTES_MAX: u64 = 8 << 20;

/// Records that hold an extended attribute begin so.
const ATTRIBUTE_RECORD: &str = "SCHILY.xattr.";

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
        for record in PaxExtensions::new(&text) {
            let record = record.map_err(LayerError::Read)?;
            let (key, value) = (record.key().unwrap_or_default(), record.value_bytes().to_vec());
            match key {
                "path" => records.path = Some(value),
                "linkpath" => records.target = Some(value),
                _ => match key.strip_prefix(ATTRIBUTE_RECORD).filter(|name| is_attribute(name)) {
                    Some(name) => records.attributes.push((name.to_owned(), value)),
                    None => {
                        return Err(LayerError::Unknown("a record that the agent does not know"));
                    }
                },
            }
        }
        Ok(records)
    }
}

impl About {
    /// Understands an entry and the records before it.
    pub(super) fn of(
        entry: &Entry<'_, impl Read>,
        records: Option<Records>,
    ) -> Result<Self, LayerError> {
        let Records { path, target, attributes } = records.unwrap_or_default();
        let header = entry.header();
        let path = path.unwrap_or_else(|| header.path_bytes().into_owned());
        let path = place(&path).ok_or(LayerError::Unknown("a path that leads elsewhere"))?;
        let target = target.or_else(|| Some(header.link_name_bytes()?.into_owned()));
        let id = |id: std::io::Result<u64>| {
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

/// Whether an attribute is one that a file of a container has, and not overlayfs.
fn is_attribute(name: &str) -> bool {
    (name.starts_with("user.") && !name.starts_with("user.overlay."))
        || name == "security.capability"
        || name.starts_with("system.posix_acl_")
}
