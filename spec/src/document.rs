//! JSON documents that somebody else wrote.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{
    DeserializeOwned, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use crate::{Index, Manifest};

/// Parses a document in which no object has a member twice: of two members with one name, parsers
/// differ in which they take, and what one program has checked another would not act on.
pub fn parse<T: DeserializeOwned>(content: &[u8]) -> Result<T, serde_json::Error> {
    let _: Unique = serde_json::from_slice(content)?;
    serde_json::from_slice(content)
}

/// Parses an image index that is not at the same time a manifest.
pub fn parse_index(content: &[u8]) -> Result<Index, serde_json::Error> {
    let index: Index = parse(content)?;
    let Members { config, layers, .. } = serde_json::from_slice(content)?;
    one_of_two(index.schema_version, config.is_none() && layers.is_none())?;
    Ok(index)
}

/// Parses an image manifest that is not at the same time an index.
pub fn parse_manifest(content: &[u8]) -> Result<Manifest, serde_json::Error> {
    let manifest: Manifest = parse(content)?;
    let Members { manifests, .. } = serde_json::from_slice(content)?;
    one_of_two(manifest.schema_version, manifests.is_none())?;
    Ok(manifest)
}

/// The members that tell an index from a manifest.
#[derive(Deserialize)]
struct Members {
    manifests: Option<IgnoredAny>,
    config: Option<IgnoredAny>,
    layers: Option<IgnoredAny>,
}

/// What is both leads programs that take it for the one elsewhere than those that take it for the
/// other (image specification, CVE-2021-41190).
fn one_of_two(schema_version: u32, one: bool) -> Result<(), serde_json::Error> {
    if schema_version != 2 {
        return Err(serde_json::Error::custom("its schemaVersion is not 2"));
    }
    if !one {
        return Err(serde_json::Error::custom("it is an index and a manifest at once"));
    }
    Ok(())
}

/// Any value without a repeated member. Keeps nothing.
struct Unique;

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Unique;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_str<E>(self, _: &str) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_unit<E>(self) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Unique, A::Error> {
        while items.next_element::<Unique>()?.is_some() {}
        Ok(Unique)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Unique, A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = members.next_key::<String>()? {
            if names.contains(&name) {
                return Err(A::Error::custom(format_args!("member {name:?} comes twice")));
            }
            names.insert(name);
            let _: Unique = members.next_value()?;
        }
        Ok(Unique)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{parse, parse_index, parse_manifest};

    #[test]
    fn what_is_an_index_and_a_manifest_at_once_is_refused() {
        let config = json!({"mediaType": "a/b", "digest": crate::Digest::of(b""), "size": 0});
        let both = json!({"schemaVersion": 2, "manifests": [], "layers": [], "config": config});
        let both = both.to_string();
        assert!(parse_index(both.as_bytes()).unwrap_err().to_string().contains("at once"));
        assert!(parse_manifest(both.as_bytes()).unwrap_err().to_string().contains("at once"));
        assert!(parse_index(br#"{"schemaVersion":2,"manifests":[]}"#).is_ok());
        assert!(parse_index(br#"{"schemaVersion":1,"manifests":[]}"#).is_err());
    }

    #[test]
    fn what_the_image_specification_requires_is_there() {
        let config = json!({"mediaType": "a/b", "digest": crate::Digest::of(b""), "size": 0});
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": []});
        assert!(parse_manifest(manifest.to_string().as_bytes()).is_ok());
        let index = json!({"schemaVersion": 2, "manifests": []});
        for (document, members) in [(manifest, &["config", "layers"][..]), (index, &["manifests"])]
        {
            for member in members {
                let mut without = document.clone();
                without.as_object_mut().unwrap().remove(*member);
                let text = without.to_string();
                let missing = format!("missing field `{member}`");
                let told = if *member == "manifests" {
                    parse_index(text.as_bytes()).unwrap_err().to_string()
                } else {
                    parse_manifest(text.as_bytes()).unwrap_err().to_string()
                };
                assert!(told.contains(&missing), "{told}");
            }
        }
    }

    #[test]
    fn a_document_is_parsed_as_ever() {
        let text = br#"{"a":[1,-2,0.5,"x",null,true],"b":{"a":{}}}"#;
        let value: Value = parse(text).unwrap();
        assert_eq!(value, json!({"a": [1, -2, 0.5, "x", null, true], "b": {"a": {}}}));
    }

    #[test]
    fn a_member_that_comes_twice_is_refused_wherever_it_is() {
        for text in [r#"{"a":1,"a":1}"#, r#"{"b":[{"a":1,"\u0061":2}]}"#, r#"{"x":{"":0,"":0}}"#] {
            let error = parse::<Value>(text.as_bytes()).unwrap_err();
            assert!(error.to_string().contains("comes twice"), "{error}");
        }
    }

    #[test]
    fn a_deep_document_is_an_error_and_no_overflow() {
        let text = "[".repeat(100_000);
        assert!(parse::<Value>(text.as_bytes()).is_err());
    }
}
