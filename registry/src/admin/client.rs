//! The side that asks.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use backon::Retryable as _;
use fs_err as fs;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use super::{Reply, Request, SOCKET, line, server, short};
use crate::config::Config;
use crate::gc::Settings;
use crate::janitor::stoppable;
use crate::store::{OpenError, ScanError, Store, StoreError, looks};

/// Why maintenance could not be done.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The store is served by somebody who does not answer.
    #[error("the store at {0:?} is served, and its server cannot be reached")]
    Unreachable(PathBuf, #[source] io::Error),
    /// The store cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The index could not be made.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// The server failed.
    #[error("the server failed: {0}")]
    Server(String),
    /// The connection ended before the work did.
    #[error("the server went away; what is done stays done, run the command again for the rest")]
    Cut,
    /// What was told could not be passed on.
    #[error("failed to talk to the server")]
    Io(#[from] io::Error),
}

impl AdminError {
    /// Whether the command has to be given another directory.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Open(error) if error.is_usage())
    }
}

/// Is given each line of a reply; an error ends the work.
pub type Told<'a> = dyn FnMut(&Reply) -> io::Result<()> + 'a;

/// Asks whoever has the store of `config` for maintenance, and does it here when that is nobody.
/// Returns the last line.
pub async fn run(
    config: &Config,
    request: &Request,
    told: &mut Told<'_>,
) -> Result<Reply, AdminError> {
    let root = &config.root;
    Store::require(root)?;
    let mut waited = false;
    let reached = (async || reach(root).await)
        .retry(looks(config.root_wait.0))
        .when(|error| matches!(error, AdminError::Open(error) if error.is_locked()))
        .notify(|_locked, _pause| {
            if !std::mem::replace(&mut waited, true) {
                tracing::warn!(?root, wait = %config.root_wait, "another process has the store and does not answer; waiting for it");
            }
        });
    match reached.await {
        Ok(Reached::Server(stream)) => ask(stream, request, told).await,
        Ok(Reached::Store(store)) => perform_here(config, store, request, told).await,
        Err(AdminError::Open(error)) if error.is_locked() => {
            let refused = io::ErrorKind::ConnectionRefused.into();
            Err(AdminError::Unreachable(root.join(SOCKET), refused))
        }
        Err(error) => Err(error),
    }
}

/// Who can do the work.
enum Reached {
    Server(UnixStream),
    Store(Arc<Store>),
}

/// Fails as locked when somebody has the store who does not answer: one who begins or ends to serve.
async fn reach(root: &Path) -> Result<Reached, AdminError> {
    match connect(root).await? {
        Some(stream) => Ok(Reached::Server(stream)),
        None => Ok(Reached::Store(Arc::new(Store::open_existing(root)?))),
    }
}

/// Connects to the server, if there is one. A socket that a killed one left answers nobody.
async fn connect(root: &Path) -> Result<Option<UnixStream>, AdminError> {
    let dir = fs::File::open(root)?;
    match UnixStream::connect(short(&dir)).await {
        Ok(stream) => Ok(Some(stream)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(AdminError::Unreachable(root.join(SOCKET), error)),
    }
}

async fn ask(
    stream: UnixStream,
    request: &Request,
    told: &mut Told<'_>,
) -> Result<Reply, AdminError> {
    let (receiving, mut sending) = stream.into_split();
    sending.write_all(&line(request)?).await?;
    let mut lines = BufReader::new(receiving).lines();
    let mut last = None;
    while let Some(text) = lines.next_line().await? {
        let reply: Reply = serde_json::from_str(&text).map_err(io::Error::other)?;
        if let Reply::Failed { error } = reply {
            return Err(AdminError::Server(error));
        }
        told(&reply)?;
        last = Some(reply);
    }
    // Kept open until here: closing it would ask the server to stop.
    drop(sending);
    last.filter(Reply::is_last).ok_or(AdminError::Cut)
}

async fn perform_here(
    config: &Config,
    store: Arc<Store>,
    request: &Request,
    told: &mut Told<'_>,
) -> Result<Reply, AdminError> {
    // Nothing was said: what the server keeps is kept. It may be told to keep more than others do.
    let said = config.gc.settings();
    let served = if said == Settings::default() { store.served_gc()? } else { None };
    store.set_gc(served.unwrap_or(said));
    let cancel = CancellationToken::new();
    let (tell, mut heard) = tokio::sync::mpsc::channel(1);
    let (request, rate) = (request.clone(), config.scrub.rate.0);
    let working = stoppable(&store, &cancel, move |store, pace| {
        Ok(server::perform(store, &request, rate, pace, &mut |reply| {
            let _heard = tell.blocking_send(reply);
        }))
    });
    let listening = async {
        let mut last = None;
        let mut passed_on = Ok(());
        while let Some(reply) = heard.recv().await {
            passed_on = passed_on.and_then(|()| told(&reply));
            if passed_on.is_err() {
                cancel.cancel();
            }
            last = Some(reply);
        }
        (last, passed_on)
    };
    let (worked, (last, passed_on)) = tokio::join!(working, listening);
    worked??;
    passed_on?;
    last.ok_or(AdminError::Cut)
}

impl Reply {
    fn is_last(&self) -> bool {
        matches!(
            self,
            Self::Gc(crate::gc::Event::Done(_))
                | Self::Scrub(crate::scrub::Event::Done(_))
                | Self::Reindex(_)
        )
    }
}
