//! Would the restored processes be more than the new container may be? A comparison of what the dump
//! says with what the new container and this node are.

use std::collections::BTreeSet;
use std::path::Path;

use kybernate_spec::checkpoint::NodeFacts;

use super::Summary;
use super::common::FILE_KINDS;
use super::mounts::{judge_given, judge_mounts};
use super::seccomp::Refused;
use super::summary::ThreadIdentity;
use crate::gpu::plugin::CUDA;
use crate::node::numbers;
use crate::preflight::{CriuOptions, DEFAULT_FILE};

/// What the new container may be.
#[derive(Clone, Debug, Default)]
pub(crate) struct Expected {
    /// Its bounding set.
    pub(crate) capabilities: BTreeSet<String>,
    /// Who its processes are for as long as they live, where they can become nobody else: of a user other
    /// than root, without new privileges.
    pub(crate) user: Option<Fixed>,
    /// Whether `no_new_privs` must be set.
    pub(crate) no_new_privileges: bool,
    /// Whether a seccomp filter is required.
    pub(crate) seccomp: bool,
    /// What it must refuse.
    pub(crate) refused: Refused,
    /// Its limits that let its processes go before others of the node, by their names.
    pub(crate) limits: BTreeSet<String>,
    /// The security module of this node: 0 none, 1 `SELinux`, 2 `AppArmor`.
    pub(crate) lsm: i32,
    /// The profile or label that it gives to the container's processes, if any.
    pub(crate) lsm_profile: Option<String>,
    /// The label of the container's files.
    pub(crate) lsm_files: Option<String>,
    /// Something from this node is mounted there, by the names that the runtime has for these places.
    pub(crate) external_mounts: BTreeSet<String>,
    /// Whether those names are known.
    pub(crate) names: Names,
    /// Why two of them could be taken for each other.
    pub(crate) clashes: BTreeSet<String>,
    /// What of it follows no mount of this node: the options say `private` or `unbindable`.
    pub(crate) private: BTreeSet<String>,
    /// Where the runtime mounts the container's own cgroups of version 1, read-only, when it had
    /// them, by its names.
    pub(crate) cgroups: BTreeSet<String>,
    /// Paths that something must hide, as far as this kernel has them.
    pub(crate) masked: BTreeSet<String>,
    /// Paths that must be read-only, as far as this kernel has them.
    pub(crate) read_only: BTreeSet<String>,
    /// Where the runtime mounts sysfs and cgroups for writing, as for privileged containers.
    pub(crate) writable: BTreeSet<String>,
    /// Namespaces of this node that the container joins.
    pub(crate) host_namespaces: BTreeSet<String>,
    /// Networks and PID namespaces that the runtime has it join, by their paths.
    pub(crate) joined_namespaces: BTreeSet<String>,
    /// The version of CRIU here.
    pub(crate) criu: Vec<u64>,
    /// Whether CRIU has to mount without `MOVE_MOUNT_SET_GROUP`, or is told to.
    pub(crate) has_old_mounts: bool,
    /// CRIU's plugins that bring back what they have saved: these and no others.
    pub(crate) plugins: BTreeSet<String>,
}

/// Who a process is that gains nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fixed {
    pub(crate) uid: u32,
    pub(crate) gids: BTreeSet<u32>,
    /// What it can use.
    pub(crate) capabilities: BTreeSet<String>,
}

/// Whether it is known how the runtime calls what it hands to CRIU: it looks each place up in the new
/// root file system, in which there may be links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Names {
    #[default]
    Known,
    /// That is not there yet. Nothing is restored before [`judge`] has been asked again.
    Later,
}

/// CRIU's numbers of the security modules.
pub(crate) const SELINUX: i32 = 1;
pub(crate) const APPARMOR: i32 = 2;

/// What `AppArmor` says of a process that has no profile; CRIU writes nothing then.
const UNCONFINED: &str = "unconfined";

/// First Linux with `MOVE_MOUNT_SET_GROUP`.
const GROUPS_KERNEL: [u64; 2] = [5, 15];

/// What takes a process before others; CRIU has it, and gives them what the images say.
const NICE: &str = "CAP_SYS_NICE";

