//! One TCP connection, on which a byte that is lost or comes twice shows: one end sends the numbers from
//! 0 on, ahead of the other, which knows the next one by heart and sends it back.
//!
//! Each end says in its directory how far it is (`spoken`), and what is wrong once it is (`wrong`). A
//! read that is denied is tried again, and leaves `denied`: sockets that CRIU works on deny it.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use super::Failure;

/// How long the other end may take to listen.
const TRIES: u32 = 600;
const TRY_EVERY: Duration = Duration::from_millis(50);

/// Numbers that one end is ahead at most: 512 KiB, which is more than lies in a socket's buffers.
const AHEAD_MAX: u64 = 64 << 10;
/// Numbers in one write.
const BATCH: u64 = 512;
/// Pause between two writes: the cores are others' too.
const PAUSE: Duration = Duration::from_millis(2);
/// How often somebody says how far it is.
const SAY_EVERY: Duration = Duration::from_millis(20);
/// Where both ends of one container talk.
const LOOPBACK: &str = "127.0.0.1:7001";

/// Answers who listens at `address`.
pub(crate) fn answer(address: &str, state: &Path) -> Result<(), Failure> {
    let stream = connect(address)?;
    let next = said(state)?;
    let mut answers = stream.try_clone()?;
    let answer = read(stream, state, &next, |bytes| answers.write_all(bytes));
    wrong(state, answer)
}

/// Speaks to the first who connects to `address`.
pub(crate) fn speak(address: &str, state: &Path) -> Result<(), Failure> {
    speak_on(TcpListener::bind(address)?, state)
}

/// Does both, in two processes, over loopback.
pub(crate) fn converse(state: &Path) -> Result<(), Failure> {
    let listener = TcpListener::bind(LOOPBACK)?;
    let own = std::env::current_exe()?;
    let state_of = |name: &str| state.join(name);
    let other = ["talk", LOOPBACK, "--mib", "1", "--state"];
    let _other = Command::new(own).args(other).arg(state_of("other")).spawn()?;
    speak_on(listener, &state_of("one"))
}

fn speak_on(listener: TcpListener, state: &Path) -> Result<(), Failure> {
    let (stream, _) = listener.accept()?;
    drop(listener);
    let heard = said(state)?;
    let (seen, mut words) = (Arc::clone(&heard), stream.try_clone()?);
    let speaker = thread::spawn(move || -> io::Result<()> {
        let mut next = 0;
        loop {
            if next < seen.load(Ordering::Relaxed) + AHEAD_MAX {
                let batch: Vec<u8> = (next..next + BATCH).flat_map(u64::to_le_bytes).collect();
                words.write_all(&batch)?;
                next += BATCH;
            }
            thread::sleep(PAUSE);
        }
    });
    let read = read(stream, state, &heard, |_| Ok(()));
    if speaker.is_finished()
        && let Ok(Err(error)) = speaker.join()
    {
        return wrong(state, Err(error));
    }
    wrong(state, read)
}

fn connect(address: &str) -> io::Result<TcpStream> {
    for _ in 1..TRIES {
        if let Ok(stream) = TcpStream::connect(address) {
            return Ok(stream);
        }
        thread::sleep(TRY_EVERY);
    }
    TcpStream::connect(address)
}

/// Reads consecutive numbers until something is wrong.
fn read(
    mut stream: TcpStream,
    state: &Path,
    next: &AtomicU64,
    mut then: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let (mut buffer, mut filled) = ([0; 4096], 0);
    loop {
        let read = match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(io::Error::other("the connection has ended")),
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                fs::write(state.join("denied"), error.to_string())?;
                thread::sleep(PAUSE);
                continue;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        filled += read;
        let whole = filled - filled % 8;
        for bytes in buffer[..whole].as_chunks().0 {
            let (number, expected) = (u64::from_le_bytes(*bytes), next.load(Ordering::Relaxed));
            if number != expected {
                let text = format!("{number} came, and {expected} was to come");
                return Err(io::Error::other(text));
            }
            next.store(expected + 1, Ordering::Relaxed);
        }
        then(&buffer[..whole])?;
        buffer.copy_within(whole..filled, 0);
        filled -= whole;
    }
}

/// Says how far it is from now on.
fn said(state: &Path) -> io::Result<Arc<AtomicU64>> {
    fs::create_dir_all(state)?;
    let next = Arc::new(AtomicU64::new(0));
    let (told, state) = (Arc::clone(&next), state.to_owned());
    thread::spawn(move || {
        let (new, file) = (state.join("spoken.new"), state.join("spoken"));
        loop {
            let text = told.load(Ordering::Relaxed).to_string();
            // Who reads it sees that it stands still.
            drop(fs::write(&new, text).and_then(|()| fs::rename(&new, &file)));
            thread::sleep(SAY_EVERY);
        }
    });
    Ok(next)
}

/// Says what is wrong, and stays.
fn wrong(state: &Path, done: io::Result<()>) -> Result<(), Failure> {
    let Err(error) = done else { return Ok(()) };
    fs::write(state.join("wrong"), error.to_string())?;
    Err(error.into())
}
