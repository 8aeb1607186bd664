//! The driver as it is, on a machine that has one with a GPU: elsewhere this says that it was skipped.
//! What came of it, and where, is in `conformance/gpu/README.md`.
#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]
#![expect(clippy::print_stdout, reason = "the figures are for a person")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fs_err as fs;
use kybernate_agent::config::{GpuConfig, GpuMethod, GpuStorage};
use kybernate_agent::gpu::{Failure, GpuError, Gpus, State};
use tokio::sync::{Mutex, MutexGuard};

use crate::simulation::{asking, until};

/// So many MiB go and come so often.
const ROUNDS: [(u32, usize); 3] = [(256, 10), (4096, 10), (16384, 3)];

/// Who holds it has the GPU: its room and its time are what the tests are about.
static ALONE: Mutex<()> = Mutex::const_new(());

/// A process with so much memory on the first GPU.
struct Counter {
    child: Child,
    directory: tempfile::TempDir,
}

impl Counter {
    async fn with(mib: u32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/gpu/counter.py");
        let output = fs::File::create(directory.path().join("output")).unwrap();
        let child = Command::new("setsid")
            .args(["python3".as_ref(), program.as_os_str(), mib.to_string().as_ref()])
            .arg(directory.path().join("log"))
            .stdin(Stdio::null())
            .stdout(output.file().try_clone().unwrap())
            .stderr(output.into_file())
            .spawn()
            .unwrap();
        let counter = Self { child, directory };
        assert!(until(|| counter.steps() > 3).await, "it does not count: {}", counter.output());
        counter
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn place(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn output(&self) -> String {
        fs::read_to_string(self.place("output")).unwrap_or_default()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.place("log")).unwrap_or_default()
    }

    /// Returns how far it is; what it finds is right, or this fails.
    fn steps(&self) -> u32 {
        let log = self.log();
        assert!(!log.contains("False"), "its memory has changed: {log}");
        let last = log.lines().next_back().unwrap_or_default();
        last.split(' ').next().unwrap().parse().unwrap_or(0)
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.pid().to_string()]).status();
        assert!(status.unwrap().success());
    }

    /// Waits until it goes on, and all of its memory is what it was.
    async fn goes_on(&self) {
        let (steps, looks) = (self.steps(), self.log().matches("all True").count());
        self.signal("-USR1");
        let looked = || self.log().matches("all True").count() > looks && self.steps() > steps;
        assert!(until(looked).await, "it does not go on: {} {}", self.log(), self.output());
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // What was restored is nobody's child here, and what was not has left its id to others.
        let words = fs::read_to_string(format!("/proc/{}/cmdline", self.pid())).unwrap_or_default();
        if words.contains(&*self.directory.path().to_string_lossy()) {
            self.signal("-KILL");
        }
        self.child.wait().map(drop).unwrap_or_default();
    }
}

/// Returns who asks the driver of this machine, and what keeps the GPU from the other tests; `None` where
/// there is no driver.
async fn gpus() -> Option<(Gpus, MutexGuard<'static, ()>)> {
    if !Path::new("/proc/driver/nvidia/version").exists() {
        println!("SKIPPED: this machine has no NVIDIA driver");
        return None;
    }
    let gpus = asking(GpuConfig {
        method: GpuMethod::Driver,
        storage: GpuStorage::Pages,
        driver: None,
        management: "libnvidia-ml.so.1".into(),
        lock_limit: Duration::from_secs(10),
        limit: Duration::from_mins(2),
    });
    Some((gpus, ALONE.lock().await))
}

fn milliseconds(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let told = |time: Option<&Duration>| time.map(Duration::as_millis).unwrap_or_default();
    let middle = told(times.get(times.len() / 2));
    format!("{middle} ({}–{})", told(times.first()), told(times.last()))
}

#[tokio::test]
async fn memory_goes_from_a_gpu_and_comes_back() {
    let Some((gpus, _alone)) = gpus().await else { return };
    println!("{:?}", gpus.facts().await);
    println!("custom storage: {:?}", gpus.has_storage().await);
    for (mib, rounds) in ROUNDS {
        let counter = Counter::with(mib).await;
        let (mut away, mut back) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let held = gpus.find(&[counter.pid(), std::process::id()]).await.unwrap();
            assert_eq!(held.processes.len(), 1);
            assert!(held.uses.iter().map(|one| one.bytes).sum::<u64>() >= u64::from(mib) << 20);
            let began = Instant::now();
            gpus.take(&held).await.unwrap();
            away.push(began.elapsed());
            let states = gpus.states(&[counter.pid()]).await.unwrap();
            assert_eq!(states, [(counter.pid(), State::Checkpointed)]);
            let began = Instant::now();
            gpus.bring_back(&held).await.unwrap();
            back.push(began.elapsed());
            counter.goes_on().await;
        }
        let (away, back) = (milliseconds(&mut away), milliseconds(&mut back));
        println!("{mib} MiB: away {away} ms, back {back} ms, {rounds} rounds");
    }
}

