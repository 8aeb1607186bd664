//! GPU memory that goes to files and comes back (custom storage), through the process that asks. On a
//! simulation, which holds that memory byte by byte: no GPU has run this.
#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::io::BufRead as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use fs_err as fs;
use kybernate_agent::config::GpuConfig;
use kybernate_agent::gpu::{Failure, GpuError, Gpus, Held, Pair, State};
use tempfile::TempDir;

use crate::simulation::{GIB, Simulation, User, asking, until};

/// More than both buffers hold, and no multiple of anything.
const LARGE: usize = (100 << 20) + 12_345;

const LIMIT: Duration = Duration::from_secs(30);

/// What a GPU's memory holds, another for each seed. Some pages are zero.
fn content(seed: u64, bytes: usize) -> Vec<u8> {
    let mut number = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::repeat_with(|| {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        number.to_le_bytes()
    });
    let mut content: Vec<u8> = words.take(bytes.div_ceil(8)).flatten().collect();
    content.truncate(bytes);
    for page in content.chunks_mut(4096).skip(3).step_by(7) {
        page.fill(0);
    }
    content
}

fn file(user: &User, uuid: &str) -> String {
    let digits = uuid.trim_start_matches("GPU-").replace('-', "");
    format!("device-{:x}-{digits}.img", user.pid())
}

/// A driver of CUDA 13.4, a process with memory on its GPU, and where that goes.
struct Scene {
    simulation: Simulation,
    user: User,
    memory: Vec<u8>,
    directory: TempDir,
}

impl Scene {
    fn with(bytes: usize) -> Self {
        let simulation = Simulation::with(&[8 * GIB]).newer();
        let uuid = simulation.uuids.first().unwrap();
        let user = User::of(uuid, u64::try_from(bytes).unwrap());
        let memory = content(1, bytes);
        simulation.put(&user, uuid, &memory);
        Self { simulation, user, memory, directory: tempfile::tempdir().unwrap() }
    }

    fn uuid(&self) -> &str {
        self.simulation.uuids.first().unwrap()
    }

    /// Asks without much patience.
    fn gpus(&self) -> Gpus {
        self.simulation.gpus().impatient(Duration::from_millis(200))
    }

    async fn held(&self) -> Held {
        let held = self.simulation.gpus().find(&[self.user.pid()]).await.unwrap();
        Held { storage: Some(self.directory.path().to_owned()), ..held }
    }

    async fn state(&self) -> State {
        let states = self.simulation.gpus().states(&[self.user.pid()]).await.unwrap();
        states.first().unwrap().1
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join(file(&self.user, self.uuid()))
    }

    /// Whether it runs with the memory that it had.
    async fn is_whole(&self) -> bool {
        self.state().await == State::Running
            && self.simulation.memory(&self.user, self.uuid()).as_ref() == Some(&self.memory)
    }
}

#[tokio::test]
async fn memory_goes_into_files_and_comes_back() {
    let scene = Scene::with(LARGE);
    let gpus = scene.simulation.gpus();
    assert!(gpus.has_storage().await.unwrap());
    let held = scene.held().await;
    gpus.take(&held).await.unwrap();
    assert_eq!(scene.state().await, State::Checkpointed);
    assert_eq!(scene.simulation.memory(&scene.user, scene.uuid()), None, "it is still there");
    assert!(fs::read(scene.file()).unwrap() == scene.memory, "something else was written");
    let entries: Vec<_> = fs::read_dir(scene.directory.path()).unwrap().collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert_eq!(fs::metadata(scene.file()).unwrap().mode() & 0o7777, 0o600);
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
    // Once more changes nothing.
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
}

#[tokio::test]
async fn an_older_driver_has_no_custom_storage_and_says_so() {
    let simulation = Simulation::with(&[8 * GIB]);
    let user = User::of(&simulation.uuids[0], GIB);
    simulation.put(&user, &simulation.uuids[0], b"memory");
    let gpus = simulation.gpus();
    assert!(!gpus.has_storage().await.unwrap());
    let held = gpus.find(&[user.pid()]).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let aside =
        Held { storage: Some(directory.path().to_owned()), uses: Vec::new(), ..held.clone() };
    let error = gpus.take(&aside).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::NoStorage)), "{error}");
    assert_eq!(simulation.calls(), [""; 0]);
    // What its memory is in instead comes back as well.
    gpus.take(&held).await.unwrap();
    assert_eq!(simulation.memory(&user, &simulation.uuids[0]), None);
    gpus.bring_back(&held).await.unwrap();
    assert_eq!(simulation.memory(&user, &simulation.uuids[0]).unwrap(), b"memory");
}

