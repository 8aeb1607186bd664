//! A child that has ended, and whom nobody asks how: it stays for as long as its parent does not.

use std::fs;
use std::io;
use std::process::{Command, Stdio};

use super::Failure;

pub(super) struct Ended {
    pid: u32,
    /// Whether it was seen to have ended.
    seen: bool,
}

impl Ended {
    pub(super) fn new() -> io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?);
        child.arg("no-such-command");
        child.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        #[expect(clippy::zombie_processes, reason = "that is what it is for")]
        let child = child.spawn()?;
        Ok(Self { pid: child.id(), seen: false })
    }

    pub(super) fn tick(&mut self) -> Result<(), Failure> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid));
        let is = stat.is_ok_and(|stat| stat.contains(") Z "));
        if self.seen && !is {
            return Err("the child that has ended is not there any more".into());
        }
        self.seen |= is;
        Ok(())
    }
}
