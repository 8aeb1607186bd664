//! What the parts of the agent share, and how requests become operations.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use kybernate_packager::agent_api::{self as api, REFUSED_BY};
use kybernate_packager::policy::Policy;
use kybernate_packager::trace_parent::TraceParent;
use kybernate_spec::{ReferenceError, TagError, chain};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataValue;

use crate::checkpoint;
use crate::config::Config;
use crate::gpu::Gpus;
use crate::memory;
use crate::node::{NodeCache, NodeReport};
use crate::operations::{
    CancelError, Conclusion, Driver, Kind, Operations, OperationsError, RefusedBy, Subject,
};
use crate::pre_copy::PreCopyError;
use crate::preflight::{Finding, Findings};
use crate::restore::{self, provide};
use crate::runtime::{Containerd, RuntimeError, TaskState, TaskStatus};
use crate::serve::ServeError;
use crate::stage::{Promises, StageError};
use crate::staging::{self, EvictError, Staging};
use crate::suspend::{self, SuspendError};
use crate::tasks::Tasks;

/// Most bytes of an answer's words.
const MESSAGE_BYTES_MAX: usize = 4 << 10;

/// The agent. Built once.
#[derive(Debug)]
pub struct App {
    pub(crate) config: Config,
    pub(crate) containerd: Containerd,
    pub(crate) operations: Arc<Operations>,
    pub(crate) staging: Arc<Staging>,
    pub(crate) suspended: suspend::Ledger,
    pub(crate) claims: restore::Claims,
    pub(crate) promises: Promises,
    pub(crate) gpus: Gpus,
    pub(crate) tasks: Tasks,
    node: NodeCache,
    // Held for a look-up only, never across an `.await`.
    busy: Mutex<BTreeSet<(String, String)>>,
}

/// A container that an operation works on; free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Busy {
    app: Arc<App>,
    key: (String, String),
}

