//! Parsers of what others write take anything: they refuse it, and say where it is wrong.

use std::path::Path;

use http::header::{IF_MATCH, IF_NONE_MATCH};
use http::{HeaderMap, HeaderValue};
use kybernate_registry::condition::Condition;
use kybernate_registry::config::Config;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::deploy::every_setting;

const OURS: &str = "\"sha256:aa\"";

/// Reads a configuration; what is wrong has to be somewhere in it.
fn read(text: &str) -> Result<(), TestCaseError> {
    let Err(wrong) = Config::read(Path::new("r.toml"), text) else { return Ok(()) };
    prop_assert!(!wrong.is_empty(), "refused without a reason: {text:?}");
    for mistake in wrong {
        let lines = text.matches('\n').count() + 1;
        if let Some((line, column)) = mistake.place.at {
            prop_assert!((1..=lines).contains(&line) && column > 0, "{mistake} {text:?}");
        }
        prop_assert!(!mistake.told.is_empty(), "{text:?}");
    }
    Ok(())
}

/// Returns where a text can be cut.
fn cut(text: &str, at: Index) -> usize {
    let places: Vec<_> = text.char_indices().map(|(place, _)| place).chain([text.len()]).collect();
    *at.get(&places)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_text_is_a_configuration_or_is_refused(text in "[\\[\\]{}a-z0-9_.=\"', #\n\u{0}\u{e9}-]{0,200}") {
        read(&text)?;
    }

    /// The example, with a piece of it replaced: by nothing, by another piece, by what looks like
    /// TOML.
    #[test]
    fn a_spoiled_configuration_is_refused_with_its_place(
        from in any::<Index>(),
        length in 0..40usize,
        other in any::<Index>(),
        junk in select(vec!["", "=", "[", "]]", "\"", "{}", "-1", "1e999", "\n[gc]\n", "0x7fffffffffffffffff", "nan"]),
        borrowed in any::<bool>(),
    ) {
        let text = every_setting();
        let start = cut(&text, from);
        let end = cut(&text[start..], other).min(length) + start;
        let end = (end..=text.len()).find(|end| text.is_char_boundary(*end)).unwrap();
        let there = cut(&text, other);
        let piece = if borrowed { text[there..].chars().take(length).collect() } else { junk.to_owned() };
        read(&format!("{}{piece}{}", &text[..start], &text[end..]))?;
    }

    #[test]
    fn conditions_are_lists_of_entity_tags(
        lines in proptest::collection::vec(
            proptest::collection::vec(
                (select(vec![OURS, "W/\"sha256:aa\"", "\"b\"", "*", "", "sha256:aa", "\""]), select(vec![",", " , ", ",\t"])),
                0..4,
            ),
            0..3,
        ),
    ) {
        for name in [IF_MATCH, IF_NONE_MATCH] {
            let mut headers = HeaderMap::new();
            for line in &lines {
                let text: String = line.iter().flat_map(|(tag, comma)| [*tag, *comma]).collect();
                headers.append(name.clone(), HeaderValue::from_str(&text).unwrap());
            }
            let has = |wanted: &str| lines.iter().flatten().any(|(tag, _)| *tag == wanted);
            let expected = match (name == IF_MATCH, has(OURS) || has("*"), has("W/\"sha256:aa\"")) {
                _ if lines.is_empty() => Condition::Goes,
                (true, true, _) | (false, false, false) => Condition::Goes,
                (true, false, _) => Condition::Failed,
                (false, ..) => Condition::NotModified,
            };
            prop_assert_eq!(Condition::of(&headers, OURS), expected, "{:?}", headers);
        }
    }

    #[test]
    fn any_header_is_a_condition(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        let Ok(value) = HeaderValue::from_bytes(&bytes) else { return Ok(()) };
        for name in [IF_MATCH, IF_NONE_MATCH] {
            let headers = HeaderMap::from_iter([(name, value.clone())]);
            let _decided = Condition::of(&headers, OURS);
        }
    }
}
