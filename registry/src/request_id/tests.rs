use super::*;

fn of(id: &str) -> RequestId {
    RequestId::of(&HeaderMap::from_iter([(REQUEST_ID, HeaderValue::from_str(id).unwrap())]))
}

#[test]
fn a_sane_id_is_kept_and_another_replaced() {
    for id in ["a", "7b0c3a1e-96a5-4ad1-8b7c-52dd8d7e9a04", "trace:1.2_3+4/5=", &"x".repeat(80)] {
        assert_eq!(of(id).as_str(), id);
    }
    for id in ["", "two words", "a\tb", "\"", "{x}", "a;b", &"x".repeat(81)] {
        let made = of(id);
        assert_ne!(made.as_str(), id);
        assert!(is_sane(made.as_str().as_bytes()), "{made:?}");
    }
}

#[test]
fn no_two_are_alike() {
    let empty = HeaderMap::new();
    assert_ne!(RequestId::of(&empty), RequestId::of(&empty));
}
