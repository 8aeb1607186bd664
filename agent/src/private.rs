//! Directories that are nobody else's. What lies in the agent's decides what it does as root: what it
//! removes, whom it resumes, what CRIU reads. So nobody else may have been able to write there.

use std::fs::{Metadata, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use fs_err as fs;

use crate::stage;

/// Mode of a directory that only its owner uses.
const PRIVATE: u32 = 0o700;

/// Bits that let others look or write.
const OTHERS: u32 = 0o077;

/// Bits that let the group, or everybody, write.
const GROUP_WRITES: u32 = 0o020;
const ALL_WRITE: u32 = 0o002;

/// In such a directory, only who made a thing can rename or remove it.
const STICKY: u32 = 0o1000;

/// Makes a directory, or takes the one that is there when it is ours and was reached through nobody
/// else's. One that others could look into or write to is closed.
pub(crate) fn claim(directory: &Path) -> io::Result<()> {
    // Not made below what somebody else could move away.
    safe_above(directory)?;
    stage::make(directory)?;
    let found = fs::symlink_metadata(directory)?;
    if found.is_symlink() {
        return Err(wrong(directory, "is a symbolic link: name the directory itself"));
    }
    if !found.is_dir() {
        return Err(wrong(directory, "is no directory"));
    }
    if !is_ours(&found) {
        return Err(wrong(directory, &format!("belongs to user {}", found.uid())));
    }
    let mode = found.mode() & 0o7777;
    if mode & OTHERS != 0 {
        tracing::warn!(
            ?directory,
            mode = format!("{mode:04o}"),
            "others could use a directory of the agent's: it is for its owner alone now"
        );
        fs::set_permissions(directory, Permissions::from_mode(PRIVATE))?;
    }
    Ok(())
}

/// What is at the top of a file system of its own, as that of a disk for staging.
const LOST_AND_FOUND: &str = "lost+found";

/// Claims a directory that is to hold nothing but what is `ours`, by name. Where something else lies,
/// nothing is changed: a slip in the configuration must not cost anybody his files.
pub(crate) fn claim_own(directory: &Path, ours: impl Fn(&str) -> bool) -> io::Result<()> {
    if fs::symlink_metadata(directory).is_ok_and(|found| found.is_dir()) {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let ours = |name: &str| name == LOST_AND_FOUND || ours(name);
            if !entry.file_name().to_str().is_some_and(ours) {
                let told = "is not the agent's: give it a directory of its own";
                return Err(wrong(&entry.path(), told));
            }
        }
    }
    claim(directory)
}

/// Claims a directory in which records lie. Those that others could have written are not believed,
/// and nothing is changed then, so that somebody can look.
pub(crate) fn claim_records(directory: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(directory).ok().filter(Metadata::is_dir);
    let others = found.is_some_and(|found| found.mode() & (GROUP_WRITES | ALL_WRITE) != 0);
    if others && fs::read_dir(directory)?.next().is_some() {
        return Err(wrong(
            directory,
            "can be written by others, and what lies in it may be theirs: look at it, and remove it \
             or take their rights away (chmod 0700)",
        ));
    }
    claim(directory)
}

/// Makes sure that a place for a socket is nobody else's, and free: what is there must be a socket
/// that an earlier one of us left, and goes.
pub(crate) fn free_socket(socket: &Path) -> io::Result<()> {
    safe_above(socket)?;
    if let Some(directory) = socket.parent() {
        stage::make(directory)?;
        safe_above(socket)?;
    }
    match fs::symlink_metadata(socket) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(found) if !found.file_type().is_socket() => {
            Err(wrong(socket, "is there, and no socket: the agent does not remove it"))
        }
        Ok(_) => match fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        },
    }
}

/// Makes sure that everything above a path, as far as it exists, is root's or ours, so that nobody
/// else decides where the path leads.
fn safe_above(path: &Path) -> io::Result<()> {
    let above = path.parent().unwrap_or(path);
    look_along(above)?;
    // Links on the way are root's or ours, and lead somewhere.
    let there = above.ancestors().find(|above| above.exists());
    let real = there.map(Path::canonicalize).transpose()?;
    real.map_or(Ok(()), |real| look_along(&real))
}

fn look_along(path: &Path) -> io::Result<()> {
    let mut above: Vec<PathBuf> = path.ancestors().map(Path::to_owned).collect();
    above.reverse();
    for one in above {
        let found = match fs::symlink_metadata(&one) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if found.uid() != 0 && !is_ours(&found) {
            let told = format!("belongs to user {}, who decides what lies below", found.uid());
            return Err(wrong(&one, &told));
        }
        let others =
            found.mode() & ALL_WRITE != 0 || (found.mode() & GROUP_WRITES != 0 && found.gid() != 0);
        if found.is_dir() && others && found.mode() & STICKY == 0 {
            return Err(wrong(
                &one,
                "can be written by others, who decide what lies below (chmod go-w)",
            ));
        }
    }
    Ok(())
}

