//! A restore that kybernate-runc does, while containerd creates a pod's container: the agent judges
//! a staged checkpoint against that container's own specification, hands out where the dump lies,
//! and waits to hear how it went. Nothing is pulled but manifests and signatures; captured mounts are
//! copied from where they are staged.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kybernate_packager::agent_api as api;
use kybernate_packager::agent_api::{NEVER_FRESH, REFUSED_BY};
use kybernate_packager::artifact::Checkpoint;
use kybernate_packager::claim::Claimant;
use kybernate_spec::{Digest, Location, chain};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataValue;

mod drive;
mod fill;
mod given;
mod left;
mod open;
mod taken;
mod uses;
mod wish;

use self::drive::drive;
use self::fill::Filled;
pub(crate) use self::left::finish;
pub(crate) use self::open::Claims;
use self::open::{Key, Owner, Settled};
pub(crate) use self::taken::reserve_claimed;
use self::wish::Wish;
use super::admission::{AdmissionError, Admitted, admit};
use super::gpu::{self, GpuPlan, GpuRestoreError};
use super::live::{Here, Live};
use super::pod::{Pod, PodError};
use super::rules::Refusal;
use super::volume::{self, Tars, VolumeError};
use super::{Limits, Order, Purpose, spec};
use crate::app::{App, Rejection};
use crate::container::{is_name, namespace_or_default};
use crate::gate::{self, Expected, GateError, Paths, Summary};
use crate::operations::{Driver, Kind, Made, OperationsError, RefusedBy, Sizes, Stopped, Subject};
use crate::process::Known;
use crate::runtime::RuntimeError;
use crate::staging::{StagingError, Use};
use crate::{cgroup, criu_config};

/// How much longer than the restore may take its end is waited for.
const GRACE: Duration = Duration::from_mins(1);

/// How long the registry and containerd may take to say all that is judged.
const ACCEPT_LIMIT: Duration = Duration::from_secs(20);

/// How long the rules may take to say that no staging would help.
const RULES_LIMIT: Duration = Duration::from_secs(10);

