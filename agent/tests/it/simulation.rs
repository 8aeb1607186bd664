//! A simulated GPU: `conformance/gpu/simulation.rs`, compiled and put into a directory of its own, and
//! processes that use it.
#![expect(clippy::unwrap_used, reason = "a failed step here is a failed test")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fs_err as fs;
use kybernate_agent::config::{GpuConfig, GpuMethod, GpuStorage};
use kybernate_agent::gpu::Gpus;

pub(crate) const GIB: u64 = 1 << 30;

const NAME: &str = "libkybernate-gpu-simulation.so";

/// GPUs are told apart by the tests that run at the same time.
static COUNT: AtomicU32 = AtomicU32::new(0);

pub(crate) struct Simulation {
    directory: tempfile::TempDir,
    pub(crate) uuids: Vec<String>,
}

/// A process that uses a simulated GPU until it is dropped.
pub(crate) struct User {
    child: Child,
    directory: tempfile::TempDir,
}

impl Simulation {
    /// Makes one with GPUs of these sizes.
    pub(crate) fn with(sizes: &[u64]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::copy(compiled(), directory.path().join(NAME)).unwrap();
        let uuid = |_: &u64| {
            let (own, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            format!("GPU-{own:08x}-0000-0000-0000-0000{count:08x}")
        };
        let uuids: Vec<String> = sizes.iter().map(uuid).collect();
        let gpus = uuids.iter().zip(sizes);
        let lines: Vec<String> = gpus.map(|(uuid, size)| format!("{uuid} {size} SIM-1")).collect();
        fs::write(directory.path().join("gpus"), lines.join("\n")).unwrap();
        Self { directory, uuids }
    }

    /// Makes it a driver of CUDA 13.4.
    pub(crate) fn newer(self) -> Self {
        fs::write(self.directory.path().join("driver"), "615.10 13040").unwrap();
        self
    }

    /// Puts something into a GPU's memory for a process.
    pub(crate) fn put(&self, user: &User, uuid: &str, content: &[u8]) {
        fs::write(self.place(user, uuid), content).unwrap();
    }

    /// Returns what a process has in a GPU's memory.
    pub(crate) fn memory(&self, user: &User, uuid: &str) -> Option<Vec<u8>> {
        fs::read(self.place(user, uuid)).ok()
    }

    fn place(&self, user: &User, uuid: &str) -> PathBuf {
        self.directory.path().join(format!("memory-{uuid}-{}", user.pid()))
    }

    pub(crate) fn library(&self) -> PathBuf {
        self.directory.path().join(NAME)
    }

    pub(crate) fn config(&self) -> GpuConfig {
        GpuConfig {
            method: GpuMethod::Driver,
            storage: GpuStorage::Auto,
            driver: Some(self.library()),
            management: self.library(),
            lock_limit: Duration::from_secs(1),
            limit: Duration::from_mins(1),
        }
    }

    pub(crate) fn gpus(&self) -> Gpus {
        asking(self.config())
    }

    /// Lets calls fail from now on: `lock 600`, `restore hang`.
    pub(crate) fn fails(&self, faults: &str) {
        replace(&self.directory.path().join("faults"), faults);
    }

    /// Takes a GPU out of the machine.
    pub(crate) fn loses(&self, uuid: &str) {
        let file = self.directory.path().join("gpus");
        let text = fs::read_to_string(&file).unwrap();
        let left: Vec<&str> = text.lines().filter(|line| !line.starts_with(uuid)).collect();
        replace(&file, &left.join("\n"));
    }

    /// Returns what was called for processes, but for questions.
    pub(crate) fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.directory.path().join("calls")).unwrap_or_default();
        let acts = ["lock", "checkpoint", "restore", "unlock"];
        let call = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        text.lines().map(call).filter(|call| acts.contains(&&**call)).collect()
    }

    /// Whether a call was begun.
    pub(crate) fn was_asked(&self, call: &str) -> bool {
        self.asked(call) > 0
    }

    /// Returns how often a call was begun.
    pub(crate) fn asked(&self, call: &str) -> usize {
        let text = fs::read_to_string(self.directory.path().join("calls")).unwrap_or_default();
        text.lines().filter(|line| line.split(' ').next() == Some(call)).count()
    }
}

impl User {
    /// Starts one with memory on a GPU.
    pub(crate) fn of(uuid: &str, bytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let child = Command::new("sleep").arg("600").current_dir(directory.path()).spawn().unwrap();
        let user = Self { child, directory };
        user.becomes(&format!("0 {uuid} {bytes}"));
        user
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Puts it into a state of the driver's: number, GPUs, bytes.
    pub(crate) fn becomes(&self, state: &str) {
        // As the driver does: what it has looked at is not changed before it has changed it.
        let held = fs::File::open(self.directory.path()).unwrap();
        held.file().lock().unwrap();
        replace(&self.directory.path().join("gpu-simulation"), state);
    }

    /// Returns the GPU that it is on.
    pub(crate) fn gpu(&self) -> String {
        let text = fs::read_to_string(self.directory.path().join("gpu-simulation")).unwrap();
        text.split(' ').nth(1).unwrap().to_owned()
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.pid().to_string()]).status().unwrap();
        assert!(status.success());
    }

    pub(crate) fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // Gone already in the tests that end it.
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}

/// Puts a file in the place of one that somebody may read just now.
fn replace(path: &Path, content: &str) {
    let new = path.with_extension("new");
    fs::write(&new, content).unwrap();
    fs::rename(new, path).unwrap();
}

/// Asks through the program that was built for this test.
pub(crate) fn asking(config: GpuConfig) -> Gpus {
    Gpus::new(config, PathBuf::from(env!("CARGO_BIN_EXE_kybernate-agent")))
}

/// Waits for something; false when it does not come.
pub(crate) async fn until(is_so: impl Fn() -> bool) -> bool {
    let mut looks = tokio::time::interval(Duration::from_millis(20));
    let looked = async {
        while !is_so() {
            looks.tick().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), looked).await.is_ok()
}

/// Compiles the simulation unless that was done since it was last changed.
fn compiled() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/gpu/simulation.rs");
    let place = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let library = place.join(NAME);
    let changed = |path: &Path| fs::metadata(path).and_then(|found| found.modified());
    let part = source.with_file_name("storage.rs");
    let newest = changed(&source).unwrap().max(changed(&part).unwrap());
    if changed(&library).is_ok_and(|built| built >= newest) {
        return library;
    }
    // Under a name of its own first: others may be at it.
    let own = tempfile::tempdir_in(&place).unwrap();
    let output = own.path().join(NAME);
    let status = Command::new(Path::new(env!("CARGO")).with_file_name("rustc"))
        .args(["--crate-type", "cdylib", "--edition", "2024", "-D", "warnings"])
        .args(["-C", "strip=symbols", "-o"])
        .args([&output, &source])
        .status()
        .unwrap();
    assert!(status.success(), "the simulation does not compile");
    fs::rename(output, &library).unwrap();
    library
}
