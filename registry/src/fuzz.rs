//! What `fuzz/` and the replay of its corpus give the bytes of others to.
//!
//! Each function is one parser, and panics where it breaks a promise. They are compiled for tests
//! and for fuzzing only. [`TARGETS`] has them all: each has a file in `fuzz/fuzz_targets` and seeds
//! in `fuzz/corpus`, under the name `registry_` and its own.

#![expect(clippy::missing_panics_doc, reason = "to panic is what these functions are for")]

use std::path::Path;
use std::str::FromStr;

use http::header::{AUTHORIZATION, IF_MATCH, IF_NONE_MATCH};
use http::{HeaderMap, HeaderValue};
use kybernate_spec::{Digest, Location, RepositoryName, Tag, media_type};

pub use crate::access::fuzz::{htpasswd, keys, token};
pub use crate::notify::fuzz::outbox;

use crate::access::action::Action;
use crate::access::credentials::Credentials;
use crate::access::policy::Policy;
use crate::access::scope::Scope;
use crate::access::subject::{Holder, Identity};
use crate::condition::{Condition, WriteConditions};
use crate::config::{Config, Mistake};
use crate::manifest::References;
use crate::range::{ContentRange, Wanted};
use crate::route::{Route, without_secrets};
use crate::store::UploadId;

/// Takes what others wrote.
pub type Parser = fn(&[u8]);

/// Every parser and its name.
pub const TARGETS: [(&str, Parser); 9] = [
    ("config", config),
    ("headers", headers),
    ("htpasswd", htpasswd),
    ("keys", keys),
    ("manifest", manifest),
    ("outbox", outbox),
    ("path", path),
    ("policy", policy),
    ("token", token),
];

/// Media types that a manifest comes with; the first byte of an input picks one.
const TYPES: [Option<&str>; 6] = [
    None,
    Some(media_type::OCI_MANIFEST),
    Some(media_type::OCI_INDEX),
    Some(media_type::DOCKER_MANIFEST),
    Some(media_type::DOCKER_MANIFEST_LIST),
    Some("x/y"),
];

/// A manifest, as a PUT brings it: a byte that picks its media type, and the document.
pub fn manifest(bytes: &[u8]) {
    let Some((pick, content)) = bytes.split_first() else { return };
    let Some(header) = TYPES.get(usize::from(*pick) % TYPES.len()) else { return };
    let Ok((media_type, references)) = References::parse(*header, content) else { return };
    assert!(header.is_none_or(|header| header == media_type));
    let again = References::parse(Some(&media_type), content).ok();
    assert_eq!(again, Some((media_type, references)), "it is read in one way only");
}

/// A path, and the names it is made of.
pub fn path(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Some(route) = Route::of(text) {
        assert!(Route::LABELS.contains(&route.label()));
        assert!(!route.template().is_empty());
        assert!(!matches!(route, Route::Upload(..)) || route.reference().is_none());
    }
    let shown = without_secrets(text);
    assert_eq!(without_secrets(&shown), shown);
    if let Some((name, id)) = text.rsplit_once("blobs/uploads/") {
        let hidden = id.is_empty() || id.contains('/') || !(name.is_empty() || name.ends_with('/'));
        assert!(hidden || shown.ends_with("REDACTED"), "{shown}");
    }
    reads_back::<RepositoryName>(text);
    reads_back::<Tag>(text);
    reads_back::<Digest>(text);
    reads_back::<Location>(text);
    if let Ok(name) = text.parse::<RepositoryName>() {
        let odd = |part: &str| part.is_empty() || part.starts_with('.') || part.contains('\0');
        assert!(!name.as_str().split('/').any(odd), "{name} leads elsewhere");
    }
    if let Ok(id) = text.parse::<UploadId>() {
        assert!(id.secret().bytes().all(|byte| byte.is_ascii_hexdigit()));
    }
}

/// What was accepted is written as something that means the same.
fn reads_back<T: FromStr + ToString + PartialEq>(text: &str) {
    if let Ok(value) = text.parse::<T>() {
        assert!(value.to_string().parse::<T>().is_ok_and(|again| again == value), "{text:?}");
    }
}

/// Headers of requests: eight bytes that are a length, and a value.
pub fn headers(bytes: &[u8]) {
    let Some((length, value)) = bytes.split_first_chunk() else { return };
    let Ok(value) = HeaderValue::from_bytes(value) else { return };
    let text = value.to_str().ok();
    let length = u64::from_le_bytes(*length);
    let inside = |part: &std::ops::Range<u64>| part.start < part.end && part.end <= length;
    match Wanted::of(text, length) {
        Wanted::Whole | Wanted::Unsatisfiable => {}
        Wanted::Part(part) => assert!(inside(&part)),
        Wanted::Several(parts) => {
            assert!(parts.len() > 1 && parts.iter().all(inside));
            assert!(parts.iter().map(|part| part.end - part.start).sum::<u64>() <= length);
        }
    }
    if let Some(ContentRange { start, length }) = text.and_then(ContentRange::parse) {
        assert!(length > 0 && start.checked_add(length - 1).is_some());
    }
    for name in [IF_MATCH, IF_NONE_MATCH] {
        let headers = HeaderMap::from_iter([(name, value.clone())]);
        let _decided = Condition::of(&headers, "\"sha256:aa\"");
        let allowed = WriteConditions::of(&headers).map(|conditions| conditions.allow(None));
        assert!(allowed.is_some());
    }
    let headers = HeaderMap::from_iter([(AUTHORIZATION, value.clone())]);
    match Credentials::of(&headers) {
        Ok(Some(Credentials::Basic { user, password })) => {
            assert!(!user.contains(':'));
            assert!(!user.is_empty() || !password.is_empty());
        }
        Ok(Some(Credentials::Bearer(token))) => assert!(!token.is_empty()),
        Ok(None) | Err(_) => {}
    }
    if let Ok(scopes) = Scope::parse_all(text) {
        assert!(scopes.len() <= 50);
    }
}

/// A policy file.
pub fn policy(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let policy = match Policy::read(Path::new("policy.toml"), text, &["ci"]) {
        Ok(policy) => policy,
        Err(wrong) => return have_places(&wrong, text),
    };
    assert!(policy.rules() > 0);
    let anonymous = Identity::default();
    let user = Identity { holder: Holder::User("alice".into()), ..Identity::default() };
    for repository in ["a", "team-a/app", "team-a/x/y"] {
        for action in Action::ALL {
            let anyone = policy.allows(&anonymous, action, repository);
            assert!(!anyone || policy.allows(&user, action, repository), "rules only add");
        }
    }
}

/// A configuration file.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Err(wrong) = Config::read(Path::new("registry.toml"), text) {
        have_places(&wrong, text);
    }
}

/// What is wrong with a text is told, and is somewhere in it.
pub(crate) fn have_places(wrong: &[Mistake], text: &str) {
    assert!(!wrong.is_empty(), "refused without a reason: {text:?}");
    let lines = text.matches('\n').count() + 1;
    for mistake in wrong {
        assert!(!mistake.told.is_empty(), "{text:?}");
        if let Some((line, column)) = mistake.place.at {
            assert!((1..=lines).contains(&line) && column > 0, "{mistake} {text:?}");
        }
    }
}

#[cfg(test)]
mod tests;