/// Whether something belongs to who we are.
fn is_ours(found: &Metadata) -> bool {
    found.uid() == rustix::process::geteuid().as_raw()
}

fn wrong(path: &Path, why: &str) -> io::Error {
    io::Error::other(format!("{} {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn open(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn refused(claimed: io::Result<()>, why: &str) {
        let told = claimed.unwrap_err().to_string();
        assert!(told.contains(why), "{told:?} does not mention {why:?}");
    }

    #[test]
    fn what_others_could_use_is_closed() {
        let top = tempfile::tempdir().unwrap();
        let (new, open_one) = (top.path().join("a/b"), top.path().join("open"));
        claim(&new).unwrap();
        assert_eq!(mode(&new), 0o700);
        fs::create_dir(&open_one).unwrap();
        for given in [0o755, 0o777, 0o1777, 0o770, 0o500] {
            open(&open_one, given);
            claim(&open_one).unwrap();
            assert_eq!(mode(&open_one) & 0o077, 0, "{given:o}");
        }
    }

    #[test]
    fn a_directory_with_what_is_somebody_elses_stays_as_it_is() {
        let top = tempfile::tempdir().unwrap();
        open(top.path(), 0o1777);
        fs::create_dir(top.path().join("own")).unwrap();
        fs::create_dir(top.path().join("lost+found")).unwrap();
        fs::create_dir(top.path().join("app")).unwrap();
        let own = |name: &str| name == "own";
        refused(claim_own(top.path(), own), "/app is not the agent's");
        assert_eq!(mode(top.path()), 0o1777);
        fs::remove_dir(top.path().join("app")).unwrap();
        claim_own(top.path(), own).unwrap();
        assert_eq!(mode(top.path()), 0o700);
        claim_own(&top.path().join("new/one"), own).unwrap();
    }

    #[test]
    fn a_planted_link_or_a_foreign_directory_is_refused() {
        let top = tempfile::tempdir().unwrap();
        let (real, link) = (top.path().join("real"), top.path().join("link"));
        fs::create_dir(&real).unwrap();
        symlink(&real, &link).unwrap();
        refused(claim(&link), "symbolic link");
        fs::write(top.path().join("file"), "").unwrap();
        claim(&top.path().join("file")).unwrap_err();
        // Our own link on the way is fine.
        claim(&link.join("below")).unwrap();
        if !rustix::process::geteuid().is_root() {
            println!("not root: nothing can be given to somebody else");
            return;
        }
        chown(&real, Some(65_534), None).unwrap();
        refused(claim(&real), "belongs to user 65534");
        refused(claim(&real.join("below")), "belongs to user 65534");
        refused(claim(&link.join("below")), "belongs to user 65534");
        assert!(!real.join("new").exists());
    }

    #[test]
    fn whoever_can_write_above_decides_what_lies_below() {
        let top = tempfile::tempdir().unwrap();
        let above = top.path().join("above");
        fs::create_dir(&above).unwrap();
        open(&above, 0o777);
        refused(claim(&above.join("below")), "can be written by others");
        assert!(!above.join("below").exists(), "it was made all the same");
        open(&above, 0o1777);
        claim(&above.join("below")).unwrap();
    }

    #[test]
    fn records_that_others_could_have_written_are_not_believed() {
        let top = tempfile::tempdir().unwrap();
        let place = top.path().join("operations");
        claim_records(&place).unwrap();
        open(&place, 0o777);
        claim_records(&place).unwrap();
        fs::write(place.join("planted.json"), "{}").unwrap();
        claim_records(&place).unwrap();
        open(&place, 0o777);
        for _ in 0..2 {
            refused(claim_records(&place), "may be theirs");
            assert_eq!(mode(&place), 0o777);
        }
        open(&place, 0o755);
        claim_records(&place).unwrap();
    }

    #[test]
    fn only_a_socket_makes_room_for_a_socket() {
        let top = tempfile::tempdir().unwrap();
        let socket = top.path().join("run/agent.sock");
        free_socket(&socket).unwrap();
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        free_socket(&socket).unwrap();
        assert!(!socket.exists());
        let file = top.path().join("precious");
        fs::write(&file, "x").unwrap();
        for place in [file.clone(), socket.clone()] {
            if place == socket {
                symlink(&file, &socket).unwrap();
            }
            let told = free_socket(&place).unwrap_err().to_string();
            assert!(told.contains("no socket"), "{told}");
        }
        assert_eq!(fs::read_to_string(file).unwrap(), "x");
        open(&top.path().join("run"), 0o777);
        fs::remove_file(&socket).unwrap();
        let told = free_socket(&socket).unwrap_err().to_string();
        assert!(told.contains("can be written by others"), "{told}");
    }
}
