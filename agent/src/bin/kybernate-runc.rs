//! `kybernate-runc`: runc's command line, for containerd.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    kybernate_agent::wrapper::run(&words)
}
