//! Tasks: the processes of containers.

use std::path::Path;
use std::time::Duration;

use containerd_client::services::v1::tasks_client::TasksClient;
use containerd_client::services::v1::{
    CheckpointTaskRequest, CreateTaskRequest, DeleteTaskRequest, GetRequest, KillRequest,
    ListPidsRequest, ListTasksRequest, PauseTaskRequest, ResumeTaskRequest, StartRequest,
    WaitRequest,
};
use containerd_client::types::v1::{Process, Status};
use tonic::transport::Channel;

use super::options::{CheckpointOptions, RuncOptions, exec_name};
use super::{Mount, Namespace, RuntimeError, empty};
use crate::patience::Patience;
use crate::preflight::TcpPolicy;

/// Where the standard streams of restored containers end. Named, the shim puts pipes in between;
/// without a name the container would hold this node's own /dev/null, whose mount it does not
/// have, and CRIU could not dump it again.
const NOWHERE: &str = "/dev/null";

/// How long the runtime is asked to freeze what it could not, and how long between. On cgroup v1
/// runc tries for some tenths of a second and thaws again; on a busy node, or held back by its limit
/// of processor time, a process may not get that soon to where it freezes.
const FREEZE_LIMIT: Duration = Duration::from_secs(15);
const FREEZE_AGAIN: Duration = Duration::from_millis(100);

/// How long containerd may take to make a task of which nothing runs yet: as long as a kubelet waits for
/// its runtime. A start of a shim takes milliseconds.
const CREATE_LIMIT: Duration = Duration::from_mins(2);

/// What a task is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskStatus {
    Created,
    Running,
    /// The runtime is at it.
    Pausing,
    Paused,
    Stopped,
    Unknown,
}

/// A task as containerd sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskState {
    pub(crate) status: TaskStatus,
    pub(crate) pid: u32,
    pub(crate) exit_status: u32,
}

impl TaskStatus {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Unknown => "unknown",
        }
    }
}

impl From<&Process> for TaskState {
    fn from(process: &Process) -> Self {
        let status = match process.status() {
            Status::Created => TaskStatus::Created,
            Status::Running => TaskStatus::Running,
            Status::Stopped => TaskStatus::Stopped,
            Status::Paused => TaskStatus::Paused,
            Status::Pausing => TaskStatus::Pausing,
            Status::Unknown => TaskStatus::Unknown,
        };
        Self { status, pid: process.pid, exit_status: process.exit_status }
    }
}

impl Namespace {
    /// Returns the state of a container's task, or `None` when it has none.
    pub(crate) async fn task(&self, id: &str) -> Result<Option<TaskState>, RuntimeError> {
        let message = GetRequest { container_id: id.to_owned(), ..GetRequest::default() };
        match self.tasks().get(self.quick(message)).await {
            Ok(answer) => Ok(answer.into_inner().process.as_ref().map(TaskState::from)),
            Err(status) if status.code() == tonic::Code::NotFound => Ok(None),
            Err(status) => Err(self.error("look at the task of", id, status)),
        }
    }

    /// Returns the state of all tasks, by container.
    pub(crate) async fn all_tasks(&self) -> Result<Vec<(String, TaskState)>, RuntimeError> {
        let answer = self.tasks().list(self.quick(ListTasksRequest::default())).await;
        let answer = answer.map_err(|status| self.error("list", "tasks", status))?;
        let tasks = answer.into_inner().tasks;
        Ok(tasks.iter().map(|task| (task.id.clone(), TaskState::from(task))).collect())
    }

    /// Returns the names of the exec sessions of a container.
    pub(crate) async fn execs(&self, id: &str) -> Result<Vec<String>, RuntimeError> {
        let request = self.quick(ListPidsRequest { container_id: id.to_owned() });
        let answer = self.tasks().list_pids(request).await;
        let answer = answer.map_err(|s| self.error("list the processes of", id, s))?;
        let infos = answer.into_inner().processes.into_iter().filter_map(|process| process.info);
        Ok(infos.filter_map(|info| exec_name(&info)).collect())
    }

    /// Freezes a container. Where the runtime gave up, it is asked again for some seconds.
    pub(crate) async fn pause(&self, id: &str) -> Result<(), RuntimeError> {
        let mut patience = Patience::new(FREEZE_LIMIT, FREEZE_AGAIN);
        loop {
            let request = self.quick(PauseTaskRequest { container_id: id.to_owned() });
            let mut tasks = self.tasks();
            match self.make(async move { tasks.pause(request).await }).await {
                Ok(_) => return Ok(()),
                Err(status) if gave_up(&status) && patience.once_more().await => {
                    tracing::warn!(container = id, "was not frozen in time: once more");
                }
                Err(status) => return Err(self.error("pause container", id, status)),
            }
        }
    }

    /// Thaws a container. Waits no longer than `limit`: while a dump is under way, the shim holds
    /// the answer back.
    pub(crate) async fn resume(&self, id: &str, limit: Duration) -> Result<(), RuntimeError> {
        let mut request = self.request(ResumeTaskRequest { container_id: id.to_owned() });
        request.set_timeout(limit);
        self.tasks().resume(request).await.map_err(|s| self.error("resume container", id, s))?;
        Ok(())
    }

    /// Dumps a container into the directory `images`; CRIU's log goes to `work`. No bound: it
    /// takes as long as the memory is large, and whoever calls has a deadline.
    pub(crate) async fn dump(
        &self,
        id: &str,
        images: &Path,
        work: &Path,
        tcp: TcpPolicy,
    ) -> Result<(), RuntimeError> {
        let options = CheckpointOptions {
            exit: false,
            open_tcp: tcp == TcpPolicy::Keep,
            file_locks: true,
            image_path: images.display().to_string(),
            work_path: work.display().to_string(),
        };
        let request = self.request(CheckpointTaskRequest {
            container_id: id.to_owned(),
            parent_checkpoint: String::new(),
            options: Some(options.to_any()),
        });
        self.tasks().checkpoint(request).await.map_err(|s| self.error("dump container", id, s))?;
        Ok(())
    }

