//! Credentials from Docker's `config.json` and its helpers.

use docker_credential::DockerCredential;
use kybernate_spec::chain;
use oci_client::secrets::RegistryAuth;

use crate::docker_config::{DockerConfig, server};

/// Looks for credentials for `registry`. When there are none, or a helper fails, the registry is
/// met anonymously: most pulls need no more, and the rest is refused by the registry itself.
pub(super) async fn find(registry: &str) -> RegistryAuth {
    let Some(config) = DockerConfig::of_environment() else { return RegistryAuth::Anonymous };
    let without = |what: &str| {
        tracing::warn!(registry, what, "no credentials, going on without");
        RegistryAuth::Anonymous
    };
    match config.credentials(&server(registry)).await {
        Ok(Some(DockerCredential::UsernamePassword(user, password))) => {
            RegistryAuth::Basic(user, password)
        }
        Ok(Some(DockerCredential::IdentityToken(_))) => {
            without("identity tokens are not supported")
        }
        Ok(None) => RegistryAuth::Anonymous,
        Err(error) => without(&chain(&error).to_string()),
    }
}
