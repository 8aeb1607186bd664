//! The mounts of the dumped container. CRIU makes them anew in a mount namespace of its own, in which the
//! node's files are, too, before it moves them to where they belong (`criu/mount-v2.c`, of CRIU 4.1 and
//! 4.2). What it does there follows from the images alone:
//!
//! - All mounts with one number of a device are of one file system. The first is mounted, from outside
//!   where it comes from there, and each whose root is below the root of another is bound from that one,
//!   by a path: through any symbolic link that a dump's own files have on the way, and through `..`.
//! - Flags of the mount are its own; those of the file system count for one that is mounted anew only.
//!   One from outside gets none where they are the same as those of the one that it is bound from, and
//!   is then as writable as what it comes from.

use std::collections::BTreeSet;

use kybernate_packager::criu::messages::MountEntry;
use serde::{Deserialize, Serialize};

use super::common::{Inside, is_plain};
use super::judge::Expected;

/// Options of a mount that tell `SELinux` a label.
const LABELS: &[&str] = &["context", "fscontext", "defcontext", "rootcontext"];

/// `MS_RDONLY`.
const READ_ONLY: u32 = 1;

/// `MS_UNBINDABLE`, `MS_PRIVATE`, `MS_SLAVE`, `MS_SHARED`: CRIU sets them later.
const PROPAGATION: u32 = 0xf << 17;

/// What hides a file.
const NULL: &str = "/dev/null";

/// A mount of the dumped container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MountFact {
    pub(crate) id: u32,
    pub(crate) parent: u32,
    /// Which file system it is one of.
    pub(crate) device: u32,
    /// CRIU's number of the file system type.
    pub(crate) kind: i32,
    pub(crate) root: String,
    pub(crate) path: String,
    /// What CRIU gives the mount itself.
    pub(crate) flags: u32,
    pub(crate) read_only: bool,
    /// By which name it comes from outside; empty when it does not.
    pub(crate) external: Option<String>,
    pub(crate) with_plugin: bool,
    /// Whether CRIU makes what is mounted, and removes it.
    pub(crate) deleted: bool,
    /// The labels that `SELinux` is told to give to what is in it.
    pub(crate) labels: BTreeSet<String>,
}

impl MountFact {
    pub(super) fn of(mount: MountEntry) -> Self {
        let is_external = mount.external == Some(true) || mount.external_key.is_some();
        let path = mount.path.strip_prefix('.').unwrap_or(&mount.path);
        // Images that do not tell the two apart are from before 2017, and CRIU takes it for one of the
        // file system's then.
        let own = if mount.super_flags.is_some() { mount.flags } else { mount.flags & !READ_ONLY };
        Self {
            id: mount.id,
            parent: mount.parent,
            device: mount.device,
            kind: mount.kind,
            path: path.to_owned(),
            root: mount.root,
            flags: own & !PROPAGATION,
            read_only: own & READ_ONLY != 0,
            external: is_external.then(|| mount.external_key.unwrap_or_default()),
            with_plugin: mount.with_plugin == Some(true),
            deleted: mount.deleted == Some(true),
            labels: labels(&mount.options),
        }
    }

    fn inside(&self) -> Inside<'_> {
        let Self { kind, root, path, read_only, .. } = self;
        Inside { kind: *kind, root, path, read_only: *read_only }
    }

    /// Whether it is the container's root, or comes from outside.
    fn is_given(&self) -> bool {
        self.path == "/" || self.external.is_some()
    }

    /// Whether CRIU may bind it from another one.
    fn is_bound_from(&self, other: &Self) -> bool {
        // A root that is not written as paths are may be above anything.
        let is_within = || {
            let root = other.root.trim_end_matches('/');
            let rest = self.root.strip_prefix(root);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let is_known = other.root == "/" || is_plain(&other.root);
        self.id != other.id && self.device == other.device && (!is_known || is_within())
    }

    /// Whether it is one of those at `place`, which the new container may know by another path: CRIU
    /// names where a link leads, the runtime where it is told to mount.
    fn is_at(&self, place: &str) -> bool {
        self.path == place || self.external.as_deref() == Some(place)
    }

    /// Whether it hides what it is mounted on.
    fn hides(&self) -> bool {
        match &self.external {
            Some(key) => key == NULL,
            None => self.inside().is_memory(),
        }
    }

    /// Whether a file with this path may be on it, for all that its path tells.
    pub(super) fn has(&self, path: &str) -> bool {
        let top = self.path.trim_end_matches('/');
        path.strip_prefix(top).is_some_and(|rest| rest.len() > 1 && rest.starts_with('/'))
    }

    /// Whether its files are none of the kernel's own.
    pub(super) fn holds_files(&self) -> bool {
        self.is_given() || self.inside().is_memory()
    }
}