#[tokio::test]
async fn each_process_and_gpu_has_a_file_of_its_own() {
    let simulation = Simulation::with(&[8 * GIB, 8 * GIB, 8 * GIB]).newer();
    let uuids = &simulation.uuids;
    let both = User::of(&format!("{},{}", uuids[0], uuids[1]), 64 << 20);
    let other = User::of(&uuids[1], 1 << 20);
    let memory = [content(1, 40 << 20), content(2, 5000), content(3, 1)];
    simulation.put(&both, &uuids[0], &memory[0]);
    simulation.put(&both, &uuids[1], &memory[1]);
    simulation.put(&other, &uuids[1], &memory[2]);
    let gpus = simulation.gpus();
    let directory = tempfile::tempdir().unwrap();
    let held = gpus.find(&[both.pid(), other.pid()]).await.unwrap();
    let held = Held { storage: Some(directory.path().to_owned()), uses: Vec::new(), ..held };
    gpus.take(&held).await.unwrap();
    let length = |name: String| fs::metadata(directory.path().join(name)).unwrap().len();
    assert_eq!(length(file(&both, &uuids[0])), 40 << 20);
    assert_eq!(length(file(&both, &uuids[1])), 5000);
    assert_eq!(length(file(&other, &uuids[1])), 1);
    // Onto other GPUs: the first becomes the third, the second the first.
    let pair = |from: usize, to: usize| Pair { from: uuids[from].clone(), to: uuids[to].clone() };
    gpus.bring_restored(&held, &[pair(0, 2), pair(1, 0)]).await.unwrap();
    assert!(simulation.memory(&both, &uuids[2]).unwrap() == memory[0]);
    assert!(simulation.memory(&both, &uuids[0]).unwrap() == memory[1]);
    assert!(simulation.memory(&other, &uuids[0]).unwrap() == memory[2]);
    assert_eq!(
        (simulation.memory(&both, &uuids[1]), simulation.memory(&other, &uuids[1])),
        (None, None)
    );
}

#[tokio::test]
async fn a_gpu_without_memory_needs_no_file() {
    let scene = Scene::with(0);
    let held = Held { uses: Vec::new(), ..scene.held().await };
    let gpus = scene.simulation.gpus();
    gpus.take(&held).await.unwrap();
    assert_eq!(scene.state().await, State::Checkpointed);
    assert!(!scene.file().exists());
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
}

#[tokio::test]
async fn what_has_no_room_is_not_begun() {
    let scene = Scene::with(1 << 20);
    let mut held = scene.held().await;
    held.uses[0].bytes = 1 << 60;
    let error = scene.simulation.gpus().take(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Storage { .. })), "{error}");
    assert!(!scene.simulation.was_asked("lock"));
    assert!(scene.is_whole().await);
}

#[tokio::test]
async fn before_the_driver_has_begun_every_failure_can_be_taken_back() {
    let scene = Scene::with(1 << 20);
    let (held, gpus) = (scene.held().await, scene.simulation.gpus());
    for fault in ["lock 600", "checkpoint 801", "init 100"] {
        scene.simulation.fails(fault);
        assert!(matches!(gpus.take(&held).await, Err(GpuError::Failed(Failure::Call { .. }))));
        scene.simulation.fails("");
        gpus.bring_back(&held).await.unwrap();
        assert!(scene.is_whole().await, "{fault}");
    }
    gpus.take(&held).await.unwrap();
    for fault in ["init 100", "restore 2", "unlock 401"] {
        scene.simulation.fails(fault);
        gpus.bring_back(&held).await.unwrap_err();
        scene.simulation.fails("");
    }
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
}

/// Its files would be removed, and it would stay away.
#[tokio::test]
async fn a_question_that_fails_is_not_taken_for_the_end_of_a_process() {
    let scene = Scene::with(4096);
    let (held, gpus) = (scene.held().await, scene.gpus());
    gpus.take(&held).await.unwrap();
    for fault in ["state 1", "state 304", "state 801", "state 999"] {
        scene.simulation.fails(fault);
        let error = gpus.bring_back(&held).await.unwrap_err();
        assert!(matches!(error, GpuError::Failed(Failure::Call { .. })), "{fault}: {error}");
    }
    scene.simulation.fails("");
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
}

