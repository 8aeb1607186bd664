use super::{Algorithm, Digest, DigestError, Hasher};
use proptest::prelude::*;

const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

#[test]
fn the_empty_content_has_the_well_known_digest() {
    assert_eq!(Digest::of(b"").to_string(), EMPTY);
}

#[test]
fn sha512_is_known_too() {
    let mut hasher = Hasher::new(Algorithm::Sha512);
    hasher.update(b"abc");
    let text = hasher.finish().to_string();
    assert!(text.starts_with("sha512:ddaf35a193617abacc417349ae204131"), "{text}");
    assert_eq!(text.parse::<Digest>().unwrap().to_string(), text);
}

#[test]
fn anything_but_the_canonical_text_is_refused() {
    let error = |text: &str| text.parse::<Digest>().unwrap_err();
    assert!(matches!(error("sha256"), DigestError::MissingAlgorithm(_)));
    assert!(matches!(error("md5:00"), DigestError::UnsupportedAlgorithm(_)));
    assert!(matches!(error("sha256:00"), DigestError::MalformedHex(..)));
    assert!(matches!(error(&EMPTY.to_uppercase()), DigestError::UnsupportedAlgorithm(_)));
    assert!(matches!(error(&EMPTY.replace('e', "E")), DigestError::MalformedHex(..)));
    assert!(matches!(error(&format!("{EMPTY}0")), DigestError::MalformedHex(..)));
}

proptest! {
    #[test]
    fn parsing_never_panics_and_a_parsed_digest_prints_as_it_was(text in ".{0,160}") {
        if let Ok(digest) = text.parse::<Digest>() {
            prop_assert_eq!(digest.to_string(), text);
        }
    }
}
