use serde_json::json;

use super::*;

fn means(pattern: &str, identity: &Identity) -> bool {
    pattern.parse::<Subject>().unwrap().matches(identity)
}

fn token(claims: Value) -> Identity {
    let Value::Object(claims) = claims else { panic!("claims are an object") };
    let subject = claims.get("sub").and_then(Value::as_str).unwrap_or_default().into();
    let holder = Holder::Token { issuer: "ci".into(), subject, claims: claims.into() };
    Identity { holder, ..Identity::default() }
}

#[test]
fn patterns_mean_only_their_own_kind() {
    let alice = Identity { holder: Holder::User("alice".into()), ..Identity::default() };
    let vouched = token(json!({ "sub": "alice" }));
    let names = vec!["alice".to_owned(), "spiffe://mesh/ns/prod/agent".to_owned()];
    let certified =
        Identity { certificate: Some(Arc::new(CertificateNames { names })), ..Identity::default() };
    let nobody = Identity::default();
    let check = |pattern: &str, expected: [bool; 4]| {
        let all = [&alice, &vouched, &certified, &nobody];
        assert_eq!(all.map(|identity| means(pattern, identity)), expected, "{pattern}");
    };
    check("anonymous", [true; 4]);
    check("authenticated", [true, true, true, false]);
    check("user:alice", [true, false, false, false]);
    check("user:*", [true, false, false, false]);
    check("user:Alice", [false; 4]);
    check("token:ci:alice", [false, true, false, false]);
    check("token:other:alice", [false; 4]);
    check("certificate:alice", [false, false, true, false]);
    check("certificate:spiffe://mesh/*", [false, false, true, false]);
    check("group:alice", [false; 4]);
}

#[test]
fn claims_are_values_lists_or_nested() {
    let pod = token(json!({
        "sub": "system:serviceaccount:prod:job",
        "groups": ["dev", "ops"],
        "level": 3,
        "kubernetes.io": { "namespace": "prod", "a/b": ["x"] },
        "https://example.com/role": "admin",
    }));
    for good in [
        "token:ci:system:serviceaccount:prod:*",
        "claim:ci:groups=ops",
        "claim:ci:groups=d*",
        "claim:ci:level=3",
        "claim:ci:/kubernetes.io/namespace=prod",
        "claim:ci:/kubernetes.io/a~1b=x",
        "claim:ci:https://example.com/role=admin",
    ] {
        assert!(means(good, &pod), "{good}");
    }
    for bad in [
        "claim:ci:groups=op",
        "claim:ci:none=*",
        "claim:ci:kubernetes.io=*",
        "claim:ci:/kubernetes.io=*",
        "claim:ci:/kubernetes.io/namespace/x=*",
        "claim:other:groups=ops",
    ] {
        assert!(!means(bad, &pod), "{bad}");
    }
}

#[test]
fn identities_have_names() {
    assert_eq!(Identity::default().to_string(), "anonymous");
    assert_eq!(token(json!({ "sub": "x" })).to_string(), "token:ci:x");
    assert_eq!(token(json!({})).to_string(), "token:ci:");
}
