//! Takes settings out of a TOML table and the environment, and remembers everything that is wrong.
//!
//! Each setting has a name in the environment, which wins: `[staging] tmpfs` is
//! `KYBERNATE_AGENT_STAGING_TMPFS`. Lists of tables are in the file only.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::ConfigError;

/// What the names in the environment begin with.
pub(super) const PREFIX: &str = "KYBERNATE_AGENT_";

/// What all tables of a configuration have in common.
#[derive(Debug, Default)]
pub(super) struct Sources {
    pub(super) wrong: Vec<ConfigError>,
    /// Values by their names in the environment, until they are taken out.
    environment: BTreeMap<String, String>,
    lines: BTreeMap<String, usize>,
}

/// Reads one table. Every setting is taken out; what is left over was not known.
pub(super) struct Reader<'a> {
    table: Table,
    /// Where the table is, for messages: empty, or `staging.`, or `sign_keys[0].`.
    place: String,
    sources: &'a mut Sources,
}

impl Sources {
    /// Notes where in `text` each setting is, and what of the environment is for us.
    pub(super) fn new(text: &str, environment: impl Iterator<Item = (String, String)>) -> Self {
        let mut lines = BTreeMap::new();
        if let Ok(table) = DeTable::parse(text) {
            note_table(text, "", table.get_ref(), &mut lines);
        }
        let ours =
            environment.filter(|(name, value)| name.starts_with(PREFIX) && !value.is_empty());
        Self { wrong: Vec::new(), environment: ours.collect(), lines }
    }

    /// Reports every name of the environment that nobody asked for; `others` are options.
    pub(super) fn finish(mut self, others: &[&str]) -> Vec<ConfigError> {
        for name in self.environment.into_keys() {
            let option = name.strip_prefix(PREFIX).unwrap_or_default();
            if !others.contains(&option) {
                self.wrong.push(ConfigError::Unknown(format!("{name} of the environment")));
            }
        }
        self.wrong
    }

    /// Adds its line to a setting that is in the file, or to what it would be in.
    fn locate(&self, place: &str) -> String {
        let mut around = place;
        loop {
            if let Some(line) = self.lines.get(around) {
                return format!("line {line}: {place}");
            }
            match around.rfind(['.', '[']) {
                Some(end) => around = around.get(..end).unwrap_or_default(),
                None => return place.to_owned(),
            }
        }
    }
}

impl<'a> Reader<'a> {
    pub(super) fn new(table: Table, place: &str, sources: &'a mut Sources) -> Self {
        Self { table, place: place.to_owned(), sources }
    }

    pub(super) fn text(&mut self, key: &str) -> Option<String> {
        let written = self.table.remove(key);
        if let Some(given) = self.given(key) {
            return Some(given);
        }
        match written? {
            Value::String(text) => Some(text),
            other => self.mistyped(key, "a text", other.type_str()),
        }
    }

    pub(super) fn flag(&mut self, key: &str) -> Option<bool> {
        let written = self.table.remove(key);
        if let Some(given) = self.given(key) {
            return self.parsed(key, given, "true or false");
        }
        match written? {
            Value::Boolean(flag) => Some(flag),
            other => self.mistyped(key, "true or false", other.type_str()),
        }
    }

    pub(super) fn number(&mut self, key: &str) -> Option<f64> {
        let written = self.table.remove(key);
        if let Some(given) = self.given(key) {
            return self.parsed(key, given, "a number");
        }
        match written? {
            Value::Float(number) => Some(number),
            Value::Integer(number) => i32::try_from(number).ok().map(f64::from),
            other => self.mistyped(key, "a number", other.type_str()),
        }
    }

    /// Reads a time from a second to `most`; `wanted` says so.
    pub(super) fn time(
        &mut self,
        key: &str,
        wanted: &'static str,
        most: Duration,
    ) -> Option<Duration> {
        let text = self.text(key)?;
        match humantime::parse_duration(&text) {
            Ok(time) if (Duration::from_secs(1)..=most).contains(&time) => Some(time),
            Ok(_) | Err(_) => {
                let place = self.place(key);
                self.wrong(ConfigError::Bounds(place, wanted, text));
                None
            }
        }
    }

