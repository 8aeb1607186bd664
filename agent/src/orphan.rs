//! What a containerd that was killed leaves of a task it does not know any more: a shim that waits
//! for nobody, the shim's directory with a mounted root, runc's own record. Each of them would
//! make the next task of that name fail, and nobody else removes it.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use fs_err as fs;
use rustix::mount::UnmountFlags;
use tokio::process::Command;

use crate::patience::Patience;
use crate::process::{self, PROC, Program, RUNC, has_word};
use crate::runtime::Namespace;
use crate::stage;

/// How long a killed shim may take to end.
const END_LIMIT: Duration = Duration::from_secs(5);

/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Bound of one call of runc, which takes milliseconds.
const CALL_LIMIT: Duration = Duration::from_secs(10);

/// The directory below containerd's state in which shims have theirs, one for each task.
const BUNDLES: &str = "io.containerd.runtime.v2.task";

/// A task's root file system, in its directory.
const ROOT: &str = "rootfs";

/// Where containerd's shim tells runc to keep its records (`RunRoot` in the shim's sources).
const RUNC_ROOT: &str = "/run/containerd/runc";

/// runc's record itself, in a directory of the container's name.
const STATE: &str = "state.json";

/// Where runc mounts the root once more for CRIU, beside its record. It is left when runc is
/// killed, and then runc cannot delete its own record.
pub(crate) const CRIU_ROOT: &str = "criu-root";

/// Our wrapper around it.
const WRAPPER: &str = "kybernate-runc";

/// The shim's program, as far as the kernel remembers its name.
const SHIM: &str = "containerd-shim";

/// Removes what is left of a task that containerd does not know. Only for tasks that are ours:
/// their names are taken by nobody else.
pub(crate) async fn remove(namespace: &Namespace, id: &str) -> io::Result<()> {
    end_shims(namespace, id).await?;
    let root = Path::new(RUNC_ROOT).join(namespace.name());
    let record = root.join(id);
    let place = record.clone();
    let is_left = tokio::task::spawn_blocking(move || {
        let is_left = fs::symlink_metadata(place.join(STATE)).is_ok();
        if is_left {
            unmount(&place.join(CRIU_ROOT));
        }
        is_left
    });
    if is_left.await.map_err(io::Error::other)? {
        tracing::warn!(container = id, "deleting runc's record of a task that is gone");
        delete_record(&root, id).await?;
    }
    let bundle = bundle(namespace, id);
    let removed = tokio::task::spawn_blocking(move || {
        remove_with_mount(&record, CRIU_ROOT)?;
        remove_with_mount(&bundle, ROOT)
    });
    removed.await.map_err(io::Error::other)?
}

/// Returns where containerd has the root file system of a task mounted.
pub(crate) fn root(namespace: &Namespace, id: &str) -> PathBuf {
    bundle(namespace, id).join(ROOT)
}

fn bundle(namespace: &Namespace, id: &str) -> PathBuf {
    namespace.state().join(BUNDLES).join(namespace.name()).join(id)
}

/// Ends the shims of a task, which nobody can reach.
pub(crate) async fn end_shims(namespace: &Namespace, id: &str) -> io::Result<()> {
    let mut looks = Patience::new(END_LIMIT, LOOK_EVERY);
    while looks.once_more().await {
        let (name, id) = (namespace.name().to_owned(), id.to_owned());
        let found = tokio::task::spawn_blocking(move || shims(&name, &id)).await;
        let found = found.map_err(io::Error::other)??;
        if found.is_empty() {
            return Ok(());
        }
        for pid in found {
            tracing::warn!(pid, "ending a shim or runc that containerd has lost");
            process::kill(pid)?;
        }
    }
    Err(io::Error::other("a killed shim does not end"))
}

/// Returns the shims that were started for one task, and the runcs that they have started: one
/// that still ends a restore writes its record again.
fn shims(namespace: &str, id: &str) -> io::Result<Vec<u32>> {
    let ours = |program: &Program| {
        program.is(SHIM) && is_for(&program.line(), namespace, id)
            || program.is(RUNC) && works_on(&program.line(), namespace, id)
    };
    let found = process::programs(Path::new(PROC))?;
    Ok(found.iter().filter(|program| ours(program)).map(|program| program.pid).collect())
}

/// Whether a kybernate-runc is creating a container, or the runc restores it that one has begun with:
/// that goes on when it is killed.
pub(crate) fn is_created(namespace: &str, id: &str) -> io::Result<bool> {
    is_created_in(Path::new(PROC), namespace, id)
}

fn is_created_in(proc: &Path, namespace: &str, id: &str) -> io::Result<bool> {
    let creates = |program: &Program| {
        let command: &[u8] = match program {
            program if program.is(WRAPPER) => b"create",
            program if program.is(RUNC) => b"restore",
            _ => return false,
        };
        let line = program.line();
        has_word(&line, command) && works_on(&line, namespace, id)
    };
    Ok(process::programs(proc)?.iter().any(creates))
}

