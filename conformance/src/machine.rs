//! A second machine, emulated, for what the kernel of this one lacks.
//!
//! QEMU emulates it in software: slow, but wherever programs run. Its kernel is Debian's own, as on
//! users' nodes: it tracks written pages (`CONFIG_MEM_SOFT_DIRTY`), has cgroups of version 2 alone,
//! `AppArmor` and every capability. It sees the files of this machine at the same places, and what
//! it writes is gone with it. So whatever is built here runs there.
//!
//! Nothing of it stays: QEMU is killed with the thread that started it, and what goes in and comes
//! out is in files without names, which QEMU inherits.

mod made;

use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

use rustix::fs::{MemfdFlags, memfd_create};

use self::made::Made;
pub use self::made::MadeError;
use crate::root::cache;

const QEMU: &str = "qemu-system-x86_64";
const SECOND: &str = include_str!("machine/second.sh");
/// What the kernel is told. It ends instead of waiting for somebody who looks, and spares itself
/// what an emulated processor is slow at: wiping memory, mitigations, a clock that traps.
const KERNEL: &str = "console=ttyS0 quiet panic=-1 oops=panic mitigations=off nowatchdog \
    tsc=reliable init_on_alloc=0 rcupdate.rcu_expedited=1";
/// Without AVX: wider registers are more for CRIU to save, and slower to emulate.
const PROCESSOR: &str = "Nehalem";
/// What a kernel says first of all when it gives up.
const GAVE_UP: &str = "Kernel panic";
/// How much of what the kernel said goes into an error.
const CONSOLE_LINES: usize = 80;
/// What the machine's command has in its environment, and nothing else has: its programs are built,
/// and its node roots made.
pub const INSIDE: &str = "KYBERNATE_MACHINE";

/// What runs in the machine.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Memory of the machine, in MiB; it holds the files that are written there, too.
    #[arg(long, value_name = "MIB", default_value_t = 4096,
        value_parser = clap::value_parser!(u32).range(512..))]
    memory: u32,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    words: Vec<OsString>,
}

/// Why it is not known how the command ended.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// QEMU or the machine's kernel is missing.
    #[error(transparent)]
    Made(#[from] MadeError),
    /// QEMU could not be started, or not be listened to.
    #[error("failed to run {QEMU}")]
    Io(#[from] io::Error),
    /// The kernel gave up, or QEMU was killed.
    #[error("the machine ended before its command ({status}); its console said last:\n{console}")]
    Ended {
        /// How QEMU ended.
        status: ExitStatus,
        /// What the kernel said last.
        console: String,
    },
}

/// Runs a command in the machine, in the directory of this process, and returns its exit code. What
/// the command says is said here. `say` hears what takes long.
pub fn run(args: &Args, say: &dyn Fn(&str)) -> Result<ExitCode, MachineError> {
    let made = made::ensure(say)?;
    let (mut console, mut status) = (Unnamed::of(b"")?, Unnamed::of(b"")?);
    let cache = quoted(cache().as_os_str());
    let second = Unnamed::of(&[b"cache=", &*cache, b"\n", SECOND.as_bytes()].concat())?;
    let command = Unnamed::of(&script(&args.words)?)?;
    let mut qemu = qemu(&made, args.memory);
    qemu.arg("-serial").arg(format!("file:{}", console.path()));
    let (out, err) = ("/proc/self/fd/1".to_owned(), "/proc/self/fd/2".to_owned());
    for (name, path) in [("out", out), ("err", err), ("status", status.path())] {
        qemu.args(["-chardev", &format!("file,id={name},path={path}")]);
        qemu.args(["-device", &format!("virtserialport,chardev={name},name={name}")]);
    }
    for (name, file) in [("second", &second), ("command", &command)] {
        let path = file.path();
        qemu.args(["-fw_cfg", &format!("name=opt/kybernate/{name},file={path}")]);
    }
    qemu.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let ended = pass_on(qemu.spawn()?)?;
    if let Ok(code) = status.read()?.trim().parse::<u8>() {
        return Ok(ExitCode::from(code));
    }
    Err(MachineError::Ended { status: ended, console: last_words(&console.read()?) })
}

/// Returns what a kernel said when it gave up, or the last lines of what it said.
fn last_words(console: &str) -> String {
    let lines: Vec<&str> = console.trim().lines().collect();
    let gave_up = lines.iter().rposition(|line| line.contains(GAVE_UP));
    // What went wrong is told before that.
    let from = gave_up.unwrap_or(lines.len()).saturating_sub(CONSOLE_LINES);
    lines.iter().skip(from).take(2 * CONSOLE_LINES).copied().collect::<Vec<_>>().join("\n")
}

/// Returns QEMU's command line without what the command is told and says.
fn qemu(made: &Made, memory: u32) -> Command {
    let mut qemu = Command::new("setpriv");
    qemu.args(["--pdeathsig", "KILL", "--", QEMU, "-accel", "tcg", "-cpu", PROCESSOR]);
    // One processor: with two, a kernel gave up at its start now and then, one time in fifty or so
    // (exception in an interrupt, while QEMU's threads emulate both at once).
    qemu.args(["-smp", "1", "-m", &memory.to_string()]);
    qemu.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"]);
    qemu.arg("-kernel").arg(made.kernel()).arg("-initrd").arg(made.first());
    qemu.args(["-append", KERNEL]);
    let around = "local,id=around,path=/,security_model=none,readonly=on,multidevs=remap";
    qemu.args(["-fsdev", around, "-device", "virtio-9p-pci,fsdev=around,mount_tag=around"]);
    qemu.args(["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]);
    qemu
}

/// Says what a program says, while it runs.
fn pass_on(mut child: Child) -> io::Result<ExitStatus> {
    let (out, err) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        // Whoever reads us may stop to; the command goes on, and the rest is lost.
        scope.spawn(|| out.map(|mut out| io::copy(&mut out, &mut io::stdout())));
        scope.spawn(|| err.map(|mut err| io::copy(&mut err, &mut io::stderr())));
        child.wait()
    })
}

/// Returns a shell script that becomes the command, where and as it would run here.
fn script(words: &[OsString]) -> io::Result<Vec<u8>> {
    let mut script = format!("export {INSIDE}=yes\n").into_bytes();
    for (name, value) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let known = matches!(&*text, "HOME" | "LANG" | "PATH" | "RUST_BACKTRACE" | "RUST_LOG");
        if known || text.starts_with("KYBERNATE_") {
            script.extend([b"export ", name.as_bytes(), b"=", &*quoted(&value), b"\n"].concat());
        }
    }
    let directory = std::env::current_dir()?;
    script.extend([b"cd ", &*quoted(directory.as_os_str()), b"\nexec"].concat());
    for word in words {
        script.extend([b" ", &*quoted(word)].concat());
    }
    script.push(b'\n');
    Ok(script)
}

