//! Compiles the demo's workload into a static binary, which `image` embeds.
//!
//! It is not a member of the workspace since it must be static, while everything else is not:
//! a few files, the standard library and the compiler that builds the rest are enough.

use std::env;
use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "workload/main.rs";
const PARTS: [&str; 5] =
    [SOURCE, "workload/hold.rs", "workload/keep.rs", "workload/keep", "workload/talk.rs"];

fn main() -> Result<(), Box<dyn Error>> {
    let variable = |name: &'static str| {
        env::var_os(name).ok_or_else(|| format!("cargo sets {name} for a build script"))
    };
    let output = PathBuf::from(variable("OUT_DIR")?).join("workload");
    let status = Command::new(variable("RUSTC")?)
        .args(["--crate-name", "workload", "--edition", "2024", "-O", "-D", "warnings"])
        .args(["-C", "target-feature=+crt-static", "-C", "strip=symbols", "-C", "panic=abort"])
        .arg("--target")
        .arg(variable("TARGET")?)
        .arg("-o")
        .arg(output)
        .arg(SOURCE)
        .status()?;
    if !status.success() {
        return Err(format!("failed to compile {SOURCE}: {status}").into());
    }
    // Cargo takes this line from a build script's standard output; a print macro is a lint error.
    let mut stdout = std::io::stdout();
    std::io::Write::write_all(&mut stdout, b"cargo::rerun-if-changed=build.rs\n")?;
    for part in PARTS {
        let line = format!("cargo::rerun-if-changed={part}\n");
        std::io::Write::write_all(&mut stdout, line.as_bytes())?;
    }
    Ok(())
}
