//! The real cosign, from a node root of the testbed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Programs of a node root, run by the root's own loader: nothing in the root changes, and no
/// privileges are needed.
#[derive(Debug)]
pub(crate) struct Tools {
    root: PathBuf,
    home: TempDir,
}

impl Tools {
    /// Finds the root with the tools; says so when there is none.
    pub(crate) fn find() -> Option<Self> {
        let cache = option_env!("KYBERNATE_CACHE").unwrap_or("/var/cache/kybernate");
        let root = Path::new(cache).join("roots/forky");
        if !root.join("usr/bin/cosign").exists() {
            eprintln!("SKIPPED: there is no cosign in {}", root.display());
            return None;
        }
        Some(Self { root, home: tempfile::tempdir().unwrap() })
    }

    /// Runs a program in a directory of its own.
    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> Output {
        let libraries =
            format!("{0}/lib/x86_64-linux-gnu:{0}/usr/lib/x86_64-linux-gnu", self.root.display());
        Command::new(self.root.join("lib64/ld-linux-x86-64.so.2"))
            .args(["--library-path", &libraries])
            .arg(self.root.join("usr/bin").join(program))
            .args(arguments)
            .env("HOME", self.home.path())
            .env("COSIGN_PASSWORD", "secret")
            .current_dir(self.home.path())
            .output()
            .unwrap()
    }

    /// Runs a program that has to succeed; returns what it printed.
    pub(crate) fn succeed(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.run(program, arguments);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{program} {arguments:?}: {told}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns where programs run.
    pub(crate) fn home(&self) -> &Path {
        self.home.path()
    }
}
