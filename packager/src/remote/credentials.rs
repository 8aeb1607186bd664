//! Credentials from Docker's `config.json` and its helpers.

use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;

/// The key Docker uses for its own registry.
const DOCKER_HUB: &str = "https://index.docker.io/v1/";

/// Looks for credentials for `registry`. When there are none, or a helper fails, the registry is
/// met anonymously: most pulls need no more, and the rest is refused by the registry itself.
pub(super) async fn find(registry: &str) -> RegistryAuth {
    let server = match registry {
        "docker.io" | "index.docker.io" => DOCKER_HUB.to_owned(),
        other => other.to_owned(),
    };
    // Reads files and may run a helper program.
    let found = tokio::task::spawn_blocking(move || docker_credential::get_credential(&server));
    match found.await {
        Ok(Ok(DockerCredential::UsernamePassword(user, password))) => {
            RegistryAuth::Basic(user, password)
        }
        Ok(Ok(DockerCredential::IdentityToken(_))) => {
            tracing::warn!(
                registry,
                "identity tokens are not supported, going on without credentials"
            );
            RegistryAuth::Anonymous
        }
        Ok(Err(
            CredentialRetrievalError::NoCredentialConfigured
            | CredentialRetrievalError::ConfigNotFound
            | CredentialRetrievalError::ConfigReadError,
        )) => RegistryAuth::Anonymous,
        Ok(Err(error)) => {
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
        Err(_aborted) => RegistryAuth::Anonymous,
    }
}
