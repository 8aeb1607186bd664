//! The mounts of the dumped container. CRIU makes them anew in a mount namespace of its own, in which the
//! node's files are, too, before it moves them to where they belong (`criu/mount-v2.c`, of CRIU 4.1 and
//! 4.2). What it does there follows from the images alone:
//!
//! - All mounts with one number of a device are of one file system. The first is mounted, from outside
//!   where it comes from there, and each whose root is below the root of another is bound from that one,
//!   by a path: through any symbolic link that a dump's own files have on the way, and through `..`.
//! - Flags of the mount are its own; those of the file system count for one that is mounted anew only,
//!   and are handed to mount(2) as they are: one of them binds whatever the image calls its source.
//!   One from outside gets none where they are the same as those of the one that it is bound from, and
//!   is then as writable as what it comes from; and so is what is bound from that.
//! - One that was a slave of a group that the dump does not have becomes a slave of this node's, and gets
//!   whatever is mounted there later: of the group of what it comes from, or of any from outside that it
//!   shares its file system with. Without `MOVE_MOUNT_SET_GROUP` (Linux before 5.15) it may also be one
//!   that shares its own mounts with the node, and mounts with a group in common are bound from each
//!   other whatever file system they are of (`criu/mount.c`).
//! - What comes from outside has the names that runc has for it: paths in the root file system, in which a
//!   link of the checkpoint's may lead them anywhere. CRIU is handed over nothing but what the
//!   specification has, takes the last where two have one name, and fails for others.

use std::collections::BTreeSet;

use kybernate_packager::criu::messages::MountEntry;
use serde::{Deserialize, Serialize};

use super::common::{Inside, is_plain};
use super::judge::{Expected, Names};

/// Options of a mount that tell `SELinux` a label.
const LABELS: &[&str] = &["context", "fscontext", "defcontext", "rootcontext"];

/// `MS_RDONLY`.
const READ_ONLY: u32 = 1;

/// What CRIU writes of a mount, as the kernel tells it (`criu/proc_parse.c`): `MS_RDONLY`, `MS_NOSUID`,
/// `MS_NODEV`, `MS_NOEXEC`, `MS_NOATIME`, `MS_NODIRATIME`, `MS_RELATIME`, `MS_STRICTATIME`.
const OWN_FLAGS: u32 = READ_ONLY | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 10 | 1 << 11 | 1 << 21 | 1 << 24;

/// The same of a file system: `MS_RDONLY`, `MS_SYNCHRONOUS`, `MS_MANDLOCK`, `MS_DIRSYNC`.
const SUPER_FLAGS: u32 = READ_ONLY | 1 << 4 | 1 << 6 | 1 << 7;

/// Of a cgroup of version 1: a program that the kernel runs as root, outside of any container.
const RELEASE_AGENT: &str = "release_agent";

/// First CRIU that gives a root file system its flags.
const LOCKED_ROOT_CRIU: [u64; 2] = [4, 2];

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
    /// Its groups, as `shared` and `master` of mountinfo tell them.
    pub(crate) shared: u32,
    pub(crate) master: u32,
    /// By which name it comes from outside, if it does.
    pub(crate) external: Option<String>,
    /// What no mount of a container is.
    pub(crate) faults: BTreeSet<Fault>,
    /// The labels that `SELinux` is told to give to what is in it.
    pub(crate) labels: BTreeSet<String>,
}

/// What is wrong with a mount by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Fault {
    /// A plugin would make it.
    Plugin,
    /// mount(2) would be told more than CRIU writes.
    Flags,
    /// CRIU would make what is mounted, and remove it.
    Deleted,
    /// The kernel would be told what to run.
    Program,
}

impl Fault {
    fn of(mount: &MountEntry, own: u32) -> BTreeSet<Self> {
        let of_super = mount.super_flags.unwrap_or_default();
        let is_known = own & !PROPAGATION & !OWN_FLAGS == 0 && of_super & !SUPER_FLAGS == 0;
        let all = [
            (Self::Plugin, mount.with_plugin == Some(true)),
            (Self::Flags, !is_known),
            (Self::Deleted, mount.deleted == Some(true)),
            (Self::Program, mount.options.contains(RELEASE_AGENT)),
        ];
        all.into_iter().filter(|(_, is_so)| *is_so).map(|(fault, _)| fault).collect()
    }

    /// Whether the root of a container may be so, and what comes from outside.
    const fn is_lent(self) -> bool {
        matches!(self, Self::Deleted | Self::Program)
    }

    fn told(self, path: &str) -> String {
        match self {
            Self::Plugin => format!("the mount on {path:?} needs a plugin"),
            Self::Flags => format!("the mount on {path:?} has flags that no mount has"),
            Self::Deleted => format!("what is mounted on {path:?} was deleted"),
            Self::Program => {
                format!("the mount on {path:?} names a program for the kernel to run")
            }
        }
    }
}