/// Why a container is not to be restored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error(transparent)]
    Rejected(#[from] Rejection),
    #[error(transparent)]
    Pod(#[from] PodError),
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error(transparent)]
    Gpu(#[from] GpuRestoreError),
    #[error(transparent)]
    Gate(#[from] GateError),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error("{0} is not staged on this node")]
    NotStaged(Digest),
    #[error("stage the checkpoint anew")]
    Staged(#[source] StagingError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Operations(#[from] OperationsError),
    #[error("failed to prepare the restore")]
    Place(#[source] io::Error),
    #[error(transparent)]
    Taken(#[from] kybernate_packager::claim::ClaimError),
    #[error("the registry or containerd did not answer within {} s", ACCEPT_LIMIT.as_secs())]
    Late,
    #[error("its directories in the pod are not as they were: something of a restore may be there")]
    Left(#[source] Box<Self>),
    #[error(
        "what an earlier restore was given, with which no container has begun, is still in {0:?}: end the \
         other containers that have it, or delete the pod"
    )]
    Earlier(Vec<PathBuf>),
    #[error("kybernate-runc does not wait for it any more")]
    GivenUp,
    #[error(transparent)]
    Stopped(#[from] Stopped),
    #[error("the agent is shutting down")]
    ShuttingDown,
}

impl ClaimError {
    /// Returns the rule that refused, when it was one.
    fn refused_by(&self) -> Option<RefusedBy> {
        match self {
            Self::Admission(error) => error.refused_by(),
            Self::Gpu(error) => error.refused_by(),
            Self::Gate(GateError::Refused(_)) => Some(RefusedBy::Identity),
            Self::Refused(refusal) => Some(refusal.by),
            Self::Pod(error) => error.is_refusal().then_some(RefusedBy::Policy),
            Self::Volume(error) => error.is_integrity().then_some(RefusedBy::Integrity),
            Self::Taken(error) => error.is_refusal().then_some(RefusedBy::Claim),
            Self::Left(error) => error.refused_by(),
            _ => None,
        }
    }

    /// Whether a fresh start is no way around it, whatever the pod says of failures: the pod says so
    /// elsewhere, or what it says cannot be understood, or another attempt is under way, or something of
    /// one is left.
    const fn forbids_fresh(&self) -> bool {
        match self {
            Self::Pod(error) => error.forbids_fresh(),
            Self::Rejected(rejection) => matches!(rejection, Rejection::Busy(_)),
            Self::Left(_) | Self::Earlier(_) => true,
            _ => false,
        }
    }
}

impl From<ClaimError> for tonic::Status {
    fn from(error: ClaimError) -> Self {
        let rule = error.refused_by();
        let never_fresh = error.forbids_fresh();
        let mut status = match error {
            ClaimError::Rejected(rejection) => Self::from(rejection),
            ClaimError::ShuttingDown | ClaimError::Stopped(Stopped::AgentEnds) => {
                Self::unavailable(chain(&error).to_string())
            }
            _ => Self::failed_precondition(chain(&error).to_string()),
        };
        if let Some(rule) = rule {
            status.metadata_mut().insert(REFUSED_BY, MetadataValue::from_static(rule.name()));
        }
        if never_fresh {
            status.metadata_mut().insert(NEVER_FRESH, MetadataValue::from_static("true"));
        }
        status
    }
}

/// What kybernate-runc asks for.
struct Claim {
    namespace: String,
    container: String,
    location: Location,
    digest: Digest,
    live: Live,
    /// Its root file system, in which nothing is mounted yet.
    root: PathBuf,
    /// The kybernate-runc that asks, where that is known.
    caller: Option<Known>,
    /// Where that looks for what is noted.
    restored: PathBuf,
    /// When it was asked.
    began: Instant,
}

/// What it gets, and what is kept for it meanwhile.
struct Prepared {
    answer: api::ClaimResponse,
    _staged: Use,
    sizes: Sizes,
    /// Directories of the pod that were filled.
    filled: Vec<Filled>,
    note: PathBuf,
}

/// Answers a claim; what was prepared stays until it is settled.
pub(crate) async fn claim(
    app: &Arc<App>,
    request: api::ClaimRequest,
    caller: Option<Known>,
) -> Result<api::ClaimResponse, ClaimError> {
    let claim = Claim { caller, ..Claim::parse(request)? };
    app.ready().await?;
    app.claims.supersede(&claim.key()).await;
    let busy = app.reserve(&claim.namespace, &claim.container)?;
    let wish = Wish::of(app, &claim).await;
    let (answer, answered) = oneshot::channel();
    let app = Arc::clone(app);
    // Not here: a call that is dropped in the middle must not leave an operation nobody drives, nor a thread
    // that still empties something.
    app.tasks.clone().spawn(move |cancel| async move {
        let begun = match wish {
            Ok(wish) => wish.begins(&app, &claim).await.map(|fresh| (wish, fresh)),
            Err(error) => Err(error),
        };
        let Wish { pod, claimant, alone, .. } = match begun {
            Ok((wish, None)) => wish,
            Ok((_, Some(fresh))) => return drop(answer.send(Ok(fresh))),
            Err(error) => return drop(answer.send(Err(wish::noted(&app, &claim, error).await))),
        };
        let driver = match app.operations.begin(claim.subject()).await {
            Ok(driver) => driver,
            // To nobody, when whoever asked has gone.
            Err(error) => return drop(answer.send(Err(error.into()))),
        };
        let ended = CancellationToken::new();
        let _ending = ended.clone().drop_guard();
        let owner = Owner { note: pod.note().to_owned(), caller: claim.caller };
        let cleared = CancellationToken::new();
        // What moves never starts afresh.
        let waits_for = claimant.is_none().then(|| cleared.clone());
        let (open, settled) = app.claims.open(claim.key(), driver.id(), owner, (ended, waits_for));
        let call = Driven {
            app: &app,
            driver: &driver,
            claim: &claim,
            pod: &pod,
            claimant: claimant.as_ref(),
        };
        let span = driver.begins(None);
        let work = Box::pin(drive(call, (answer, settled), (cleared, &cancel)));
        let conclusion = span.place().around(work).await;
        // Who asks meanwhile waits for the end of this one.
        drop((busy, alone));
        driver.close_within(span, conclusion).await;
        drop(open);
    });
    answered.await.unwrap_or(Err(ClaimError::ShuttingDown))
}

/// Notes how a restore went. Tells why it was ended from here, when it was. When this returns of one that
/// failed, what starts afresh has the pod's directories as they were, and nobody takes anything from it.
pub(crate) async fn settle(
    app: &App,
    request: api::SettleRequest,
) -> Result<api::SettleResponse, Rejection> {
    let namespace = namespace_or_default(request.containerd_namespace)?;
    let key = (namespace, request.container);
    let failed = !request.problem.is_empty();
    let settled = app.claims.settle(&key, request.problem);
    let container = key.1;
    let unknown = || Rejection::NoOperation(format!("restore of container {container}"));
    let Settled { operation, cleared, ended } = settled.ok_or_else(unknown)?;
    let cancelled = app.operations.cancelled(&operation).filter(|_| failed);
    let cancelled = cancelled.unwrap_or_default().to_owned();
    if let Some(cleared) = cleared.filter(|_| failed) {
        tokio::select! {
            biased;
            () = cleared.cancelled() => {}
            () = ended.cancelled() => return Err(Rejection::NotCleared(container)),
        }
    }
    Ok(api::SettleResponse { cancelled })
}

/// Whether a restore has said that its container runs. A pod's container that is restored again each
/// time it ends has a note of the time before, with another operation in it; one without any is of a
/// kybernate-runc that writes none.
async fn is_noted(note: PathBuf, operation: &str) -> bool {
    let read = tokio::task::spawn_blocking(move || fs_err::read_to_string(note)).await;
    read.ok().and_then(Result::ok).is_some_and(|noted| noted.is_empty() || noted == operation)
}

/// What a claim is driven with.
#[derive(Clone, Copy)]
struct Driven<'a> {
    app: &'a Arc<App>,
    driver: &'a Driver,
    claim: &'a Claim,
    pod: &'a Pod,
    /// Who takes the checkpoint, when nobody else is to have it.
    claimant: Option<&'a Claimant>,
}

/// What may be restored, as far as it is judged without touching anything.
struct Accepted {
    admitted: Admitted,
    staged: Use,
    summary: Summary,
}

async fn prepare(driven: Driven<'_>, wanted: CancellationToken) -> Result<Prepared, ClaimError> {
    let Driven { app, driver, claim, pod, .. } = driven;
    let accepted = tokio::select! {
        accepted = accept(driven) => accepted?,
        () = wanted.cancelled() => return Err(ClaimError::GivenUp),
    };
    let Accepted { admitted: Admitted { store, checkpoint }, staged, summary } = accepted;
    driver.step("restore");
    let work = work(app, driver).await?;
    let (root_mode, paths) = (summary.root_mode, summary.paths());
    let criu_config = criu_config(app, driver, claim, summary).await?;
    let tars = Tars { store: &store, staged: Some(&staged), driver };
    let targets = fill::targets(driven, &checkpoint, tars).await?;
    driver.will_make(Made::Claimed { note: pod.note().to_owned() }).await?;
    given::note(driven, targets.given).await?;
    if !fill::empty_all(targets.used).await {
        let told = "failed to empty what this container had in its pod before";
        return Err(ClaimError::Left(Box::new(ClaimError::Place(io::Error::other(told)))));
    }
    let filled = fill::fill(tars, targets.all, &wanted).await?;
    if let Err(error) = claim.stands(paths).await {
        return Err(fill::undone(filled, error).await);
    }
    let sizes = Sizes::of(&checkpoint.config.sizes);
    let limit = left(app.config.pods.restore_limit, claim.began.elapsed());
    let limit = u32::try_from(limit.as_secs()).unwrap_or(u32::MAX);
    let text = |path: &Path| path.display().to_string();
    let note = pod.note().to_owned();
    let answer = api::ClaimResponse {
        images: text(&staged.images()),
        work: text(&work),
        criu_config: text(&criu_config),
        limit_seconds: limit,
        note: text(&note),
        fresh_because: String::new(),
        root_mode,
    };
    Ok(Prepared { answer, _staged: staged, sizes, filled, note })
}

/// Returns how long CRIU may take when a claim has taken this long: whoever waits for the container
/// waits for both, and what large mounts took is missing at the end.
fn left(limit: Duration, spent: Duration) -> Duration {
    limit.saturating_sub(spent.saturating_sub(ACCEPT_LIMIT)).max(Duration::from_secs(1))
}

/// Judges the staged checkpoint. What has to be read for that has its own time.
async fn accept(driven: Driven<'_>) -> Result<Accepted, ClaimError> {
    let late = |_elapsed| ClaimError::Late;
    let (admitted, staged, gpu) =
        tokio::time::timeout(ACCEPT_LIMIT, may(driven)).await.map_err(late)??;
    let staged = staged.proven(&driven.driver.progress).await.map_err(ClaimError::Staged)?;
    let judged = tokio::time::timeout(ACCEPT_LIMIT, judge(driven, &admitted, &staged, &gpu)).await;
    let summary = judged.map_err(late)??;
    Ok(Accepted { admitted, staged, summary })
}

/// Asks whether the staged checkpoint may be restored by what is said about it.
async fn may(driven: Driven<'_>) -> Result<(Admitted, Use, GpuPlan), ClaimError> {
    let Driven { app, driver, claim, pod, .. } = driven;
    let order = claim.order(app, pod);
    let Some(staged) = app.staging.take(&claim.digest, driver.id()).await else {
        return Err(unstaged(app, driver, claim, &order).await);
    };
    let tier = staged.tier;
    driver.note(|record| record.tier = Some(tier));
    let admitted = admit(app, driver, &order).await?;
    let checkpoint = &admitted.checkpoint;
    let gpu = gpu::pod(app, checkpoint)?;
    claim.image(app, checkpoint).await?;
    Ok((admitted, staged, gpu))
}

/// Has the gate judge what is in it, and takes it for the pod.
async fn judge(
    driven: Driven<'_>,
    admitted: &Admitted,
    staged: &Use,
    gpu: &GpuPlan,
) -> Result<Summary, ClaimError> {
    let Driven { app, driver, claim, .. } = driven;
    driver.step("gate");
    let summary = gate::inspect(&staged.images()).await?;
    let (summary, expected) = claim.expected(app, summary).await?;
    let expected = Expected { plugins: gpu.plugins(), ..expected };
    let reasons = gate::judge(&summary, &expected);
    let lacking = gate::lacking(&summary, &staged.images(), BTreeMap::new()).await?;
    for (by, reasons) in [(RefusedBy::Identity, reasons), (RefusedBy::Integrity, lacking)] {
        if !reasons.is_empty() {
            return Err(Refusal { by, reasons }.into());
        }
    }
    taken::take(driven, admitted).await?;
    Ok(summary)
}

/// Says why a checkpoint that is not staged is not restored. What a rule refuses cannot be staged
/// here, so that rule is the reason, and one that a pod cannot get around by a fresh start.
async fn unstaged(app: &Arc<App>, driver: &Driver, claim: &Claim, order: &Order) -> ClaimError {
    match tokio::time::timeout(RULES_LIMIT, admit(app, driver, order)).await {
        Ok(Err(error)) if error.refused_by().is_some() => error.into(),
        _ => ClaimError::NotStaged(claim.digest.clone()),
    }
}

/// Makes the directory for CRIU's log.
async fn work(app: &App, driver: &Driver) -> Result<PathBuf, ClaimError> {
    let directory = app.config.disk_stage().join(driver.id());
    driver.will_make(Made::Directory(directory.clone())).await?;
    let made = directory.clone();
    let made = tokio::task::spawn_blocking(move || crate::stage::make(&made)).await;
    made.map_err(io::Error::other).and_then(|made| made).map_err(ClaimError::Place)?;
    Ok(directory)
}

/// Writes what CRIU is told about this container.
async fn criu_config(
    app: &Arc<App>,
    driver: &Driver,
    claim: &Claim,
    summary: Summary,
) -> Result<PathBuf, ClaimError> {
    volume::sweep(app).await;
    let directory = volume::directory(app, &claim.namespace, &claim.container);
    driver.will_make(Made::Volume(directory.clone())).await?;
    let file = criu_config::given(&app.config.volumes(), &claim.namespace, &claim.container);
    let (path, cgroup, yard) = (file.clone(), claim.live.cgroup(), app.config.cgroup_yard());
    let write = move || criu_config::write_restored(&path, &summary, cgroup.as_deref(), &yard);
    let written = tokio::task::spawn_blocking(write).await;
    written.map_err(io::Error::other).and_then(|done| done).map_err(ClaimError::Place)?;
    Ok(file)
}

impl Claim {
    fn parse(request: api::ClaimRequest) -> Result<Self, Rejection> {
        let location: Location = request.reference.parse()?;
        let digest = match &location {
            Location::Registry(reference) => reference.digest.clone(),
            Location::Layout(_) => None,
        };
        let digest = digest.ok_or_else(|| {
            let wanted = "a pod is restored from REPOSITORY@DIGEST";
            Rejection::Invalid(format!("{location} names no digest: {wanted}"))
        })?;
        let container = request.container;
        if !is_name(&container) {
            let text = format!("{container:?} is no name for a container");
            return Err(Rejection::Invalid(text));
        }
        let root = PathBuf::from(request.root);
        if !root.is_absolute() {
            let text = "it is not said where its root file system is: is kybernate-runc older than \
                        the agent?";
            return Err(Rejection::Invalid(text.to_owned()));
        }
        let live = Live::parse(&request.spec_json).map_err(|error| {
            Rejection::Invalid(format!("failed to read the container's specification: {error}"))
        })?;
        Ok(Self {
            namespace: namespace_or_default(request.containerd_namespace)?,
            container,
            location,
            digest,
            live,
            root,
            caller: None,
            restored: PathBuf::from(request.restored),
            began: Instant::now(),
        })
    }

    fn key(&self) -> Key {
        (self.namespace.clone(), self.container.clone())
    }

    fn subject(&self) -> Subject {
        Subject {
            kind: Kind::Restore,
            container: self.container.clone(),
            namespace: self.namespace.clone(),
            reference: self.location.to_string(),
            time_out: None,
        }
    }

    /// Returns the order that the rules are asked about: into the pod's namespace.
    fn order(&self, app: &App, pod: &Pod) -> Order {
        Order {
            plain_http: app.config.is_plain_http(&self.location),
            location: self.location.clone(),
            namespace: pod.namespace().to_owned(),
            container: Some(self.container.clone()),
            allow: self.live.allowances(),
            // Its pod's, which are the runtime's to set.
            limits: Limits::default(),
            unsigned: false,
            keys: Vec::new(),
            time_out: None,
            purpose: Purpose::Now,
        }
    }

    /// Looks once more how the runtime calls what comes from outside: what was filled may have links.
    async fn stands(&self, paths: Paths) -> Result<(), ClaimError> {
        let (live, root) = (self.live.clone(), self.root.clone());
        let looked = tokio::task::spawn_blocking(move || {
            let here = Here { hierarchies: cgroup::names()?, ..Here::default() };
            Ok(live.names(&root, &here, &paths)?.clashes())
        });
        let looked = looked.await.map_err(io::Error::other).and_then(|looked| looked);
        let clashes = looked.map_err(ClaimError::Place)?;
        Ok(Refusal::unless_none(RefusedBy::Identity, clashes)?)
    }

    /// Returns what the restored processes may be, with what there is of them.
    async fn expected(
        &self,
        app: &App,
        summary: Summary,
    ) -> Result<(Summary, Expected), ClaimError> {
        let facts = app.report().await.facts;
        let (live, root) = (self.live.clone(), self.root.clone());
        let looked = tokio::task::spawn_blocking(move || {
            let here = Here { lsm: spec::lsm(&facts.lsm), hierarchies: cgroup::names()? };
            let names = live.names(&root, &here, &summary.paths())?;
            let expected = live.expected(&summary, &here, &names).on(&facts);
            Ok((summary, expected))
        });
        let looked = looked.await.map_err(io::Error::other).and_then(|looked| looked);
        looked.map_err(ClaimError::Place)
    }

    /// Makes sure that the container's root file system is the checkpoint's own.
    async fn image(&self, app: &App, checkpoint: &Checkpoint) -> Result<(), ClaimError> {
        let namespace = app.containerd.namespace(&self.namespace);
        let name = namespace.container(&self.container).await?.image;
        let target = namespace.image(&name).await?.target.digest;
        let runnable = checkpoint.runnable.as_ref().map(|runnable| &runnable.digest);
        if target == checkpoint.stored.descriptor.digest || Some(&target) == runnable {
            return Ok(());
        }
        let reason = format!(
            "the container's image, {name}, is not the checkpoint: the files that the process had \
             written are in the checkpoint's own image, so name {} as the image",
            self.location
        );
        Err(Refusal::one(RefusedBy::Compatibility, reason).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_and_its_restore_have_their_time_together() {
        let seconds = Duration::from_secs;
        for (spent, expected) in [(0, 100), (20, 100), (35, 85), (60, 60), (1000, 1)] {
            assert_eq!(left(seconds(100), seconds(spent)), seconds(expected), "{spent}");
        }
        assert_eq!(left(seconds(5), seconds(60)), seconds(1));
        // Within the two minutes that a kubelet gives, and before who asks gives up.
        let longest = crate::wrapper::CLAIM_LIMIT;
        assert!(longest + left(seconds(100), longest) <= seconds(120) && ACCEPT_LIMIT < longest);
    }
}
