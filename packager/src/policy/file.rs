//! Reads a policy file, and tells everything that is wrong with it at once.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use jiff::Timestamp;
use kybernate_spec::chain;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Mode, Patterns, Policy, Rule};
use crate::key::{PublicKey, read_bounded};

/// Largest policy file, and largest key file: thousands of rules.
pub(super) const BYTES_MAX: u64 = 1 << 20;

/// What inline keys begin with.
const PEM: &str = "-----BEGIN ";

/// The settings of a rule.
const SETTINGS: [&str; 8] = [
    "name",
    "repositories",
    "source_namespaces",
    "target_namespaces",
    "keys",
    "mode",
    "not_before",
    "not_after",
];

/// One thing that is wrong with a policy file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Mistake {
    /// The file.
    pub file: PathBuf,
    /// Line and column, both from 1; `None` when it is about the whole file.
    pub at: Option<(usize, usize)>,
    /// Which setting, as `rule[0].keys`; empty when it is about none.
    pub setting: String,
    /// What is wrong, one clause.
    pub told: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some((line, column)) = self.at {
            write!(f, "{line}:{column}:")?;
        }
        if !self.setting.is_empty() {
            write!(f, " {}:", self.setting)?;
        }
        write!(f, " {}", self.told)
    }
}

/// A value in the file.
type Value<'t> = Spanned<DeValue<'t>>;

/// Reads one file.
struct Reader<'t> {
    file: &'t Path,
    text: &'t str,
    /// Files of keys, with what they say.
    keys: Vec<(PathBuf, Vec<u8>)>,
    wrong: Vec<Mistake>,
}

/// Reads one rule.
struct RuleReader<'r, 't> {
    reader: &'r mut Reader<'t>,
    table: &'r DeTable<'t>,
    /// Where it is, for messages.
    place: String,
    start: usize,
}

/// A text in a list.
struct Text {
    number: usize,
    start: usize,
    content: String,
}

pub(super) fn read(file: &Path) -> Result<Policy, Vec<Mistake>> {
    let whole = |told: String| {
        vec![Mistake { file: file.to_owned(), at: None, setting: String::new(), told }]
    };
    let content = read_bounded(file, BYTES_MAX)
        .map_err(|error| whole(format!("it cannot be read: {}", cause(&error))))?;
    let text = std::str::from_utf8(&content).map_err(|error| whole(error.to_string()))?;
    let mut reader = Reader { file, text, keys: Vec::new(), wrong: Vec::new() };
    let rules = reader.rules();
    if !reader.wrong.is_empty() {
        reader.wrong.sort_by_key(|mistake| mistake.at);
        return Err(reader.wrong);
    }
    let mut files = reader.keys;
    files.push((file.to_owned(), content));
    Ok(Policy { rules, files })
}

impl<'t> Reader<'t> {
    fn rules(&mut self) -> Vec<Rule> {
        let (root, errors) = DeTable::parse_recoverable(self.text);
        for error in &errors {
            let start = error.span().unwrap_or_default().start;
            self.wrong(start, "", error.message());
        }
        let mut rules = Vec::new();
        for (key, value) in root.get_ref() {
            match (&**key.get_ref(), value.get_ref()) {
                ("rule", DeValue::Array(items)) => {
                    rules.extend(
                        items
                            .iter()
                            .enumerate()
                            .filter_map(|(number, item)| self.rule(number, item)),
                    );
                }
                ("rule", other) => {
                    let told = format!("must be tables, [[rule]], not {}", article(other));
                    self.wrong(value.span().start, "rule", told);
                }
                (other, _) => {
                    self.wrong(
                        key.span().start,
                        other,
                        "is not a setting; there are only [[rule]]",
                    );
                }
            }
        }
        if rules.is_empty() && self.wrong.is_empty() {
            // An emptied file is an accident more often than a wish.
            self.wrong(0, "", "there is no rule; write at least one [[rule]]");
        }
        self.unique(&rules);
        rules
    }

    fn rule(&mut self, number: usize, item: &Value<'t>) -> Option<Rule> {
        let (place, start) = (format!("rule[{number}]"), item.span().start);
        let DeValue::Table(table) = item.get_ref() else {
            let told = format!("must be a table, not {}", article(item.get_ref()));
            self.wrong(start, &place, told);
            return None;
        };
        Some(RuleReader { reader: self, table, place, start }.read())
    }

    fn unique(&mut self, rules: &[Rule]) {
        let mut names = BTreeSet::new();
        for rule in rules {
            if !names.insert(&rule.name) {
                let told = format!("two rules are called {:?}", rule.name);
                let setting = "rule.name";
                self.wrong.push(Mistake {
                    file: self.file.to_owned(),
                    at: None,
                    setting: setting.to_owned(),
                    told,
                });
            }
        }
    }

    fn wrong(&mut self, offset: usize, setting: &str, told: impl Into<String>) {
        let before = self.text.get(..offset).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or(before).chars().count() + 1;
        self.wrong.push(Mistake {
            file: self.file.to_owned(),
            at: Some((line, column)),
            setting: setting.to_owned(),
            told: told.into(),
        });
    }
}

