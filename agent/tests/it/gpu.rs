//! Every step of the driver's state machine, and every failure of it that is documented or was seen,
//! through the process that asks. On a simulation: no GPU has run this.
#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kybernate_agent::config::GpuConfig;
use kybernate_agent::gpu::{Failure, GpuError, Held, Pair, Process, State};

use crate::simulation::{GIB, Simulation, User, asking};

/// Returns the states of these processes.
async fn states(simulation: &Simulation, users: &[&User]) -> Vec<State> {
    let pids: Vec<u32> = users.iter().map(|user| user.pid()).collect();
    let found = simulation.gpus().states(&pids).await.unwrap();
    assert_eq!(found.iter().map(|(pid, _)| *pid).collect::<Vec<_>>(), pids);
    found.into_iter().map(|(_, state)| state).collect()
}

/// Takes a process's GPU memory away.
async fn taken(simulation: &Simulation, user: &User) -> Held {
    let gpus = simulation.gpus();
    let held = gpus.find(&[user.pid()]).await.unwrap();
    gpus.take(&held).await.unwrap();
    assert_eq!(states(simulation, &[user]).await, [State::Checkpointed]);
    held
}

#[tokio::test]
async fn memory_goes_and_comes_back() {
    let simulation = Simulation::with(&[8 * GIB, 16 * GIB]);
    let [first, second] = &simulation.uuids[..] else { panic!("two GPUs were made") };
    let users = [User::of(first, GIB), User::of(second, 2 * GIB)];
    let users = [&users[0], &users[1]];
    let gpus = simulation.gpus();
    let own = std::process::id();
    let held = gpus.find(&[own, users[0].pid(), users[1].pid()]).await.unwrap();
    assert_eq!(held.processes, users.map(|user| Process::of(user.pid()).unwrap()));
    let used: Vec<_> = held.uses.iter().map(|one| (&*one.uuid, one.bytes)).collect();
    assert_eq!(used, [(&**first, GIB), (&**second, 2 * GIB)]);
    gpus.take(&held).await.unwrap();
    assert_eq!(states(&simulation, &users).await, [State::Checkpointed; 2]);
    gpus.bring_back(&held).await.unwrap();
    assert_eq!(states(&simulation, &users).await, [State::Running; 2]);
    let calls = simulation.calls();
    let expected =
        ["lock", "lock", "checkpoint", "checkpoint", "restore", "restore", "unlock", "unlock"];
    assert_eq!(calls, expected);
    // Once more changes nothing.
    gpus.bring_back(&held).await.unwrap();
    assert_eq!(simulation.calls().len(), expected.len());
}

#[tokio::test]
async fn who_uses_no_gpu_is_left_alone() {
    let simulation = Simulation::with(&[8 * GIB]);
    let held = simulation.gpus().find(&[std::process::id()]).await.unwrap();
    assert!(held.is_empty() && held.uses.is_empty());
    simulation.gpus().take(&held).await.unwrap();
    assert_eq!(simulation.calls(), [""; 0]);
}

#[tokio::test]
async fn work_that_does_not_end_stops_the_lock_and_nothing_is_changed() {
    let simulation = Simulation::with(&[8 * GIB]);
    let user = User::of(&simulation.uuids[0], GIB);
    let gpus = simulation.gpus();
    let held = gpus.find(&[user.pid()]).await.unwrap();
    simulation.fails("lock 600");
    let error = gpus.take(&held).await.unwrap_err().to_string();
    for told in ["cuCheckpointProcessLock", "NOT_READY (600)", &user.pid().to_string()] {
        assert!(error.contains(told), "{error}");
    }
    assert_eq!(states(&simulation, &[&user]).await, [State::Running]);
}

#[tokio::test]
async fn what_the_driver_cannot_checkpoint_is_unlocked_again() {
    let simulation = Simulation::with(&[8 * GIB]);
    let users = [User::of(&simulation.uuids[0], GIB), User::of(&simulation.uuids[0], GIB)];
    let users = [&users[0], &users[1]];
    let gpus = simulation.gpus();
    let held = gpus.find(&users.map(User::pid)).await.unwrap();
    simulation.fails("checkpoint 801");
    let error = gpus.take(&held).await.unwrap_err().to_string();
    assert!(error.contains("NOT_SUPPORTED") && error.contains("managed memory"), "{error}");
    assert_eq!(states(&simulation, &users).await, [State::Locked; 2]);
    gpus.bring_back(&held).await.unwrap();
    assert_eq!(states(&simulation, &users).await, [State::Running; 2]);
}

