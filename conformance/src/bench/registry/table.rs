//! Medians and ratios, as a table or as JSON.

use serde_json::{Value, json};

use super::super::spread::Spread;
use super::figures::Figure;

/// Everything that was measured.
#[derive(Debug, Default)]
pub(in crate::bench) struct Table {
    servers: Vec<String>,
    names: Vec<String>,
    /// Server, figure, value; in the order in which they were measured.
    cells: Vec<(String, String, f64)>,
}

impl Table {
    /// Adds what one round gave.
    pub(in crate::bench) fn add(&mut self, server: &str, figures: Vec<Figure>) {
        enter(&mut self.servers, server);
        for (name, value) in figures {
            enter(&mut self.names, &name);
            self.cells.push((server.to_owned(), name, value));
        }
    }

    /// Returns every value.
    pub(in crate::bench) fn json(&self) -> Value {
        let of = |server: &String| {
            let figures = self
                .names
                .iter()
                .map(|name| (name.clone(), json!(self.values(server, name).collect::<Vec<_>>())));
            (server.clone(), Value::Object(figures.collect()))
        };
        Value::Object(self.servers.iter().map(of).collect())
    }

    /// Returns a table in Markdown; behind each other's figure stands its ratio to ours.
    pub(in crate::bench) fn text(&self) -> String {
        let mut text = format!("| | {} |\n|---|", self.servers.join(" | "));
        text += &"---|".repeat(self.servers.len());
        text.push('\n');
        for name in &self.names {
            let cells = self.servers.iter().map(|server| self.cell(server, name));
            text += &["| ", name, " | ", &cells.collect::<Vec<_>>().join(" | "), " |\n"].concat();
        }
        text
    }

    fn cell(&self, server: &str, name: &str) -> String {
        let spread = Spread::of(self.values(server, name));
        if self.values(server, name).next().is_none() {
            return "–".to_owned();
        }
        let digits = if spread.median < 10.0 { 2 } else { 0 };
        let ours = self.servers.first().filter(|ours| *ours != server);
        let Some(ours) = ours else { return spread.text(digits) };
        let pairs = self.values(server, name).zip(self.values(ours, name));
        let ratio = Spread::of(pairs.map(|(other, own)| other / own));
        format!("{} = {:.2} ×", spread.text(digits), ratio.median)
    }

    fn values(&self, server: &str, name: &str) -> impl Iterator<Item = f64> {
        let found = self.cells.iter().filter(move |(s, n, _)| s == server && n == name);
        found.map(|(_, _, value)| *value)
    }
}

fn enter(list: &mut Vec<String>, text: &str) {
    if !list.iter().any(|known| known == text) {
        list.push(text.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn others_are_told_as_multiples_of_ours() {
        let mut table = Table::default();
        for (server, value) in [("a", 2.0), ("b", 4.0), ("a", 3.0), ("b", 9.0)] {
            table.add(server, vec![("x".to_owned(), value)]);
        }
        table.add("a", vec![("y".to_owned(), 100.0)]);
        assert_eq!(
            table.text(),
            "| | a | b |\n|---|---|---|\n\
             | x | 2.50 (2.00–3.00) | 6.50 (4.00–9.00) = 2.50 × |\n\
             | y | 100 (100–100) | – |\n"
        );
    }
}
