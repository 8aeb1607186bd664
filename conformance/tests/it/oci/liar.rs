//! Registries that are wrong on purpose.
//!
//! The liar passes every request on to a registry that is right, and spoils what one kind of reply
//! says: so each lie is one fault and nothing else, and what finds it was made to.

use std::io;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use tokio::net::TcpListener;

/// One fault, and every check of those named that must find it.
pub(super) struct Lie {
    pub(super) name: &'static str,
    /// Identifiers of checks, in the order of the suite.
    pub(super) found_by: &'static [&'static str],
    spoil: fn(&Parts, &mut Answer),
}

/// A reply while it is spoilt.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    fn says(&mut self, status: u16) {
        self.status = StatusCode::from_u16(status).unwrap();
    }

    fn set(&mut self, name: &'static str, value: &'static str) {
        self.headers.insert(name, HeaderValue::from_static(value));
    }

    /// Replaces a text in the body.
    fn replace(&mut self, from: &str, to: &str) {
        let text = String::from_utf8_lossy(&self.body).replace(from, to);
        self.body = text.into();
    }
}

/// A digest of something else.
const OTHER: &str = "sha256:1111111111111111111111111111111111111111111111111111111111111111";

pub(super) const LIES: &[Lie] = &[
    Lie {
        name: "a missing manifest is there and empty",
        found_by: &[
            "pull.manifest.missing-tag.get",
            "pull.manifest.missing-tag.head",
            "pull.manifest.other-repository",
            "delete.tag.then-get",
            "delete.manifest.then-get-by-digest",
        ],
        spoil: |parts, answer| {
            if answer.status == 404 && parts.uri.path().contains("/manifests/") {
                answer.says(200);
            }
        },
    },
    Lie {
        name: "one bit of every blob is flipped",
        found_by: &[
            "pull.blob.get.body",
            "pull.blob.content.empty.body",
            "push.blob.monolithic.post-put.pullable",
            "push.blob.chunked.two-chunks.pullable",
        ],
        spoil: |parts, answer| {
            if parts.method == Method::GET && is_blob(parts) && answer.status == 200 {
                let mut body = answer.body.to_vec();
                match body.first_mut() {
                    Some(byte) => *byte ^= 1,
                    None => body.push(0),
                }
                answer.body = body.into();
            }
        },
    },
    Lie {
        name: "Location is left out",
        found_by: &[
            "push.blob.begin.location",
            "push.blob.monolithic.post-put.location",
            "push.upload.status.chunk.location",
            "push.blob.mount.location",
            "push.manifest.by-tag.location",
        ],
        spoil: |parts, answer| {
            // Where every other check needs it, the one about it must still be the one to tell.
            if parts.method != Method::HEAD {
                answer.headers.remove("location");
            }
        },
    },
    Lie {
        name: "the digest in the header is another one",
        found_by: &[
            "pull.manifest.get-by-tag.digest",
            "pull.blob.head.digest",
            "push.blob.monolithic.post-put.digest",
            "push.manifest.by-digest.digest",
        ],
        spoil: |_, answer| {
            if answer.headers.contains_key("docker-content-digest") {
                answer.set("docker-content-digest", OTHER);
            }
        },
    },
    Lie {
        name: "a range brings the right length of the wrong bytes",
        found_by: &["pull.blob.range.middle.bytes", "pull.blob.range.resume"],
        spoil: |_, answer| {
            if answer.status == 206 {
                answer.body = vec![b'x'; answer.body.len()].into();
            }
        },
    },
    Lie {
        name: "Content-Range counts from one",
        found_by: &["pull.blob.range.first-byte.content-range"],
        spoil: |_, answer| {
            if answer.status == 206 {
                answer.set("content-range", "bytes 1-1/1000");
            }
        },
    },
    Lie {
        name: "a chunk out of order is taken",
        found_by: &[
            "push.blob.chunked.not-from-zero.refused",
            "push.blob.chunked.gap.refused",
            "push.blob.chunked.repeated.refused",
        ],
        spoil: |parts, answer| {
            if parts.method == Method::PATCH && answer.status == 416 {
                answer.says(202);
            }
        },
    },
    Lie {
        name: "the range of an upload is its length",
        found_by: &["push.blob.chunked.first.range", "push.upload.status.chunk.range"],
        spoil: |_, answer| {
            if answer.headers.get("range").is_some_and(|range| range == "0-99") {
                answer.set("range", "0-100");
            }
        },
    },
    Lie {
        name: "content that is not its digest's is taken",
        found_by: &[
            "digest.short.blob-put.refused",
            "push.blob.wrong-digest.refused",
            "push.manifest.wrong-digest.refused",
        ],
        spoil: |parts, answer| {
            if parts.method == Method::PUT && answer.status == 400 {
                answer.says(201);
            }
        },
    },
    Lie {
        name: "tags are listed backwards",
        found_by: &["list.tags.complete", "list.tags.link.follow-by-2"],
        spoil: |_, answer| {
            let Ok(mut body) = serde_json::from_slice::<serde_json::Value>(&answer.body) else {
                return;
            };
            if let Some(tags) = body.get_mut("tags").and_then(serde_json::Value::as_array_mut) {
                tags.reverse();
                answer.body = body.to_string().into();
            }
        },
    },
    Lie {
        name: "subjects and filters are passed over in silence",
        found_by: &[
            "push.subject.header.image",
            "push.subject.header.index",
            "list.referrers.filter.first.told",
            "list.referrers.filter.supported",
        ],
        spoil: |_, answer| {
            answer.headers.remove("oci-subject");
            answer.headers.remove("oci-filters-applied");
        },
    },
    Lie {
        name: "referrers have another type and no annotations",
        found_by: &[
            "list.referrers.entry.artifact-type",
            "list.referrers.entry.annotations",
            "list.referrers.filter.first.matching",
        ],
        spoil: |parts, answer| {
            if parts.uri.path().contains("/referrers/") {
                answer.replace("application/vnd.example.signature.v1+json", "text/plain");
                answer.replace("org.example.key", "org.example.other");
            }
        },
    },
    Lie {
        name: "an error has a code of its own",
        found_by: &["error.blob-unknown.known", "error.blob-unknown.code"],
        spoil: |_, answer| answer.replace("BLOB_UNKNOWN", "NO_SUCH_BLOB"),
    },
    Lie {
        name: "a manifest is written anew before it is sent",
        found_by: &["push.manifest.kind.whitespace.exact", "push.manifest.kind.field-order.exact"],
        spoil: |parts, answer| {
            if parts.method == Method::GET
                && parts.uri.path().contains("/manifests/")
                && let Ok(value) = serde_json::from_slice::<serde_json::Value>(&answer.body)
            {
                answer.body = value.to_string().into();
            }
        },
    },
    Lie {
        name: "warnings are long, dated and many",
        found_by: &["warning.blob.form", "warning.blob.size"],
        spoil: |_, answer| {
            let text = format!("199 - \"{}\" \"Sat, 25 Aug 2012 23:34:45 GMT\"", "x".repeat(5000));
            answer.headers.insert("warning", HeaderValue::try_from(text).unwrap());
        },
    },
];

