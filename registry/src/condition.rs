//! Conditional requests (RFC 9110, 13.1 and 13.2): what is under a digest never changes, so a
//! client that has it needs no second copy.

use axum::body::Body;
use axum::response::Response;
use http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_MATCH, IF_NONE_MATCH,
};
use http::request::Parts;
use http::{HeaderMap, HeaderName, Method, StatusCode};

/// What a condition makes of a GET or HEAD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// The request is answered as if there were none.
    Goes,
    /// The client has it already: 304.
    NotModified,
    /// The client wants something else than what is here: 412.
    Failed,
}

impl Condition {
    /// Compares the request's conditions with the entity tag of what is here, which is strong.
    ///
    /// `If-Match` is looked at first (13.2.2). Dates are ignored: nothing here has one.
    pub fn of(headers: &HeaderMap, tag: &str) -> Self {
        if headers.contains_key(IF_MATCH) && !names(headers, IF_MATCH, |text| text == tag) {
            return Self::Failed;
        }
        // `If-None-Match` compares weakly, `If-Match` does not (8.8.3.2).
        let same = |text: &str| text.strip_prefix("W/").unwrap_or(text) == tag;
        if names(headers, IF_NONE_MATCH, same) { Self::NotModified } else { Self::Goes }
    }
}

/// The conditions of a PUT or DELETE, kept beyond the request's headers.
#[derive(Debug)]
pub struct WriteConditions(HeaderMap);

impl WriteConditions {
    /// Returns those of a request, if it has any.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut own = HeaderMap::new();
        for name in [IF_MATCH, IF_NONE_MATCH] {
            for value in headers.get_all(&name) {
                own.append(name.clone(), value.clone());
            }
        }
        (!own.is_empty()).then_some(Self(own))
    }

    /// Whether what is here, by its entity tag, may be replaced or removed (RFC 9110, 13.1.1 and 13.1.2).
    pub fn allow(&self, tag: Option<&str>) -> bool {
        let Self(headers) = self;
        match tag {
            Some(tag) => Condition::of(headers, tag) == Condition::Goes,
            None => !headers.contains_key(IF_MATCH),
        }
    }
}

/// Answers a GET or HEAD as its conditions want it, once it is known what would be answered.
pub fn apply(parts: &Parts, response: Response) -> Response {
    let has = |name| parts.headers.contains_key(name);
    let reads = matches!(parts.method, Method::GET | Method::HEAD);
    if !reads || !response.status().is_success() || !(has(IF_MATCH) || has(IF_NONE_MATCH)) {
        return response;
    }
    let Some(tag) = response.headers().get(ETAG).and_then(|tag| tag.to_str().ok()) else {
        return response;
    };
    let status = match Condition::of(&parts.headers, tag) {
        Condition::Goes => return response,
        Condition::NotModified => StatusCode::NOT_MODIFIED,
        Condition::Failed => StatusCode::PRECONDITION_FAILED,
    };
    let (mut head, _content) = response.into_parts();
    head.status = status;
    for name in [CONTENT_TYPE, CONTENT_RANGE, ACCEPT_RANGES] {
        head.headers.remove(name);
    }
    // In a 304 it may only be the length that a 200 would have (8.6), and where it is missing in the
    // reply to a HEAD the HTTP library says 0.
    if status != StatusCode::NOT_MODIFIED || parts.method != Method::HEAD {
        head.headers.remove(CONTENT_LENGTH);
    }
    Response::from_parts(head, Body::empty())
}

/// Whether a list of entity tags is `*` or has one that is the `same`. Our tags hold no comma.
fn names(headers: &HeaderMap, name: HeaderName, same: impl Fn(&str) -> bool) -> bool {
    let lines = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).any(|text| text == "*" || same(text))
}

#[cfg(test)]
mod tests {
    use http::header::{IF_MATCH, IF_NONE_MATCH};
    use http::{HeaderMap, HeaderName, HeaderValue};

    use super::Condition;

    fn check(name: HeaderName, value: &'static str, wanted: Condition) {
        let headers = HeaderMap::from_iter([(name, HeaderValue::from_static(value))]);
        assert_eq!(Condition::of(&headers, "\"sha256:aa\""), wanted, "{headers:?}");
    }

    #[test]
    fn what_the_client_has_is_not_sent_again() {
        for value in ["\"sha256:aa\"", "W/\"sha256:aa\"", "*", "\"x\" , \"sha256:aa\""] {
            check(IF_NONE_MATCH, value, Condition::NotModified);
        }
        check(IF_NONE_MATCH, "\"sha256:bb\"", Condition::Goes);
        check(IF_NONE_MATCH, "sha256:aa", Condition::Goes);
        check(IF_NONE_MATCH, "", Condition::Goes);
    }

    #[test]
    fn what_the_client_does_not_want_is_not_sent() {
        check(IF_MATCH, "\"sha256:aa\"", Condition::Goes);
        check(IF_MATCH, "*", Condition::Goes);
        for value in ["\"sha256:bb\"", "W/\"sha256:aa\"", ""] {
            check(IF_MATCH, value, Condition::Failed);
        }
        assert_eq!(Condition::of(&HeaderMap::new(), "\"sha256:aa\""), Condition::Goes);
    }
}
