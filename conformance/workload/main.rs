//! The demo's workload: a process tree whose damage by a checkpoint would show.
//!
//! It holds memory of known content and keeps summing it, ticks in several threads, talks to a
//! child process over pipes, and writes consecutive lines through files it keeps open. A lost or
//! doubled tick, a changed byte, a dead thread, a broken pipe or a fresh start in place of a
//! restore each show in `workload status`.
//!
//! Only the standard library is used, and the binary is static, so that it runs in any image.
//! As PID 1 of a container it has no handler for SIGTERM, which the kernel then ignores: it is
//! ended by SIGKILL. Elsewhere SIGTERM ends it by default.

mod hold;
mod keep;
mod talk;

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

type Failure = Box<dyn Error + Send + Sync>;

const USAGE: &str = "\
usage: workload run --state DIR [--mib N] [--pattern demo|bench] [--shm DIR] [--tick-ms N]
                    [--say nothing|ticks]
       workload pause
       workload status --state DIR
       workload echo --state DIR
       workload keep --state DIR [--threads N] [--huge MIB] [--links yes]
       workload talk ADDRESS --state DIR [--mib N]
       workload speak ADDRESS --state DIR
       workload converse --state DIR [--mib N]
       workload hold tcp|listen|unix|lock|device|map|deleted|inotify|io-uring [ARGUMENT]
";

/// Words of one page.
const PAGE_WORDS: usize = 4096 / 8;
/// Words of one MiB: the unit of the sums.
const SLICE_WORDS: usize = (1 << 20) / 8;
/// Distinct pages of the repeating part.
const REPEATED_PAGES: usize = 16;
/// Threads that only count.
const COUNTING_THREADS: usize = 3;
/// Bytes of known content in the file under `--shm`.
const SHM_BYTES: usize = 1 << 20;
/// The most memory asked for, in MiB, so that a slip does not take the machine down.
const MIB_MAX: usize = 1 << 16;
/// How long summing all of the memory takes at least: the workload must leave the cores to what is
/// measured, and to the workloads beside it.
const ROUND: Duration = Duration::from_secs(1);
/// Pause between two sums, however much memory there is.
const CHECK_PAUSE_MIN: Duration = Duration::from_millis(1);

/// What the memory holds.
#[derive(Clone, Copy)]
enum Pattern {
    /// A third random, a third zero but present, a third repeating pages.
    Demo,
    /// All random: nothing compresses and no page is there twice.
    Bench,
}

struct Options {
    state: PathBuf,
    mib: usize,
    pattern: Pattern,
    shm: Option<PathBuf>,
    tick: Duration,
    /// Whether each tick is a line on standard output.
    says: bool,
    threads: usize,
    huge: usize,
    /// Whether files are held by names that were deleted, and have others.
    links: bool,
}

/// What the threads tell the ticker.
struct Shared {
    checksum_ok: AtomicBool,
    checksums: AtomicU64,
    rounds: AtomicU64,
    counters: Vec<AtomicU64>,
}

/// The memory and the sum of each of its slices at the start.
struct Memory {
    buffers: Vec<Vec<u64>>,
    sums: Vec<u64>,
}

