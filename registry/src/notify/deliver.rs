//! Sends events to an endpoint until it takes them.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use backon::{BackoffBuilder as _, ExponentialBuilder};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use kybernate_spec::chain;
use tokio_util::sync::CancellationToken;

use super::event::{Envelope, MEDIA_TYPE};
use super::outbox::Outbox;
use super::queue::Parcel;
use super::sign::{self, SignError};
use crate::config::NotifyEndpoint;

/// Between the first two attempts.
const RETRY_MIN: Duration = Duration::from_secs(1);

/// Sends events to one endpoint.
#[derive(Debug)]
pub(super) struct Sender {
    endpoint: NotifyEndpoint,
    client: reqwest::Client,
}

/// Why an endpoint has not got an event. Names no URL: it may hold a secret.
#[derive(Debug, thiserror::Error)]
enum SendError {
    #[error("failed to make the request")]
    Sign(#[from] SignError),
    #[error("failed to write the event")]
    Encode(#[source] serde_json::Error),
    #[error("failed to send the event")]
    Send(#[source] reqwest::Error),
    #[error("the endpoint answered {0}")]
    Refused(StatusCode),
    #[error("the request was not made")]
    Task(#[source] tokio::task::JoinError),
}

impl Sender {
    pub(super) fn new(endpoint: NotifyEndpoint) -> Result<Self, reqwest::Error> {
        // Who is redirected should be configured anew: credentials are not sent elsewhere.
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .timeout(endpoint.timeout.0)
            .user_agent(concat!("kybernate-registry/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self { endpoint, client })
    }

    async fn send(&self, parcel: &Parcel) -> Result<(), SendError> {
        let Parcel { event, lost, .. } = parcel;
        let envelope = Envelope { events: [&**event], lost: *lost };
        let body = serde_json::to_vec(&envelope).map_err(SendError::Encode)?;
        let (endpoint, id) = (self.endpoint.clone(), event.id.clone());
        // Its files are on a disk.
        let signing = tokio::task::spawn_blocking(move || {
            sign::headers(&endpoint, &id, &body, SystemTime::now()).map(|headers| (headers, body))
        });
        let (headers, body) = signing.await.map_err(SendError::Task)??;
        let request = self.client.post(&self.endpoint.url).headers(headers);
        let request = request.header(CONTENT_TYPE, MEDIA_TYPE).body(body);
        let reply = request.send().await.map_err(|error| SendError::Send(error.without_url()))?;
        match reply.status() {
            status if status.is_success() => Ok(()),
            status => Err(SendError::Refused(status)),
        }
    }

    /// Returns the times between attempts, without end.
    fn waits(&self) -> impl Iterator<Item = Duration> {
        let most = self.endpoint.retry_max.0;
        ExponentialBuilder::default()
            .with_min_delay(RETRY_MIN.min(most))
            .with_max_delay(most)
            .with_jitter()
            .without_max_times()
            .build()
    }
}

/// Delivers what endpoint `number` is to get, until `cancel`.
pub(super) async fn deliver(
    outbox: Arc<Outbox>,
    number: usize,
    sender: Sender,
    cancel: CancellationToken,
) {
    let delivering = async {
        loop {
            let parcel = outbox.next(number).await;
            insist(&sender, &parcel, &outbox).await;
            let outbox = Arc::clone(&outbox);
            let noting = tokio::task::spawn_blocking(move || outbox.delivered(number, &parcel));
            if let Err(error) = noting.await {
                tracing::error!(%error, "a delivery was not noted, and will be repeated");
                return;
            }
        }
    };
    tokio::select! {
        () = delivering => {}
        () = cancel.cancelled() => {}
    }
}

/// Sends until it is taken.
async fn insist(sender: &Sender, parcel: &Parcel, outbox: &Outbox) {
    let name = &sender.endpoint.name;
    let mut waits = sender.waits();
    let mut attempts = 1;
    loop {
        let Err(error) = sender.send(parcel).await else { break };
        outbox.failed(name);
        let (error, event) = (chain(&error).to_string(), &parcel.event.id);
        if attempts == 1 {
            tracing::warn!(endpoint = name, event, error, "an event is not taken; it is repeated");
        } else {
            tracing::debug!(endpoint = name, event, error, attempts, "an event is not taken");
        }
        attempts += 1;
        let wait = waits.next().unwrap_or(sender.endpoint.retry_max.0);
        #[expect(clippy::disallowed_methods, reason = "the backoff between two attempts")]
        tokio::time::sleep(wait).await;
    }
    outbox.took(name);
    if attempts > 1 {
        tracing::info!(endpoint = name, attempts, "an event is taken after all");
    }
    if parcel.lost > 0 {
        tracing::warn!(endpoint = name, lost = parcel.lost, "events were lost while it was away");
    }
}