#[tokio::test]
async fn a_driver_that_hangs_costs_one_process_and_no_more_than_the_limit() {
    let simulation = Simulation::with(&[8 * GIB]);
    let user = User::of(&simulation.uuids[0], GIB);
    let held = simulation.gpus().find(&[user.pid()]).await.unwrap();
    for call in ["lock", "checkpoint", "restore", "unlock"] {
        simulation.fails(&format!("{call} hang"));
        let limit = Duration::from_secs(5);
        let impatient = asking(GpuConfig { limit, ..simulation.config() });
        let began = Instant::now();
        let error = match call {
            "lock" | "checkpoint" => impatient.take(&held).await,
            _ => {
                simulation.fails("");
                simulation.gpus().take(&held).await.unwrap();
                simulation.fails(&format!("{call} hang"));
                impatient.bring_back(&held).await
            }
        };
        assert!(matches!(error, Err(GpuError::Hung { .. })), "{call}: {error:?}");
        assert!(began.elapsed() < Duration::from_secs(30), "{call}");
        // Whatever it was at, it comes back.
        simulation.fails("");
        simulation.gpus().bring_back(&held).await.unwrap();
        assert_eq!(states(&simulation, &[&user]).await, [State::Running], "{call}");
    }
}

#[tokio::test]
async fn what_somebody_else_has_locked_is_theirs() {
    let simulation = Simulation::with(&[8 * GIB]);
    let user = User::of(&simulation.uuids[0], GIB);
    let held = simulation.gpus().find(&[user.pid()]).await.unwrap();
    for (number, state) in [(1, State::Locked), (2, State::Checkpointed), (3, State::Failed)] {
        user.becomes(&format!("{number} {} {GIB}", simulation.uuids[0]));
        let error = simulation.gpus().find(&[user.pid()]).await.unwrap_err();
        assert!(matches!(error, GpuError::Foreign { state: found, .. } if found == state));
        simulation.gpus().take(&held).await.unwrap_err();
    }
    assert_eq!(simulation.calls(), [""; 0]);
}

#[tokio::test]
async fn memory_moves_to_another_gpu_when_that_is_said_for_all() {
    let simulation = Simulation::with(&[8 * GIB, 8 * GIB]);
    let [old, new] = &simulation.uuids[..] else { panic!("two GPUs were made") };
    let user = User::of(old, GIB);
    let held = taken(&simulation, &user).await;
    simulation.loses(old);
    let away = Held { uses: Vec::new(), ..held.clone() };
    let error = simulation.gpus().bring_back(&away).await.unwrap_err().to_string();
    assert!(error.contains("INVALID_DEVICE (101)"), "{error}");
    let other = [Pair { from: new.clone(), to: old.clone() }];
    let error = simulation.gpus().bring_restored(&away, &other).await.unwrap_err().to_string();
    assert!(error.contains("INVALID_VALUE (1)"), "{error}");
    let pairs = [Pair { from: old.clone(), to: new.clone() }];
    simulation.gpus().bring_restored(&held, &pairs).await.unwrap();
    assert_eq!(states(&simulation, &[&user]).await, [State::Running]);
    assert_eq!(user.gpu(), *new);
    let wrong = [Pair { from: "GPU-1".to_owned(), to: "GPU-2".to_owned() }];
    user.becomes(&format!("2 {new} {GIB}"));
    let error = simulation.gpus().bring_restored(&away, &wrong).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Uuid(_))));
}

#[tokio::test]
async fn memory_waits_for_room_rather_than_be_spoilt() {
    let simulation = Simulation::with(&[8 * GIB]);
    let uuid = &simulation.uuids[0];
    let user = User::of(uuid, 6 * GIB);
    let held = taken(&simulation, &user).await;
    let mut other = User::of(uuid, 3 * GIB);
    let error = simulation.gpus().bring_back(&held).await.unwrap_err();
    let GpuError::Failed(Failure::Room { needed, free, .. }) = error else { panic!("{error}") };
    assert_eq!((needed, free), (6 * GIB, 5 * GIB));
    assert!(!simulation.was_asked("restore"));
    other.end();
    simulation.gpus().bring_back(&held).await.unwrap();
    assert_eq!(states(&simulation, &[&user]).await, [State::Running]);
}

