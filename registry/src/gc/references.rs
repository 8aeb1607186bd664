//! What a manifest names, as far as it must be kept.
//!
//! Unlike what is checked at push this errs on the side of keeping: layers that need not be pushed
//! are kept when they are there, and of a document whose type says nothing to us everything is
//! kept that looks like a digest.

use kybernate_spec::{Digest, media_type};
use serde::Deserialize;

#[derive(Deserialize)]
struct Document {
    config: Option<Target>,
    layers: Option<Vec<Target>>,
    blobs: Option<Vec<Target>>,
    manifests: Option<Vec<Target>>,
}

#[derive(Deserialize)]
struct Target {
    digest: Digest,
}

/// Returns what a manifest of this media type needs. A known type's subject is not among it: a
/// referrer keeps nothing alive but what it consists of.
pub(crate) fn names(media_type: Option<&str>, content: &[u8]) -> Vec<Digest> {
    let known = matches!(
        media_type,
        Some(
            media_type::OCI_MANIFEST
                | media_type::OCI_INDEX
                | media_type::DOCKER_MANIFEST
                | media_type::DOCKER_MANIFEST_LIST
        )
    );
    match serde_json::from_slice::<Document>(content) {
        Ok(document) if known => {
            let lists = [document.layers, document.blobs, document.manifests];
            let listed = lists.into_iter().flatten().flatten();
            document.config.into_iter().chain(listed).map(|target| target.digest).collect()
        }
        _ => anything(content),
    }
}

/// Returns every digest that stands anywhere.
fn anything(content: &[u8]) -> Vec<Digest> {
    let text = String::from_utf8_lossy(content);
    let mut found = Vec::new();
    for algorithm in ["sha256:", "sha512:"] {
        for (at, _) in text.match_indices(algorithm) {
            let rest = text.get(at..).unwrap_or_default();
            let digits = rest.bytes().skip(algorithm.len()).take_while(u8::is_ascii_hexdigit);
            let length = algorithm.len() + digits.count();
            found.extend(rest.get(..length).and_then(|digest| digest.parse().ok()));
        }
    }
    found
}

#[cfg(test)]
mod tests;