/// Why a request is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum Rejection {
    /// The request cannot be understood.
    #[error("{0}")]
    Invalid(String),
    /// The reference is none.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// The tag is none.
    #[error(transparent)]
    Tag(#[from] TagError),
    /// There is no such operation.
    #[error("there is no operation {0:?}")]
    NoOperation(String),
    /// What a restore that failed was given is still there.
    #[error("what the pod's container {0:?} was given to be restored is not taken away yet")]
    NotCleared(String),
    /// An operation is not cancelled.
    #[error(transparent)]
    Cancel(#[from] CancelError),
    /// This node cannot do it.
    #[error("this node can neither take nor restore checkpoints: {}", .0.join("; "))]
    Node(Vec<String>),
    /// This container cannot be dumped.
    #[error("container {container:?} cannot be checkpointed: {reason}")]
    Container {
        /// The container.
        container: String,
        /// Why.
        reason: String,
    },
    /// CRIU would not take what it has.
    #[error("container {container:?} cannot be checkpointed: {findings}")]
    Preflight {
        /// The container.
        container: String,
        /// What stands in the way.
        findings: Findings,
    },
    /// Memory is not copied before the pause here.
    #[error(transparent)]
    PreCopy(#[from] PreCopyError),
    /// There is no room for the dump.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// There would be room for the dump without other operations.
    #[error("{0}: ask again when other operations have ended")]
    RoomTaken(StageError),
    /// A staged checkpoint stays.
    #[error(transparent)]
    Evict(#[from] EvictError),
    /// A container is neither suspended nor resumed.
    #[error(transparent)]
    Suspend(#[from] SuspendError),
    /// The name is taken.
    #[error("container {0:?} exists already: take another name (--name), or remove it first")]
    Taken(String),
    /// Another operation works on the container.
    #[error(
        "container {0:?} is busy with another operation: `kyb ps --operations --state running` tells of it"
    )]
    Busy(String),
    /// containerd did not answer as it should.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The operation could not be written down.
    #[error(transparent)]
    Operations(#[from] OperationsError),
    /// The agent ends.
    #[error("the agent is shutting down")]
    ShuttingDown,
}

impl App {
    /// Puts the agent together. Nothing runs yet.
    pub fn new(config: Config) -> Result<Arc<Self>, ServeError> {
        let operations = Operations::open(&config.operations())?;
        let staging = Staging::open(&config.staging, operations.metrics.staging.clone())?;
        Ok(Arc::new(Self {
            containerd: Containerd::at(&config.containerd),
            operations,
            staging,
            suspended: suspend::Ledger::open(&config.suspended())?,
            claims: restore::Claims::default(),
            promises: Promises::default(),
            gpus: Gpus::ours(config.gpu.clone()),
            tasks: Tasks::default(),
            node: NodeCache::default(),
            busy: Mutex::default(),
            config,
        }))
    }

    /// Starts a checkpoint.
    pub(crate) async fn checkpoint(
        self: &Arc<Self>,
        request: api::CheckpointRequest,
        trace: Option<TraceParent>,
    ) -> Result<api::Operation, Rejection> {
        let order = checkpoint::Order::parse(request, &self.config)?;
        self.ready().await?;
        let busy = self.reserve(&order.namespace, &order.container)?;
        let source = checkpoint::Source::find(self, &order.wanted()).await;
        let source = source.inspect_err(|rejection| self.refused(rejection))?;
        self.drive(order.subject(), Some(busy), trace, |app, driver, cancel| async move {
            checkpoint::run(&app, &driver, source, order, cancel).await
        })
        .await
    }

    /// Logs and counts what a checkpoint is refused for, when that is no finding.
    fn refused(&self, rejection: &Rejection) {
        if let Rejection::PreCopy(error) = rejection {
            tracing::info!(error = %chain(error), "a checkpoint is refused");
            self.operations.metrics.refused(Kind::Checkpoint, "pre-copy");
        }
    }

    /// Looks at a container as a checkpoint would, and touches nothing.
    pub(crate) async fn preflight(
        self: &Arc<Self>,
        request: api::PreflightRequest,
    ) -> Result<Vec<Finding>, Rejection> {
        let wanted = checkpoint::Wanted::parse(request)?;
        self.ready().await?;
        Ok(checkpoint::examine(self, &wanted).await?.findings)
    }

    /// Starts a restore.
    pub(crate) async fn restore(
        self: &Arc<Self>,
        request: api::RestoreRequest,
        trace: Option<TraceParent>,
    ) -> Result<api::Operation, Rejection> {
        let order = restore::Order::parse(request)?;
        self.ready().await?;
        let reserved = order.container.as_ref().map(|name| self.reserve(&order.namespace, name));
        let busy = reserved.transpose()?;
        if let Some(name) = &order.container {
            self.free(&order.namespace, name).await?;
        }
        self.drive(order.subject(), busy, trace, |app, driver, cancel| async move {
            restore::run(&app, &driver, order, cancel).await
        })
        .await
    }

    /// Begins an operation and has `work` done. A request that is dropped in the middle of this must
    /// not leave an operation that nobody drives, so that what begins it is a task of its own.
    async fn drive<F>(
        self: &Arc<Self>,
        subject: Subject,
        busy: Option<Busy>,
        trace: Option<TraceParent>,
        work: impl FnOnce(Arc<Self>, Driver, CancellationToken) -> F + Send + 'static,
    ) -> Result<api::Operation, Rejection>
    where
        F: Future<Output = Option<Conclusion>> + Send + 'static,
    {
        let (tell, told) = oneshot::channel();
        let app = Arc::clone(self);
        self.tasks.spawn(move |cancel| async move {
            let driver = match app.operations.begin(subject).await {
                Ok(driver) => driver,
                // To nobody, when whoever asked has gone.
                Err(error) => return tell.send(Err(error)).unwrap_or_default(),
            };
            let span = driver.begins(trace);
            let conclusion = match tell.send(Ok(driver.to_api())) {
                Ok(()) => {
                    let work = Box::pin(work(Arc::clone(&app), driver.clone(), cancel));
                    driver.bounded(span.place().around(work)).await
                }
                Err(_unheard) => Some(Conclusion::unheard()),
            };
            // Whoever sees it closed may begin the next one.
            drop(busy);
            driver.close_within(span, conclusion).await;
            let given = tokio::task::spawn_blocking(memory::give_back).await;
            given.unwrap_or_else(|error| tracing::warn!(error = %chain(&error), "memory is kept"));
        });
        Ok(told.await.map_err(|_ended| Rejection::ShuttingDown)??)
    }

    /// Starts to stage a checkpoint.
    pub(crate) async fn stage(
        self: &Arc<Self>,
        request: api::StageRequest,
        trace: Option<TraceParent>,
    ) -> Result<api::Operation, Rejection> {
        let order = staging::Order::parse(request)?;
        self.ready().await?;
        self.drive(order.subject(), None, trace, |app, driver, cancel| async move {
            staging::run(&app, &driver, order, cancel).await
        })
        .await
    }

    /// Starts to provide a checkpoint to containerd.
    pub(crate) async fn provide(
        self: &Arc<Self>,
        request: api::ProvideRequest,
        trace: Option<TraceParent>,
    ) -> Result<api::Operation, Rejection> {
        let order = provide::Order::parse(request)?;
        self.ready().await?;
        self.drive(order.subject(), None, trace, |app, driver, cancel| async move {
            provide::run(&app, &driver, order, cancel).await
        })
        .await
    }

    /// Takes staged checkpoints away.
    pub(crate) async fn evict(
        &self,
        request: &api::EvictRequest,
    ) -> Result<Vec<api::StagedCheckpoint>, Rejection> {
        let wanted = staging::Wanted::parse(request)?;
        Ok(self.staging.evict(&wanted).await?)
    }

    /// Returns the trust policy, as its files say it now.
    pub(crate) async fn trust(&self) -> Arc<Policy> {
        let (trust, metrics) = (Arc::clone(&self.config.trust), self.operations.metrics.clone());
        let looked = tokio::task::spawn_blocking(move || trust.current(&metrics)).await;
        looked.unwrap_or_else(|error| {
            tracing::error!(%error, "the trust policy could not be looked at");
            // Lets nothing in.
            Arc::default()
        })
    }

    /// Starts to suspend a container in place, or to resume it.
    pub(crate) async fn change(
        self: &Arc<Self>,
        order: suspend::Order,
        trace: Option<TraceParent>,
    ) -> Result<api::Operation, Rejection> {
        let wanted = order.wanted();
        let busy = self.reserve(&wanted.namespace, &wanted.container)?;
        let subject = order.subject();
        let plan = order.plan(self).await?;
        self.drive(subject, Some(busy), trace, |app, driver, ends| async move {
            suspend::run(&app, &driver, plan, &ends).await
        })
        .await
    }

    /// Returns what this node is.
    pub(crate) async fn report(&self) -> NodeReport {
        self.node.report(&self.containerd, &self.gpus).await
    }

    /// Returns the containers of one namespace, or of all.
    pub(crate) async fn containers(
        &self,
        namespace: &str,
    ) -> Result<Vec<api::Container>, RuntimeError> {
        let namespaces = match namespace {
            "" => self.containerd.namespaces().await?,
            one => vec![one.to_owned()],
        };
        let mut found = Vec::new();
        for name in namespaces {
            let namespace = self.containerd.namespace(&name);
            let tasks = namespace.all_tasks().await?;
            for container in namespace.containers().await? {
                let task = tasks.iter().find(|(id, _)| *id == container.id);
                let task: Option<TaskState> = task.map(|(_, state)| *state);
                let restored = container.labels.get(restore::CHECKPOINT_LABEL);
                let wanted =
                    suspend::Wanted { container: container.id.clone(), namespace: name.clone() };
                let suspended = task
                    .filter(|task| task.status == TaskStatus::Paused)
                    .filter(|task| self.suspended.is(&wanted, task.pid))
                    .and_then(|_| self.suspended.get(&wanted));
                found.push(api::Container {
                    suspended_since: suspended.map_or_else(String::new, |it| it.since.to_string()),
                    containerd_namespace: name.clone(),
                    status: task.map_or("stopped", |task| task.status.name()).to_owned(),
                    pid: task.map_or(0, |task| task.pid),
                    restored_from: restored.cloned().unwrap_or_default(),
                    id: container.id,
                    image: container.image,
                });
            }
        }
        Ok(found)
    }

    /// Reserves a container for one operation.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        namespace: &str,
        container: &str,
    ) -> Result<Busy, Rejection> {
        let key = (namespace.to_owned(), container.to_owned());
        let new = self.busy.lock().unwrap_or_else(PoisonError::into_inner).insert(key.clone());
        if !new {
            return Err(Rejection::Busy(container.to_owned()));
        }
        Ok(Busy { app: Arc::clone(self), key })
    }

    /// Checks that no container has this name.
    pub(crate) async fn free(&self, namespace: &str, container: &str) -> Result<(), Rejection> {
        match self.containerd.namespace(namespace).container(container).await {
            Ok(_) => Err(Rejection::Taken(container.to_owned())),
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) async fn ready(&self) -> Result<(), Rejection> {
        if self.tasks.is_stopping() {
            return Err(Rejection::ShuttingDown);
        }
        let problems = self.report().await.problems;
        if problems.is_empty() { Ok(()) } else { Err(Rejection::Node(problems)) }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.app.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

/// Cuts what a request may have made long: an answer's words are a header, of which gRPC's clients take
/// 16 KiB in all, and of a character of which may become three.
pub(crate) fn bounded(mut message: String) -> String {
    if message.len() > MESSAGE_BYTES_MAX {
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        message.push('…');
    }
    message
}

impl From<Rejection> for tonic::Status {
    /// Exhaustive: a new reason does not compile without a code.
    fn from(rejection: Rejection) -> Self {
        use tonic::Code;
        let code = match &rejection {
            Rejection::Invalid(_) | Rejection::Reference(_) | Rejection::Tag(_) => {
                Code::InvalidArgument
            }
            Rejection::NoOperation(_)
            | Rejection::Cancel(CancelError::NoOperation(_))
            | Rejection::Evict(EvictError::NotStaged(_)) => Code::NotFound,
            Rejection::Runtime(error) | Rejection::Suspend(SuspendError::Runtime(error))
                if error.is_not_found() =>
            {
                Code::NotFound
            }
            Rejection::Cancel(
                CancelError::Ended(..) | CancelError::Undoing(_) | CancelError::TooLate(..),
            )
            | Rejection::Node(_)
            | Rejection::Preflight { .. }
            | Rejection::PreCopy(
                PreCopyError::NotTracked
                | PreCopyError::Untold(_)
                | PreCopyError::Filtered
                | PreCopyError::Gpu,
            )
            | Rejection::Container { .. }
            | Rejection::Evict(EvictError::InUse(..))
            | Rejection::Suspend(
                SuspendError::NotRunning { .. }
                | SuspendError::Foreign(_)
                | SuspendError::Gpu(_)
                | SuspendError::Away { .. }
                | SuspendError::Unfit { .. },
            )
            | Rejection::Stage(_) => Code::FailedPrecondition,
            Rejection::Taken(_) => Code::AlreadyExists,
            Rejection::RoomTaken(_) => Code::ResourceExhausted,
            Rejection::Busy(_) | Rejection::NotCleared(_) => Code::Aborted,
            Rejection::ShuttingDown | Rejection::Suspend(SuspendError::Stopped(_)) => {
                Code::Unavailable
            }
            Rejection::Runtime(_)
            | Rejection::Operations(_)
            | Rejection::PreCopy(PreCopyError::Unknown(_))
            | Rejection::Evict(EvictError::Staging(_))
            | Rejection::Suspend(
                SuspendError::Ledger(_)
                | SuspendError::Runtime(_)
                | SuspendError::Freezer(_)
                | SuspendError::Revive(_),
            )
            | Rejection::Cancel(CancelError::Operations(_)) => Code::Internal,
        };
        let message = bounded(chain(&rejection).to_string());
        let mut status = match &rejection {
            Rejection::Preflight { findings, .. } => {
                Self::with_details(code, message, findings.details().into())
            }
            _ => Self::new(code, message),
        };
        let by_the_node = matches!(rejection, Rejection::Preflight { .. } | Rejection::PreCopy(_))
            && code == Code::FailedPrecondition;
        if by_the_node {
            let rule = MetadataValue::from_static(RefusedBy::Compatibility.name());
            status.metadata_mut().insert(REFUSED_BY, rule);
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt as _, StreamExt as _};

    use super::*;
    use crate::config::ServeArgs;
    use crate::operations::Filter;

    #[test]
    fn a_long_request_is_answered_with_few_words() {
        let status = tonic::Status::from(Rejection::Invalid("ü".repeat(100_000)));
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().len() <= MESSAGE_BYTES_MAX + 3 && status.message().ends_with('…'));
        assert_eq!(bounded("short".to_owned()), "short");
    }

    #[tokio::test]
    async fn a_request_that_is_dropped_leaves_no_operation_behind() {
        let root = tempfile::tempdir().unwrap();
        let args = ServeArgs { root: Some(root.path().to_owned()), ..ServeArgs::default() };
        let app = App::new(args.validate().unwrap()).unwrap();
        let busy = app.reserve("default", "web").unwrap();
        let mut all = app.operations.watch(None).unwrap();
        let work = |_, _, _| std::future::pending();
        assert!(app.drive(Subject::example(), Some(busy), None, work).now_or_never().is_none());
        while all.next().await.unwrap().state() == api::OperationState::Running {}
        let told = app.operations.list(&Filter::default());
        assert_eq!((told.len(), told[0].state()), (1, api::OperationState::Cancelled));
        app.reserve("default", "web").unwrap();
    }
}
