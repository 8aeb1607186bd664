//! What is counted and logged about each request.

use std::sync::Arc;
use std::time::Instant;

use http::StatusCode;
use http::header::USER_AGENT;
use http::request::Parts;

use crate::app::AppState;
use crate::config::AccessLog;
use crate::route::{Route, without_secrets};

/// A request under way; counted as such until dropped.
#[derive(Debug)]
pub(super) struct Seen {
    app: AppState,
    began: Instant,
}

impl Seen {
    pub(super) fn begin(app: &AppState) -> Self {
        app.metrics.http.in_flight.inc();
        Self { app: Arc::clone(app), began: Instant::now() }
    }

    /// Counts and logs the reply, whose head is known.
    pub(super) fn end(
        self,
        parts: &Parts,
        route: Option<&Route<'_>>,
        client: Option<&str>,
        status: StatusCode,
    ) {
        let took = self.began.elapsed();
        let label = route.map_or("none", Route::label);
        self.app.metrics.http.answered(label, &parts.method, status, took);
        let failed = status.is_client_error() || status.is_server_error();
        match self.app.config.log.access {
            AccessLog::All => {}
            AccessLog::Errors if failed => {}
            AccessLog::Errors | AccessLog::None => return,
        }
        tracing::info!(
            http.method = %parts.method,
            http.route = label,
            client,
            repository = route.and_then(Route::repository).map(without_secrets).as_deref(),
            reference = route.and_then(Route::reference),
            http.status = status.as_u16(),
            http.user_agent = parts.headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok()),
            duration_ms = took.as_millis(),
            "answered"
        );
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.app.metrics.http.in_flight.dec();
    }
}
