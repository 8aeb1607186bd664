//! What no agent can beat: `runc checkpoint` into memory, a plain copy of what the container has
//! written, and `runc restore` into a root file system that is ready.

use std::time::{Duration, Instant};

use crate::command::CommandError;
use crate::node::Node;

/// What runc works with. The memory is of the kind that the agent dumps into.
const PREPARE: &str = r#"
set -e
mountpoint -q /run/floor || {
    mkdir -p /run/floor
    mount -t tmpfs -o mode=700,huge=within_size,size=8g floor /run/floor
}
mkdir -p "$home/bundle/rootfs" "$home/criu" "$home/overlay" "$home/upper"
cp "/run/containerd/io.containerd.runtime.v2.task/default/$id/config.json" "$home/bundle"
pid=$(ctr task ls | awk -v id="$id" '$1 == id { print $2 }')
awk '$5 == "/" { print $NF }' "/proc/$pid/mountinfo" | tr , '\n' >"$home/options"
"#;

/// Paused all the while: what is copied has to be of the instant of the dump.
const TAKE: &str = r#"
set -e
alias runc='runc --root /run/containerd/runc/default'
runc pause "$id"
runc checkpoint --leave-running --image-path "$home/images" --work-path "$home/criu" "$id"
cp -a "$(sed -n 's/^upperdir=//p' "$home/options")/." "$home/upper"
runc resume "$id"
"#;

/// The container's root file system, with what was copied as what it has written.
const MOUNT: &str = r#"
lower=$(sed -n 's/^lowerdir=//p' "$home/options")
exec mount -t overlay -o "lowerdir=$lower,upperdir=$home/upper,workdir=$home/overlay" \
    floor "$home/bundle/rootfs"
"#;

/// What is restored keeps the output, so that it is a file.
const RESTORE: &str = r#"
runc --root /run/floor/runc restore --detach --bundle "$home/bundle" \
    --image-path "$home/images" --work-path "$home/criu" "$id" </dev/null >"$home/out" 2>&1 || {
    tail -n 20 "$home/criu/restore.log" "$home/out" >&2
    exit 1
}
"#;

/// What a second restore would need, since the first one writes there.
const COPY: &str = r#"
exec cp -a "$home/upper" "$home/copy"
"#;

const STATUS: &str = r#"
exec runc --root /run/floor/runc exec "$id" /workload status --state /state
"#;

const END: &str = r#"
set -e
runc --root /run/floor/runc delete --force "$id"
umount "$home/bundle/rootfs"
rm -r "$home"
"#;

/// One container that runc alone dumps and restores.
#[derive(Debug)]
pub(super) struct Floor<'a> {
    node: &'a Node,
    id: &'a str,
}

impl<'a> Floor<'a> {
    /// Remembers what a running container of containerd's is made of.
    pub(super) fn new(node: &'a Node, id: &'a str) -> Result<Self, CommandError> {
        let floor = Self { node, id };
        floor.run(PREPARE)?;
        Ok(floor)
    }

    /// Dumps it and copies what it has written; it runs on.
    pub(super) fn take(&self) -> Result<(), CommandError> {
        self.run(TAKE).map(drop)
    }

    /// Makes the root file system of what comes back.
    pub(super) fn mount(&self) -> Result<(), CommandError> {
        self.run(MOUNT).map(drop)
    }

    /// Brings it back; it must be gone, and its root file system be there.
    pub(super) fn restore(&self) -> Result<Duration, CommandError> {
        let began = Instant::now();
        self.run(RESTORE)?;
        Ok(began.elapsed())
    }

    /// Copies what it had written, as for a restore into a root file system that is not ready.
    pub(super) fn copy(&self) -> Result<Duration, CommandError> {
        let began = Instant::now();
        self.run(COPY)?;
        Ok(began.elapsed())
    }

    /// Returns what it says of itself.
    pub(super) fn status(&self) -> Result<String, CommandError> {
        self.run(STATUS)
    }

    /// Ends it and removes everything.
    pub(super) fn end(self) -> Result<(), CommandError> {
        self.run(END).map(drop)
    }

    fn run(&self, script: &str) -> Result<String, CommandError> {
        let id = format!("id={}", self.id);
        let home = format!("home=/run/floor/{}", self.id);
        self.node.run(&["env", &id, &home, "sh", "-c", script])
    }
}