/// The driver has no call that gives up.
#[tokio::test]
async fn after_it_has_begun_what_fails_is_lost_and_said_to_be() {
    for fault in ["copy-out 2", "complete 401"] {
        let scene = Scene::with(1 << 20);
        let (held, gpus) = (scene.held().await, scene.gpus());
        scene.simulation.fails(fault);
        let error = gpus.take(&held).await.unwrap_err();
        let is_cut = matches!(&error, GpuError::Failed(Failure::Cut { pid, .. }) if *pid == scene.user.pid());
        assert!(is_cut, "{fault}: {error}");
        scene.simulation.fails("");
        assert_eq!(scene.state().await, State::Checkpointing, "{fault}");
        let error = gpus.bring_back(&held).await.unwrap_err();
        assert!(matches!(error, GpuError::Failed(Failure::Lost(_))), "{fault}: {error}");
    }
    for fault in ["copy-in 2", "complete 401"] {
        let scene = Scene::with(1 << 20);
        let (held, gpus) = (scene.held().await, scene.gpus());
        gpus.take(&held).await.unwrap();
        scene.simulation.fails(fault);
        let error = gpus.bring_back(&held).await.unwrap_err();
        assert!(matches!(error, GpuError::Failed(Failure::Cut { .. })), "{fault}: {error}");
        scene.simulation.fails("");
        assert_eq!(scene.state().await, State::Restoring, "{fault}");
        let error = gpus.bring_back(&held).await.unwrap_err();
        assert!(matches!(error, GpuError::Failed(Failure::Lost(_))), "{fault}: {error}");
    }
}

/// A file system of so many MiB, in a mount namespace of its own.
struct Small(std::process::Child);

impl Small {
    fn of(mebibytes: u32) -> Self {
        let script = format!(
            "mount -t tmpfs -o size={mebibytes}m none /mnt && echo ready && exec sleep 600"
        );
        let mut child = Command::new("unshare")
            .args(["--mount", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/root/mnt", self.0.id()).into()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        self.0.kill().unwrap_or_default();
        self.0.wait().map(drop).unwrap_or_default();
    }
}

/// There was more than anybody had counted, as where nothing can be reserved: all of it goes back.
#[tokio::test]
async fn files_that_cannot_take_it_leave_the_process_with_its_memory() {
    let mut scene = Scene::with(1 << 20);
    let (mut held, gpus) = (scene.held().await, scene.gpus());
    scene.memory = content(2, (70 << 20) + 123);
    scene.simulation.put(&scene.user, scene.uuid(), &scene.memory);
    let small = Small::of(40);
    held.storage = Some(small.path());
    let error = gpus.take(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Storage { .. })), "{error}");
    let error = error.to_string();
    assert!(error.contains("No space left") && error.contains("is back on its GPUs"), "{error}");
    assert_eq!(scene.state().await, State::Locked);
    assert_eq!(fs::read_dir(small.path()).unwrap().count(), 0, "something is left");
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
    // Something is in its place, which leads elsewhere.
    held.storage = Some(scene.directory.path().to_owned());
    symlink("/dev/null", scene.file()).unwrap();
    let error = gpus.take(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Storage { .. })), "{error}");
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
    // It breaks off on its way back, too.
    held.storage = Some(small.path());
    scene.simulation.fails("copy-in 2");
    let error = gpus.take(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Cut { .. })), "{error}");
}

#[tokio::test]
async fn files_that_are_not_what_was_taken_are_not_brought() {
    let scene = Scene::with(1 << 20);
    let (held, gpus) = (scene.held().await, scene.simulation.gpus());
    gpus.take(&held).await.unwrap();
    let elsewhere = scene.directory.path().join("elsewhere");
    fs::rename(scene.file(), &elsewhere).unwrap();
    symlink(&elsewhere, scene.file()).unwrap();
    let error = gpus.bring_back(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Storage { .. })), "{error}");
    assert!(!scene.simulation.was_asked("restore"), "it was begun");
    fs::rename(&elsewhere, scene.file()).unwrap();
    fs::OpenOptions::new().write(true).open(scene.file()).unwrap().set_len(4096).unwrap();
    let error = gpus.bring_back(&held).await.unwrap_err().to_string();
    assert!(error.contains("wants 1048576 bytes, and there are 4096"), "{error}");
}

