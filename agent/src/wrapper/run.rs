//! Runs runc's restore, with a bound: CRIU can hang for ever, and what it has begun outlives a runtime
//! that is killed.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::call::{Call, Create};
use super::claim::Dump;
use super::mark::State;
use super::settings::FILE;
use super::wait_for;
use crate::cgroup::{self, Freezer};
use crate::orphan::{self, CRIU_ROOT};
use crate::process::{CRIU_GRACE, PROC};
use crate::{criu_log, network, process};

/// How often a restore is looked at while it lasts.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long killed processes may take to be gone.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How long the runtime may take to clean up.
const DELETE_LIMIT: Duration = Duration::from_secs(20);

/// Why a container was not restored.
#[derive(Debug, thiserror::Error)]
pub(super) enum RunError {
    #[error("failed to run {0}")]
    Start(String, #[source] io::Error),
    #[error("only runc restores, and {0} is none: name a runc as `runtime` in {FILE}")]
    NotRunc(String),
    #[error("{0:?} is gone, without which CRIU would go by what the images say: was it deleted?")]
    Untold(String),
    #[error("the restore failed{log}")]
    Failed {
        /// What CRIU's log has to say about it, if anything.
        log: String,
    },
    #[error("the restore took longer than {} s{log}", limit.as_secs())]
    Late { limit: Duration, log: String },
    #[error("CRIU was killed in the middle of the restore{log}")]
    Abandoned { log: String },
}

/// Restores the container. Its processes have our standard input and output, as after `create`.
pub(super) fn restore(
    runtime: &Path,
    call: &Call<'_>,
    create: &Create,
    dump: &Dump,
) -> Result<(), RunError> {
    let name = || runtime.display().to_string();
    if !is_runc(runtime).map_err(|error| RunError::Start(name(), error))? {
        return Err(RunError::NotRunc(name()));
    }
    if !Path::new(&dump.criu_config).exists() {
        return Err(RunError::Untold(dump.criu_config.clone()));
    }
    let mut command = Command::new(runtime);
    command.args(call.globals).args(words(create, dump));
    let log = || criu_log::telling(&dump.work.join("restore.log"));
    match bounded(&mut command, dump.limit) {
        Ok(End::Well) => Ok(()),
        Ok(End::Badly) => Err(RunError::Failed { log: log() }),
        Ok(End::Late) => Err(RunError::Late { limit: dump.limit, log: log() }),
        Ok(End::Abandoned) => Err(RunError::Abandoned { log: log() }),
        Err(error) => Err(RunError::Start(name(), error)),
    }
}

/// Whether a program is runc, whatever it is called here: some call others by that name, and others
/// pass everything on to it.
fn is_runc(runtime: &Path) -> io::Result<bool> {
    let real = fs::canonicalize(runtime)?;
    if let Some(known) = known(&real) {
        return Ok(known);
    }
    let told = Command::new(runtime).arg("--version").stdin(Stdio::null()).output()?;
    Ok(names_runc(&String::from_utf8_lossy(&told.stdout)))
}

/// Whether a file is runc; `None` when it has to be asked.
fn known(file: &Path) -> Option<bool> {
    match file.file_name().and_then(OsStr::to_str) {
        Some("runc") => Some(true),
        Some("crun") => Some(false),
        _ => None,
    }
}

/// Whether what a program says of its version is runc's, maybe after its own.
fn names_runc(version: &str) -> bool {
    version.lines().any(|line| line.starts_with("runc version "))
}

/// Returns the words of runc's `restore`. CRIU's own options come from its configuration.
fn words(create: &Create, dump: &Dump) -> Vec<OsString> {
    // The shim takes orphans.
    let mut words: Vec<OsString> =
        ["restore", "--detach", "--no-subreaper"].map(OsString::from).into();
    if create.no_pivot {
        words.push("--no-pivot".into());
    }
    let mut option = |name: &str, value: OsString| words.extend([OsString::from(name), value]);
    option("--image-path", dump.images.clone().into());
    option("--work-path", dump.work.clone().into());
    option("--bundle", create.bundle.clone().into());
    if let Some(file) = &create.pid_file {
        option("--pid-file", file.clone());
    }
    if let Some(socket) = &create.console_socket {
        option("--console-socket", socket.clone());
    }
    words.push((&*create.id).into());
    words
}

/// Takes away what a restore has left: the processes in its cgroup, CRIU's lock on its network, and the
/// runtime's record.
pub(super) fn clean(runtime: &Path, call: &Call<'_>, id: &str, begun: &State) -> io::Result<()> {
    let State { cgroup, network, .. } = begun;
    orphan::end_restores(&call.root, id)?;
    if let Some(cgroup) = cgroup {
        empty(cgroup)?;
    }
    let unlocked = network.as_ref().map_or(Ok(()), |net| wait_for(network::unlock_given(net)));
    // A killed runc leaves a mount there, over which it cannot delete its own record.
    let record = call.root.join(id);
    orphan::unmount(&record.join(CRIU_ROOT));
    let mut delete = Command::new(runtime);
    delete.args(call.globals).args(["delete", "--force", id]);
    delete.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // What is not there cannot be deleted, which is fine; so is what is removed now.
    bounded(&mut delete, DELETE_LIMIT)?;
    orphan::remove_with_mount(&record, CRIU_ROOT)?;
    cgroup.as_deref().map_or(Ok(()), cgroup::remove)?;
    // Whatever else there is to do is done by now.
    unlocked
}

/// Whether nothing is in a cgroup; of one that cannot be looked into that is not known.
pub(super) fn is_empty(cgroup: Option<&str>) -> bool {
    let processes = |path: &str| Freezer::at(path).and_then(|freezer| freezer.processes());
    cgroup.is_some_and(|path| processes(path).is_ok_and(|found| found.is_empty()))
}

/// Kills whatever is in a cgroup until nothing is.
fn empty(cgroup: &str) -> io::Result<()> {
    let freezer = Freezer::at(cgroup)?;
    let began = Instant::now();
    loop {
        let processes = freezer.processes()?;
        if processes.is_empty() {
            return Ok(());
        }
        if began.elapsed() > END_LIMIT {
            let text = format!("processes {processes:?} of a begun restore do not end");
            return Err(io::Error::other(text));
        }
        for pid in processes {
            process::kill(pid)?;
        }
        // CRIU may have died with its freezer shut, in which nothing dies in version 1. Not before: what
        // is frozen would go on with a restore of which all else is gone.
        freezer.thaw()?;
        #[expect(
            clippy::disallowed_methods,
            reason = "the one place here that polls, with a bound"
        )]
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a program in a process group of its own, which is killed when that does not end. What outlives
/// us is ended by the mark.
fn bounded(command: &mut Command, limit: Duration) -> io::Result<End> {
    let mut child = command.process_group(0).spawn()?;
    let id = child.id();
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("a process without an id"))?;
    let descriptor = pidfd_open(pid, PidfdFlags::empty())?;
    let end = Instant::now() + limit;
    // What CRIU has made by then waits for it for ever, and the runtime for them.
    let mut dead_since = None;
    let why = loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left.min(LOOK_EVERY)).map_err(io::Error::other)?;
        let mut watched = [PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN)];
        match poll(&mut watched, Some(&timeout)) {
            Ok(0) if left <= LOOK_EVERY => break End::Late,
            Ok(0) if !process::has_dead_criu(Path::new(PROC), id).unwrap_or_default() => {
                dead_since = None;
            }
            Ok(0) => {
                if dead_since.get_or_insert_with(Instant::now).elapsed() > CRIU_GRACE {
                    break End::Abandoned;
                }
            }
            Ok(_) => return Ok(if child.wait()?.success() { End::Well } else { End::Badly }),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    };
    // It cannot have ended unseen: its id is its own until it is waited for.
    kill_process_group(pid, Signal::KILL)?;
    child.wait()?;
    Ok(why)
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Well,
    Badly,
    /// It was killed, since it took too long.
    Late,
    /// It was killed, since its CRIU had been, and it did not notice.
    Abandoned,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn create() -> Create {
        Create {
            id: "c".to_owned(),
            bundle: "/b".into(),
            console_socket: None,
            pid_file: Some("/b/pid".into()),
            no_pivot: true,
        }
    }

    fn dump() -> Dump {
        Dump {
            images: "/d/images".into(),
            work: "/d/work".into(),
            criu_config: String::new(),
            limit: Duration::from_secs(1),
            note: "/d/note".into(),
            root_mode: None,
        }
    }

    #[test]
    fn runc_gets_the_options_it_has() {
        let line = words(&create(), &dump()).join(OsStr::new(" ")).into_string().unwrap();
        let rest = "--image-path /d/images --work-path /d/work --bundle /b --pid-file /b/pid c";
        assert_eq!(line, format!("restore --detach --no-subreaper --no-pivot {rest}"));
    }

    #[test]
    fn runc_is_known_by_what_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let place = |name: &str| directory.path().join(name);
        for (name, known) in [("runc", true), ("crun", false)] {
            fs::create_dir(place(name)).unwrap();
            let real = place(name).join(name);
            fs::write(&real, "").unwrap();
            // Neither can be asked. The other's name makes no difference.
            let called = place(if known { "called-crun" } else { "called-runc" });
            std::os::unix::fs::symlink(&real, &called).unwrap();
            assert_eq!(is_runc(&called).unwrap(), known, "{name}");
        }
        assert!(is_runc(&place("nowhere")).is_err());
        // This program has no version.
        assert!(!is_runc(Path::new("/bin/true")).unwrap());
        assert!(names_runc("runc version 1.3.0\ncommit: x\n"));
        assert!(names_runc("A runtime version 1.14\n\nrunc version 1.1.7\n"));
        assert!(!names_runc("youki version 0.5\n") && !names_runc("crun version 1.21\n"));
    }

    #[test]
    fn what_takes_too_long_is_ended_with_its_children() {
        // The pipe is open for as long as one of them lives.
        let (reader, writer) = io::pipe().unwrap();
        let mut late = Command::new("sh");
        late.args(["-c", "sleep 1000 & wait"]).stdout(writer);
        assert_eq!(bounded(&mut late, Duration::from_millis(500)).unwrap(), End::Late);
        drop(late);
        let timeout = Timespec::try_from(END_LIMIT).unwrap();
        let mut watched = [PollFd::new(&reader, PollFlags::IN)];
        assert_eq!(poll(&mut watched, Some(&timeout)).unwrap(), 1, "the child lives");
        assert_eq!(bounded(&mut Command::new("true"), END_LIMIT).unwrap(), End::Well);
        assert_eq!(bounded(&mut Command::new("false"), END_LIMIT).unwrap(), End::Badly);
    }
}
