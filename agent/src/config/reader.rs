//! Takes settings out of a TOML table and remembers everything that is wrong with it.

use toml::{Table, Value};

use super::ConfigError;

/// Reads one table. Every setting is taken out; what is left over was not known.
pub(super) struct Reader<'a> {
    table: Table,
    /// Where the table is, for messages: empty, or `staging.`, or `sign_keys[0].`.
    place: String,
    wrong: &'a mut Vec<ConfigError>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(table: Table, place: &str, wrong: &'a mut Vec<ConfigError>) -> Self {
        Self { table, place: place.to_owned(), wrong }
    }

    pub(super) fn text(&mut self, key: &str) -> Option<String> {
        match self.table.remove(key)? {
            Value::String(text) => Some(text),
            other => self.mistyped(key, "a text", &other),
        }
    }

    pub(super) fn flag(&mut self, key: &str) -> Option<bool> {
        match self.table.remove(key)? {
            Value::Boolean(flag) => Some(flag),
            other => self.mistyped(key, "true or false", &other),
        }
    }

    pub(super) fn number(&mut self, key: &str) -> Option<f64> {
        match self.table.remove(key)? {
            Value::Float(number) => Some(number),
            Value::Integer(number) => i32::try_from(number).ok().map(f64::from),
            other => self.mistyped(key, "a number", &other),
        }
    }

    pub(super) fn required(&mut self, key: &str) -> String {
        if !self.table.contains_key(key) {
            self.wrong.push(ConfigError::Missing(format!("{}{key}", self.place)));
        }
        self.text(key).unwrap_or_default()
    }

    pub(super) fn table(&mut self, key: &str) -> Reader<'_> {
        let place = format!("{}{key}.", self.place);
        let table = match self.table.remove(key) {
            Some(Value::Table(table)) => table,
            None => Table::new(),
            Some(other) => self.mistyped(key, "a table", &other).unwrap_or_default(),
        };
        Reader { table, place, wrong: self.wrong }
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
            Some(other) => self.mistyped(key, "a list of tables", &other).unwrap_or_default(),
        };
        let mut all = Vec::new();
        for (position, item) in items.into_iter().enumerate() {
            let place = format!("{}{key}[{position}]", self.place);
            if let Value::Table(table) = item {
                let mut reader = Reader::new(table, &format!("{place}."), self.wrong);
                all.push(read(&mut reader));
                reader.finish();
            } else {
                self.wrong.push(ConfigError::Mistyped(place, "a table", item.type_str()));
            }
        }
        all
    }

    pub(super) fn wrong(&mut self, error: ConfigError) {
        self.wrong.push(error);
    }

    pub(super) fn place(&self, key: &str) -> String {
        format!("{}{key}", self.place)
    }

    /// Reports every setting nobody asked for.
    pub(super) fn finish(self) {
        for key in self.table.keys() {
            self.wrong.push(ConfigError::Unknown(format!("{}{key}", self.place)));
        }
    }

    fn mistyped<T>(&mut self, key: &str, wanted: &'static str, found: &Value) -> Option<T> {
        let place = self.place(key);
        self.wrong.push(ConfigError::Mistyped(place, wanted, found.type_str()));
        None
    }
}