/// Returns a word as a shell reads it.
fn quoted(word: &OsStr) -> Vec<u8> {
    let parts: Vec<&[u8]> = word.as_bytes().split(|byte| *byte == b'\'').collect();
    [b"'", &*parts.join(&b"'\\''"[..]), b"'"].concat()
}

/// A file without a name that children inherit.
#[derive(Debug)]
struct Unnamed(std::fs::File);

impl Unnamed {
    fn of(content: &[u8]) -> io::Result<Self> {
        // Not closed when a child becomes another program.
        let mut file = std::fs::File::from(memfd_create("machine", MemfdFlags::empty())?);
        file.write_all(content)?;
        Ok(Self(file))
    }

    /// Returns its path in a child.
    fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.0.as_raw_fd())
    }

    fn read(&mut self) -> io::Result<String> {
        let mut content = Vec::new();
        self.0.rewind()?;
        self.0.read_to_end(&mut content)?;
        Ok(String::from_utf8_lossy(&content).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::process::Command;

    use super::{CONSOLE_LINES, Unnamed, last_words, quoted};

    #[test]
    fn why_a_kernel_gave_up_is_not_cut_off() {
        let trace = "trace\n".repeat(CONSOLE_LINES * 2);
        let words = last_words(&format!("{trace}why\nKernel panic - not syncing: x\n{trace}"));
        assert!(words.contains("trace\nwhy\nKernel panic - not syncing: x\ntrace\n"), "{words}");
        assert_eq!(words.lines().count(), 2 * CONSOLE_LINES);
        assert!(last_words(&format!("{trace}killed")).ends_with("trace\nkilled"));
        assert_eq!(last_words(""), "");
    }

    #[test]
    fn a_shell_reads_a_quoted_word_as_it_was() {
        for word in ["", "plain", "two words", "it's $HOME; `id` \\ \"x\"\n"] {
            let script = [b"printf %s ", &*quoted(OsStr::new(word))].concat();
            let script = String::from_utf8(script).unwrap();
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }

    #[test]
    fn a_child_reads_and_writes_what_has_no_name() {
        let (given, mut told) = (Unnamed::of(b"given").unwrap(), Unnamed::of(b"").unwrap());
        let script = format!("cat {} >{}", given.path(), told.path());
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
        assert_eq!(told.read().unwrap(), "given");
    }
}