impl MountFact {
    pub(super) fn of(mount: MountEntry) -> Self {
        // Images that do not tell the two apart are from before 2017, and CRIU takes it for one of the
        // file system's then.
        let own = if mount.super_flags.is_some() { mount.flags } else { mount.flags & !READ_ONLY };
        let faults = Fault::of(&mount, own);
        // Without a name of its own, one from outside is known by its root, and of that nothing is known.
        let by_root = mount.external == Some(true) && mount.external_key.is_none();
        let (external, root) = if by_root {
            (Some(mount.root), String::new())
        } else {
            (mount.external_key, mount.root)
        };
        let path = mount.path.strip_prefix('.').unwrap_or(&mount.path);
        Self {
            id: mount.id,
            parent: mount.parent,
            device: mount.device,
            kind: mount.kind,
            path: path.to_owned(),
            root,
            flags: own & !PROPAGATION,
            read_only: own & READ_ONLY != 0,
            shared: mount.shared.unwrap_or_default(),
            master: mount.master.unwrap_or_default(),
            external,
            faults,
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

    /// Whether it hides a file, as a runtime does.
    pub(super) fn is_masked(&self) -> bool {
        self.external.as_deref() == Some(NULL) && is_plain(&self.path)
    }

    /// Whether CRIU may bind it from another one.
    fn is_bound_from(&self, other: &Self) -> bool {
        // A root that is not written as paths are may be above anything, and below it.
        let is_within = || {
            let root = other.root.trim_end_matches('/');
            let rest = self.root.strip_prefix(root);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let is_known = self.knows_its_root() && other.knows_its_root();
        self.id != other.id && self.device == other.device && (!is_known || is_within())
    }

    fn knows_its_root(&self) -> bool {
        self.root == "/" || is_plain(&self.root)
    }

    /// Whether it is all that another one shows, so that CRIU follows no path to it.
    fn is_the_same_as(&self, other: &Self) -> bool {
        self.knows_its_root() && self.root == other.root
    }

    /// Whether it is one of those at `place`, which the new container may know by another path: CRIU
    /// names where a link leads, the runtime where it is told to mount.
    fn is_at(&self, place: &str) -> bool {
        self.path == place || self.external.as_deref() == Some(place)
    }

    /// Whether it gets what is mounted on the node, at once or by way of others.
    fn follows(&self, mounts: &[Self]) -> bool {
        let mut masters = BTreeSet::from([self.master]);
        // More steps than there are mounts lead round in a circle, and who knows what CRIU makes of that.
        for _ in mounts {
            masters.remove(&0);
            let of = |group: u32| mounts.iter().filter(move |other| other.shared == group);
            if masters.iter().any(|group| of(*group).next().is_none()) {
                return true;
            }
            let leaders = masters.iter().flat_map(|group| of(*group));
            masters = leaders.map(|leader| leader.master).collect();
        }
        masters.iter().any(|group| *group != 0)
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

    /// Makes sure that CRIU may make this file on it. It makes what is for reading only writable, and
    /// what fails in the middle leaves a file there.
    pub(super) fn takes(&self, name: &str) -> Result<(), String> {
        if self.external.is_none() || !self.read_only {
            return Ok(());
        }
        let place = &self.path;
        Err(format!(
            "{name:?} would be made on {place:?}, which comes from outside for reading only"
        ))
    }

    /// Whether its files are in memory, and the dump's own.
    pub(super) fn is_filled(&self) -> bool {
        !self.is_given() && self.inside().is_memory()
    }

    /// Returns at which path it shows a file of its file system.
    pub(super) fn shows(&self, file: &str) -> Option<String> {
        let rest = file.strip_prefix(self.root.trim_end_matches('/'))?;
        let is_below = rest.len() > 1 && rest.starts_with('/');
        is_below.then(|| format!("{}{rest}", self.path.trim_end_matches('/')))
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
    let mut faults = mount.faults.iter().filter(|fault| !mount.is_given() || !fault.is_lent());
    if let Some(fault) = faults.next() {
        return Some(fault.told(path));
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
    let is_part = |other: &&MountFact| {
        let shares = mount.read_only && mount.is_the_same_as(other);
        other.is_given() && mount.is_bound_from(other) && !shares
    };
    let above = mounts.iter().find(is_part)?;
    Some(format!("the mount on {path:?} is a part of that on {:?}", above.path))
}

/// Holds mounts against those that the new container has.
pub(super) fn judge_given(
    mounts: &[MountFact],
    expected: &Expected,
    reasons: &mut BTreeSet<String>,
) {
    let below = || mounts.iter().filter(|mount| mount.path != "/");
    for mount in below().filter(|mount| mount.external.is_none()) {
        let place = &*mount.path;
        if mount.inside().is_privileged() && !expected.writable.contains(place) {
            reasons.insert(writable(place));
        }
    }
    let is_strange = |mount: &&MountFact| {
        let key = mount.external.as_deref();
        key.is_some_and(|key| !is_given(mount, key, mounts, expected))
    };
    let strange: Vec<_> = below().filter(is_strange).collect();
    // Before the names are known, as many may be there as none is by the place that was told.
    let is_free = |name: &&String| !below().any(|mount| mount.external.as_ref() == Some(*name));
    let free = || expected.external_mounts.iter().chain(&expected.cgroups).filter(is_free).count();
    if expected.names == Names::Known || strange.len() > free() {
        reasons.extend(strange.iter().map(|mount| {
            let place = &mount.path;
            format!(
                "it wants something from the node on {place:?} \
                 (allow.mounts, --allow-mount SOURCE:{place})"
            )
        }));
    }
    judge_groups(mounts, expected, reasons);
    for path in &expected.masked {
        if !mounts.iter().any(|mount| mount.path == *path && mount.hides()) {
            reasons.insert(format!("nothing hides {path:?}, which is hidden in new containers"));
        }
    }
    for path in &expected.read_only {
        let mut at = mounts.iter().filter(|mount| mount.is_at(path)).peekable();
        let is_it = |mount: &MountFact| mount.external.as_deref() == Some(path);
        // Something else may have the place of what comes from outside.
        if expected.external_mounts.contains(path) && !mounts.iter().any(is_it) {
            reasons.insert(format!(
                "{path:?} is read-only in new containers, and no mount of the dump's with that name is"
            ));
        } else if at.peek().is_none() || at.any(|mount| !stays_read_only(mount, mounts)) {
            reasons.insert(writable(path));
        }
    }
    let root = mounts.iter().find(|mount| mount.path == "/");
    let is_locked = root.is_some_and(|root| root.read_only) || expected.read_only.contains("/");
    if is_locked && expected.criu.as_slice() < LOCKED_ROOT_CRIU.as_slice() {
        reasons.insert(
            "its root file system is read-only, which CRIU before 4.2 does not give back"
                .to_owned(),
        );
    }
}

/// Makes sure that no mount gets what is mounted on the node where the new container's does not.
fn judge_groups(mounts: &[MountFact], expected: &Expected, reasons: &mut BTreeSet<String>) {
    for mount in mounts.iter().filter(|mount| mount.follows(mounts)) {
        if !may_follow(mount, mounts, expected) {
            let place = &mount.path;
            reasons.insert(format!(
                "{place:?} would follow this node's mounts, which it does not in new containers"
            ));
        }
    }
    let is_in_a_group =
        |mount: &&MountFact| mount.shared != 0 || (mount.master != 0 && mount.path != "/");
    if expected.has_old_mounts
        && let Some(mount) = mounts.iter().find(is_in_a_group)
    {
        let place = &mount.path;
        reasons.insert(format!(
            "{place:?} shares its mounts, which CRIU gives back safely from Linux 5.15 on and \
             without mntns-compat-mode"
        ));
    }
}

/// Whether the new container's mount gets what is mounted on the node, too.
fn may_follow(mount: &MountFact, mounts: &[MountFact], expected: &Expected) -> bool {
    let is_private = |path: &str| expected.private.contains(path);
    let may_lead = |given: &MountFact| {
        !is_private(given.external.as_deref().unwrap_or("/")) && !is_private(&given.path)
    };
    if mount.is_given() {
        return may_lead(mount);
    }
    // CRIU takes the source of the group from any of these.
    let sources = || mounts.iter().filter(|other| other.is_given() && mount.is_bound_from(other));
    !is_private(&mount.path)
        && sources().any(|other| other.master == mount.master)
        && sources().all(may_lead)
}

/// Whether CRIU makes a mount read-only that says so.
fn stays_read_only(mount: &MountFact, mounts: &[MountFact]) -> bool {
    // What is bound from a mount of the new namespace is as that is; what comes from outside is as it
    // is there.
    let is_left_out = |other: &MountFact| {
        let is_writable = || mount.external.is_some() || !stays_read_only(other, mounts);
        let is_bound = other.is_given() && mount.is_bound_from(other);
        is_bound && other.flags == mount.flags && is_writable()
    };
    // CRIU mounts the root file system by itself.
    mount.read_only && (mount.path == "/" || !mounts.iter().any(is_left_out))
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
fn is_given(mount: &MountFact, key: &str, mounts: &[MountFact], expected: &Expected) -> bool {
    let place = &*mount.path;
    let hides = key == NULL && !place.starts_with("/dev/");
    let is_cgroup = || key == place && expected.cgroups.contains(place);
    hides
        || expected.external_mounts.contains(key)
        || (is_cgroup() && stays_read_only(mount, mounts))
}