impl RuleReader<'_, '_> {
    fn read(mut self) -> Rule {
        for (key, _) in self.table {
            if !SETTINGS.contains(&&**key.get_ref()) {
                let setting = format!("{}.{}", self.place, key.get_ref());
                let told = format!("is not a setting; there are {}", SETTINGS.join(", "));
                self.reader.wrong(key.span().start, &setting, told);
            }
        }
        let name = self.text("name").unwrap_or_else(|| self.place.clone());
        let mode = self.mode();
        if mode != Mode::Off && !self.table.contains_key("keys") {
            self.missing("keys");
        }
        if !self.table.contains_key("repositories") {
            self.missing("repositories");
        }
        let rule = Rule {
            name,
            repositories: self.patterns("repositories").unwrap_or_else(Patterns::any),
            source_namespaces: self.patterns("source_namespaces").unwrap_or_else(Patterns::any),
            target_namespaces: self.patterns("target_namespaces"),
            keys: self.keys(),
            mode,
            not_before: self.time("not_before"),
            not_after: self.time("not_after"),
        };
        if let (Some(begin), Some(end)) = (rule.not_before, rule.not_after)
            && end < begin
        {
            self.wrong("not_after", "is before not_before: the rule never counts");
        }
        rule
    }

    fn mode(&mut self) -> Mode {
        let Some(text) = self.text("mode") else { return Mode::Enforce };
        let modes = [Mode::Enforce, Mode::Warn, Mode::Off];
        modes.into_iter().find(|mode| mode.name() == text).unwrap_or_else(|| {
            self.wrong("mode", format!("must be enforce, warn or off, not {text:?}"));
            Mode::Enforce
        })
    }

    fn patterns(&mut self, key: &str) -> Option<Patterns> {
        let found = self.texts(key)?;
        let texts: Vec<String> = found.iter().map(|text| text.content.clone()).collect();
        match Patterns::parse(&texts) {
            Ok(patterns) => Some(patterns),
            Err(wrong) => {
                for (place, told) in wrong {
                    if let Some(text) = found.get(place) {
                        let told = format!("{told}; write a glob such as \"team/**\"");
                        self.wrong_text(key, text, told);
                    }
                }
                None
            }
        }
    }

    fn keys(&mut self) -> Vec<PublicKey> {
        let mut keys = Vec::new();
        for text in self.texts("keys").unwrap_or_default() {
            match self.key(&text.content) {
                Ok(key) => keys.push(key),
                Err(told) => self.wrong_text("keys", &text, told),
            }
        }
        keys
    }

    /// Reads a key that is written out, or in a file beside the policy.
    fn key(&mut self, text: &str) -> Result<PublicKey, String> {
        if text.trim_start().starts_with(PEM) {
            return PublicKey::from_pem(text.as_bytes()).map_err(|error| chain(&error).to_string());
        }
        let directory = self.reader.file.parent().unwrap_or(Path::new(""));
        let path = directory.join(text);
        let content = read_bounded(&path, BYTES_MAX)
            .map_err(|error| format!("{} cannot be read: {}", path.display(), cause(&error)))?;
        let key = PublicKey::from_pem(&content).map_err(|error| chain(&error).to_string());
        self.reader.keys.push((path, content));
        key
    }

    fn time(&mut self, key: &str) -> Option<Timestamp> {
        let value = self.table.get(key)?;
        let text = match value.get_ref() {
            DeValue::Datetime(time) => time.to_string(),
            DeValue::String(text) => text.to_string(),
            other => article(other),
        };
        let time = text.parse().ok();
        if time.is_none() {
            let told =
                format!("must be a time with its offset, as 2027-01-01T00:00:00Z, not {text}");
            self.wrong(key, told);
        }
        time
    }

    fn text(&mut self, key: &str) -> Option<String> {
        let value = self.table.get(key)?;
        match value.get_ref() {
            DeValue::String(text) => return Some(text.to_string()),
            other => self.wrong(key, format!("must be a text, not {}", article(other))),
        }
        None
    }

    /// Returns the texts of a list.
    fn texts(&mut self, key: &str) -> Option<Vec<Text>> {
        let value = self.table.get(key)?;
        let DeValue::Array(items) = value.get_ref() else {
            let told = format!("must be a list of texts, not {}", article(value.get_ref()));
            self.wrong(key, told);
            return None;
        };
        if items.is_empty() {
            self.wrong(key, "is empty, so the rule says nothing; name at least one");
        }
        let mut texts = Vec::new();
        for (number, item) in items.iter().enumerate() {
            let text = |content| Text { number, start: item.span().start, content };
            match item.get_ref() {
                DeValue::String(content) => texts.push(text(content.to_string())),
                other => {
                    let told = format!("must be a text, not {}", article(other));
                    self.wrong_text(key, &text(String::new()), told);
                }
            }
        }
        Some(texts)
    }

    fn missing(&mut self, key: &str) {
        let place = format!("{}.{key}", self.place);
        self.reader.wrong(self.start, &place, "is missing");
    }

    fn wrong_text(&mut self, key: &str, text: &Text, told: impl Into<String>) {
        let place = format!("{}.{key}[{}]", self.place, text.number);
        self.reader.wrong(text.start, &place, told);
    }

    fn wrong(&mut self, key: &str, told: impl Into<String>) {
        let start = self.table.get(key).map_or(self.start, |value| value.span().start);
        self.reader.wrong(start, &format!("{}.{key}", self.place), told);
    }
}

/// Says what kind of value it is, without its content.
fn article(value: &DeValue<'_>) -> String {
    match value.type_str() {
        kind @ ("array" | "integer") => format!("an {kind}"),
        kind => format!("a {kind}"),
    }
}

/// Says why a file cannot be read without its name, which stands before.
fn cause(error: &io::Error) -> String {
    error.kind().to_string()
}
