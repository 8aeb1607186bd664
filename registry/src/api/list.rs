//! Lists: tags, referrers, repositories (distribution specification, "Content Discovery").

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, LINK};
use http::{HeaderName, HeaderValue};
use kybernate_spec::{Annotations, Index, media_type};

use super::{Call, digest, parameter, repository};
use crate::access::Caller;
use crate::error::ApiError;
use crate::places::until_sent;
use crate::store::{Page, Store, StoreError, Window};

const FILTERS: HeaderName = HeaderName::from_static("oci-filters-applied");

/// Names in one reply, whatever is asked for; more are found through `Link`.
const NAMES_MAX: usize = 10_000;
/// Referrers in one reply.
const REFERRERS_MAX: usize = 1_000;

pub(super) async fn tags(call: Call<'_>, name: &str) -> Result<Response, ApiError> {
    let repository = repository(name)?;
    let query = call.query()?;
    let window = window(&query, NAMES_MAX)?;
    let limit = window.limit;
    let wanted = repository.clone();
    let place = call.app.sending.take().await?;
    let page = call.on_store(move |store| store.tags(&wanted, window)).await?;
    let page = page.ok_or(ApiError::NameUnknown)?;
    let body = Json(serde_json::json!({ "name": repository, "tags": page.items }));
    let path = format!("/v2/{repository}/tags/list?n={limit}");
    Ok(until_sent(place, linked(body.into_response(), &path, page.next.as_deref())))
}

pub(super) async fn catalog(call: Call<'_>) -> Result<Response, ApiError> {
    let query = call.query()?;
    let window = window(&query, NAMES_MAX)?;
    let path = format!("/v2/_catalog?n={}", window.limit);
    let caller = call.caller.clone();
    let place = call.app.sending.take().await?;
    let page = call.on_store(move |store| visible(store, &caller, window)).await?;
    if page.items.is_empty() {
        call.reach().await?;
    }
    let body = Json(serde_json::json!({ "repositories": page.items }));
    Ok(until_sent(place, linked(body.into_response(), &path, page.next.as_deref())))
}

pub(super) async fn referrers(
    call: Call<'_>,
    name: &str,
    subject: &str,
) -> Result<Response, ApiError> {
    let (repository, subject) = (repository(name)?, digest(subject)?);
    let query = call.query()?;
    let window = window(&query, REFERRERS_MAX)?;
    // A '+' typed into a query reads as a space, which no media type has.
    let wanted = parameter(&query, "artifactType").map(|text| text.replace(' ', "+"));
    let wanted = wanted.filter(|text| !text.is_empty());
    let mut path = format!("/v2/{repository}/referrers/{subject}?n={}", window.limit);
    if let Some(wanted) = &wanted {
        path.push_str("&artifactType=");
        path.push_str(&encode(wanted));
    }
    let filter = wanted.clone();
    let place = call.app.sending.take().await?;
    let list = call
        .on_store(move |store| store.referrers(&repository, &subject, filter.as_deref(), window));
    let page = list.await?;
    if page.items.is_empty() {
        call.reach().await?;
    }
    let index = Index {
        schema_version: 2,
        media_type: Some(media_type::OCI_INDEX.to_owned()),
        artifact_type: None,
        manifests: page.items,
        subject: None,
        annotations: Annotations::new(),
    };
    let mut response = linked(Json(index).into_response(), &path, page.next.as_deref());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type::OCI_INDEX));
    if wanted.is_some() {
        headers.insert(FILTERS, HeaderValue::from_static("artifactType"));
    }
    Ok(until_sent(place, response))
}

/// Lists the repositories that the caller may see. That there are others is not told, neither by an
/// empty page nor by a link to one.
fn visible(store: &Store, caller: &Caller, window: Window) -> Result<Page<String>, StoreError> {
    if let Caller::Anyone = caller {
        return store.repositories(window);
    }
    let Window { mut after, limit } = window;
    let mut items = Vec::new();
    loop {
        let page = store.repositories(Window { after, limit: NAMES_MAX })?;
        items.extend(page.items.into_iter().filter(|name| caller.sees(name)));
        if items.len() > limit {
            items.truncate(limit);
            return Ok(Page { next: items.last().cloned(), items });
        }
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(Page { items, next: None }),
        }
    }
}

fn window(query: &[(String, String)], limit_max: usize) -> Result<Window, ApiError> {
    let limit = match parameter(query, "n").map(str::parse::<usize>) {
        None => limit_max,
        Some(Ok(n)) => n.min(limit_max),
        Some(Err(_not_a_number)) => return Err(ApiError::Malformed("query parameter 'n'")),
    };
    Ok(Window { after: parameter(query, "last").map(str::to_owned), limit })
}

fn linked(mut response: Response, path: &str, next: Option<&str>) -> Response {
    let link = next.map(|next| format!("<{path}&last={}>; rel=\"next\"", encode(next)));
    if let Some(Ok(link)) = link.map(HeaderValue::try_from) {
        response.headers_mut().insert(LINK, link);
    }
    response
}

/// Percent-encodes what is not unreserved (RFC 3986, 2.3).
fn encode(text: &str) -> String {
    let unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let letters = text.bytes().map(|byte| {
        if unreserved(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    });
    letters.collect()
}

#[cfg(test)]
mod tests;