/// Has CRIU mount as it had to before.
const OLD_MOUNTS: &str = "mntns-compat-mode";

/// What CRIU reads first of all.
const CRIU_FILE: &str = "/etc/criu/default.conf";

impl Expected {
    /// Adds what CRIU and the kernel are here, and what CRIU's own files tell it, which are read.
    pub(crate) fn on(self, facts: &NodeFacts) -> Self {
        self.told_by([DEFAULT_FILE, CRIU_FILE].map(Path::new), facts)
    }

    pub(super) fn told_by(self, files: [&Path; 2], facts: &NodeFacts) -> Self {
        let is_told = files.into_iter().any(|file| CriuOptions::of(file).has(OLD_MOUNTS));
        let lacks_groups = numbers(&facts.kernel).as_slice() < GROUPS_KERNEL.as_slice();
        let has_old_mounts = lacks_groups || is_told;
        Self { criu: numbers(&facts.criu), has_old_mounts, ..self }
    }

    /// Returns the label of the container's processes, which its sockets have too.
    fn label(&self) -> Option<&String> {
        self.lsm_profile.as_ref().filter(|_| self.lsm == SELINUX)
    }
}

/// The namespaces that runc hands over to CRIU, and by which names (`criuNsToKey`). Those of other kinds
/// CRIU joins by itself, wherever the dumped processes were.
pub(crate) const HANDED_OVER: [(&str, &str); 2] =
    [("network", "extRootNetNS"), ("pid", "extRootPidNS")];

/// Images that would reach beyond the container, by how their names begin.
const FORBIDDEN: &[&str] = &[
    "apparmor",
    "autofs-",
    "binfmt-misc",
    "bpfmap-",
    "creds-",
    "rlimit-",
    "tunfile",
    "userns-",
    "amdgpu",
];

/// Returns every reason why the dump must not be restored; none when it may.
pub(crate) fn judge(summary: &Summary, expected: &Expected) -> Vec<String> {
    let mut reasons: BTreeSet<String> = judge_alone(summary).into_iter().collect();
    for identity in &summary.identities {
        judge_identity(identity, expected, &mut reasons);
    }
    if summary.lsm != 0 && summary.lsm != expected.lsm {
        reasons.insert("it was dumped under a security module that this node has not".to_owned());
    }
    for capability in summary.for_sockets.difference(&expected.capabilities) {
        reasons.insert(format!(
            "it has sockets for which the new container lacks {capability} \
             (allow.capabilities, --allow-cap)"
        ));
    }
    judge_plugins(summary, expected, &mut reasons);
    judge_labels(summary, expected, &mut reasons);
    judge_shared(summary, expected, &mut reasons);
    reasons.extend(expected.clashes.iter().cloned());
    judge_given(&summary.mounts, expected, &mut reasons);
    for copy in &summary.copies {
        reasons.insert(format!(
            "its file {:?} would be made by its path, through whatever is there: stage it anew",
            copy.name
        ));
    }
    reasons.into_iter().collect()
}

/// Returns every reason why nobody restores the dump, whatever the new container may be.
pub(crate) fn judge_alone(summary: &Summary) -> Vec<String> {
    let mut reasons = BTreeSet::new();
    for plugin in summary.plugins.iter().filter(|plugin| *plugin != CUDA) {
        reasons.insert(format!("it needs CRIU's plugin {plugin:?}, which no restore lets in"));
    }
    if !summary.host_namespaces.contains("user") {
        reasons.insert("its processes are in a user namespace".to_owned());
    }
    if summary.nested_namespaces || summary.mount_namespaces != 1 {
        reasons.insert("some of its processes are in namespaces of their own".to_owned());
    }
    judge_mounts(&summary.mounts, &mut reasons);
    for kind in summary.file_kinds.iter().filter(|kind| !FILE_KINDS.contains(kind)) {
        reasons.insert(format!("it has open files of kind {kind}, which reach beyond a container"));
    }
    for file in &summary.external_files {
        reasons.insert(format!("its open file {file:?} is outside of the container"));
    }
    for path in &summary.elsewhere {
        reasons.insert(format!(
            "it has something open by the path {path:?}, which the kernel writes for nothing in a container"
        ));
    }
    for path in &summary.open_links {
        // A link on the way of what CRIU opens leads it elsewhere: it cannot be told from this one.
        reasons.insert(format!(
            "it has the symbolic link {path:?} itself open, which no restore opens"
        ));
    }
    for path in &summary.led {
        reasons.insert(format!(
            "its own files have a link, {path:?}, on the way to what is opened or mounted there"
        ));
    }
    for link in summary.links.iter().filter(|link| !link.is_criu_s()) {
        reasons.insert(format!(
            "its file {:?} is to be linked from {:?}, which would be removed and is not CRIU's",
            link.name, link.link
        ));
    }
    for name in &summary.names {
        if FORBIDDEN.iter().any(|prefix| name.starts_with(prefix)) {
            reasons.insert(format!("it has {name:?}, which would change more than a container"));
        }
    }
    reasons.into_iter().collect()
}