    /// Whether something is written.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Reads a list of texts. Not in the environment.
    pub(super) fn texts(&mut self, key: &str) -> Option<Vec<String>> {
        let items = match self.table.remove(key)? {
            Value::Array(items) => items,
            other => return self.mistyped(key, "a list of texts", other.type_str()),
        };
        let mut all = Vec::new();
        for item in items {
            match item {
                Value::String(text) => all.push(text),
                other => return self.mistyped(key, "a list of texts", other.type_str()),
            }
        }
        Some(all)
    }

    pub(super) fn required(&mut self, key: &str) -> String {
        if !self.table.contains_key(key) {
            let place = self.place(key);
            self.wrong(ConfigError::Missing(place));
        }
        let text = self.text(key);
        if text.as_deref() == Some("") {
            let place = self.place(key);
            self.wrong(ConfigError::Bounds(place, "a text that is not empty", String::new()));
        }
        text.unwrap_or_default()
    }

    pub(super) fn table(&mut self, key: &str) -> Reader<'_> {
        let place = format!("{}{key}.", self.place);
        let table = match self.table.remove(key) {
            Some(Value::Table(table)) => table,
            None => Table::new(),
            Some(other) => self.mistyped(key, "a table", other.type_str()).unwrap_or_default(),
        };
        Reader { table, place, sources: self.sources }
    }

    /// Reads each table of an array of tables.
    pub(super) fn each<T>(
        &mut self,
        key: &str,
        mut read: impl FnMut(&mut Reader<'_>) -> T,
    ) -> Vec<T> {
        let items = match self.table.remove(key) {
            Some(Value::Array(items)) => items,
            None => Vec::new(),
            Some(other) => {
                self.mistyped(key, "a list of tables", other.type_str()).unwrap_or_default()
            }
        };
        let mut all = Vec::new();
        for (position, item) in items.into_iter().enumerate() {
            let place = format!("{}{key}[{position}]", self.place);
            if let Value::Table(table) = item {
                let mut reader = Reader::new(table, &format!("{place}."), self.sources);
                all.push(read(&mut reader));
                reader.finish();
            } else {
                let place = self.sources.locate(&place);
                self.wrong(ConfigError::Mistyped(place, "a table", item.type_str()));
            }
        }
        all
    }

    pub(super) fn wrong(&mut self, error: ConfigError) {
        self.sources.wrong.push(error);
    }

    /// Returns where a setting is, for a message.
    pub(super) fn place(&self, key: &str) -> String {
        self.sources.locate(&format!("{}{key}", self.place))
    }

    /// Reports every setting nobody asked for.
    pub(super) fn finish(self) {
        for key in self.table.keys() {
            let place = self.sources.locate(&format!("{}{key}", self.place));
            self.sources.wrong.push(ConfigError::Unknown(place));
        }
    }

    /// Takes a setting out of the environment.
    fn given(&mut self, key: &str) -> Option<String> {
        self.sources.environment.remove(&self.name(key))
    }

    /// Returns the name of a setting in the environment.
    fn name(&self, key: &str) -> String {
        format!("{PREFIX}{}{key}", self.place).replace('.', "_").to_uppercase()
    }

    fn parsed<T: FromStr>(&mut self, key: &str, given: String, wanted: &'static str) -> Option<T> {
        let parsed = given.parse().ok();
        if parsed.is_none() {
            let name = self.name(key);
            self.wrong(ConfigError::Bounds(name, wanted, given));
        }
        parsed
    }

    fn mistyped<T>(&mut self, key: &str, wanted: &'static str, found: &'static str) -> Option<T> {
        let place = self.place(key);
        self.wrong(ConfigError::Mistyped(place, wanted, found));
        None
    }
}

fn note_table(text: &str, place: &str, table: &DeTable<'_>, lines: &mut BTreeMap<String, usize>) {
    for (key, value) in table {
        let place = format!("{place}{}", key.get_ref());
        note(text, &place, key.span().start, value, lines);
    }
}

fn note(
    text: &str,
    place: &str,
    start: usize,
    value: &Spanned<DeValue<'_>>,
    lines: &mut BTreeMap<String, usize>,
) {
    let before = text.get(..start).unwrap_or(text);
    lines.insert(place.to_owned(), before.matches('\n').count() + 1);
    match value.get_ref() {
        DeValue::Table(table) => note_table(text, &format!("{place}."), table, lines),
        DeValue::Array(items) => {
            for (position, item) in items.iter().enumerate() {
                let place = format!("{place}[{position}]");
                note(text, &place, item.span().start, item, lines);
            }
        }
        _ => {}
    }
}
