//! Pages for those who run the registry: health and figures.

use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, StatusCode};
use kybernate_spec::chain;

use super::Call;
use crate::metrics::CONTENT_TYPE as OPEN_METRICS;

/// The process runs. It says nothing about the disk: a restart would not mend it.
pub(super) fn live() -> Response {
    page(StatusCode::OK, "alive")
}

/// The process has started: nothing listens before the store is open.
pub(super) fn started() -> Response {
    page(StatusCode::OK, "started")
}

/// Requests should come here: the store can be reached, and the end has not begun.
pub(super) async fn ready(call: Call<'_>) -> Response {
    if call.app.leaving.is_cancelled() || call.app.tasks.is_ending() {
        return page(StatusCode::SERVICE_UNAVAILABLE, "draining");
    }
    match call.on_store(|store| store.probe()).await {
        Ok(()) => page(StatusCode::OK, "ready"),
        Err(error) => {
            tracing::error!(error = %chain(&error), "not ready");
            page(StatusCode::SERVICE_UNAVAILABLE, "the store cannot be reached")
        }
    }
}

/// Figures for Prometheus.
pub(super) fn metrics(call: Call<'_>) -> Response {
    let open = call.app.uploads.open_count();
    call.app.metrics.uploads_open.set(i64::try_from(open).unwrap_or(i64::MAX));
    match call.app.metrics.page() {
        Ok(page) => ([(CONTENT_TYPE, OPEN_METRICS)], page).into_response(),
        Err(error) => {
            tracing::error!(%error, "failed to write metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

fn page(status: StatusCode, word: &'static str) -> Response {
    let uncached = [(CACHE_CONTROL, HeaderValue::from_static("no-store"))];
    (status, uncached, word).into_response()
}