/// Ends the runc that restores a container for kybernate-runc, if one does.
pub(crate) async fn end_restore(namespace: &str, id: &str) {
    let (root, id) = (Path::new(RUNC_ROOT).join(namespace), id.to_owned());
    let ended = tokio::task::spawn_blocking(move || end_restores(&root, &id)).await;
    if let Err(error) = ended.map_err(io::Error::other).and_then(|ended| ended) {
        tracing::warn!(%error, "failed to end a restore");
    }
}

/// Ends every runc that restores a container: one that outlives whoever began that would have CRIU begin
/// yet, and what it is to be told may be gone. `root` is where that runc keeps its records.
pub(crate) fn end_restores(root: &Path, id: &str) -> io::Result<()> {
    let restores = |program: &Program| {
        let line = program.line();
        has_word(&line, b"restore") && works_on_in(&line, root.as_os_str().as_bytes(), id)
    };
    let found = process::programs(Path::new(PROC))?;
    found.iter().filter(|program| restores(program)).try_for_each(|found| process::kill(found.pid))
}

/// Whether a container that was begun runs, or may come to: runc has a record of it until it is deleted,
/// as containerd does with one whose creation failed.
pub(crate) fn may_run(namespace: &str, id: &str) -> io::Result<bool> {
    let record = Path::new(RUNC_ROOT).join(namespace).join(id).join(STATE);
    Ok(is_created(namespace, id)? || record.try_exists()?)
}

/// Whether a shim's command line, `containerd-shim-runc-v2 -namespace NAME -id ID -address …`,
/// names a task.
fn is_for(line: &[u8], namespace: &str, id: &str) -> bool {
    let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    let says = |option: &str, value: &str| {
        words.windows(2).any(|pair| pair == [option.as_bytes(), value.as_bytes()])
    };
    says("-namespace", namespace) && says("-id", id)
}

/// Whether a command line of runc, `runc --root DIRECTORY … COMMAND … ID`, works on a task.
fn works_on(line: &[u8], namespace: &str, id: &str) -> bool {
    works_on_in(line, format!("{RUNC_ROOT}/{namespace}").as_bytes(), id)
}

fn works_on_in(line: &[u8], root: &[u8], id: &str) -> bool {
    let mut words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.any(|word| word == root) && words.next_back() == Some(id.as_bytes())
}

async fn delete_record(root: &Path, id: &str) -> io::Result<()> {
    let mut command = Command::new("runc");
    command.arg("--root").arg(root).args(["delete", "--force", id]);
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(CALL_LIMIT, command.output()).await??;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("runc delete ended with {}: {}", output.status, said.trim())))
}

/// Removes a directory in which a container's root is mounted, if it is there.
pub(crate) fn remove_with_mount(directory: &Path, root: &str) -> io::Result<()> {
    if fs::symlink_metadata(directory).is_err() {
        return Ok(());
    }
    tracing::warn!(?directory, "removing the directory of a task that is gone");
    unmount(&directory.join(root));
    stage::remove(directory)
}

/// Unmounts all that is mounted at a place: what lies below is not ours to remove.
pub(crate) fn unmount(place: &Path) {
    while rustix::mount::unmount(place, UnmountFlags::DETACH).is_ok() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shim_is_known_by_its_task() {
        let line =
            b"/usr/bin/containerd-shim-runc-v2\0-namespace\0default\0-id\0web\0-address\0x\0";
        assert!(is_for(line, "default", "web"));
        assert!(!is_for(line, "default", "we") && !is_for(line, "k8s.io", "web"));
        assert!(!is_for(b"vi\0-id\0web\0", "default", "web"));

        let line = b"runc\0--root\0/run/containerd/runc/default\0restore\0--detach\0web\0";
        assert!(works_on(line, "default", "web"));
        assert!(!works_on(line, "default", "restore") && !works_on(line, "k8s.io", "web"));
    }

    #[test]
    fn a_restore_goes_on_without_who_began_it() {
        let proc = tempfile::tempdir().unwrap();
        let created = |name: &str, command: &str| {
            let process = proc.path().join("7");
            fs::create_dir_all(&process).unwrap();
            fs::write(process.join("comm"), format!("{name}\n")).unwrap();
            let line = format!("{name}\0--root\0{RUNC_ROOT}/default\0{command}\0web\0");
            fs::write(process.join("cmdline"), line).unwrap();
            is_created_in(proc.path(), "default", "web").unwrap()
        };
        assert!(created("kybernate-runc", "create") && created("runc", "restore"));
        assert!(!created("kybernate-runc", "delete") && !created("runc", "delete"));
        assert!(!created("vi", "restore"));
        is_created_in(&proc.path().join("none"), "default", "web").unwrap_err();
    }
}
