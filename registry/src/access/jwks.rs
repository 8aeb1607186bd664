//! The public keys of issuers: from a file, or from where the issuer publishes them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Secret;
use super::follow::{Followed, View};
use super::token::{Issuer, KeySet, Unproven};
use crate::config::{IssuerSettings, Mistake};
use crate::tasks::Tasks;

/// How often published keys are asked for.
const FETCH_EVERY: Duration = Duration::from_mins(10);
/// How soon again, after a failure or when a token names a key that is not known.
const FETCH_AGAIN: Duration = Duration::from_secs(15);
/// How long an issuer may take to answer.
const FETCH_TIME_MAX: Duration = Duration::from_secs(10);
/// Longest key set.
const KEYS_BYTES_MAX: usize = 256 << 10;

/// An issuer, and where its keys come from.
#[derive(Debug)]
pub(super) struct Trusted {
    pub(super) issuer: Issuer,
    keys: Keys,
}

#[derive(Debug)]
enum Keys {
    File(View<KeySet>),
    Url { current: watch::Receiver<Arc<KeySet>>, missed: Arc<Notify> },
}

/// An issuer whose keys have been looked for and are not followed yet.
#[derive(Debug)]
pub(super) struct Prepared {
    issuer: Issuer,
    keys: Source,
}

#[derive(Debug)]
enum Source {
    File(Followed<KeySet>),
    Url(String),
}

/// Why keys could not be fetched.
#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error("the issuer could not be asked")]
    Http(#[source] reqwest::Error),
    #[error("the issuer's answer has more than 256 KiB")]
    Length,
    #[error("the issuer's answer is of no use: {}", .0.iter().map(|wrong| &*wrong.told).collect::<Vec<_>>().join(", "))]
    Keys(Vec<Mistake>),
}

impl Prepared {
    /// Reads an issuer's keys when they are in a file. Blocks.
    pub(super) fn read(settings: &IssuerSettings, secret: Secret) -> Result<Self, Vec<Mistake>> {
        let issuer = Issuer {
            name: Some(settings.name.as_str().into()),
            claim: settings.issuer.clone(),
            audience: settings.audience.clone(),
            decides: settings.decides,
        };
        if settings.keys_are_published() {
            return Ok(Self { issuer, keys: Source::Url(settings.jwks.clone()) });
        }
        let path = PathBuf::from(&settings.jwks);
        let name = path.clone();
        let keys = Followed::open("issuer's keys", [path], move |contents| {
            KeySet::read(&name, contents.first().map(Vec::as_slice).unwrap_or_default(), &secret)
        })?;
        Ok(Self { issuer, keys: Source::File(keys) })
    }

    /// Follows the keys as long as tasks run.
    pub(super) fn start(self, tasks: &Tasks, secret: Secret) -> Trusted {
        let keys = match self.keys {
            Source::File(file) => {
                let view = file.view();
                file.follow(tasks);
                Keys::File(view)
            }
            Source::Url(url) => {
                let (sender, current) = watch::channel(Arc::new(KeySet::empty(&secret)));
                let missed = Arc::new(Notify::new());
                let asked = Arc::clone(&missed);
                tasks.spawn(|cancel| keep(url, secret, sender, asked, cancel));
                Keys::Url { current, missed }
            }
        };
        Trusted { issuer: self.issuer, keys }
    }
}

impl Trusted {
    /// Returns the keys to prove a token with. One that names a key that is not here makes us ask
    /// the issuer again soon.
    pub(super) fn keys(&self, token: &Unproven<'_>) -> Arc<KeySet> {
        match &self.keys {
            Keys::File(view) => view.get(),
            Keys::Url { current, missed } => {
                let keys = Arc::clone(&current.borrow());
                if !keys.may_have_signed(token) {
                    missed.notify_one();
                }
                keys
            }
        }
    }
}

async fn keep(
    url: String,
    secret: Secret,
    sender: watch::Sender<Arc<KeySet>>,
    missed: Arc<Notify>,
    cancel: CancellationToken,
) {
    let mut client = None;
    let mut last = None;
    loop {
        let fetched = tokio::select! {
            fetched = fetch(&mut client, &url, &secret) => fetched,
            () = cancel.cancelled() => return,
        };
        let wait = match fetched {
            Ok((body, keys)) => {
                // The same keys again would forget who has proven to have a token.
                if last.as_ref() != Some(&body) {
                    sender.send_replace(Arc::new(keys));
                    tracing::info!(url, "the issuer's keys have been read");
                    last = Some(body);
                }
                FETCH_EVERY
            }
            Err(error) => {
                tracing::error!(url, error = %kybernate_spec::chain(&error), "failed to read an issuer's keys: those that were there stay in force");
                FETCH_AGAIN
            }
        };
        let began = Instant::now();
        tokio::select! {
            () = tokio::time::sleep_until(began + wait) => {}
            () = missed.notified() => {
                tokio::select! {
                    () = tokio::time::sleep_until(began + FETCH_AGAIN) => {}
                    () = cancel.cancelled() => return,
                }
            }
            () = cancel.cancelled() => return,
        }
    }
}

async fn fetch(
    client: &mut Option<reqwest::Client>,
    url: &str,
    secret: &Secret,
) -> Result<(Vec<u8>, KeySet), FetchError> {
    let client = match client {
        Some(client) => client,
        // Built only here: it reads all certificates that the system trusts.
        None => client.insert(
            reqwest::Client::builder()
                .timeout(FETCH_TIME_MAX)
                .redirect(reqwest::redirect::Policy::none())
                .build()
                .map_err(FetchError::Http)?,
        ),
    };
    let sent = client.get(url).send().await;
    let mut answer =
        sent.and_then(reqwest::Response::error_for_status).map_err(FetchError::Http)?;
    let mut body = Vec::new();
    while let Some(bytes) = answer.chunk().await.map_err(FetchError::Http)? {
        body.extend_from_slice(&bytes);
        if body.len() > KEYS_BYTES_MAX {
            return Err(FetchError::Length);
        }
    }
    let keys = KeySet::read(Path::new(url), &body, secret).map_err(FetchError::Keys)?;
    Ok((body, keys))
}
