//! Container images of other people's programs, for workloads: made once from Debian's packages,
//! then kept.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;
use rustix::fs::{FlockOperation, flock};

use crate::command;
use crate::image::{self, ImageError};
use crate::root::{self, Release, RootError};

/// What an image has. One with less is pushed and pulled in a part of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Programs {
    /// redis, nginx, and Python.
    Servers,
    /// These, and Node.js and Java.
    All,
}

impl Programs {
    const fn name(self) -> &'static str {
        match self {
            Self::Servers => "servers",
            Self::All => "all",
        }
    }

    /// Returns the names of Debian's packages.
    fn packages(self) -> Vec<&'static str> {
        let mut packages = vec!["busybox-static", "nginx-light", "python3", "redis-server"];
        if self == Self::All {
            packages.extend(["librhino-java", "nodejs", "openjdk-21-jre-headless"]);
        }
        packages
    }
}

const MAKE: &str = include_str!("programs/make.sh");

/// Why there is no such image.
#[derive(Debug, thiserror::Error)]
pub enum ProgramsError {
    /// Its file system could not be made.
    #[error(transparent)]
    Root(#[from] RootError),
    /// The image could not be written.
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// Returns an image's layout, whose tag is `base`, making it first when it is missing or its
/// packages changed. `say` hears what takes long. Safe to call from several processes.
pub fn ensure(what: Programs, say: &dyn Fn(&str)) -> Result<PathBuf, ProgramsError> {
    let packages = what.packages();
    let directory = root::cache().join("programs").join(what.name());
    let (done, list) = (directory.join("image"), directory.join("image/packages"));
    let failed = |error| RootError::Io(directory.clone(), error);
    fs::create_dir_all(&directory).map_err(failed)?;
    let lock = fs::File::create(directory.join("lock")).map_err(failed)?;
    flock(lock.file(), FlockOperation::LockExclusive).map_err(|errno| failed(errno.into()))?;
    let wanted = format!("{}\n{MAKE}", packages.join("\n"));
    if fs::read_to_string(&list).is_ok_and(|made_of| made_of == wanted) {
        return Ok(done);
    }
    let name = what.name();
    say(&format!(
        "making an image of other people's programs ({name}) from Debian's packages, once"
    ));
    let partial = directory.join("partial");
    for old in [&partial, &done] {
        remove(old).map_err(failed)?;
    }
    fs::create_dir_all(&partial).map_err(failed)?;
    make(&partial, &packages)?;
    let layout = partial.join("image");
    image::build_of(&layout, &partial.join("layer.tar"), "base")?;
    fs::write(layout.join("packages"), wanted).map_err(failed)?;
    fs::rename(&layout, &done).map_err(failed)?;
    remove(&partial).map_err(failed)?;
    say(&format!("the image is complete: {}", done.display()));
    Ok(done)
}

fn make(directory: &Path, packages: &[&str]) -> Result<(), RootError> {
    let mirror = root::mirror().ok_or(RootError::NoMirror)?;
    // It ends when we are killed.
    let mut shell = Command::new("setpriv");
    shell
        .args(["--pdeathsig", "KILL", "--", "sh", "-c", MAKE])
        .env("DIRECTORY", directory)
        .env("MIRROR", mirror)
        .env("RELEASE", Release::Trixie.name())
        .env("PACKAGES", packages.join(" "));
    let made = command::run(&mut shell).map(drop);
    made.map_err(|error| RootError::Command(directory.to_owned(), error))
}

fn remove(directory: &Path) -> io::Result<()> {
    if directory.exists() { fs::remove_dir_all(directory) } else { Ok(()) }
}
