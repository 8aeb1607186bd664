//! A whole reply, and what can be asked of it.
//!
//! Every question returns the reply again or ends the check with what was asked, expected and got.

use bytes::Bytes;
use kybernate_spec::{Algorithm, Digest, Hasher};
use reqwest::Url;
use reqwest::header::HeaderMap;
use serde_json::Value;

use super::check::{Stop, fail, skip};

/// How much of a body is told.
const TOLD_LETTERS_MAX: usize = 300;

/// The error codes the specification knows; there are no others ("Error Codes").
pub const CODES: [&str; 14] = [
    "BLOB_UNKNOWN",
    "BLOB_UPLOAD_INVALID",
    "BLOB_UPLOAD_UNKNOWN",
    "DIGEST_INVALID",
    "MANIFEST_BLOB_UNKNOWN",
    "MANIFEST_INVALID",
    "MANIFEST_UNKNOWN",
    "NAME_INVALID",
    "NAME_UNKNOWN",
    "SIZE_INVALID",
    "UNAUTHORIZED",
    "DENIED",
    "UNSUPPORTED",
    "TOOMANYREQUESTS",
];

/// A reply that has arrived whole.
#[derive(Clone, Debug)]
pub struct Reply {
    /// What was asked, for people.
    pub request: String,
    /// Where the reply came from, after redirects.
    pub url: Url,
    /// The status.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

impl Reply {
    /// Asks for one status.
    pub fn is(&self, status: u16) -> Result<&Self, Stop> {
        self.is_any(&[status])
    }

    /// Asks for one of several statuses.
    pub fn is_any(&self, statuses: &[u16]) -> Result<&Self, Stop> {
        if statuses.contains(&self.status) {
            return Ok(self);
        }
        let texts: Vec<String> = statuses.iter().map(ToString::to_string).collect();
        self.wrong(format!("status {}", texts.join(" or ")))
    }

    /// Asks for a refusal that is the client's fault: 4xx.
    pub fn is_refused(&self) -> Result<&Self, Stop> {
        if (400..500).contains(&self.status) { Ok(self) } else { self.wrong("a status of 4xx") }
    }

    /// Asks for anything but a failure of the registry itself.
    pub fn is_no_crash(&self) -> Result<&Self, Stop> {
        if self.status < 500 { Ok(self) } else { self.wrong("any status but 5xx") }
    }

    /// Ends the check when the registry says that it does not do this.
    pub fn or_unsupported(&self) -> Result<&Self, Stop> {
        let says = self.codes().is_some_and(|codes| codes.iter().any(|code| code == "UNSUPPORTED"));
        if self.status == 405 || self.status == 501 || (self.status >= 400 && says) {
            return skip(format!("{} says it is unsupported ({})", self.request, self.status));
        }
        Ok(self)
    }

    /// Returns a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Asks for a header.
    pub fn has(&self, name: &str) -> Result<&str, Stop> {
        match self.header(name) {
            Some(value) if !value.is_empty() => Ok(value),
            _ => self.wrong(format!("a header {name}")),
        }
    }

    /// Asks for the absence of a header.
    pub fn lacks(&self, name: &str) -> Result<&Self, Stop> {
        if self.headers.contains_key(name) {
            return self.wrong(format!("no header {name}"));
        }
        Ok(self)
    }

    /// Asks for a header and its value.
    pub fn header_is(&self, name: &str, value: &str) -> Result<&Self, Stop> {
        if self.header(name) == Some(value) {
            return Ok(self);
        }
        self.wrong(format!("header {name}: {value}"))
    }

    /// Asks that a header, if it is there, has a value.
    pub fn header_is_if_there(&self, name: &str, value: &str) -> Result<&Self, Stop> {
        if self.headers.contains_key(name) { self.header_is(name, value) } else { Ok(self) }
    }

    /// Asks for a body byte by byte.
    pub fn body_is(&self, content: &[u8]) -> Result<&Self, Stop> {
        if self.body == content {
            return Ok(self);
        }
        self.wrong(format!("a body of {} bytes: {}", content.len(), told(content)))
    }

