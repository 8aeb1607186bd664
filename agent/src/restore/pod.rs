//! Who a container that is being created belongs to, as containerd knows it, and whether it was
//! restored before: a restore is for a pod's container once, unless its pod says otherwise.
//!
//! ```text
//! <root>/restored               0700
//!   NAMESPACE/POD.CONTAINER     by which operation, or `afresh`; written by kybernate-runc when the
//!                               container runs
//!   NAMESPACE/….given~          what may be in the pod's directories that no container has begun with;
//!                               written by the agent
//! ```

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_packager::claim::Claimant;
use kybernate_spec::chain;

use super::live::Live;
use super::noted::{self, AFRESH, is_plain};
use crate::app::App;
use crate::container::RESTORE_AS;
use crate::runtime::RuntimeError;
use crate::stage;

/// Labels of containerd's CRI plugin.
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Annotation of the same plugin, in the specification.
const NAME_ANNOTATION: &str = "io.kubernetes.cri.container-name";

/// Of a pod: `on-restart.kybernate.io/CONTAINER: fresh|restore|fail`.
const ON_RESTART: &str = "on-restart.kybernate.io/";

/// The owner of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pod {
    /// Kubernetes' namespace; containerd's for a container without a pod.
    namespace: String,
    /// Name of the container in its pod.
    container: String,
    /// UID of the pod; the container's id without one.
    uid: String,
    note: PathBuf,
    /// Whether it may be one that ended and is created again, under another id, as pods' are.
    starts_again: bool,
}

/// What a pod wants of a container that was restored before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnRestart {
    Fresh,
    Restore,
    Fail,
}

/// What becomes of a container that is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Restart {
    /// It is restored.
    Restore,
    /// It begins anew, for this reason.
    Fresh(String),
}

