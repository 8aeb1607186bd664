//! Our own token server (Docker's token specification, and its OAuth 2 form).

use std::time::{Duration, SystemTime};

use axum::Json;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Method};
use serde_json::json;

use super::{Call, gate, parameter};
use crate::access::proof::{Issued, Refusal};
use crate::access::scope::Scope;
use crate::access::{Caller, Somebody};
use crate::error::ApiError;
use crate::upload::{UploadError, next_frame};

/// Longest form; a password and fifty scopes of 300 bytes.
const FORM_BYTES_MAX: usize = 32 << 10;

/// How long a form may take: nothing is proven yet of who sends it, and it is short.
const FORM_TIME_MAX: Duration = Duration::from_secs(30);

/// Makes a token for whoever has a password, or for nobody in particular.
pub(super) async fn issue(call: Call<'_>, body: &mut Option<Body>) -> Result<Response, ApiError> {
    let Caller::Somebody(caller) = call.caller else { return Err(ApiError::NoEndpoint) };
    if !call.app.access.issues_tokens() {
        return Err(ApiError::NoEndpoint);
    }
    let parameters = match call.parts.method {
        Method::POST => form(call, body).await?,
        _ => call.query()?,
    };
    let by_form = match parameter(&parameters, "grant_type") {
        None => None,
        Some("password") => Some(by_password(call, caller, &parameters).await?),
        Some(_) => return Err(ApiError::Malformed("grant_type; only password is supported")),
    };
    let caller = by_form.as_ref().unwrap_or(caller);
    match caller.refused() {
        Some(Refusal::Busy) => gate::refuse_credentials(call, caller)?,
        Some(refusal) => {
            tracing::warn!(client = %call.peer.address, why = %refusal, "credentials are not accepted");
            return Err(unauthorized(call, refusal.to_string()));
        }
        None => {}
    }
    let wanted = parameters.iter().filter(|(key, _)| key == "scope");
    let scopes = Scope::parse_all(wanted.map(|(_, value)| value.as_str()));
    let scopes = scopes.map_err(|error| {
        tracing::debug!(%error, "a scope cannot be read");
        ApiError::Malformed("scope; write repository:NAME:pull,push")
    })?;
    let nobody = caller.is_nobody();
    match call.app.access.issue(caller, &scopes) {
        // A token that is good for nothing would only hide that credentials are missing.
        Some(Ok(issued)) if nobody && issued.access.is_empty() => {
            Err(unauthorized(call, "prove who you are".to_owned()))
        }
        Some(Ok(issued)) => Ok(reply(&issued)),
        Some(Err(error)) => Err(ApiError::Sign(error)),
        None => Err(ApiError::Denied),
    }
}

/// Returns the keys that others, such as agents, check our tokens with.
pub(super) fn keys(call: Call<'_>) -> Result<Response, ApiError> {
    let keys = call.app.access.public_keys().ok_or(ApiError::NoEndpoint)?;
    Ok(Json(keys).into_response())
}

async fn by_password(
    call: Call<'_>,
    caller: &Somebody,
    parameters: &[(String, String)],
) -> Result<Somebody, ApiError> {
    let named = parameter(parameters, "username").zip(parameter(parameters, "password"));
    let (user, password) =
        named.ok_or(ApiError::Malformed("form; username or password is missing"))?;
    let address = call.peer.address.ip();
    Ok(call.app.access.identify_by_password(caller, (user, password), address).await)
}

async fn form(call: Call<'_>, body: &mut Option<Body>) -> Result<Vec<(String, String)>, ApiError> {
    let kind = call.header(CONTENT_TYPE).unwrap_or_default();
    let kind = kind.split_once(';').map_or(kind, |(kind, _)| kind).trim();
    if !kind.eq_ignore_ascii_case("application/x-www-form-urlencoded") {
        return Err(ApiError::Malformed("Content-Type; send a form"));
    }
    let Some(body) = body else { return Err(ApiError::Body) };
    let content = tokio::time::timeout(FORM_TIME_MAX, whole(body)).await;
    let content = content.map_err(|_too_long| UploadError::Stalled)??;
    serde_urlencoded::from_bytes(&content).map_err(|error| {
        // Not the error: it may hold a part of the form.
        drop(error);
        ApiError::Malformed("form")
    })
}

async fn whole(body: &mut Body) -> Result<BytesMut, ApiError> {
    let mut content = BytesMut::new();
    while let Some(bytes) = next_frame(body).await? {
        content.extend_from_slice(&bytes);
        if content.len() > FORM_BYTES_MAX {
            return Err(ApiError::Malformed("form; it is too long"));
        }
    }
    Ok(content)
}

fn unauthorized(call: Call<'_>, why: String) -> ApiError {
    let challenge = call.app.access.ask_for_password().unwrap_or_default();
    ApiError::Unauthorized { challenge, why }
}

fn reply(issued: &Issued) -> Response {
    let scope = issued
        .access
        .iter()
        .map(|access| format!("{}:{}:{}", access.kind, access.name, access.actions.join(",")));
    let body = json!({
        // Both forms of the specification in one.
        "token": issued.token,
        "access_token": issued.token,
        "token_type": "Bearer",
        "expires_in": issued.life.as_secs(),
        "issued_at": humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        "scope": scope.collect::<Vec<_>>().join(" "),
    });
    let mut response = Json(body).into_response();
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
