use super::{Location, Reference, ReferenceErrorKind, without_credentials};
use crate::{Digest, chain};
use proptest::prelude::*;

fn reference(text: &str) -> Reference {
    text.parse().unwrap()
}

#[test]
fn a_reference_prints_as_it_was_written() {
    let digest = Digest::of(b"");
    for text in [
        "localhost/a".to_owned(),
        "127.0.0.1:5000/team/app:v1".to_owned(),
        format!("r.example.com/team/app:v1@{digest}"),
        format!("[::1]:5000/app@{digest}"),
    ] {
        assert_eq!(reference(&text).to_string(), text);
    }
}

#[test]
fn a_layout_may_have_colons_in_its_path() {
    for (text, tag) in [("oci:/tmp/a", None), ("oci:/tmp/a:v1", Some("v1")), ("oci:a:b/c", None)] {
        let location: Location = text.parse().unwrap();
        assert_eq!(location.tag().map(ToString::to_string).as_deref(), tag);
        assert_eq!(location.to_string(), text);
    }
}

#[test]
fn a_reference_without_a_host_is_refused_with_the_remedy() {
    let error = "team/app:v1".parse::<Location>().unwrap_err();
    assert_eq!(
        chain(&error).to_string(),
        "\"team/app:v1\" is not a reference (host[:port]/name[:tag][@digest] or oci:DIR[:tag]): \
         it must begin with a registry's host, as in registry.example.com/team/app:v1"
    );
}

#[test]
fn credentials_in_a_reference_are_refused_and_never_repeated() {
    for (text, host) in [
        ("https://me:hunter2@r.example.com/team/app:v1", "r.example.com"),
        ("me:hunter2@r.example.com:5000/app", "r.example.com:5000"),
        ("me:hunter2@localhost/app", "localhost"),
        ("http://me:hun/ter2@r.example.com/app", "r.example.com"),
        ("me:hun/ter2@r.example.com/app", "r.example.com"),
        ("https://me:h@hunter2@r.example.com/app", "r.example.com"),
        ("https://hunter2@[::1]:5000/app", "[::1]:5000"),
        ("https://me:hunter2@", "REGISTRY"),
        ("me:hunter2@r", "r"),
        ("https://me:hunter2@r.example.com/app@sha256:44136fa355b3678a", "r.example.com"),
    ] {
        let error = text.parse::<Location>().unwrap_err();
        let told = format!("{} {error:?}", chain(&error));
        assert!(!told.contains("hunter2") && !told.contains("ter2"), "{told}");
        assert!(told.contains(&format!("`kyb login {host}`")), "{told}");
        assert!(told.contains("***@"), "{told}");
    }
}

#[test]
fn what_holds_no_credentials_is_shown_as_it_is() {
    for text in [
        "r.example.com:5000/app@sha256:44136fa",
        "r.example.com:5000/app@latest",
        "r.example.com/app:v1@v2",
        "oci:/home/me@work/a.b/layout:v1",
        "https://r.example.com/app@sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "./dump@2",
        "--option",
        "",
    ] {
        assert_eq!(without_credentials(text), text);
    }
}

#[test]
fn a_url_is_no_reference_and_is_told_so() {
    let error = "https://r.example.com/app:v1".parse::<Location>().unwrap_err();
    assert!(
        chain(&error).to_string().ends_with("it is a URL: leave out \"https://\""),
        "{error:?}"
    );
}

#[test]
fn a_port_is_a_number_of_a_port() {
    for text in ["localhost:x/a", "r.example.com:99999/a", "r.example.com:/a", "[::1]:/a"] {
        let error = text.parse::<Reference>().unwrap_err();
        assert!(matches!(error.kind, ReferenceErrorKind::MalformedHost(_)), "{error}");
    }
    for text in ["localhost:65535/a", "[::1]/a", "[fe80::1]:5000/a"] {
        assert_eq!(reference(text).to_string(), text);
    }
}

#[test]
fn only_loopback_hosts_are_loopback() {
    for text in ["localhost:5000/a", "127.0.0.9/a", "[::1]:1/a"] {
        assert!(reference(text).is_loopback(), "{text}");
    }
    for text in ["10.0.0.1:5000/a", "localhost.example.com/a", "r.example.com/a"] {
        assert!(!reference(text).is_loopback(), "{text}");
    }
}

#[test]
fn the_digest_decides_over_the_tag() {
    let digest = Digest::of(b"");
    assert_eq!(reference("h.x/a").manifest_reference(), "latest");
    assert_eq!(reference("h.x/a:t").manifest_reference(), "t");
    assert_eq!(reference(&format!("h.x/a:t@{digest}")).manifest_reference(), digest.to_string());
}

proptest! {
    #[test]
    fn parsing_never_panics_and_survives_a_round_trip(text in "[a-zA-Z0-9:/@._\\[\\]-]{0,80}") {
        if let Ok(location) = text.parse::<Location>() {
            prop_assert_eq!(location.to_string().parse::<Location>().unwrap(), location);
        }
    }
}
