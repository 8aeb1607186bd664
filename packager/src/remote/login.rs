//! Whether a registry takes a user's password.

use kybernate_spec::Reference;
use oci_client::secrets::RegistryAuth;
use reqwest::header::HeaderMap;

use super::documents::{client, failure};
use super::patience::within_stall;
use super::scheme::Scheme;
use super::tokens::{Access, Tokens};
use crate::store::{ConnectOptions, StoreError, StoreErrorKind};

/// How far a registry has looked at credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// It lets nobody in without, and lets these in.
    Proven,
    /// It asks nobody who they are before it is asked for something, so nothing is proven.
    Unasked,
}

/// Asks the registry of `reference` whether it takes these credentials. They go over TLS, to the
/// registry and to the token server that it names, unless `options` or loopback say otherwise.
pub async fn check_credentials(
    reference: &Reference,
    user: &str,
    password: &str,
    options: &ConnectOptions,
) -> Result<Accepted, StoreError> {
    let scheme = Scheme::of(reference, options);
    let auth = RegistryAuth::Basic(user.to_owned(), password.to_owned());
    check(scheme, reference, auth).await.map_err(|kind| StoreError {
        operation: "log in to registry",
        subject: format!("{} over {}", reference.registry, scheme.failed(&kind)),
        kind,
    })
}

async fn check(
    scheme: Scheme,
    reference: &Reference,
    auth: RegistryAuth,
) -> Result<Accepted, StoreErrorKind> {
    let image = super::image(reference);
    let http = client().read_timeout(super::patience::STALL).build()?;
    let (root, reply) = scheme.greet(&http, image.resolve_registry()).await?;
    let open = reply.status().is_success();
    let wanted = if open { &HeaderMap::new() } else { reply.headers() };
    let tokens = Tokens::new(http.clone(), auth, String::new(), wanted);
    let plain = scheme == Scheme::Plain;
    let request = tokens.sign(http.get(root.clone()), Access::Nothing, plain).await?;
    let reply = within_stall(request.send()).await?;
    if !reply.status().is_success() {
        return Err(failure(reply, root.to_string()).await);
    }
    Ok(if open { Accepted::Unasked } else { Accepted::Proven })
}