/// Returns the labels in the options of a mount: `context="a:b:c:s0:c1,c2"`, in which a comma ends
/// nothing while it is quoted.
fn labels(options: &str) -> BTreeSet<String> {
    let mut quoted = false;
    let words = options.split(|letter| {
        quoted ^= letter == '"';
        letter == ',' && !quoted
    });
    let label = |word: &str| {
        let (name, label) = word.split_once('=')?;
        LABELS.contains(&name).then(|| label.trim_matches('"').to_owned())
    };
    words.filter_map(label).collect()
}

/// Looks at mounts by themselves.
pub(super) fn judge_mounts(mounts: &[MountFact], reasons: &mut BTreeSet<String>) {
    let (mut places, mut numbers) = (BTreeSet::new(), BTreeSet::new());
    for mount in mounts {
        let path = &mount.path;
        if path != "/" && !is_plain(path) {
            reasons.insert(format!("{path:?} is no place for a mount"));
        }
        if !numbers.insert(mount.id) {
            reasons.insert(format!("two mounts have the number {}", mount.id));
        }
        if !places.insert(&**path) {
            reasons.insert(format!("two mounts are stacked on {path:?}, and one hides the other"));
        }
        if !stands_on_its_parent(mount, mounts) {
            reasons.insert(format!("the mount on {path:?} is hidden"));
        }
        if let Some(reason) = wrong_alone(mount, mounts) {
            reasons.insert(reason);
        }
    }
    if !places.contains("/") {
        reasons.insert("it has no root file system".to_owned());
    }
}

/// Returns why no container has a mount.
fn wrong_alone(mount: &MountFact, mounts: &[MountFact]) -> Option<String> {
    let MountFact { path, kind, root, .. } = mount;
    if mount.with_plugin {
        return Some(format!("the mount on {path:?} needs a plugin"));
    }
    // The new container's own root file system comes to "/", whatever the old one was.
    if mount.is_given() {
        return None;
    }
    if !mount.inside().fits() {
        return Some(format!(
            "the mount on {path:?} (kind {kind}) is none that new containers have, of {root:?}"
        ));
    }
    if mount.deleted {
        return Some(format!("what is mounted on {path:?} was deleted"));
    }
    let mut above = mounts.iter().filter(|other| other.is_given() && mount.is_bound_from(other));
    let above = above.next().filter(|_| !mount.read_only)?;
    Some(format!("the mount on {path:?} is a part of that on {:?}", above.path))
}

/// Holds mounts against those that the new container has.
pub(super) fn judge_given(
    mounts: &[MountFact],
    expected: &Expected,
    reasons: &mut BTreeSet<String>,
) {
    for mount in mounts.iter().filter(|mount| mount.path != "/") {
        let place = &*mount.path;
        if let Some(key) = &mount.external {
            if !is_given(mount, key, expected) {
                reasons.insert(format!(
                    "it wants something from the node on {place:?} \
                     (allow.mounts, --allow-mount SOURCE:{place})"
                ));
            }
        } else if mount.inside().is_privileged() && !expected.writable.contains(place) {
            reasons.insert(writable(place));
        }
    }
    for path in &expected.masked {
        if !mounts.iter().any(|mount| mount.path == *path && mount.hides()) {
            reasons.insert(format!("nothing hides {path:?}, which is hidden in new containers"));
        }
    }
    for path in &expected.read_only {
        let mut at = mounts.iter().filter(|mount| mount.is_at(path)).peekable();
        if at.peek().is_none() || at.any(|mount| !stays_read_only(mount, mounts)) {
            reasons.insert(writable(path));
        }
    }
}

/// Whether CRIU makes a mount read-only that says so.
fn stays_read_only(mount: &MountFact, mounts: &[MountFact]) -> bool {
    let is_left_out = |other: &MountFact| {
        other.is_given() && other.flags == mount.flags && mount.is_bound_from(other)
    };
    mount.read_only && (mount.external.is_none() || !mounts.iter().any(is_left_out))
}

fn writable(path: &str) -> String {
    format!("{path:?} is writable, which it is not in new containers")
}

/// Whether a mount is where its path says: on the mount that has the longest part of its path.
fn stands_on_its_parent(mount: &MountFact, mounts: &[MountFact]) -> bool {
    if mount.path == "/" {
        return true;
    }
    let above = mounts.iter().filter(|other| other.id != mount.id && other.has(&mount.path));
    above.max_by_key(|other| other.path.len()).is_some_and(|parent| parent.id == mount.parent)
}

/// Whether the new container has what comes from outside, by the name that CRIU knows it by.
fn is_given(mount: &MountFact, key: &str, expected: &Expected) -> bool {
    let place = &*mount.path;
    let hides = key == NULL && !place.starts_with("/dev/");
    hides
        || expected.external_mounts.contains(key)
        || (key.is_empty() && expected.external_mounts.contains(place))
        || (mount.read_only && key == place && expected.cgroups.contains(place))
}
