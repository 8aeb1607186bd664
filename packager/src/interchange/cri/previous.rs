//! Podman's increments: `podman container checkpoint --pre-checkpoint` exports memory alone, and
//! `--with-previous` a dump that has the pages which have changed since. Its link `parent` leads to
//! where Podman would unpack the other archive; both are put beside one another here, and packing
//! flattens them as it does CRIU's own parents.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::PRE_CHECKPOINT;
use crate::interchange::dump;
use crate::interchange::foreign::{ForeignError, Members};
use crate::wanted::Wanted;

/// Where the link leads, in all that Podman makes.
const LEADS_TO: &str = "../pre-checkpoint";

/// Returns the directory of the earlier dump; it is made when it is not there.
pub(super) fn directory(place: &Path) -> io::Result<PathBuf> {
    let directory = place.join(PRE_CHECKPOINT.trim_end_matches('/'));
    match fs::create_dir(&directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(directory),
    }
}

/// Puts a dump and what it was taken upon together, once its archive was read; refuses what is not
/// whole.
pub(super) fn join(
    place: &Path,
    link: Option<&str>,
    has_dump: bool,
    previous: Option<&Path>,
    wanted: &Wanted,
) -> Result<(), ForeignError> {
    let refused = |text: &str| Err(ForeignError::Content(text.to_owned()));
    let has_previous = place.join(PRE_CHECKPOINT).exists();
    let Some(link) = link else {
        return match (has_dump, has_previous, previous) {
            (false, true, _) => refused(
                "it is a pre-checkpoint: memory without processes. Import the checkpoint that was \
                 taken after it with --with-previous, and name this one with --previous",
            ),
            (true, true, _) => refused("it has a pre-checkpoint, and no link that needs it"),
            (_, false, Some(_)) => {
                refused("it was taken upon no other: leave --previous out, or name its archive")
            }
            (_, false, None) => Ok(()),
        };
    };
    if link.trim_end_matches('/') != LEADS_TO {
        return refused(&format!("its link to an earlier dump leads to {link:?}"));
    }
    match (previous, has_previous) {
        (Some(_), true) => return refused("it has its pre-checkpoint in it: leave --previous out"),
        (Some(archive), false) => read(archive, place, wanted)?,
        (None, true) => {}
        (None, false) => {
            return refused(
                "it was taken with --with-previous: what had not changed is in the archive of its \
                 pre-checkpoint. Name that one too, with --previous FILE",
            );
        }
    }
    Ok(std::os::unix::fs::symlink(LEADS_TO, place.join("dump/parent"))?)
}

/// Reads the archive of a pre-checkpoint: CRIU's images in it, and nothing else.
fn read(archive: &Path, place: &Path, wanted: &Wanted) -> Result<(), ForeignError> {
    let refused = |text: &str| {
        Err(ForeignError::Content(format!("{}, the archive before it, {text}", archive.display())))
    };
    let file = fs::File::open(archive)?;
    let mut members =
        Members::new(wanted.reader(dump::plain_reader(file)?)).noting_link(super::PARENT);
    let mut found = false;
    while let Some(member) = members.next_file()? {
        if let Some(name) = member.name.strip_prefix(PRE_CHECKPOINT) {
            let name = name.to_owned();
            dump::take(&mut members, &member, &name, &directory(place)?)?;
            found = true;
        } else if member.name.starts_with(super::CHECKPOINT) {
            return refused("is a checkpoint itself and no pre-checkpoint");
        }
    }
    if found { Ok(()) } else { refused("has no pre-checkpoint") }
}