/// Why a container's owner does not get what it wants.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PodError {
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error("the specification calls the container {0:?}, and containerd {1:?}")]
    Name(String, String),
    #[error("the annotation {0} is {1:?}: it is fresh, restore or fail")]
    Policy(String, String),
    #[error("the annotation {0} is {1:?}: it is clone or move")]
    As(String, String),
    #[error("it {0} before, and its pod wants it to fail then")]
    Again(&'static str),
    #[error("failed to look up whether it was restored before")]
    Note(#[from] io::Error),
}

impl PodError {
    pub(super) const fn is_refusal(&self) -> bool {
        matches!(self, Self::Name(..) | Self::Again(_))
    }

    /// Whether the container must not start afresh either.
    pub(super) const fn forbids_fresh(&self) -> bool {
        matches!(self, Self::Name(..) | Self::Policy(..) | Self::As(..) | Self::Again(_))
    }
}

impl Pod {
    /// Finds out whose a container is. A pod's word for it is not taken: it is what containerd was
    /// told by the kubelet.
    pub(super) async fn find(
        app: &App,
        namespace: &str,
        id: &str,
        live: &Live,
    ) -> Result<Self, PodError> {
        sweep(app, namespace).await;
        let labels = app.containerd.namespace(namespace).container(id).await?.labels;
        let told = live.annotation(NAME_ANNOTATION).unwrap_or_default();
        let label = |key: &str| labels.get(key).filter(|text| is_plain(text)).cloned();
        let directory = app.config.restored().join(namespace);
        let (Some(pod), Some(uid)) = (label(POD_NAMESPACE), label(POD_UID)) else {
            let (namespace, container) = (namespace.to_owned(), told.to_owned());
            return Ok(Self {
                namespace,
                container,
                uid: id.to_owned(),
                note: directory.join(id),
                starts_again: false,
            });
        };
        let container = label(CONTAINER_NAME).unwrap_or_default();
        let Some(note) = noted::name(&uid, &container).filter(|_| container == told) else {
            return Err(PodError::Name(told.to_owned(), container));
        };
        let note = directory.join(note);
        Ok(Self { namespace: pod, container, uid, note, starts_again: true })
    }

    /// Returns the namespace that trust rules are about.
    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns what its container is called in the pod.
    pub(super) fn name(&self) -> &str {
        &self.container
    }

    /// Returns the file that says that it was restored.
    pub(super) fn note(&self) -> &Path {
        &self.note
    }

    /// Returns what its pod wants when it is created again.
    pub(super) fn policy(&self, live: &Live) -> Result<OnRestart, PodError> {
        let key = format!("{ON_RESTART}{}", self.container);
        match live.annotation(&key) {
            None | Some("fresh") => Ok(OnRestart::Fresh),
            Some("restore") => Ok(OnRestart::Restore),
            Some("fail") => Ok(OnRestart::Fail),
            Some(other) => Err(PodError::Policy(key, other.to_owned())),
        }
    }

    /// Returns who takes the checkpoint, when it goes on in one place only.
    pub(super) fn claimant(&self, live: &Live, node: &str) -> Result<Option<Claimant>, PodError> {
        let key = format!("{RESTORE_AS}{}", self.container);
        match live.annotation(&key) {
            None | Some("clone") => Ok(None),
            Some("move") => Ok(Some(Claimant {
                node: node.to_owned(),
                namespace: self.namespace.clone(),
                owner: self.uid.clone(),
                container: self.container.clone(),
            })),
            Some(other) => Err(PodError::As(key, other.to_owned())),
        }
    }

    /// Whether it was restored before in this pod, so that what lies in its directories is of a restore. What
    /// one has written that began afresh is its own.
    pub(super) async fn was_restored(&self) -> bool {
        let note = self.note.clone();
        let read = tokio::task::spawn_blocking(move || fs::read_to_string(note)).await;
        let noted = read.ok().and_then(Result::ok);
        self.starts_again && noted.is_some_and(|noted| noted != AFRESH)
    }

    /// Whether it may be one that ended and is created again, so that its directories are those of before.
    pub(super) const fn starts_again(&self) -> bool {
        self.starts_again
    }

    /// Decides whether it is restored, now that it is created. Blocks.
    pub(super) fn restart(&self, policy: OnRestart) -> Result<Restart, PodError> {
        if let Some(directory) = self.note.parent() {
            stage::make(directory)?;
        }
        let noted = match fs::read_to_string(&self.note) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            read => Some(read?),
        };
        let Some(noted) = noted.filter(|_| self.starts_again && policy != OnRestart::Restore)
        else {
            return Ok(Restart::Restore);
        };
        let before = if noted == AFRESH { "began afresh" } else { "was restored" };
        if policy == OnRestart::Fail {
            return Err(PodError::Again(before));
        }
        let key = format!("{ON_RESTART}{}", self.container);
        Ok(Restart::Fresh(format!("it {before} before in this pod ({key}: fresh)")))
    }
}

/// Forgets the pods and containers that are gone.
async fn sweep(app: &App, namespace: &str) {
    let containers = match app.containerd.namespace(namespace).containers().await {
        Ok(containers) => containers,
        Err(error) => {
            tracing::warn!(error = %chain(&error), "failed to look which pods are there");
            return;
        }
    };
    let mut there: BTreeSet<String> = containers.iter().map(|one| one.id.clone()).collect();
    there.extend(containers.into_iter().filter_map(|mut one| one.labels.remove(POD_UID)));
    let directory = app.config.restored().join(namespace);
    let swept = tokio::task::spawn_blocking(move || forget(&directory, &there)).await;
    if let Err(error) = swept.map_err(io::Error::other).and_then(|swept| swept) {
        tracing::warn!(%error, "failed to forget pods that are gone");
    }
}

