//! Clients of servers in containers: threads in the containers' networks.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kybernate_conformance::command::wait_until;

use super::Place;
use crate::harness::in_network;

/// How long a server may take to listen, and to answer: it may be frozen meanwhile, and Python begins in
/// an emulated machine that has half of a processor.
const LIMIT: Duration = Duration::from_mins(2);

/// Runs `work` on a thread that has the network of a container.
pub(crate) fn inside<T: Send + 'static>(
    place: Place<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let network = place.node.path(&format!("/proc/{}/ns/net", place.pid().unwrap()));
    in_network(&network, work)
}

/// A connection on which each line is answered.
#[derive(Debug)]
pub(crate) struct Line(BufReader<TcpStream>);

impl Line {
    /// Connects as soon as somebody listens.
    pub(crate) fn connect(port: u16) -> Self {
        let mut stream = Err(io::Error::other("nobody tried"));
        wait_until(LIMIT, || {
            stream = TcpStream::connect(("127.0.0.1", port));
            stream.is_ok()
        });
        let stream = stream.unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Self(BufReader::new(stream))
    }

    /// Sends some lines and returns the first line of the answer.
    pub(crate) fn ask(&mut self, words: &str) -> io::Result<String> {
        self.0.get_mut().write_all(words.as_bytes())?;
        self.read()
    }

    /// Returns one more line of the answer.
    pub(crate) fn read(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.0.read_line(&mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    /// Returns the answer's lines up to the end of the connection.
    pub(crate) fn rest(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.read().ok()).collect()
    }
}

/// Clients that go on until the server is gone.
#[derive(Debug)]
pub(crate) struct Load {
    ends: Arc<AtomicBool>,
    clients: Vec<JoinHandle<u64>>,
}

impl Load {
    /// Starts clients; each calls `step` with its own number and 1, 2, 3, … until that fails.
    pub(crate) fn start(
        place: Place<'_>,
        port: u16,
        clients: usize,
        step: fn(&mut Line, usize, u64) -> io::Result<()>,
    ) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let client = |number: usize| {
            let ends = Arc::clone(&ends);
            inside(place, move || {
                let (mut line, mut done) = (Line::connect(port), 0);
                while !ends.load(Ordering::Relaxed) && step(&mut line, number, done + 1).is_ok() {
                    done += 1;
                }
                done
            })
        };
        let clients = (0..clients).map(client).collect();
        Self { ends, clients }
    }

    /// Ends it, and returns how many steps of each client were answered.
    pub(crate) fn end(self) -> Vec<u64> {
        self.ends.store(true, Ordering::Relaxed);
        self.clients.into_iter().map(|client| client.join().unwrap()).collect()
    }
}