#[tokio::test]
async fn what_stands_in_the_way_is_told_and_passes() {
    let Some((gpus, _alone)) = gpus().await else { return };
    let counter = Counter::with(4096).await;
    counter.signal("-STOP");
    let error = gpus.find(&[counter.pid()]).await.unwrap_err();
    println!("stopped: {error}");
    assert!(matches!(error, GpuError::Failed(Failure::Stopped(pid)) if pid == counter.pid()));
    counter.signal("-CONT");
    counter.goes_on().await;

    let held = gpus.find(&[counter.pid()]).await.unwrap();
    counter.signal("-USR2");
    assert!(until(|| counter.log().contains("works")).await);
    // What the GPU has been given it does, and the driver waits for it; nothing more is taken on.
    let began = Instant::now();
    gpus.take(&held).await.unwrap();
    println!("it works: away after {} ms", began.elapsed().as_millis());
    gpus.bring_back(&held).await.unwrap();
    counter.goes_on().await;

    let held = gpus.find(&[counter.pid()]).await.unwrap();
    gpus.take(&held).await.unwrap();
    let facts = gpus.facts().await.unwrap().unwrap();
    let most = u32::try_from(facts.devices[0].memory_bytes >> 20).unwrap();
    let other = Counter::with(most - 3072).await;
    let error = gpus.bring_back(&held).await.unwrap_err();
    println!("no room: {error}");
    assert!(matches!(error, GpuError::Failed(Failure::Room { .. })));
    let steps = other.steps();
    assert!(
        until(|| other.steps() > steps).await,
        "the other one was disturbed: {}",
        other.output()
    );
    drop(other);
    gpus.bring_back(&held).await.unwrap();
    counter.goes_on().await;
}

#[tokio::test]
async fn memory_comes_back_when_who_asks_is_killed() {
    let Some((gpus, _alone)) = gpus().await else { return };
    let counter = Counter::with(8192).await;
    let states = async || gpus.states(&[counter.pid()]).await.unwrap();
    for milliseconds in [50, 300, 700, 1500, 3000, 4000] {
        let held = gpus.find(&[counter.pid()]).await.unwrap();
        let limit = Duration::from_millis(milliseconds);
        // Nobody waits for the process that asks any more: it is killed.
        let taken = tokio::time::timeout(limit, gpus.take(&held)).await;
        println!("killed after {milliseconds} ms: {taken:?}, {:?}", states().await);
        gpus.bring_back(&held).await.unwrap();
        counter.goes_on().await;
        gpus.take(&held).await.unwrap();
        let brought = tokio::time::timeout(limit / 2, gpus.bring_back(&held)).await;
        println!("killed on the way back: {brought:?}, {:?}", states().await);
        gpus.bring_back(&held).await.unwrap();
        assert_eq!(states().await, [(counter.pid(), State::Running)]);
        counter.goes_on().await;
    }
}

#[tokio::test]
async fn criu_dumps_and_restores_what_was_on_a_gpu() {
    let Some((gpus, _alone)) = gpus().await else { return };
    if Command::new("criu").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: this machine has no CRIU");
        return;
    }
    let mut counter = Counter::with(1024).await;
    let pid = counter.pid();
    let held = gpus.find(&[pid]).await.unwrap();
    gpus.take(&held).await.unwrap();
    let before = counter.steps();
    let images = counter.place("images");
    fs::create_dir(&images).unwrap();
    let criu = |words: &[&str]| {
        let began = Instant::now();
        let output =
            Command::new("criu").args(words).args(["-v4", "-D"]).arg(&images).output().unwrap();
        println!("criu {}: {} ms", words[0], began.elapsed().as_millis());
        let log = fs::read_to_string(images.join("criu.log")).unwrap_or_default();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?}: {said}\n{log}");
    };
    criu(&["dump", "-o", "criu.log", "-t", &pid.to_string()]);
    counter.child.wait().unwrap();
    criu(&["restore", "-d", "-o", "criu.log"]);
    let held = gpus.find_restored(&[pid]).await.unwrap();
    assert_eq!(held.processes.len(), 1);
    let began = Instant::now();
    gpus.bring_restored(&held, &[]).await.unwrap();
    println!("back on the GPU: {} ms", began.elapsed().as_millis());
    counter.goes_on().await;
    assert!(counter.steps() > before);
}