    /// Asks that `Docker-Content-Digest`, if it is there, is a digest of `content`.
    pub fn digest_header_fits(&self, content: &[u8]) -> Result<&Self, Stop> {
        let Some(text) = self.header("docker-content-digest") else { return Ok(self) };
        let fits = text
            .parse::<Digest>()
            .is_ok_and(|digest| digest == digest_of(digest.algorithm(), content));
        if fits {
            return Ok(self);
        }
        self.wrong("a Docker-Content-Digest that is a digest of the content")
    }

    /// Asks for a body in JSON.
    pub fn json(&self) -> Result<Value, Stop> {
        match serde_json::from_slice(&self.body) {
            Ok(value) => Ok(value),
            Err(error) => self.wrong(format!("a body in JSON ({error})")),
        }
    }

    /// Returns the error codes of a body that has the specification's form.
    pub fn codes(&self) -> Option<Vec<String>> {
        let body: Value = serde_json::from_slice(&self.body).ok()?;
        let errors = body.get("errors")?.as_array()?;
        errors.iter().map(|error| Some(error.get("code")?.as_str()?.to_owned())).collect()
    }

    /// Asks for one of several error codes. A body that is not JSON may have any form.
    pub fn code_is(&self, codes: &[&str]) -> Result<&Self, Stop> {
        if !self.is_json() {
            return skip("the body is not JSON, which the specification permits");
        }
        let found = self.codes().unwrap_or_default();
        if found.iter().any(|code| codes.contains(&code.as_str())) {
            return Ok(self);
        }
        self.wrong(format!("error code {}", codes.join(" or ")))
    }

    /// Whether the body is JSON.
    pub fn is_json(&self) -> bool {
        serde_json::from_slice::<Value>(&self.body).is_ok()
    }

    /// Returns where `Location` leads.
    pub fn location(&self) -> Result<Url, Stop> {
        let text = self.has("location")?;
        match self.url.join(text) {
            Ok(url) => Ok(url),
            Err(error) => self.wrong(format!("a Location that is a URL ({error})")),
        }
    }

    /// Returns where the `Link` to the next page leads, if there is one (RFC 5988).
    pub fn next(&self) -> Result<Option<Url>, Stop> {
        let Some(text) = self.header("link") else { return Ok(None) };
        let target = text.trim().strip_prefix('<').and_then(|text| text.split_once('>'));
        let Some((target, parameters)) = target else {
            return self.wrong("a Link header of the form <URL>; rel=\"next\"");
        };
        let is_next = parameters.split(';').any(|parameter| {
            let words = parameter.split_once('=');
            words.is_some_and(|(name, value)| {
                name.trim().eq_ignore_ascii_case("rel") && value.trim().trim_matches('"') == "next"
            })
        });
        match self.url.join(target) {
            Ok(url) if is_next => Ok(Some(url)),
            _ => self.wrong("a Link header of the form <URL>; rel=\"next\""),
        }
    }

    /// Ends the check: this is not what was expected.
    pub fn wrong<T>(&self, expected: impl Into<String>) -> Result<T, Stop> {
        fail(self.request.clone(), expected, self.told())
    }

    /// Returns status, headers and the begin of the body on one line.
    fn told(&self) -> String {
        let shown = self.headers.iter().filter(|(name, _)| *name != "date");
        let headers: Vec<String> = shown
            .map(|(name, value)| format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())))
            .collect();
        let body = if self.body.is_empty() { String::new() } else { told(&self.body) };
        format!("{} [{}] {body}", self.status, headers.join(", ")).trim_end().to_owned()
    }
}

/// Computes a digest.
pub fn digest_of(algorithm: Algorithm, content: &[u8]) -> Digest {
    let mut hasher = Hasher::new(algorithm);
    hasher.update(content);
    hasher.finish()
}

/// Returns the begin of a body where it is text, and its length where it is not.
fn told(content: &[u8]) -> String {
    let readable = |text: &&str| !text.contains(|c: char| c.is_control() && !c.is_whitespace());
    let Some(text) = std::str::from_utf8(content).ok().filter(readable) else {
        return format!("({} bytes that are no text)", content.len());
    };
    let begin: String = text.chars().take(TOLD_LETTERS_MAX).collect();
    let more = if begin.len() < text.len() { "…" } else { "" };
    format!("{}{more}", begin.trim_end())
}