/// The child process and the two pipes to it.
struct Echo {
    _child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

/// An open file on a tmpfs: the counter in its first eight bytes, then known content.
struct Shm {
    file: File,
    sum: u64,
}

/// What the ticker owns, and what it has found so far.
struct Ticker {
    options: Options,
    shared: Arc<Shared>,
    echo: Echo,
    shm: Option<Shm>,
    ticks: File,
    counter: u64,
    pipe_ok: bool,
    shm_ok: bool,
    started: u64,
    last: u64,
    gap: u64,
    boot_id: u64,
}

/// Marsaglia's xorshift64*: fast, and good enough not to compress.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.split_first() {
        Some((command, rest)) if command == "hold" => match rest {
            [kind] => hold::hold(kind, None),
            [kind, argument] => hold::hold(kind, Some(argument)),
            _ => Err(USAGE.into()),
        },
        // Holds a pod's namespaces; it is killed when the pod ends.
        Some((command, [])) if command == "pause" => loop {
            thread::park();
        },
        Some((command, [address, rest @ ..])) if command == "talk" || command == "speak" => {
            Options::parse(rest).and_then(|options| match command.as_str() {
                "speak" => talk::speak(address, &options.state),
                _ => holding(&options, || talk::answer(address, &options.state)),
            })
        }
        Some((command, rest)) => match (command.as_str(), Options::parse(rest)) {
            ("run", Ok(options)) => Ticker::start(options).and_then(Ticker::run),
            ("keep", Ok(options)) => keep::keep(&options),
            ("status", Ok(options)) => status(&options.state),
            ("echo", Ok(options)) => echo(&options.state),
            ("converse", Ok(options)) => holding(&options, || talk::converse(&options.state)),
            ("run" | "keep" | "status" | "echo" | "converse", Err(error)) => Err(error),
            _ => Err(USAGE.into()),
        },
        None => Err(USAGE.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing is left to tell when standard error is gone too.
            drop(writeln!(io::stderr(), "workload: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Does something in the middle of much memory.
fn holding<T>(options: &Options, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let memory = Memory::fill(options.mib, options.pattern, &mut Random(random_seed()? | 1));
    let done = work();
    black_box(memory);
    done
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self, Failure> {
        let mut options = Self {
            state: PathBuf::from("/state"),
            mib: 256,
            pattern: Pattern::Demo,
            shm: None,
            tick: Duration::from_millis(100),
            says: false,
            threads: 0,
            huge: 0,
            links: false,
        };
        let mut rest = arguments.iter();
        while let Some(flag) = rest.next() {
            let value = rest.next().ok_or_else(|| format!("{flag} needs a value\n{USAGE}"))?;
            match (flag.as_str(), value.as_str()) {
                ("--state", _) => options.state = value.into(),
                ("--mib", _) => options.mib = value.parse()?,
                ("--pattern", "demo") => options.pattern = Pattern::Demo,
                ("--pattern", "bench") => options.pattern = Pattern::Bench,
                ("--shm", _) => options.shm = Some(value.into()),
                ("--say", "nothing") => options.says = false,
                ("--say", "ticks") => options.says = true,
                ("--threads", _) => options.threads = value.parse()?,
                ("--huge", _) => options.huge = value.parse()?,
                ("--links", "yes") => options.links = true,
                ("--tick-ms", _) => options.tick = Duration::from_millis(value.parse()?),
                _ => return Err(format!("{flag} {value} is not known\n{USAGE}").into()),
            }
        }
        if !(1..=MIB_MAX).contains(&options.mib) {
            return Err(format!("--mib must be from 1 to {MIB_MAX}").into());
        }
        Ok(options)
    }
}

impl Memory {
    fn fill(mib: usize, pattern: Pattern, random: &mut Random) -> Self {
        let words = mib * SLICE_WORDS;
        let buffers = match pattern {
            Pattern::Bench => vec![random_words(words, random)],
            Pattern::Demo => {
                let third = words / 3 / PAGE_WORDS * PAGE_WORDS;
                vec![
                    random_words(third, random),
                    zero_words(third),
                    repeated_words(words - 2 * third, random),
                ]
            }
        };
        let sums = slices(&buffers).map(sum).collect();
        Self { buffers, sums }
    }
}

fn slices(buffers: &[Vec<u64>]) -> impl Iterator<Item = &[u64]> {
    buffers.iter().flat_map(|buffer| buffer.chunks(SLICE_WORDS))
}

fn random_words(words: usize, random: &mut Random) -> Vec<u64> {
    (0..words).map(|_| random.next()).collect()
}

/// Zero pages that are present: written first, since untouched memory is no page to dump.
fn zero_words(words: usize) -> Vec<u64> {
    let mut buffer = black_box(vec![u64::MAX; words]);
    buffer.fill(0);
    black_box(buffer)
}

fn repeated_words(words: usize, random: &mut Random) -> Vec<u64> {
    let pages = random_words(REPEATED_PAGES * PAGE_WORDS, random);
    pages.iter().copied().cycle().take(words).collect()
}

/// A sum that notices a changed word and two words that changed places.
fn sum(words: &[u64]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |sum, word| {
        (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    })
}

fn sum_bytes(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    sum(&words.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<_>>())
}

/// Sums the memory slice by slice for ever.
fn check(memory: &Memory, shared: &Shared) {
    let parts = u32::try_from(memory.sums.len()).unwrap_or(u32::MAX).max(1);
    let pause = (ROUND / parts).max(CHECK_PAUSE_MIN);
    loop {
        for (slice, &expected) in slices(&memory.buffers).zip(&memory.sums) {
            if sum(black_box(slice)) != expected {
                shared.checksum_ok.store(false, Ordering::Relaxed);
            }
            shared.checksums.fetch_add(1, Ordering::Relaxed);
            thread::sleep(pause);
        }
        shared.rounds.fetch_add(1, Ordering::Relaxed);
    }
}

fn count(shared: &Shared, thread: usize, pause: Duration) {
    while let Some(counter) = shared.counters.get(thread) {
        counter.fetch_add(1, Ordering::Relaxed);
        thread::sleep(pause);
    }
}

impl Echo {
    fn start(state: &Path) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("echo")
            .arg("--state")
            .arg(state)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let to = child.stdin.take().ok_or("the child has no standard input")?;
        let from = child.stdout.take().ok_or("the child has no standard output")?;
        Ok(Self { _child: child, to, from: BufReader::new(from) })
    }

    /// Sends `counter` and returns whether the same number came back.
    fn ask(&mut self, counter: u64) -> bool {
        let mut line = String::new();
        let sent = self.to.write_all(format!("{counter}\n").as_bytes());
        sent.and_then(|()| self.from.read_line(&mut line)).is_ok()
            && line.trim_end().parse() == Ok(counter)
    }
}

/// The child: returns each line it reads, and keeps it in its own file.
fn echo(state: &Path) -> Result<(), Failure> {
    let mut log = OpenOptions::new().append(true).create(true).open(state.join("child.log"))?;
    let mut output = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let line = line? + "\n";
        log.write_all(line.as_bytes())?;
        output.write_all(line.as_bytes())?;
        output.flush()?;
    }
    Ok(())
}

impl Shm {
    fn create(dir: &Path, random: &mut Random) -> Result<Self, Failure> {
        let path = dir.join("kybernate-workload");
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        let content: Vec<u8> = random_words(SHM_BYTES / 8, random)
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        file.write_all_at(&0_u64.to_le_bytes(), 0)?;
        file.write_all_at(&content, 8)?;
        Ok(Self { file, sum: sum_bytes(&content) })
    }

    /// Whether the file still has the last counter and its content; writes the new counter.
    fn tick(&self, counter: u64) -> io::Result<bool> {
        let mut last = [0; 8];
        let mut content = vec![0; SHM_BYTES];
        self.file.read_exact_at(&mut last, 0)?;
        self.file.read_exact_at(&mut content, 8)?;
        self.file.write_all_at(&counter.to_le_bytes(), 0)?;
        Ok(u64::from_le_bytes(last).checked_add(1) == Some(counter)
            && sum_bytes(&content) == self.sum)
    }
}

impl Ticker {
    fn start(options: Options) -> Result<Self, Failure> {
        fs::create_dir_all(&options.state)?;
        for name in ["status.json", "child.log"] {
            match fs::remove_file(options.state.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
        }
        let boot_id = random_seed()?;
        let mut random = Random(boot_id | 1);
        let shm = options.shm.as_deref().map(|dir| Shm::create(dir, &mut random)).transpose()?;
        // Not opened for appending, unlike the child's: its offset must survive as well.
        let ticks = File::create(options.state.join("ticks.log"))?;
        let echo = Echo::start(&options.state)?;
        let memory = Memory::fill(options.mib, options.pattern, &mut random);
        let shared = Arc::new(Shared {
            checksum_ok: AtomicBool::new(true),
            checksums: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            counters: (0..COUNTING_THREADS).map(|_| AtomicU64::new(0)).collect(),
        });
        for thread in 0..COUNTING_THREADS {
            let (shared, tick) = (Arc::clone(&shared), options.tick);
            thread::Builder::new().spawn(move || count(&shared, thread, tick))?;
        }
        let checked = Arc::clone(&shared);
        thread::Builder::new().spawn(move || check(&memory, &checked))?;
        let started = now();
        Ok(Self {
            options,
            shared,
            echo,
            shm,
            ticks,
            counter: 0,
            pipe_ok: true,
            shm_ok: true,
            started,
            last: started,
            gap: 0,
            boot_id,
        })
    }

    fn run(mut self) -> Result<(), Failure> {
        loop {
            self.counter += 1;
            self.pipe_ok &= self.echo.ask(self.counter);
            if let Some(shm) = &self.shm {
                self.shm_ok &= shm.tick(self.counter).unwrap_or(false);
            }
            let line = format!("{}\n", self.counter);
            self.ticks.write_all(line.as_bytes())?;
            if self.options.says {
                // Whoever reads it may be another one after a restore, but there is always one.
                self.pipe_ok &= io::stdout().write_all(line.as_bytes()).is_ok();
            }
            let time = now();
            self.gap = self.gap.max(time.saturating_sub(self.last));
            self.last = time;
            self.publish()?;
            thread::sleep(self.options.tick);
        }
    }

    /// Replaces `status.json` whole, so that no reader ever sees half of it.
    fn publish(&self) -> Result<(), Failure> {
        let new = self.options.state.join("status.json.new");
        let threads = fs::read_dir("/proc/self/task")?.count();
        let counters = self.shared.counters.iter().map(|counter| counter.load(Ordering::Relaxed));
        let text = format!(
            "{{\"counter\":{},\"checksum_ok\":{},\"checksums_done\":{},\"rounds_done\":{},\
             \"pipe_ok\":{},\"shm_ok\":{},\"lines\":{},\"pid\":{},\"threads\":{threads},\
             \"slowest_thread\":{},\"started_unix_ms\":{},\"ticked_unix_ms\":{},\
             \"longest_gap_ms\":{},\"boot_id_of_process\":{}}}\n",
            self.counter,
            self.shared.checksum_ok.load(Ordering::Relaxed),
            self.shared.checksums.load(Ordering::Relaxed),
            self.shared.rounds.load(Ordering::Relaxed),
            self.pipe_ok,
            self.shm_ok,
            self.counter,
            std::process::id(),
            counters.min().unwrap_or_default(),
            self.started,
            self.last,
            self.gap,
            self.boot_id,
        );
        fs::write(&new, text)?;
        fs::rename(new, self.options.state.join("status.json"))?;
        Ok(())
    }
}

/// Prints the status with `log_ok`, and fails when anything in it is wrong.
///
/// The workload goes on meanwhile: the logs are held against a status read before them and one
/// read after them. At any moment the child's log is at most one ahead of the ticks, and these at
/// most one ahead of the status.
fn status(state: &Path) -> Result<(), Failure> {
    let before = read_status(state)?;
    let ticks = consecutive(&state.join("ticks.log"))?;
    let child = consecutive(&state.join("child.log"))?;
    let after = read_status(state)?;

    let latest = number(&after, "counter")? + 1;
    let log_ok = ticks.zip(child).is_some_and(|(ticks, child)| {
        number(&before, "counter").is_ok_and(|counter| counter <= ticks)
            && ticks <= child
            && child <= latest
    });
    let same = field(&before, "boot_id_of_process")? == field(&after, "boot_id_of_process")?;
    let text = after.trim_end().trim_end_matches('}');
    writeln!(io::stdout(), "{text},\"log_ok\":{}}}", log_ok && same)?;
    for flag in ["checksum_ok", "pipe_ok", "shm_ok"] {
        if field(&after, flag)? != "true" {
            return Err(format!("{flag} is not true").into());
        }
    }
    if !log_ok {
        return Err(format!("lines are missing or doubled: {ticks:?} and {child:?}").into());
    }
    if !same {
        return Err("the workload was started anew meanwhile".into());
    }
    Ok(())
}

fn read_status(state: &Path) -> Result<String, Failure> {
    let path = state.join("status.json");
    fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()).into())
}

/// Counts the lines when they are 1, 2, 3 and so on; a last line without its end does not count.
fn consecutive(path: &Path) -> Result<Option<u64>, Failure> {
    let file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let (mut reader, mut line, mut lines) = (BufReader::new(file), String::new(), 0);
    while reader.read_line(&mut line)? > 0 && line.ends_with('\n') {
        if line.trim_end().parse() != Ok(lines + 1) {
            return Ok(None);
        }
        lines += 1;
        line.clear();
    }
    Ok(Some(lines))
}

/// Returns the text of a field of the flat JSON object that `publish` writes.
fn field<'a>(json: &'a str, name: &str) -> Result<&'a str, Failure> {
    let (_, rest) = json
        .split_once(&format!("\"{name}\":"))
        .ok_or_else(|| format!("the status has no {name}"))?;
    Ok(rest.split([',', '}']).next().unwrap_or_default())
}

fn number(json: &str, name: &str) -> Result<u64, Failure> {
    Ok(field(json, name)?.parse()?)
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Eight bytes of the kernel's: they tell one start from every other.
fn random_seed() -> io::Result<u64> {
    let mut seed = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut seed)?;
    Ok(u64::from_le_bytes(seed))
}
