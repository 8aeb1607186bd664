//! Credentials from Docker's `config.json` and its helpers.

use std::time::Duration;

use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::docker_config::server;

/// Longest wait for a helper: one that asks a cloud for a password takes seconds, one that waits for
/// a keychain to be unlocked takes for ever.
const HELPER_LIMIT: Duration = Duration::from_secs(30);

/// Looks for credentials for `registry`. When there are none, or a helper fails, the registry is
/// met anonymously: most pulls need no more, and the rest is refused by the registry itself.
pub(super) async fn find(registry: &str) -> RegistryAuth {
    let server = server(registry);
    // Reads files and may run a helper program.
    let found = within(HELPER_LIMIT, move || docker_credential::get_credential(&server));
    match found.await {
        Some(Ok(DockerCredential::UsernamePassword(user, password))) => {
            RegistryAuth::Basic(user, password)
        }
        Some(Ok(DockerCredential::IdentityToken(_))) => {
            tracing::warn!(
                registry,
                "identity tokens are not supported, going on without credentials"
            );
            RegistryAuth::Anonymous
        }
        Some(Err(
            CredentialRetrievalError::NoCredentialConfigured
            | CredentialRetrievalError::ConfigNotFound
            | CredentialRetrievalError::ConfigReadError,
        )) => RegistryAuth::Anonymous,
        Some(Err(error)) => {
            // A helper's output may hold secrets, so only the kind of failure is told.
            let what = match error {
                CredentialRetrievalError::HelperFailure { helper, .. } => {
                    format!("credential helper {helper:?} failed")
                }
                other => other.to_string(),
            };
            tracing::warn!(registry, what, "no credentials, going on without");
            RegistryAuth::Anonymous
        }
        None => {
            let what = "the credential helper has not answered";
            tracing::warn!(registry, what, "no credentials, going on without");
            RegistryAuth::Anonymous
        }
    }
}

/// Waits for `work`, at most so long; what it comes to later is dropped.
async fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, result) = oneshot::channel();
    // A thread of its own, and no blocking task: the end of a runtime waits for those.
    std::thread::spawn(move || {
        // Nobody waits any more.
        let _late = done.send(work());
    });
    timeout(limit, result).await.ok()?.ok()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn what_a_helper_says_is_taken() {
        assert_eq!(within(HELPER_LIMIT, || 7).await, Some(7));
    }

    #[tokio::test(start_paused = true)]
    async fn a_helper_that_never_answers_is_not_waited_for() {
        let (end, wait) = mpsc::channel::<()>();
        let waits = within(HELPER_LIMIT, move || wait.recv().is_ok());
        assert_eq!(waits.await, None);
        drop(end);
    }
}
