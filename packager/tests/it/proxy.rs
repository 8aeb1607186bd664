//! A proxy that cuts or stalls connections.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kybernate_spec::Location;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// Stands before a registry. It cuts the connection over which the given numbers of bytes passed,
/// one after the other, both directions counted; then it lets everything pass.
#[derive(Debug)]
pub(crate) struct Proxy {
    address: String,
    shared: Arc<Shared>,
    // Aborted with all its connections when dropped.
    _accepting: JoinSet<()>,
}

#[derive(Debug)]
struct Shared {
    cuts: Mutex<Vec<u64>>,
    stall: AtomicU64,
    stalled: Notify,
    healed: Notify,
    passed: AtomicU64,
    /// Whether no part of anything is asked for.
    whole: bool,
}

impl Proxy {
    /// Starts a proxy that cuts.
    pub(crate) async fn start(upstream: &str, cuts: &[u64]) -> Self {
        Self::before(upstream, cuts, u64::MAX, false).await
    }

    /// Starts a proxy that asks for the whole when a part is asked for.
    pub(crate) async fn without_parts(upstream: &str) -> Self {
        Self::before(upstream, &[], u64::MAX, true).await
    }

    /// Starts a proxy over which nothing passes any more after so many bytes.
    pub(crate) async fn stalling(upstream: &str, stall: u64) -> Self {
        Self::before(upstream, &[], stall, false).await
    }

    async fn before(upstream: &str, cuts: &[u64], stall: u64, whole: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let cuts = Mutex::new(cuts.iter().rev().copied().collect());
        let (stalled, healed) = (Notify::new(), Notify::new());
        let (stall, passed) = (AtomicU64::new(stall), AtomicU64::new(0));
        let shared = Arc::new(Shared { cuts, stall, stalled, healed, passed, whole });
        let (upstream, state) = (upstream.to_owned(), Arc::clone(&shared));
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&upstream).await.unwrap();
                connections.spawn(pass(client, server, Arc::clone(&state)));
            }
        });
        Self { address, shared, _accepting: accepting }
    }

    /// Names something in the registry, through the proxy.
    pub(crate) fn at(&self, path: &str) -> Location {
        format!("{}/{path}", self.address).parse().unwrap()
    }

    /// Returns how many cuts have not happened yet.
    pub(crate) fn cuts_left(&self) -> usize {
        self.shared.cuts.lock().unwrap().len()
    }

    /// Waits until nothing passes any more.
    pub(crate) async fn stalled(&self) {
        self.shared.stalled.notified().await;
    }

    /// Lets everything pass from now on, over new connections; what stood still is cut.
    pub(crate) fn heal(&self) {
        self.shared.stall.store(u64::MAX, Ordering::Relaxed);
        self.shared.healed.notify_waiters();
    }

    /// Returns how many bytes passed.
    pub(crate) fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::Relaxed)
    }
}

async fn pass(mut client: TcpStream, mut server: TcpStream, shared: Arc<Shared>) {
    let mut here = 0;
    let (mut up, mut down) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        let (done, is_sent) = tokio::select! {
            read = client.read(&mut up) => {
                if shared.whole {
                    hide_range(&mut up);
                }
                (forward(read, &up, &mut server).await, true)
            }
            read = server.read(&mut down) => (forward(read, &down, &mut client).await, false),
        };
        let Some(bytes) = done else { return };
        here += bytes;
        let healed = shared.healed.notified();
        let passed = shared.passed.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if passed >= shared.stall.load(Ordering::Relaxed) {
            shared.stalled.notify_one();
            healed.await;
            return;
        }
        let is_cut = shared.cuts.lock().unwrap().pop_if(|cut| here >= *cut).is_some();
        if is_cut && is_sent {
            let_end(&mut server).await;
        }
        if is_cut {
            return;
        }
    }
}

/// Lets the registry have what passed, and waits until it has no use for the connection any more:
/// whoever is cut off asks at once how much is there, and a busy registry may not have looked yet.
async fn let_end(server: &mut TcpStream) {
    server.shutdown().await.ok();
    tokio::io::copy(server, &mut tokio::io::sink()).await.ok();
}

/// Gives the header a name that nobody knows. A request comes in one piece.
fn hide_range(request: &mut [u8]) {
    const RANGE: &[u8] = b"\r\nrange: bytes=";
    if let Some(at) = request.windows(RANGE.len()).position(|part| part == RANGE) {
        request[at + 2] = b'x';
    }
}

async fn forward(
    read: std::io::Result<usize>,
    buffer: &[u8],
    target: &mut TcpStream,
) -> Option<u64> {
    let read = read.ok().filter(|read| *read > 0)?;
    target.write_all(buffer.get(..read)?).await.ok()?;
    u64::try_from(read).ok()
}
