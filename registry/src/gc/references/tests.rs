use kybernate_spec::Descriptor;
use serde_json::json;

use super::*;

fn descriptor(content: &[u8]) -> Descriptor {
    Descriptor::of("application/octet-stream", content)
}

#[track_caller]
fn check(media_type: Option<&str>, document: &serde_json::Value, expected: &[&[u8]]) {
    let mut found = names(media_type, document.to_string().as_bytes());
    let mut expected: Vec<_> = expected.iter().map(|content| Digest::of(content)).collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected, "{document}");
}

#[test]
fn a_manifest_needs_what_it_consists_of_and_not_its_subject() {
    let foreign = "application/vnd.oci.image.layer.nondistributable.v1.tar";
    let image = json!({
        "config": descriptor(b"config"),
        "layers": [descriptor(b"a"), Descriptor::of(foreign, b"b")],
        "subject": descriptor(b"subject"),
        "annotations": { "base": Digest::of(b"base") },
    });
    check(Some(media_type::OCI_MANIFEST), &image, &[b"config", b"a", b"b"]);
    check(Some(media_type::DOCKER_MANIFEST), &image, &[b"config", b"a", b"b"]);
    let index = json!({ "manifests": [descriptor(b"m")], "subject": descriptor(b"subject") });
    check(Some(media_type::OCI_INDEX), &index, &[b"m"]);
    check(Some(media_type::DOCKER_MANIFEST_LIST), &index, &[b"m"]);
    let artifact = json!({ "blobs": [descriptor(b"a")], "layers": [] });
    check(Some(media_type::OCI_MANIFEST), &artifact, &[b"a"]);
}

#[test]
fn a_document_of_another_type_needs_everything_it_names() {
    let any = json!({
        "subject": descriptor(b"subject"),
        "fsLayers": [{ "blobSum": Digest::of(b"layer") }],
        "note": format!("see {}.", Digest::of(b"note")),
        "short": "sha256:abc",
        "long": format!("{}0", Digest::of(b"long")),
    });
    for media_type in [None, Some("application/vnd.docker.distribution.manifest.v1+prettyjws")] {
        check(media_type, &any, &[b"subject", b"layer", b"note"]);
    }
    let plain = format!("\u{fffd}{}", Digest::of(b"a"));
    assert_eq!(names(Some("text/plain"), plain.as_bytes()), [Digest::of(b"a")]);
    assert_eq!(names(Some("text/plain"), b"\xff\xfesha256:"), []);
}

#[test]
fn a_known_type_that_cannot_be_read_needs_everything_it_names() {
    let odd = json!({ "config": "text", "layers": [descriptor(b"a")] });
    check(Some(media_type::OCI_MANIFEST), &odd, &[b"a"]);
}
