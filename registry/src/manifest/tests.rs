use proptest::prelude::*;

use super::*;

const A: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const B: &str = "sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

fn image(layer_type: &str) -> Vec<u8> {
    serde_json::json!({
        "schemaVersion": 2,
        "config": { "mediaType": "application/vnd.oci.empty.v1+json", "digest": A, "size": 2 },
        "layers": [{ "mediaType": layer_type, "digest": B, "size": 1 }],
    })
    .to_string()
    .into_bytes()
}

#[test]
fn an_image_refers_to_its_config_and_layers() {
    let (media_type, references) =
        References::parse(Some(media_type::OCI_MANIFEST), &image("a/b")).unwrap();
    assert_eq!(media_type, media_type::OCI_MANIFEST);
    assert_eq!(references.blobs, [A.parse().unwrap(), B.parse().unwrap()]);
    assert_eq!(references.artifact_type.as_deref(), Some("application/vnd.oci.empty.v1+json"));
}

#[test]
fn layers_that_may_not_be_distributed_need_not_be_there() {
    for layer in [
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
    ] {
        let (_, references) =
            References::parse(Some(media_type::DOCKER_MANIFEST), &image(layer)).unwrap();
        assert_eq!(references.blobs, [A.parse().unwrap()]);
    }
}

#[test]
fn an_unknown_media_type_is_kept_as_it_is() {
    let (media_type, references) = References::parse(Some("text/plain"), b"\xff\x00").unwrap();
    assert_eq!(media_type, "text/plain");
    assert_eq!(references, References::default());
}

#[test]
fn without_a_header_the_document_says_what_it_is() {
    let index = serde_json::json!({
        "mediaType": media_type::OCI_INDEX,
        "manifests": [{ "mediaType": media_type::OCI_MANIFEST, "digest": A, "size": 2 }],
    });
    let (media_type, references) = References::parse(None, index.to_string().as_bytes()).unwrap();
    assert_eq!(media_type, media_type::OCI_INDEX);
    assert_eq!(references.manifests, [A.parse().unwrap()]);
    assert!(matches!(References::parse(None, b"{}"), Err(ManifestError::NoMediaType)));
}

#[test]
fn a_document_that_two_clients_could_read_as_two_things_is_refused() {
    let check = |media_type, document: serde_json::Value| {
        References::parse(Some(media_type), document.to_string().as_bytes()).unwrap_err()
    };
    let target = serde_json::json!({ "mediaType": "a/b", "digest": A, "size": 2 });
    let both = serde_json::json!({ "config": target, "layers": [], "manifests": [] });
    assert!(matches!(check(media_type::OCI_MANIFEST, both.clone()), ManifestError::Ambiguous));
    assert!(matches!(check(media_type::OCI_INDEX, both), ManifestError::Ambiguous));
    let other = serde_json::json!({ "mediaType": media_type::OCI_INDEX, "manifests": [] });
    assert!(matches!(check(media_type::OCI_MANIFEST, other), ManifestError::MediaType { .. }));
    for header in ["application/x", media_type::DOCKER_MANIFEST_LIST] {
        let ours = serde_json::json!({ "mediaType": media_type::OCI_INDEX, "manifests": [] });
        assert!(matches!(check(header, ours), ManifestError::MediaType { .. }), "{header}");
    }
    let no_config = serde_json::json!({ "layers": [] });
    assert!(matches!(check(media_type::OCI_MANIFEST, no_config), ManifestError::Ambiguous));
}

proptest! {
    #[test]
    fn no_document_is_too_strange_to_be_refused(text in "\\PC*") {
        for media_type in [None, Some(media_type::OCI_MANIFEST), Some(media_type::OCI_INDEX)] {
            drop(References::parse(media_type, text.as_bytes()));
        }
    }
}
