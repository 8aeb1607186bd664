//! Whom this machine trusts to say who a registry is.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use rustls::crypto::aws_lc_rs;
use rustls_platform_verifier::BuilderVerifierExt as _;

/// How long the machine's certificates are believed. To read them takes 4 ms (146 of them), a
/// hundredth of a restore from memory.
const FRESH: Duration = Duration::from_mins(1);

/// For all registries: a session with one is taken up again by the next client of it.
static TRUST: Trust = Trust(Mutex::new(None));

/// What was read last.
struct Trust(Mutex<Option<(Instant, ClientConfig)>>);

impl Trust {
    /// Returns what was read within the last minute, or what `read` returns now.
    fn config<E>(&self, read: impl FnOnce() -> Result<ClientConfig, E>) -> Result<ClientConfig, E> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((when, config)) = &*known
            && when.elapsed() < FRESH
        {
            return Ok(config.clone());
        }
        let config = read()?;
        *known = Some((Instant::now(), config.clone()));
        Ok(config)
    }

    fn forget(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Returns how to speak TLS to registries. None when the machine's certificates cannot be read.
pub(super) fn config() -> Option<ClientConfig> {
    TRUST.config(read).ok()
}

fn read() -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions()?.with_platform_verifier()?;
    Ok(builder.with_no_client_auth())
}

/// Lets the certificates be read anew: somebody was not trusted, and may be by now.
pub(super) fn forget() {
    TRUST.forget();
}

#[cfg(test)]
mod tests {
    use rustls::RootCertStore;

    use super::*;

    #[test]
    fn certificates_are_read_once_until_somebody_is_not_trusted() {
        let trust = Trust(Mutex::new(None));
        let mut times = 0;
        let mut read = |works: bool| {
            let config = || {
                times += 1;
                let provider = Arc::new(aws_lc_rs::default_provider());
                let config = ClientConfig::builder_with_provider(provider)
                    .with_safe_default_protocol_versions()
                    .unwrap()
                    .with_root_certificates(RootCertStore::empty())
                    .with_no_client_auth();
                works.then_some(config).ok_or("no certificates")
            };
            trust.config(config).map(|_| times)
        };
        assert_eq!(read(false).unwrap_err(), "no certificates");
        assert_eq!([read(true), read(true), read(false)], [Ok(2); 3]);
        trust.forget();
        assert_eq!(read(true), Ok(3));
    }
}
