use super::*;

fn endpoint(text: &str) -> NotifyEndpoint {
    toml::from_str(&format!("name = \"a\"\nurl = \"https://h\"\n{text}")).unwrap()
}

fn written(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    file
}

/// The example that libraries of Standard Webhooks test themselves with.
#[test]
fn a_signature_is_what_libraries_expect() {
    let secret = written("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n");
    let endpoint = endpoint(&format!("secret = {:?}", secret.path()));
    let now = UNIX_EPOCH + std::time::Duration::from_secs(1_614_265_330);
    let body = br#"{"test": 2432232314}"#;
    let headers = headers(&endpoint, "msg_p5jXN8AQM9LWM0D4loKWxJek", body, now).unwrap();
    assert_eq!(headers["webhook-signature"], "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    assert_eq!(headers["webhook-timestamp"], "1614265330");
    assert!(!headers.contains_key("authorization"));
}

#[test]
fn what_is_wrong_with_a_file_is_said_without_what_is_in_it() {
    for (text, told) in [
        ("", "the file of the bearer token does not hold one line that can be sent"),
        ("geheim\nzwei", "the file of the bearer token does not hold one line that can be sent"),
        ("geheim\u{7}", "the file of the bearer token does not hold one line that can be sent"),
    ] {
        let file = written(text);
        let endpoint = endpoint(&format!("bearer = {:?}", file.path()));
        let error = headers(&endpoint, "1", b"", SystemTime::now()).unwrap_err();
        assert_eq!(error.to_string(), told);
        assert!(!format!("{error:?}").contains("geheim"), "{error:?}");
    }
    let endpoint = endpoint("secret = \"/nowhere\"");
    let error = headers(&endpoint, "1", b"", SystemTime::now()).unwrap_err();
    assert_eq!(error.to_string(), "failed to read the secret");
}

#[test]
fn a_token_is_not_shown_where_headers_are() {
    let file = written("geheim\n");
    let endpoint = endpoint(&format!("bearer = {:?}", file.path()));
    let headers = headers(&endpoint, "1", b"", SystemTime::now()).unwrap();
    assert_eq!(headers["authorization"], "Bearer geheim");
    assert!(!format!("{headers:?}").contains("geheim"), "{headers:?}");
}
