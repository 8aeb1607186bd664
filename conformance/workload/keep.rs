//! Keeps what Linux gives to processes, uses all of it again and again, and says whether it is still
//! what it was.
//!
//! Each tick goes through two processes. The one that was started owns everything; the other, forked
//! from it, answers over semaphores, pipes and sockets, and sees in shared memory what the first has
//! written. What is once wrong stays wrong in `DIR/keep`:
//! `{"boot":N,"count":N,"threads":N,"wrong":"…"}`.

mod ended;
mod events;
mod huge;
mod linked;
mod memory;
mod peer;
mod sys;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use self::ended::Ended;
use self::events::Events;
use self::huge::Huge;
use self::linked::Linked;
use self::peer::Peer;
use super::{Failure, Options};

/// Pause between two ticks.
const TICK: Duration = Duration::from_millis(50);
/// Bytes of what is said, filled up with blanks.
const TOLD_BYTES: usize = 512;
/// In so many ticks each thread must have counted on. Time would go on while all are frozen, or gone.
const THREAD_TICKS: u64 = 100;
/// Pause of a thread that only counts.
const THREAD_TICK: Duration = Duration::from_secs(1);

/// Holds everything until it is killed. `threads` more threads count meanwhile; `huge` MiB of each
/// kind are in huge pages, and with `links` files are held whose names were deleted.
pub(crate) fn keep(options: &Options) -> Result<(), Failure> {
    let Options { state, threads, huge, links, .. } = options;
    let (threads, huge) = (*threads, *huge);
    fs::create_dir_all(state)?;
    // Before the first thread: all inherit it.
    events::block_signals()?;
    let peer = Peer::fork(*links)?;
    let keeper = Keeper {
        state: state.clone(),
        boot: boot()?,
        count: 0,
        peer,
        ended: Ended::new()?,
        events: Events::new()?,
        deleted: Deleted::new(state)?,
        linked: links.then(Linked::new).transpose()?,
        locks: Locks::new(state)?,
        huge: Huge::new(huge)?,
        counters: count_in(threads)?,
        seen: vec![0; threads],
    };
    keeper.run()
}

struct Keeper {
    state: PathBuf,
    boot: u64,
    count: u64,
    peer: Peer,
    ended: Ended,
    events: Events,
    deleted: Deleted,
    linked: Option<Linked>,
    locks: Locks,
    huge: Huge,
    counters: Arc<Vec<AtomicU64>>,
    /// What they had counted when it was last looked.
    seen: Vec<u64>,
}

impl Keeper {
    fn run(mut self) -> Result<(), Failure> {
        let mut wrong = String::new();
        loop {
            self.count += 1;
            // Once something is wrong, the other process may wait for what never comes.
            if wrong.is_empty()
                && let Err(error) = self.tick()
            {
                wrong = error.to_string().replace(['"', '\\', '\n'], "'");
            }
            let threads = fs::read_dir("/proc/self/task")?.count();
            let slowest = self.counters.iter().map(|counter| counter.load(Ordering::Relaxed)).min();
            let text = format!(
                "{{\"boot\":{},\"count\":{},\"threads\":{threads},\"slowest\":{},\
                 \"wrong\":\"{wrong}\"}}\n",
                self.boot,
                self.count,
                slowest.unwrap_or_default(),
            );
            // One file of one length: a checkpoint may meet it open, and where it lies on the node the
            // source goes on with it, while a restore wants it as it was. One short write, so that
            // readers see all of it.
            let told = format!("{text:<TOLD_BYTES$}");
            let mut file = OpenOptions::new();
            file.write(true).create(true).truncate(false);
            file.open(self.state.join("keep"))?.write_all_at(told.as_bytes(), 0)?;
            thread::sleep(TICK);
        }
    }

    fn tick(&mut self) -> Result<(), Failure> {
        self.peer.tick(self.count)?;
        self.ended.tick()?;
        self.events.tick(self.count)?;
        self.deleted.tick(self.count)?;
        if let Some(linked) = &self.linked {
            linked.tick(self.count, &self.peer)?;
        }
        self.locks.tick(&mut self.peer)?;
        self.huge.tick(self.count)?;
        if self.count.is_multiple_of(THREAD_TICKS) {
            for (counter, before) in self.counters.iter().zip(self.seen.iter_mut()) {
                let now = counter.load(Ordering::Relaxed);
                if now == *before {
                    return Err("a thread has stopped".into());
                }
                *before = now;
            }
        }
        Ok(())
    }
}

fn boot() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    // Other programs read it as a number of JSON.
    Ok(u64::from_le_bytes(bytes) >> 16)
}

fn count_in(threads: usize) -> io::Result<Arc<Vec<AtomicU64>>> {
    let counters: Arc<Vec<AtomicU64>> = Arc::new((0..threads).map(|_| 0.into()).collect());
    for thread in 0..threads {
        let counters = Arc::clone(&counters);
        thread::Builder::new().stack_size(64 << 10).spawn(move || {
            while let Some(counter) = counters.get(thread) {
                counter.fetch_add(1, Ordering::Relaxed);
                thread::sleep(THREAD_TICK);
            }
        })?;
    }
    Ok(counters)
}

/// A file without a name, read and written where its offset is.
struct Deleted {
    file: File,
    last: u64,
}

impl Deleted {
    fn new(state: &Path) -> io::Result<Self> {
        let path = state.join("deleted");
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
        fs::remove_file(path)?;
        file.write_all(&0_u64.to_le_bytes())?;
        Ok(Self { file, last: 0 })
    }

    fn tick(&mut self, count: u64) -> Result<(), Failure> {
        if self.file.stream_position()? != 8 {
            return Err("the deleted file's offset moved".into());
        }
        self.file.seek(SeekFrom::Start(0))?;
        let mut bytes = [0; 8];
        self.file.read_exact(&mut bytes)?;
        if u64::from_le_bytes(bytes) != self.last {
            return Err("the deleted file is another one".into());
        }
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&count.to_le_bytes())?;
        self.last = count;
        Ok(())
    }
}

/// The three kinds of locks that files have. Nobody else must get one of them.
struct Locks {
    _flock: File,
    _posix: File,
    _description: File,
    path: PathBuf,
}

impl Locks {
    fn new(state: &Path) -> Result<Self, Failure> {
        let open = |name: &str| {
            let path = state.join(name);
            OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)
        };
        let (flock, posix, description) = (open("flock")?, open("posix")?, open("description")?);
        flock.lock()?;
        sys::lock(posix.as_raw_fd(), sys::SET_LOCK)?;
        sys::lock(description.as_raw_fd(), sys::SET_DESCRIPTION_LOCK)?;
        Ok(Self { _flock: flock, _posix: posix, _description: description, path: state.to_owned() })
    }

    fn tick(&self, peer: &mut Peer) -> Result<(), Failure> {
        let open =
            |name: &str| OpenOptions::new().read(true).write(true).open(self.path.join(name));
        if open("flock")?.try_lock().is_ok() {
            return Err("somebody else got the flock".into());
        }
        let other = open("description")?;
        if sys::lock(other.as_raw_fd(), sys::SET_DESCRIPTION_LOCK).is_ok() {
            return Err("somebody else got the lock of an open file description".into());
        }
        // Locks of POSIX are a process's: only another one finds out, and this one loses all of them
        // when it closes the file once more.
        if peer.gets_lock(&self.path.join("posix"))? {
            return Err("somebody else got the POSIX lock".into());
        }
        Ok(())
    }
}