    /// Creates a task that will be restored from the directory `images` when it is started. Its
    /// standard streams are pipes that lead nowhere.
    pub(crate) async fn create_restored_task(
        &self,
        id: &str,
        rootfs: Vec<Mount>,
        images: &Path,
        work: &Path,
    ) -> Result<(), RuntimeError> {
        let options = RuncOptions {
            criu_image_path: images.display().to_string(),
            criu_work_path: work.display().to_string(),
        };
        let mut request = self.request(CreateTaskRequest {
            container_id: id.to_owned(),
            rootfs: rootfs.into_iter().map(Into::into).collect(),
            stdin: NOWHERE.to_owned(),
            stdout: NOWHERE.to_owned(),
            stderr: NOWHERE.to_owned(),
            options: Some(options.to_any()),
            ..CreateTaskRequest::default()
        });
        request.set_timeout(CREATE_LIMIT);
        let mut tasks = self.tasks();
        let created = self.make(async move { tasks.create(request).await }).await;
        created.map_err(|s| self.error("create task", id, s)).map(drop)
    }

    /// Starts a task and returns the id of its first process. Restoring happens here, so there is
    /// no bound.
    pub(crate) async fn start(&self, id: &str) -> Result<u32, RuntimeError> {
        let request =
            self.request(StartRequest { container_id: id.to_owned(), exec_id: String::new() });
        let answer = self.tasks().start(request).await;
        Ok(answer.map_err(|s| self.error("start task", id, s))?.into_inner().pid)
    }

    /// Kills every process of a container.
    pub(crate) async fn kill(&self, id: &str) -> Result<(), RuntimeError> {
        /// SIGKILL of signal(7).
        const KILL: u32 = 9;
        let message = KillRequest {
            container_id: id.to_owned(),
            exec_id: String::new(),
            signal: KILL,
            all: true,
        };
        self.tasks().kill(self.quick(message)).await.map_err(|s| self.error("kill", id, s))?;
        Ok(())
    }

    /// Waits until a task has ended and returns its exit status.
    pub(crate) async fn wait(&self, id: &str, limit: Duration) -> Result<u32, RuntimeError> {
        let message = WaitRequest { container_id: id.to_owned(), exec_id: String::new() };
        // The limit is kept here and not sent along: containerd answers a deadline of its own
        // with the code "unknown", and which of the two answers first is a matter of luck.
        let answer = tokio::time::timeout(limit, self.tasks().wait(self.request(message))).await;
        let answer =
            answer.unwrap_or_else(|_elapsed| Err(tonic::Status::deadline_exceeded("it runs on")));
        Ok(answer.map_err(|s| self.error("wait for", id, s))?.into_inner().exit_status)
    }

    /// Deletes a task that has ended.
    pub(crate) async fn delete_task(&self, id: &str) -> Result<(), RuntimeError> {
        let request = self.quick(DeleteTaskRequest { container_id: id.to_owned() });
        let answer = self.tasks().delete(request).await;
        let answer = answer.map_err(|s| self.error("delete task", id, s))?;
        if answer.into_inner().id.is_empty() { Err(empty("delete task", id)) } else { Ok(()) }
    }

    fn tasks(&self) -> TasksClient<Channel> {
        TasksClient::new(self.channel())
    }
}

/// Whether the runtime could not freeze all processes in the time it takes for it (runc,
/// `fs/freezer.go`).
fn gave_up(status: &tonic::Status) -> bool {
    status.message().contains("unable to freeze")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::time::Instant;
    use tonic::Status;

    use super::*;
    use crate::runtime::fake::Fake;

    /// As containerd passes on what runc says.
    const GAVE_UP: &str = "OCI runtime pause failed: unable to freeze: unknown";

    /// Pauses a container of a runtime that refuses the first `times` with `message`. Returns how it
    /// went, how often the runtime was asked and how long that took.
    async fn pause(times: usize, message: &'static str) -> (Option<String>, usize, Duration) {
        let asked = AtomicUsize::new(0);
        let fake = Fake::start(move |_, _| {
            let refused = asked.fetch_add(1, Ordering::Relaxed) < times;
            if refused { Err(Status::unknown(message)) } else { Ok(Vec::new()) }
        });
        let begun = Instant::now();
        let paused = fake.app().containerd.namespace("default").pause("web").await;
        let asked = fake.asked();
        assert!(asked.iter().all(|method| method == "Tasks/Pause"), "{asked:?}");
        let failure = paused.err().map(|error| kybernate_spec::chain(&error).to_string());
        (failure, asked.len(), begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_gave_up_freezing_is_asked_again() {
        let (failure, asked, _) = pause(3, GAVE_UP).await;
        assert_eq!((failure, asked), (None, 4));
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_fails_otherwise_is_not_asked_again() {
        let (failure, asked, _) = pause(1, "cannot pause a stopped container").await;
        assert!(failure.unwrap().contains("a stopped container"));
        assert_eq!(asked, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_gives_up_for_ever_is_the_reason_in_the_end() {
        let (failure, asked, took) = pause(usize::MAX, GAVE_UP).await;
        assert!(failure.unwrap().contains("unable to freeze"));
        assert!(asked > 100 && took >= FREEZE_LIMIT, "{asked} times, {took:?}");
        assert!(took < FREEZE_LIMIT + 2 * FREEZE_AGAIN, "{took:?}");
    }
}
