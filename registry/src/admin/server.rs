//! The side that has the store.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fs_err as fs;
use kybernate_spec::chain;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Take};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{AdminError, Reply, Request, SOCKET, line, short};
use crate::app::AppState;
use crate::gc::{self, Scope};
use crate::janitor::{Pace, stoppable};
use crate::store::Store;
use crate::{index, scrub};

/// Bytes of a request.
const REQUEST_MAX: u64 = 4096;
/// How long a client may take to send it.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(10);
/// Lines of a reply that wait for the client; then the work waits too.
const LINES_MAX: usize = 256;

/// Begins to take requests. One that cannot listen says so and serves without.
pub(crate) fn start(app: &AppState) {
    match listen(&app.store) {
        Ok(listener) => {
            let app = Arc::clone(app);
            app.tasks.clone().spawn(|cancel| accept(app, listener, cancel));
        }
        Err(error) => {
            tracing::error!(error = %chain(&error), "no maintenance while this serves");
        }
    }
}

/// Makes the socket so that nobody else can ever open it: it gets its name after its mode.
fn listen(store: &Store) -> io::Result<UnixListener> {
    let temporary = fs::File::open(store.temporary())?;
    let made = store.temporary().join(SOCKET);
    match fs::remove_file(&made) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(short(&temporary))?;
    fs::set_permissions(&made, Permissions::from_mode(0o600))?;
    fs::rename(&made, store.root().join(SOCKET))?;
    Ok(listener)
}

async fn accept(app: AppState, listener: UnixListener, cancel: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = cancel.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let app = Arc::clone(&app);
                app.tasks.clone().spawn(|cancel| async move {
                    if let Err(error) = answer(&app, stream, cancel).await {
                        tracing::debug!(%error, "a maintenance client went away");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "failed to accept a maintenance client");
                let pause = Duration::from_millis(100);
                let _ended = tokio::time::timeout(pause, cancel.cancelled()).await;
            }
        }
    }
}

async fn answer(app: &AppState, stream: UnixStream, cancel: CancellationToken) -> io::Result<()> {
    let (receiving, mut sending) = stream.into_split();
    let mut receiving = BufReader::new(receiving.take(REQUEST_MAX));
    let mut text = String::new();
    let read = tokio::time::timeout(REQUEST_TIME_MAX, receiving.read_line(&mut text));
    read.await.map_err(io::Error::from)??;
    let request: Request = match serde_json::from_str(&text) {
        Ok(request) => request,
        Err(error) => {
            let error = format!("the request is not understood: {error}");
            return sending.write_all(&line(&Reply::Failed { error })?).await;
        }
    };
    tracing::info!(?request, "maintenance");
    let gone = cancel.child_token();
    let (tell, mut told) = mpsc::channel::<Reply>(LINES_MAX);
    let rate = app.config.scrub.rate.0;
    let working = stoppable(&app.store, &gone, move |store, pace| {
        let mut tell = |reply| {
            // When nobody listens any more, the pace says so, too.
            let _heard = tell.blocking_send(reply);
        };
        if let Err(error) = perform(store, &request, rate, pace, &mut tell) {
            tell(Reply::Failed { error: chain(&error).to_string() });
        }
        Ok(())
    });
    let writing = async {
        let written = write(&mut receiving, &mut sending, &mut told).await;
        // Whether it is all written or nobody reads it: there is nothing more to do.
        drop(told);
        gone.cancel();
        written
    };
    let (worked, written) = tokio::join!(working, writing);
    worked.map_err(io::Error::other)?;
    written
}

/// Passes on what is told until there is nothing more or the client hangs up.
async fn write(
    receiving: &mut BufReader<Take<OwnedReadHalf>>,
    sending: &mut OwnedWriteHalf,
    told: &mut mpsc::Receiver<Reply>,
) -> io::Result<()> {
    let mut more = [0; 1];
    loop {
        let reply = tokio::select! {
            reply = told.recv() => reply,
            // Nothing more is to come from there but the end.
            _end = receiving.get_mut().get_mut().read(&mut more) => None,
        };
        match reply {
            Some(reply) => sending.write_all(&line(&reply)?).await?,
            None => return sending.shutdown().await,
        }
    }
}

/// Does what is asked for on a store that is open here.
pub(super) fn perform(
    store: &Arc<Store>,
    request: &Request,
    rate: u64,
    pace: &Pace,
    tell: &mut dyn FnMut(Reply),
) -> Result<(), AdminError> {
    match *request {
        Request::Gc { dry_run, everything } => {
            let run = gc::Run {
                store,
                scope: if everything { Scope::Everything } else { Scope::Noted },
                dry_run,
                now: SystemTime::now(),
                tell: &mut |event| tell(Reply::Gc(event.clone())),
                pace: &mut |_| pace.rest(Duration::ZERO),
            };
            run.collect()?;
        }
        Request::Scrub { restart, rate: asked } => {
            let run = scrub::Run {
                store,
                restart,
                rate: Some(asked.unwrap_or(rate)),
                tell: &mut |event| tell(Reply::Scrub(event.clone())),
                rest: &mut |time| pace.rest(time),
            };
            run.scrub()?;
        }
        Request::Reindex => {
            let made = index::reindex(store, &|| !pace.rest(Duration::ZERO))?;
            tell(Reply::Reindex(made));
        }
    }
    Ok(())
}