/// Removes the notes of what is not `there`: by id, or by the uid of the pod before a dot.
fn forget(directory: &Path, there: &BTreeSet<String>) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let whose = noted::whose(&name);
        let pod = whose.split_once('.').map_or(whose, |(pod, _)| pod);
        if !there.contains(whose) && !there.contains(pod) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_restored_once_unless_its_pod_says_otherwise() {
        let directory = tempfile::tempdir().unwrap();
        let note = directory.path().join("k8s.io/uid.web");
        let mut pod = Pod {
            namespace: "team".to_owned(),
            container: "web".to_owned(),
            uid: "uid".to_owned(),
            note: note.clone(),
            starts_again: true,
        };
        let policy = |pod: &Pod, policy: &str| {
            let annotations = serde_json::json!({ "on-restart.kybernate.io/web": policy });
            let spec = serde_json::json!({ "annotations": annotations }).to_string();
            pod.policy(&Live::parse(spec.as_bytes()).unwrap())
        };
        let restart = |pod: &Pod, name: &str| pod.restart(policy(pod, name).unwrap());
        for name in ["fresh", "restore", "fail"] {
            assert_eq!(restart(&pod, name).unwrap(), Restart::Restore, "{name}");
        }
        fs::write(&note, "").unwrap();
        assert!(matches!(restart(&pod, "fresh").unwrap(), Restart::Fresh(_)));
        assert_eq!(restart(&pod, "restore").unwrap(), Restart::Restore);
        assert!(matches!(restart(&pod, "fail"), Err(PodError::Again("was restored"))));
        let wrong = policy(&pod, "maybe").unwrap_err().to_string();
        assert!(wrong.contains("on-restart.kybernate.io/web"), "{wrong}");
        fs::write(&note, AFRESH).unwrap();
        let told = Restart::Fresh(
            "it began afresh before in this pod (on-restart.kybernate.io/web: fresh)".into(),
        );
        assert_eq!(restart(&pod, "fresh").unwrap(), told);
        assert_eq!(restart(&pod, "restore").unwrap(), Restart::Restore);
        assert!(matches!(restart(&pod, "fail"), Err(PodError::Again("began afresh"))));
        // Without a pod, the same id is another container.
        pod.starts_again = false;
        assert_eq!(restart(&pod, "fresh").unwrap(), Restart::Restore);
    }

    #[test]
    fn a_checkpoint_is_taken_for_a_move_alone() {
        let pod = Pod {
            namespace: "team".to_owned(),
            container: "web".to_owned(),
            uid: "uid".to_owned(),
            note: "/none".into(),
            starts_again: true,
        };
        let claimant = |annotations: serde_json::Value| {
            let spec = serde_json::json!({ "annotations": annotations }).to_string();
            pod.claimant(&Live::parse(spec.as_bytes()).unwrap(), "b")
        };
        let key = "restore-as.kybernate.io/web";
        assert_eq!(claimant(serde_json::json!({})).unwrap(), None);
        assert_eq!(claimant(serde_json::json!({ key: "clone" })).unwrap(), None);
        let moved = claimant(serde_json::json!({ key: "move" })).unwrap().unwrap();
        assert_eq!((&*moved.owner, &*moved.node, &*moved.container), ("uid", "b", "web"));
        let wrong = claimant(serde_json::json!({ key: "both" })).unwrap_err();
        assert!(wrong.to_string().contains(key), "{wrong}");
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path();
        let names = ["uid-1.web", "uid-2.web", "c1", "c2", "c.1"].map(|name| top.join(name));
        for name in &names {
            fs::write(name, "").unwrap();
            fs::write(noted::given(name), "").unwrap();
        }
        forget(top, &["uid-1", "c1", "c.1"].map(str::to_owned).into()).unwrap();
        let left = |of: fn(&Path) -> PathBuf| names.each_ref().map(|name| of(name).exists());
        assert_eq!(left(Path::to_owned), [true, false, true, false, true]);
        assert_eq!(left(noted::given), [true, false, true, false, true]);
        forget(&top.join("none"), &BTreeSet::new()).unwrap();
    }
}
