//! Whose checkpoints this node restores, from where to where.

use kybernate_packager::key::PublicKey;

/// A text in which `*` stands for anything, `/` included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob(String);

/// One line of the trust policy: this key may vouch for checkpoints of these repositories, taken
/// in these namespaces, to be restored into those.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Who vouches.
    pub key: PublicKey,
    /// `host[:port]/name` of the repository.
    pub repository: Glob,
    /// Namespace the checkpoint was taken in.
    pub source_namespace: Glob,
    /// Namespace it may be restored into; the same as the source's when absent.
    pub target_namespace: Option<Glob>,
}

/// What a rule is asked about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question<'a> {
    pub(crate) repository: &'a str,
    pub(crate) source_namespace: &'a str,
    pub(crate) target_namespace: &'a str,
}

impl Glob {
    /// Takes a pattern as it is written.
    pub fn new(pattern: &str) -> Self {
        Self(pattern.to_owned())
    }

    /// Whether all of `text` matches.
    pub fn matches(&self, text: &str) -> bool {
        let mut parts = self.0.split('*');
        let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else {
            return false;
        };
        let mut parts: Vec<&str> = parts.collect();
        let Some(last) = parts.pop() else { return rest.is_empty() };
        for part in parts {
            let Some(position) = rest.find(part) else { return false };
            rest = rest.get(position + part.len()..).unwrap_or_default();
        }
        rest.ends_with(last)
    }
}

impl Rule {
    /// Whether the rule speaks of this repository and these namespaces.
    pub(crate) fn covers(&self, question: Question<'_>) -> bool {
        let target = match &self.target_namespace {
            Some(target) => target.matches(question.target_namespace),
            None => question.source_namespace == question.target_namespace,
        };
        target
            && self.repository.matches(question.repository)
            && self.source_namespace.matches(question.source_namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kybernate_packager::key::SigningKey;

    #[test]
    fn a_star_stands_for_anything() {
        let check = |pattern: &str, text: &str| Glob::new(pattern).matches(text);
        assert!(check("*", "") && check("*", "a/b"));
        assert!(check("host/team/*", "host/team/a/b") && !check("host/team/*", "host/other/a"));
        assert!(check("a*c*e", "abcde") && !check("a*c*e", "abcd"));
        assert!(check("ab", "ab") && !check("ab", "abc") && !check("a*ba", "aba-b"));
        assert!(!check("aba*aba", "aba"));
    }

    #[test]
    fn without_a_target_only_the_same_namespace_will_do() {
        let key = SigningKey::generate().unwrap().public().clone();
        let mut rule = Rule {
            key,
            repository: Glob::new("host/*"),
            source_namespace: Glob::new("*"),
            target_namespace: None,
        };
        let question = |target_namespace| Question {
            repository: "host/web",
            source_namespace: "shop",
            target_namespace,
        };
        assert!(rule.covers(question("shop")) && !rule.covers(question("bank")));
        rule.target_namespace = Some(Glob::new("ba*"));
        assert!(rule.covers(question("bank")) && !rule.covers(question("shop")));
    }
}