#[tokio::test]
async fn what_the_driver_lost_is_said_and_what_has_ended_is_nobodys() {
    let simulation = Simulation::with(&[8 * GIB]);
    let uuid = &simulation.uuids[0];
    let mut user = User::of(uuid, GIB);
    let held = taken(&simulation, &user).await;
    user.becomes(&format!("3 {uuid} {GIB}"));
    let error = simulation.gpus().bring_back(&held).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Lost(pid)) if pid == user.pid()));
    // One with the same id is another one.
    user.becomes(&format!("2 {uuid} {GIB}"));
    let other = Process { born: held.processes[0].born + 1, ..held.processes[0] };
    let other = Held { processes: vec![other], ..held.clone() };
    simulation.gpus().bring_back(&other).await.unwrap();
    assert_eq!(states(&simulation, &[&user]).await, [State::Checkpointed]);
    user.end();
    simulation.gpus().bring_back(&held).await.unwrap();
}

#[tokio::test]
async fn a_stopped_process_is_not_waited_for() {
    let simulation = Simulation::with(&[8 * GIB]);
    let user = User::of(&simulation.uuids[0], GIB);
    user.signal("-STOP");
    let error = simulation.gpus().find(&[user.pid()]).await.unwrap_err();
    assert!(matches!(error, GpuError::Failed(Failure::Stopped(pid)) if pid == user.pid()));
    user.signal("-CONT");
    assert_eq!(simulation.gpus().find(&[user.pid()]).await.unwrap().processes.len(), 1);
}

#[tokio::test]
async fn a_library_that_is_not_there_is_named() {
    let simulation = Simulation::with(&[8 * GIB]);
    let nowhere = simulation.library().with_file_name("nowhere.so");
    let config = GpuConfig { driver: Some(nowhere.clone()), ..simulation.config() };
    let error = asking(config).find(&[std::process::id()]).await.unwrap_err();
    let GpuError::Failed(Failure::Library { path, .. }) = error else { panic!("{error}") };
    assert_eq!(path, nowhere);
    // One without the calls is too old.
    let libc = "/lib/x86_64-linux-gnu/libc.so.6";
    let config = GpuConfig { driver: Some(libc.into()), ..simulation.config() };
    let error = asking(config).find(&[std::process::id()]).await.unwrap_err().to_string();
    assert!(error.contains("driver 570"), "{error}");
}

#[tokio::test]
async fn the_gpus_are_described() {
    let simulation = Simulation::with(&[8 * GIB, 16 * GIB]);
    let facts = simulation.gpus().facts().await.unwrap().unwrap();
    assert_eq!((&*facts.driver, &*facts.cuda), ("580.105.08", "13.0"));
    let found: Vec<_> = facts.devices.iter().map(|gpu| (&*gpu.uuid, gpu.memory_bytes)).collect();
    let [first, second] = &simulation.uuids[..] else { panic!("two GPUs were made") };
    assert_eq!(found, [(&**first, 8 * GIB), (&**second, 16 * GIB)]);
    assert!(
        facts.devices.iter().all(|gpu| gpu.model == "SIM-1" && gpu.compute_capability == "9.0")
    );
}

/// Nobody would know of what it did after the agent's end.
#[tokio::test]
async fn the_process_that_asks_ends_with_the_agent() {
    let simulation = Simulation::with(&[8 * GIB]);
    let user = User::of(&simulation.uuids[0], GIB);
    simulation.fails("lock hang");
    let mut child = Command::new(env!("CARGO_BIN_EXE_kybernate-agent"))
        .arg("gpu")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let library = simulation.library();
    let pid = user.pid();
    let line = format!(
        r#"{{"driver":{library:?},"management":{library:?},"work":{{"take":{{"pids":[{pid}],"lock_ms":1}}}}}}"#
    );
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut looks = tokio::time::interval(Duration::from_millis(20));
    let asked = async {
        while !simulation.was_asked("lock") {
            looks.tick().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), asked).await.unwrap();
    drop(stdin);
    let mut said = String::new();
    // To its end: the other end of the pipe is closed when the process has ended.
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(!child.wait().unwrap().success() && said.is_empty());
    assert_eq!(states(&simulation, &[&user]).await, [State::Running]);
}