#[tokio::test]
async fn what_is_in_files_is_not_looked_for_in_processes_and_the_other_way() {
    let scene = Scene::with(4096);
    let (held, gpus) = (scene.held().await, scene.simulation.gpus());
    let pages = Held { storage: None, ..held.clone() };
    for (taken, brought, told) in
        [(&held, &pages, "ILLEGAL_STATE"), (&pages, &held, "there is no file")]
    {
        gpus.take(taken).await.unwrap();
        let error = gpus.bring_back(brought).await.unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
        gpus.bring_back(taken).await.unwrap();
        assert!(scene.is_whole().await);
        fs::remove_file(scene.file()).unwrap_or_default();
    }
}

#[tokio::test]
async fn files_that_are_gone_take_the_memory_with_them() {
    let scene = Scene::with(4096);
    let (mut held, gpus) = (scene.held().await, scene.simulation.gpus());
    gpus.take(&held).await.unwrap();
    held.storage = Some(scene.directory.path().join("gone"));
    let error = gpus.bring_back(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Lost(_))), "{error}");
    held.storage = Some(scene.directory.path().to_owned());
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
}

/// Whoever waits goes away in the middle: what was begun is brought to its end, and found so.
#[tokio::test]
async fn a_move_that_nobody_waits_for_is_brought_to_its_end() {
    let scene = Scene::with(1 << 20);
    let (held, gpus) = (scene.held().await, scene.simulation.gpus());
    for call in ["copy-out", "copy-in"] {
        scene.simulation.fails(&format!("{call} wait"));
        {
            let moved = async {
                if call == "copy-out" {
                    gpus.take(&held).await
                } else {
                    gpus.bring_back(&held).await
                }
            };
            tokio::select! {
                moved = moved => panic!("{call}: {moved:?}"),
                begun = until(|| scene.simulation.was_asked(call)) => assert!(begun, "{call}"),
            }
        }
        scene.simulation.fails("");
        if call == "copy-out" {
            // Who brings it back waits for its end; here it is looked at first.
            let mut looks = tokio::time::interval(Duration::from_millis(20));
            let ended = async {
                while scene.state().await != State::Checkpointed {
                    looks.tick().await;
                }
            };
            tokio::time::timeout(LIMIT, ended).await.unwrap();
            assert!(fs::read(scene.file()).unwrap() == scene.memory);
        }
    }
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
}

/// What is staged once is read for all that are restored from it.
#[tokio::test]
async fn restores_from_one_dump_do_not_wait_for_each_other_and_the_source_waits_for_all() {
    let (first, second) = (Scene::with(1 << 20), Scene::with(1 << 20));
    let directory = first.directory.path();
    let mut held = [first.held().await, second.held().await];
    for (scene, held) in [&first, &second].into_iter().zip(&mut held) {
        held.storage = Some(directory.to_owned());
        scene.gpus().take(held).await.unwrap();
    }
    let [of_first, of_second] = &held;
    first.simulation.fails("copy-in wait");
    let (gpus, slow) = (second.simulation.gpus(), first.simulation.gpus());
    let mut slow = Box::pin(slow.bring_restored(of_first, &[]));
    tokio::select! {
        brought = &mut slow => panic!("{brought:?}"),
        begun = until(|| first.simulation.was_asked("copy-in")) => assert!(begun),
    }
    // One whose source it is waits: somebody may be at just that.
    let limit = Duration::from_secs(2);
    let waits = asking(GpuConfig { limit, ..second.simulation.config() });
    assert!(matches!(waits.bring_back(of_second).await, Err(GpuError::Hung { .. })));
    assert!(!second.simulation.was_asked("restore"));
    let brought = tokio::time::timeout(LIMIT, gpus.bring_restored(of_second, &[])).await;
    assert!(matches!(brought, Ok(Ok(()))), "{brought:?}");
    assert!(second.is_whole().await);
    first.simulation.fails("");
    slow.await.unwrap();
    assert!(first.is_whole().await);
}

