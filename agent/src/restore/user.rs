//! Who a container's first process would be: the image's `User`, by number or by name.
//!
//! CRIU gives the restored processes their own credentials; this is for what is run in the
//! container later.

use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};

use crate::runtime::Mount;

/// Largest /etc/passwd or /etc/group that is read.
const TABLE_BYTES_MAX: u64 = 1 << 20;

/// A user with its groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: Vec<u32>,
}

/// Why a user is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UserError {
    /// The image's files name no such user or group.
    #[error("the image has no {0} {1:?}")]
    Unknown(&'static str, String),
    /// The image's files cannot be read.
    #[error("failed to read {0:?} of the image")]
    Read(&'static str, #[source] io::Error),
}

/// Finds the user `text`, as `user[:group]` in numbers or names.
pub(super) fn resolve(text: &str, rootfs: &[Mount]) -> Result<User, UserError> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (text, None),
    };
    let passwd = table(rootfs, "etc/passwd")?;
    let entry = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| {
        fields.first() == Some(&user) || (is_number(user) && fields.get(2) == Some(&user))
    });
    let field = |position: usize| {
        entry.as_ref().and_then(|fields| fields.get(position)?.parse::<u32>().ok())
    };
    let uid = match user {
        "" => Some(0),
        name => field(2).or_else(|| name.parse().ok()),
    };
    let uid = uid.ok_or_else(|| UserError::Unknown("user", user.to_owned()))?;
    let gid = match group.filter(|group| !group.is_empty()) {
        None => field(3).unwrap_or(0),
        Some(group) => group_id(group, rootfs)?,
    };
    Ok(User { uid, gid, groups: vec![gid] })
}

fn group_id(group: &str, rootfs: &[Mount]) -> Result<u32, UserError> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    let groups = table(rootfs, "etc/group")?;
    groups
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>())
        .find(|fields| fields.first() == Some(&group))
        .and_then(|fields| fields.get(2)?.parse().ok())
        .ok_or_else(|| UserError::Unknown("group", group.to_owned()))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Reads a file of a root file system that is not mounted: from the directories the overlay is
/// made of, highest first. Links in them lead nowhere outside.
fn table(rootfs: &[Mount], path: &'static str) -> Result<String, UserError> {
    for directory in rootfs.iter().flat_map(Mount::directories) {
        match read_in(Path::new(directory), path) {
            Ok(Some(text)) => return Ok(text),
            Ok(None) => {}
            Err(error) => return Err(UserError::Read(path, error)),
        }
    }
    Ok(String::new())
}

fn read_in(directory: &Path, path: &str) -> io::Result<Option<String>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let top = rustix::fs::open(directory, flags | OFlags::DIRECTORY, Mode::empty())?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = match rustix::fs::openat2(&top, path, flags, Mode::empty(), resolve) {
        Ok(file) => std::fs::File::from(file),
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR | rustix::io::Errno::NXIO) => {
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let found = file.metadata()?;
    // A whiteout hides the file in the directories below.
    if !found.is_file() {
        return Ok((found.rdev() == 0).then(String::new));
    }
    let mut text = String::new();
    file.take(TABLE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fs_err as fs;

    #[expect(clippy::unwrap_in_result, reason = "a failed preparation is a failed test")]
    fn check(text: &str) -> Result<User, String> {
        let (upper, lower) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(lower.path().join("etc")).unwrap();
        fs::create_dir_all(upper.path().join("etc")).unwrap();
        fs::write(lower.path().join("etc/passwd"), "old:x:1:1::/:/bin/sh\n").unwrap();
        let passwd = "root:x:0:0::/:/bin/sh\napp:x:1000:100::/:/bin/sh\n";
        fs::write(upper.path().join("etc/passwd"), passwd).unwrap();
        fs::write(lower.path().join("etc/group"), "staff:x:50:\n").unwrap();
        let rootfs = Mount {
            kind: "overlay".to_owned(),
            source: "overlay".to_owned(),
            target: String::new(),
            options: vec![
                format!("upperdir={}", upper.path().display()),
                format!("lowerdir={}", lower.path().display()),
            ],
        };
        resolve(text, &[rootfs]).map_err(|error| error.to_string())
    }

    #[test]
    fn users_are_found_by_number_and_by_name() {
        let user = |uid, gid| Ok(User { uid, gid, groups: vec![gid] });
        assert_eq!(check(""), user(0, 0));
        assert_eq!(check("app"), user(1000, 100));
        assert_eq!(check("1000"), user(1000, 100));
        assert_eq!(check("4711"), user(4711, 0));
        assert_eq!(check("app:staff"), user(1000, 50));
        assert_eq!(check("4711:12"), user(4711, 12));
    }

    #[test]
    fn unknown_names_are_an_error() {
        assert!(check("old").unwrap_err().contains("user \"old\""), "the upper file hides it");
        assert!(check("app:nobody").unwrap_err().contains("group"));
    }

    #[test]
    fn links_do_not_lead_out_of_the_image() {
        let lower = tempfile::tempdir().unwrap();
        fs::create_dir_all(lower.path().join("etc")).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", lower.path().join("etc/passwd")).unwrap();
        assert_eq!(read_in(lower.path(), "etc/passwd").unwrap(), None);
    }
}
