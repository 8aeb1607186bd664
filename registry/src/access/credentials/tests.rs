use base64::engine::general_purpose;
use http::HeaderValue;
use proptest::prelude::*;

use super::*;

fn basic(user: &str, password: &str) -> Credentials {
    Credentials::Basic { user: user.to_owned(), password: password.to_owned() }
}

#[test]
fn headers_are_read_as_clients_write_them() {
    let read = |text: &str| Credentials::parse(text);
    assert_eq!(read("Basic YWxpY2U6c2VjcmV0"), Ok(Some(basic("alice", "secret"))));
    assert_eq!(read("basic YWxpY2U6YTpi"), Ok(Some(basic("alice", "a:b"))));
    assert_eq!(read("BASIC  YWxpY2U6"), Ok(Some(basic("alice", ""))));
    assert_eq!(read("Basic YWxpY2U6eA"), Ok(Some(basic("alice", "x"))), "without padding");
    assert_eq!(read("Basic Og=="), Ok(None));
    assert_eq!(read("Bearer a.b.c"), Ok(Some(Credentials::Bearer("a.b.c".to_owned()))));
    for malformed in [
        "",
        "Basic",
        "Bearer ",
        "Bearer a b",
        "Basic !!",
        "Basic YWxpY2U=",
        "Basic /w==",
        "Basic YQA6Yg==",
    ] {
        assert_eq!(read(malformed), Err(CredentialsError::Malformed), "{malformed}");
    }
    assert_eq!(read("Digest x"), Err(CredentialsError::Scheme));
    let long = format!("Bearer {}", "a".repeat(HEADER_BYTES_MAX));
    assert_eq!(read(&long), Err(CredentialsError::Malformed));
}

#[test]
fn one_header_is_enough() {
    let mut headers = HeaderMap::new();
    assert_eq!(Credentials::of(&headers), Ok(None));
    headers.append(AUTHORIZATION, HeaderValue::from_static("Bearer a"));
    assert!(Credentials::of(&headers).is_ok_and(|found| found.is_some()));
    headers.append(AUTHORIZATION, HeaderValue::from_static("Bearer b"));
    assert_eq!(Credentials::of(&headers), Err(CredentialsError::Several));
    let mut headers = HeaderMap::new();
    headers.append(AUTHORIZATION, HeaderValue::from_bytes(b"Bearer \xff").unwrap());
    assert_eq!(Credentials::of(&headers), Err(CredentialsError::Malformed));
}

#[test]
fn nothing_secret_is_shown() {
    let shown = format!("{:?} {:?}", basic("u", "hush"), Credentials::Bearer("hush".to_owned()));
    assert_eq!(shown, "Basic Bearer");
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,80}", scheme in "(Basic|Bearer|basic|)") {
        let _either = Credentials::parse(&text).is_ok();
        let _either = Credentials::parse(&format!("{scheme} {text}")).is_ok();
    }

    #[test]
    fn what_was_encoded_is_read_back(user in "[^:\\p{Cc}]{1,20}", password in "[^\\p{Cc}]{0,20}") {
        let encoded = general_purpose::STANDARD.encode(format!("{user}:{password}"));
        let read = Credentials::parse(&format!("Basic {encoded}"));
        prop_assert_eq!(read, Ok(Some(basic(&user, &password))));
    }
}
