//! Patterns over names of repositories and namespaces.

use std::fmt;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

/// Some patterns, of which one has to match all of a name.
#[derive(Clone)]
pub struct Patterns {
    set: GlobSet,
    written: Vec<String>,
}

impl Patterns {
    /// Reads patterns as a policy file has them, and as the registry's policy has: `*` is any text
    /// without a `/`, `**` any text, `?` one letter, `[a-z]` one of some, `{a,b}` either; a
    /// backslash takes the meaning away. Each that cannot be read is told with its number.
    pub fn parse(written: &[String]) -> Result<Self, Vec<(usize, String)>> {
        let mut globs = GlobSetBuilder::new();
        let mut wrong = Vec::new();
        for (number, text) in written.iter().enumerate() {
            let mut glob = GlobBuilder::new(text);
            match glob.literal_separator(true).backslash_escape(true).build() {
                Ok(_) if text.is_empty() => wrong.push((number, "is empty".to_owned())),
                Ok(glob) => {
                    globs.add(glob);
                }
                Err(error) => wrong.push((number, error.kind().to_string())),
            }
        }
        if !wrong.is_empty() {
            return Err(wrong);
        }
        let set = globs.build().map_err(|error| vec![(0, error.kind().to_string())])?;
        Ok(Self { set, written: written.to_vec() })
    }

    /// Makes a pattern of a text in which `*` stands for anything, `/` included, and nothing else
    /// has a meaning.
    pub fn stars(text: &str) -> Self {
        let mut single = text.to_owned();
        while single.contains("**") {
            // Two of them would mean components.
            single = single.replace("**", "*");
        }
        let parts: Vec<String> = single.split('*').map(globset::escape).collect();
        let pattern = parts.join("*");
        let mut glob = GlobBuilder::new(&pattern);
        let glob = glob.literal_separator(false).backslash_escape(false).build();
        let set = glob.and_then(|glob| GlobSetBuilder::new().add(glob).build());
        // What cannot be read matches nothing, so lets nothing in.
        let set = set.unwrap_or_else(|_| GlobSet::empty());
        Self { set, written: vec![text.to_owned()] }
    }

    /// Returns what matches every name.
    pub fn any() -> Self {
        Self::stars("*")
    }

    /// Whether one of them matches all of `name`.
    pub fn matches(&self, name: &str) -> bool {
        self.set.is_match(name)
    }
}

impl fmt::Debug for Patterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.written).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_anything_in_a_rule_about_one_key() {
        let check = |pattern: &str, text: &str| Patterns::stars(pattern).matches(text);
        assert!(check("*", "") && check("*", "a/b") && check("*", "a\nb"));
        assert!(check("host/team/*", "host/team/a/b") && !check("host/team/*", "host/other/a"));
        assert!(check("a*c*e", "abcde") && !check("a*c*e", "abcd"));
        assert!(check("ab", "ab") && !check("ab", "abc") && !check("a*ba", "aba-b"));
        assert!(!check("aba*aba", "aba"));
        assert!(check("**/x", "a/x") && !check("**/x", "x"));
        assert!(check("[::1]:5000/{a}?", "[::1]:5000/{a}?") && !check("a?", "ab"));
        assert!(check("a\\b", "a\\b") && !check("a\\*", "a*") && check("a\\*", "a\\x"));
    }

    #[test]
    fn a_star_of_a_policy_file_stays_within_a_component() {
        let check = |pattern: &str, text: &str| {
            Patterns::parse(&[pattern.to_owned()]).unwrap().matches(text)
        };
        assert!(check("host/team/*", "host/team/a") && !check("host/team/*", "host/team/a/b"));
        assert!(check("host/team/**", "host/team/a/b") && !check("host/team/**", "host/teams/a"));
        assert!(check("*", "") && check("shop-{a,b}", "shop-b") && check("\\[::1\\]/a", "[::1]/a"));
        let wrong = Patterns::parse(&["a".to_owned(), "[".to_owned(), String::new()]).unwrap_err();
        assert_eq!(wrong.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 2]);
    }
}