#[tokio::test]
async fn a_driver_that_hangs_in_the_middle_is_given_up_and_what_it_had_is_lost() {
    let scene = Scene::with(1 << 20);
    let held = scene.held().await;
    scene.simulation.fails("complete hang");
    let limit = Duration::from_secs(4);
    let patience = Duration::from_millis(500);
    let impatient = asking(GpuConfig { limit, ..scene.simulation.config() }).impatient(patience);
    let error = impatient.take(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Hung { .. }), "{error}");
    // The process that asked ends when it has had no more patience, and somebody else may look.
    let error = impatient.bring_back(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Lost(_))), "{error}");
    // Before the driver has begun, nothing is lost.
    let scene = Scene::with(1 << 20);
    let held = scene.held().await;
    scene.simulation.fails("checkpoint hang");
    let impatient = asking(GpuConfig { limit, ..scene.simulation.config() }).impatient(patience);
    assert!(matches!(impatient.take(&held).await, Err(GpuError::Hung { .. })));
    scene.simulation.fails("");
    impatient.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
}

/// What a process has got since it was looked at has room as well, or nothing is begun.
#[tokio::test]
async fn room_is_taken_for_what_there_is_when_nobody_gets_more() {
    let scene = Scene::with(1 << 20);
    let (held, gpus) = (scene.held().await, scene.gpus());
    scene.user.becomes(&format!("0 {} {}", scene.uuid(), 1_u64 << 60));
    let error = gpus.take(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Storage { .. })), "{error}");
    assert!(scene.simulation.was_asked("lock") && !scene.simulation.was_asked("checkpoint"));
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
    // Nobody says how much it is: no more than is used of the GPU.
    scene.user.becomes(&format!("0 {} {}", scene.uuid(), 1_u64 << 20));
    scene.simulation.fails("nvml 9");
    gpus.take(&held).await.unwrap();
    scene.simulation.fails("");
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
}

/// What can still be brought back is not given up for what is lost.
#[tokio::test]
async fn one_that_is_lost_does_not_take_the_files_of_the_others_with_it() {
    let scene = Scene::with(4096);
    let gpus = scene.gpus();
    let uuid = scene.uuid().to_owned();
    let other = User::of(&uuid, 4096);
    scene.simulation.put(&other, &uuid, b"memory");
    let held = scene.simulation.gpus().find(&[other.pid(), scene.user.pid()]).await.unwrap();
    let held = Held { storage: Some(scene.directory.path().to_owned()), ..held };
    gpus.take(&held).await.unwrap();
    other.becomes(&format!("3 {uuid} 4096"));
    scene.simulation.fails("restore 2");
    let error = gpus.bring_back(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Call { .. })), "{error}");
    // Somebody else has the room: it is not begun, though nothing of the other comes back.
    scene.simulation.fails("");
    let full = User::of(&uuid, 8 * GIB);
    let error = gpus.bring_back(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Room { needed: 4096, .. })), "{error}");
    drop(full);
    let error = gpus.bring_back(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Lost(pid)) if pid == other.pid()), "{error}");
    assert!(scene.is_whole().await);
}

#[tokio::test]
async fn a_directory_without_files_is_not_read_and_one_that_is_gone_unlocks_nobody() {
    let scene = Scene::with(4096);
    let (mut held, gpus) = (scene.held().await, scene.gpus());
    gpus.take(&held).await.unwrap();
    let elsewhere = scene.directory.path().join("elsewhere");
    fs::rename(scene.file(), &elsewhere).unwrap();
    let error = gpus.bring_back(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Storage { .. })), "{error}");
    assert!(!scene.simulation.was_asked("restore"));
    fs::rename(&elsewhere, scene.file()).unwrap();
    gpus.bring_back(&held).await.unwrap();
    assert!(scene.is_whole().await);
    // It may be locked for the next one.
    scene.user.becomes(&format!("1 {} 4096", scene.uuid()));
    held.storage = Some(scene.directory.path().join("gone"));
    let error = gpus.bring_back(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Foreign { .. })), "{error}");
    assert_eq!(scene.state().await, State::Locked);
}

/// The driver may come to an end of a move by itself.
#[tokio::test]
async fn what_is_between_two_states_is_looked_at_again_and_unlocked() {
    let scene = Scene::with(4096);
    let held = scene.held().await;
    scene.user.becomes(&format!("4 {} 4096", scene.uuid()));
    let gpus = scene.simulation.gpus();
    let looks = || scene.simulation.asked("state");
    let before = looks();
    let locked = async {
        assert!(until(|| looks() > before).await);
        scene.user.becomes(&format!("1 {} 4096", scene.uuid()));
    };
    let (brought, ()) = tokio::join!(gpus.bring_back(&held), locked);
    brought.unwrap();
    assert!(scene.is_whole().await);
}