fn judge_identity(identity: &ThreadIdentity, expected: &Expected, reasons: &mut BTreeSet<String>) {
    let more: Vec<&str> =
        identity.capabilities.difference(&expected.capabilities).map(String::as_str).collect();
    if !more.is_empty() {
        reasons.insert(format!(
            "its processes have {}, which the new container has not \
             (allow.capabilities, --allow-cap)",
            more.join(", ")
        ));
    }
    if let Some(user) = &expected.user {
        judge_user(identity, user, reasons);
    }
    if identity.is_urgent && !expected.capabilities.contains(NICE) {
        reasons.insert(format!(
            "its processes go before those of the node (a priority below 0, or real time), for which the \
             new container lacks {NICE} (allow.capabilities, --allow-cap)"
        ));
    }
    let more: Vec<&str> =
        identity.limits.difference(&expected.limits).map(String::as_str).collect();
    if !more.is_empty() && !expected.capabilities.contains(NICE) {
        reasons.insert(format!(
            "its processes may go before those of the node ({}), for which the new container has no such limit, \
             and lacks {NICE} (allow.capabilities, --allow-cap)",
            more.join(", ")
        ));
    }
    if expected.no_new_privileges && !identity.no_new_privileges {
        reasons.insert(
            "its processes may gain privileges, which the new container may not \
             (allow.new_privileges, --allow-new-privileges)"
                .to_owned(),
        );
    }
    if expected.seccomp {
        judge_seccomp(identity, expected, reasons);
    }
    judge_profile(identity, expected, reasons);
}

fn judge_seccomp(identity: &ThreadIdentity, expected: &Expected, reasons: &mut BTreeSet<String>) {
    const HINT: &str = "(allow.no_seccomp, --allow-no-seccomp)";
    if !identity.seccomp {
        reasons.insert(format!(
            "its processes have no seccomp filter, which this node requires {HINT}"
        ));
        return;
    }
    let through = expected.refused.beyond(identity.refused);
    if !through.is_empty() {
        let through = through.into_iter().collect::<Vec<_>>().join(", ");
        reasons.insert(format!(
            "the seccomp filters of its processes let {through} through, which the new container's do not {HINT}"
        ));
    }
}

fn judge_user(identity: &ThreadIdentity, user: &Fixed, reasons: &mut BTreeSet<String>) {
    let others = identity.uids.iter().filter(|uid| **uid != user.uid);
    reasons.extend(others.map(|uid| {
        format!(
            "its processes have the user {uid}, and those of the new container are {}",
            user.uid
        )
    }));
    reasons.extend(identity.gids.difference(&user.gids).map(|gid| {
        format!("its processes have the group {gid}, which those of the new container have not")
    }));
    let held: Vec<&str> =
        identity.held.difference(&user.capabilities).map(String::as_str).collect();
    if !held.is_empty() {
        reasons.insert(format!(
            "its processes hold {}, which those of the new container, of user {}, do not",
            held.join(", "),
            user.uid
        ));
    }
}