fn is_blob(parts: &Parts) -> bool {
    parts.uri.path().contains("/blobs/sha")
}

/// Takes a free port.
pub(super) async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

/// Answers everything with one status.
pub(super) async fn always(listener: TcpListener, status: u16) -> io::Result<()> {
    let status = StatusCode::from_u16(status).unwrap();
    // The body is read, or the client would see a closed connection instead of the answer.
    let service = Router::new().fallback(async move |_: Bytes| status);
    let service = service.layer(axum::extract::DefaultBodyLimit::disable());
    axum::serve(listener, service).await
}

#[derive(Clone)]
struct Liar {
    truth: String,
    client: reqwest::Client,
    lie: &'static Lie,
}

/// Answers as the registry at `truth` does, but for one lie.
pub(super) async fn serve(listener: TcpListener, truth: &str, lie: &'static Lie) -> io::Result<()> {
    let client = reqwest::Client::new();
    let liar = Liar { truth: truth.to_owned(), client, lie };
    axum::serve(listener, Router::new().fallback(answer).with_state(liar)).await
}

async fn answer(State(liar): State<Liar>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let path = parts.uri.path_and_query().unwrap();
    let mut headers = parts.headers.clone();
    headers.remove("host");
    headers.remove("transfer-encoding");
    let asked = liar.client.request(parts.method.clone(), format!("{}{path}", liar.truth));
    let reply = asked.headers(headers).body(body).send().await.unwrap();
    let (status, headers) = (reply.status(), reply.headers().clone());
    let mut answer = Answer { status, headers, body: reply.bytes().await.unwrap() };
    (liar.lie.spoil)(&parts, &mut answer);
    if parts.method != Method::HEAD {
        answer.headers.remove("content-length");
    }
    answer.headers.remove("transfer-encoding");
    let mut response = (answer.status, Body::from(answer.body)).into_response();
    *response.headers_mut() = answer.headers;
    response
}
