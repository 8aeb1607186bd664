use proptest::prelude::*;

use super::*;

#[track_caller]
fn check(path: &str, expected: Option<Route<'_>>) {
    assert_eq!(Route::of(path), expected, "{path}");
}

#[test]
fn each_endpoint_is_told_from_the_right() {
    check("/v2/", Some(Route::Base));
    check("/v2", Some(Route::Base));
    check("/v2/_catalog", Some(Route::Catalog));
    check("/v2/a/tags/list", Some(Route::Tags("a".into())));
    check("/v2/a/b/c/tags/list", Some(Route::Tags("a/b/c".into())));
    check("/v2/a/b/blobs/sha256:x", Some(Route::Blob("a/b".into(), "sha256:x".into())));
    check("/v2/a/b/blobs/uploads/", Some(Route::Uploads("a/b".into())));
    check("/v2/a/blobs/uploads", Some(Route::Uploads("a".into())));
    check("/v2/a/blobs/uploads/id", Some(Route::Upload("a".into(), "id".into())));
    check("/v2/a/manifests/v1", Some(Route::Manifest("a".into(), "v1".into())));
    check("/v2/a/referrers/sha256:x", Some(Route::Referrers("a".into(), "sha256:x".into())));
}

#[test]
fn a_name_may_hold_the_words_of_the_api() {
    check(
        "/v2/blobs/uploads/blobs/uploads/id",
        Some(Route::Upload("blobs/uploads".into(), "id".into())),
    );
    check("/v2/tags/list/tags/list", Some(Route::Tags("tags/list".into())));
    check(
        "/v2/a/manifests/b/manifests/c",
        Some(Route::Manifest("a/manifests/b".into(), "c".into())),
    );
    check(
        "/v2/a/blobs/manifests/uploads",
        Some(Route::Manifest("a/blobs".into(), "uploads".into())),
    );
    check("/v2/uploads/blobs/x", Some(Route::Blob("uploads".into(), "x".into())));
}

#[test]
fn what_is_no_endpoint_is_nothing() {
    for path in [
        "",
        "/",
        "/v1/",
        "/v2/a",
        "/v2/tags/list",
        "/v2/blobs/uploads/",
        "/v2/a/manifests/",
        "/v2//manifests",
        "/v2/a/uploads/id",
        "/v2/a/tags/list/",
        "/v3/a/tags/list",
        "/v2/a/x/y",
    ] {
        check(path, None);
    }
}

#[test]
fn a_digest_may_be_percent_encoded() {
    check("/v2/a/blobs/sha256%3Ax", Some(Route::Blob("a".into(), "sha256:x".into())));
    check("/v2/a/blobs/%zz", None);
    check("/v2/a/blobs/%f", None);
    check("/v2/a/blobs/%+1", None);
    check("/v2/a/blobs/%ff", None);
}

proptest! {
    #[test]
    fn any_path_is_read_without_harm(path in "(/v2)?(/[a-z%:]{0,6}|/blobs|/uploads|/tags|/list|/manifests)*") {
        drop(Route::of(&path));
    }

    #[test]
    fn name_and_reference_come_back(name in "[a-z]{1,4}(/(blobs|uploads|tags|manifests|[a-z]{1,3})){0,4}", last in "[a-z]{1,9}") {
        let path = format!("/v2/{name}/manifests/{last}");
        let route = Route::of(&path).unwrap();
        // `…/manifests/list` is no list of tags, nor `…/manifests/uploads` an upload.
        prop_assert_eq!(route, Route::Manifest(name.into(), last.into()));
    }
}

#[test]
fn an_uploads_id_is_left_out_wherever_it_stands() {
    for (path, told) in [
        ("/v2/a/blobs/uploads/66f0a1b2", "/v2/a/blobs/uploads/REDACTED"),
        ("/v2/a/b/blobs/uploads/", "/v2/a/b/blobs/uploads/"),
        ("/v2/a/blobs/uploads", "/v2/a/blobs/uploads"),
        ("/v2/a/blobs/uploads/x/manifests/v1", "/v2/a/blobs/uploads/REDACTED/manifests/v1"),
        ("a/blobs/uploads/x", "a/blobs/uploads/REDACTED"),
        ("/v2/uploads/a/manifests/v1", "/v2/uploads/a/manifests/v1"),
        ("/", "/"),
    ] {
        assert_eq!(without_secrets(path), told);
    }
}
