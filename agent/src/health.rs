//! Whether the agent lives and can work, for whoever watches it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CACHE_CONTROL;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use kybernate_spec::chain;
use tokio::sync::Mutex;

use crate::app::App;

/// How long containerd and the disk may take to answer: who asks does not wait longer.
const LIMIT: Duration = Duration::from_secs(2);

/// What is looked at.
#[derive(Clone, Debug)]
struct Health {
    app: Arc<App>,
    // Held while the disk is tried, also by a look that nobody waits for any more: a disk that hangs
    // costs one thread.
    trying: Arc<Mutex<()>>,
}

/// Returns the pages `/healthz` and `/readyz`.
pub(crate) fn routes(app: &Arc<App>) -> Router {
    let health = Health { app: Arc::clone(app), trying: Arc::default() };
    let ready = move || {
        let health = health.clone();
        async move { health.ready().await }
    };
    Router::new().route("/healthz", get(alive)).route("/readyz", get(ready))
}

/// The process answers. It says nothing about containerd or the disk: a restart would not mend them.
async fn alive() -> Response {
    page(StatusCode::OK, "alive")
}

impl Health {
    /// The agent can work, or why it cannot.
    async fn ready(&self) -> Response {
        if self.app.tasks.is_stopping() {
            return page(StatusCode::SERVICE_UNAVAILABLE, "draining");
        }
        let (containerd, journal) = tokio::join!(self.containerd(), self.journal());
        let wrong: Vec<String> =
            [containerd, journal].into_iter().filter_map(Result::err).collect();
        if wrong.is_empty() {
            return page(StatusCode::OK, "ready");
        }
        let wrong = wrong.join("\n");
        tracing::warn!(wrong, "not ready");
        page(StatusCode::SERVICE_UNAVAILABLE, wrong)
    }

    async fn containerd(&self) -> Result<(), String> {
        match tokio::time::timeout(LIMIT, self.app.containerd.version()).await {
            Ok(Ok(_version)) => Ok(()),
            Ok(Err(error)) => Err(chain(&error).to_string()),
            Err(_elapsed) => Err(late("containerd")),
        }
    }

    /// Whether what an operation does can be written down.
    async fn journal(&self) -> Result<(), String> {
        let tried = async {
            let trying = Arc::clone(&self.trying).lock_owned().await;
            let operations = Arc::clone(&self.app.operations);
            let tried = tokio::task::spawn_blocking(move || {
                let _trying = trying;
                operations.probe()
            });
            tried
                .await
                .map_err(|error| io::Error::other(error).to_string())?
                .map_err(|error| chain(&error).to_string())
        };
        tokio::time::timeout(LIMIT, tried).await.unwrap_or_else(|_elapsed| Err(late("the disk")))
    }
}

fn late(what: &str) -> String {
    format!("{what} does not answer within {} s", LIMIT.as_secs())
}

fn page(status: StatusCode, text: impl Into<String>) -> Response {
    (status, [(CACHE_CONTROL, "no-store")], format!("{}\n", text.into())).into_response()
}

#[cfg(test)]
mod tests {
    use containerd_client::services::v1::VersionResponse;
    use prost::Message as _;

    use super::*;
    use crate::runtime::fake::Fake;

    async fn ask(app: &Arc<App>, path: &str) -> (StatusCode, String) {
        use tower::ServiceExt as _;
        let request = axum::http::Request::get(path).body(axum::body::Body::empty()).unwrap();
        let answer = routes(app).oneshot(request).await.unwrap();
        assert_eq!(answer.headers()[CACHE_CONTROL], "no-store");
        let status = answer.status();
        let body = axum::body::to_bytes(answer.into_body(), 1 << 16).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    fn ok(text: &str) -> (StatusCode, String) {
        (StatusCode::OK, text.to_owned())
    }

    #[tokio::test]
    async fn an_agent_is_ready_while_its_journal_can_be_written() {
        let version = VersionResponse { version: "2.1".to_owned(), ..VersionResponse::default() };
        let fake = Fake::start(move |_, _| Ok(version.encode_to_vec()));
        let app = fake.app();
        assert_eq!(ask(&app, "/healthz").await, ok("alive\n"));
        assert_eq!(ask(&app, "/readyz").await, ok("ready\n"));
        let place = app.config.operations();
        assert_eq!(fs_err::read_dir(&place).unwrap().count(), 0, "something is left");
        let away = place.with_extension("away");
        fs_err::rename(&place, &away).unwrap();
        let (status, text) = ask(&app, "/readyz").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(text.contains(place.to_str().unwrap()) && !text.contains("containerd "), "{text}");
        assert_eq!(ask(&app, "/healthz").await, ok("alive\n"));
        fs_err::rename(&away, &place).unwrap();
        assert_eq!(ask(&app, "/readyz").await, ok("ready\n"));
        app.tasks.stop();
        let draining = (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
        assert_eq!(ask(&app, "/readyz").await, draining);
    }

    #[tokio::test]
    async fn an_agent_is_not_ready_without_containerd() {
        let fake = Fake::start(|_, _| Err(tonic::Status::unavailable("it starts")));
        let app = fake.app();
        let (status, text) = ask(&app, "/readyz").await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(text.contains("containerd") && text.lines().count() == 1, "{text}");
        assert_eq!(ask(&app, "/healthz").await, ok("alive\n"));
    }
}