/// CRIU gives to each process what its image says, word for word, and nothing where that says nothing:
/// then it is CRIU's own profile that stays, which confines nothing (`criu/lsm.c`).
fn judge_profile(identity: &ThreadIdentity, expected: &Expected, reasons: &mut BTreeSet<String>) {
    let dumped = identity.lsm_profile.as_deref().filter(|profile| *profile != UNCONFINED);
    let given = expected.lsm_profile.as_deref();
    if dumped != given {
        let of = |profile: Option<&str>| {
            profile.map_or("no security profile".to_owned(), |name| {
                format!("the security profile {name:?}")
            })
        };
        let hint = match expected.lsm {
            SELINUX => " (a Pod's categories are its own unless seLinuxOptions.level names them)",
            APPARMOR => " (a Pod's is its securityContext.appArmorProfile)",
            _ => "",
        };
        let (dumped, given) = (of(dumped), of(given));
        reasons.insert(format!(
            "its processes have {dumped}, and the new container has {given}{hint}"
        ));
    }
    if let Some(label) = &identity.lsm_socket
        && expected.label() != Some(label)
    {
        reasons.insert(format!("its processes give the security label {label:?} to sockets"));
    }
}

fn judge_plugins(summary: &Summary, expected: &Expected, reasons: &mut BTreeSet<String>) {
    let known = summary.plugins.iter().filter(|plugin| *plugin == CUDA);
    for plugin in known.filter(|plugin| !expected.plugins.contains(*plugin)) {
        reasons.insert(format!(
            "it needs CRIU's plugin {plugin:?}, which is to bring nothing back here ([gpu] method)"
        ));
    }
    // CRIU 4.0 does not say, and then has all of them at work.
    let missing = expected.plugins.iter().filter(|plugin| !summary.plugins.contains(*plugin));
    for plugin in missing.filter(|_| summary.lists_plugins) {
        reasons.insert(format!(
            "CRIU's plugin {plugin:?} is to bring its GPU memory back, and has not dumped it \
             ([gpu] method)"
        ));
    }
}

/// Labels are foreign bytes too, which CRIU hands on to the kernel.
fn judge_labels(summary: &Summary, expected: &Expected, reasons: &mut BTreeSet<String>) {
    for label in &summary.socket_labels {
        if expected.label() != Some(label) {
            reasons.insert(format!(
                "it has sockets with the security label {label:?}, which the new container has not"
            ));
        }
    }
    for mount in summary.mounts.iter().filter(|mount| mount.external.is_none() && mount.path != "/")
    {
        for label in mount.labels.iter().filter(|label| expected.lsm_files.as_ref() != Some(label))
        {
            reasons.insert(format!(
                "files on {:?} have the security label {label:?}, which the new container has not",
                mount.path
            ));
        }
    }
}

fn judge_shared(summary: &Summary, expected: &Expected, reasons: &mut BTreeSet<String>) {
    // CRIU makes a new namespace where the dump had one of its own, and none where it had not.
    for name in &summary.host_namespaces {
        if name != "user" && !expected.host_namespaces.contains(name) {
            reasons.insert(format!(
                "its processes were in the host's {name} namespace \
                 (allow.host_namespaces, --allow-host-namespace)"
            ));
        }
    }
    for name in &expected.host_namespaces {
        if !summary.host_namespaces.contains(name) {
            reasons.insert(format!("its processes had a {name} namespace of their own"));
        }
    }
    for (name, key) in HANDED_OVER {
        judge_joined(name, key, summary, expected, reasons);
    }
}

/// CRIU takes what it is handed over where the dump says so, and nowhere else: otherwise it makes a
/// new one, whatever the new container is to join.
fn judge_joined(
    name: &str,
    key: &str,
    summary: &Summary,
    expected: &Expected,
    reasons: &mut BTreeSet<String>,
) {
    let joins = expected.joined_namespaces.contains(name);
    match summary.external_namespaces.get(name) {
        Some(other) if other != key => {
            reasons.insert(format!(
                "it asks for a {name} namespace by the name {other:?}, which runc does not know"
            ));
        }
        Some(_) if !joins => {
            reasons.insert(format!(
                "its {name} namespace was given to it, as a Pod's is, and the new container joins none \
                 (allow.host_namespaces, --allow-host-namespace {name}:PATH)"
            ));
        }
        None if joins && !summary.host_namespaces.contains(name) => {
            reasons.insert(format!(
                "its {name} namespace was its own, and the new container joins another one"
            ));
        }
        _ => {}
    }
}
