//! Whether a registry is spoken to over TLS. All are, but with plain HTTP where the user says so,
//! and on loopback where nobody answers with TLS.

use std::error::Error;
use std::io;
use std::time::Duration;

use kybernate_spec::Reference;
use oci_client::errors::OciDistributionError::RequestError;
use reqwest::{Response, Url};
use tokio::time::timeout;

use super::documents::failure;
use super::error::may_pass;
use super::patience::{persist_briefly, within_stall};
use super::tls;
use crate::store::{ConnectOptions, StoreErrorKind};

/// Longest wait for the reply to the first TLS message on loopback. Most servers of plain HTTP
/// answer or hang up at once, some wait for the end of a line.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How a registry may be spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// Only over TLS.
    Tls,
    /// Only without.
    Plain,
    /// Over TLS if it speaks that.
    Either,
}

impl Scheme {
    /// Returns how the registry of `reference` may be spoken to.
    pub(super) fn of(reference: &Reference, options: &ConnectOptions) -> Self {
        match (options.plain_http, reference.is_loopback()) {
            (true, _) => Self::Plain,
            (false, true) => Self::Either,
            (false, false) => Self::Tls,
        }
    }

    /// Returns what has failed, for an error that says so.
    pub(super) fn failed(self, kind: &StoreErrorKind) -> &'static str {
        match (self, kind) {
            (Self::Tls, StoreErrorKind::Registry(RequestError(error))) if is_no_tls(error) => {
                "https (it does not speak TLS: --plain-http, if that is meant)"
            }
            (Self::Tls, _) => "https",
            (Self::Plain, _) => "http",
            (Self::Either, StoreErrorKind::Registry(RequestError(error))) if speaks_tls(error) => {
                "https"
            }
            (Self::Either, _) => "https or http",
        }
    }

    /// Makes the first request to `host`, without credentials. Its reply's address has the scheme
    /// that the registry speaks.
    pub(super) async fn greet(
        self,
        http: &reqwest::Client,
        host: &str,
    ) -> Result<(Url, Response), StoreErrorKind> {
        let met = self.meet(http, host).await;
        if let Err(StoreErrorKind::Registry(RequestError(error))) = &met
            && speaks_tls(error)
        {
            tls::forget();
        }
        met
    }

    async fn meet(
        self,
        http: &reqwest::Client,
        host: &str,
    ) -> Result<(Url, Response), StoreErrorKind> {
        let root = |scheme: &str| super::documents::parse(&format!("{scheme}://{host}/v2/"));
        let mut url = root(if self == Self::Plain { "http" } else { "https" })?;
        if self == Self::Either {
            match timeout(HANDSHAKE, http.get(url.clone()).send()).await {
                Ok(Ok(reply)) if !may_pass(reply.status()) => return Ok((url, reply)),
                Ok(Ok(_)) => {}
                Ok(Err(error)) if speaks_tls(&error) => return Err(error.into()),
                Ok(Err(_)) | Err(_) => {
                    tracing::debug!(registry = host, "no TLS on loopback, going on with HTTP");
                    url = root("http")?;
                }
            }
        }
        let reply = persist_briefly(async || {
            let reply = within_stall(http.get(url.clone()).send()).await?;
            // What such a reply says of credentials is not the registry's last word.
            if may_pass(reply.status()) {
                return Err(failure(reply, url.to_string()).await);
            }
            Ok(reply)
        });
        let reply = reply.await?;
        Ok((url, reply))
    }
}

/// Whether a failed request has met TLS: the other end's certificate is not accepted, or it has
/// refused ours.
pub(super) fn speaks_tls(error: &reqwest::Error) -> bool {
    // What is no TLS message at all is an invalid one.
    tls_error(error).is_some_and(|error| !matches!(error, rustls::Error::InvalidMessage(_)))
}

/// Whether a failed request has met somebody who speaks something else.
fn is_no_tls(error: &reqwest::Error) -> bool {
    tls_error(error).is_some_and(|error| matches!(error, rustls::Error::InvalidMessage(_)))
}

fn tls_error(error: &reqwest::Error) -> Option<&rustls::Error> {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<rustls::Error>() {
            return Some(found);
        }
        // The source of such an error is the source of what is in it.
        next = match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    None
}
