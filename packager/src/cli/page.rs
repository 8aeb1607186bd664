//! Pages of text for people: facts, tables, colours where they help.

use std::fmt::Write as _;

use console::{Style, measure_text_width, pad_str, truncate_str};

/// Narrowest terminal that lines are cut for.
const COLUMNS_MIN: usize = 40;

/// Spaces between the columns of a table.
const GAP: &str = "  ";

/// What is printed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Page {
    blocks: Vec<Block>,
}

/// Where it is printed: on anything but a terminal there is no width and no colour.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sheet {
    pub(crate) columns: Option<usize>,
    pub(crate) colours: bool,
}

/// A table.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<Cell>>,
    rows_max: usize,
    more: usize,
}

/// A piece of text, as others wrote it.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
    right: bool,
}

/// How something is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Heading,
    Faint,
    Good,
    Odd,
    Bad,
}

#[derive(Clone, Debug)]
enum Block {
    Fact(String, Cell),
    Line(Cell),
    Table(Table),
    Blank,
}

impl Page {
    /// Adds a name and what it is.
    pub(crate) fn fact(&mut self, name: &str, what: impl Into<Cell>) {
        self.blocks.push(Block::Fact(name.to_owned(), what.into()));
    }

    /// Adds a name and what it is, when it is anything.
    pub(crate) fn fact_if(&mut self, name: &str, what: Option<&str>) {
        if let Some(what) = what {
            self.fact(name, what);
        }
    }

    /// Adds a table under a title; nothing when the table has no rows.
    pub(crate) fn table(&mut self, title: &str, table: Table) {
        if table.rows.len() > 1 {
            self.blocks.push(Block::Blank);
            if !title.is_empty() {
                self.blocks.push(Block::Line(Cell::new(title, Tone::Heading)));
            }
            self.blocks.push(Block::Table(table));
        }
    }

    /// Writes it for a place.
    pub(crate) fn render(&self, sheet: Sheet) -> String {
        let mut text = String::new();
        for block in &self.blocks {
            match block {
                Block::Fact(name, what) => {
                    let name = Cell::new(name, Tone::Faint).drawn(sheet, 11, usize::MAX);
                    let room = sheet.room().saturating_sub(12);
                    line(&mut text, &format!("{name} {}", what.drawn(sheet, 0, room)));
                }
                Block::Line(cell) => line(&mut text, &cell.drawn(sheet, 0, sheet.room())),
                Block::Table(table) => table.render(sheet, &mut text),
                Block::Blank => text.push('\n'),
            }
        }
        text
    }
}

impl Sheet {
    fn room(self) -> usize {
        self.columns.map_or(usize::MAX, |columns| columns.max(COLUMNS_MIN))
    }
}

impl Table {
    /// Begins a table of at most so many rows; what comes after is only counted.
    pub(crate) fn new(headings: &[&str], rows_max: usize) -> Self {
        let headings = headings.iter().map(|text| Cell::new(text, Tone::Faint)).collect();
        Self { rows: vec![headings], rows_max, more: 0 }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: Vec<Cell>) {
        if self.rows.len() > self.rows_max {
            self.more += 1;
        } else {
            self.rows.push(cells);
        }
    }

    fn render(&self, sheet: Sheet, text: &mut String) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(Cell::width).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut written = String::from(GAP);
            let mut room = sheet.room().saturating_sub(GAP.len());
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                // The last column is as long as it is, or as there is room.
                let last = column + 1 == row.len();
                let width = if last && !cell.right { 0 } else { *width };
                written.push_str(&cell.drawn(sheet, width, room));
                room = room.saturating_sub(width + GAP.len());
                if !last {
                    written.push_str(GAP);
                }
            }
            line(text, &written);
        }
        if self.more > 0 {
            let rest = format!("{GAP}… and {} more: --all shows them", self.more);
            line(text, &Cell::new(&rest, Tone::Faint).drawn(sheet, 0, sheet.room()));
        }
    }
}

impl Cell {
    /// Makes a cell. Nothing in it can move a cursor or turn the direction of writing.
    pub(crate) fn new(text: &str, tone: Tone) -> Self {
        let odd = |c: char| {
            c.is_control()
                || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}'
                    | '\u{2066}'..='\u{2069}')
        };
        let text = text.chars().map(|c| if odd(c) { '\u{fffd}' } else { c }).collect();
        Self { text, tone, right: false }
    }

    /// Makes a cell that ends where the column does, as numbers do.
    pub(crate) fn number(text: &str) -> Self {
        Self { right: true, ..Self::new(text, Tone::Plain) }
    }

    /// Writes it, at least and at most so wide.
    fn drawn(&self, sheet: Sheet, least: usize, most: usize) -> String {
        let text = match sheet.columns {
            Some(_) => truncate_str(&self.text, most, "…"),
            None => self.text.as_str().into(),
        };
        let side = if self.right { console::Alignment::Right } else { console::Alignment::Left };
        let text = pad_str(&text, least, side, None);
        let style = Style::new().force_styling(sheet.colours);
        let style = match self.tone {
            Tone::Plain => return text.into_owned(),
            Tone::Heading => style.bold(),
            Tone::Faint => style.dim(),
            Tone::Good => style.green(),
            Tone::Odd => style.yellow(),
            Tone::Bad => style.red(),
        };
        style.apply_to(text).to_string()
    }

    fn width(&self) -> usize {
        measure_text_width(&self.text)
    }
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(text.as_ref(), Tone::Plain)
    }
}

/// Writes a line without spaces at its end.
fn line(text: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _written = writeln!(text, "{}", line.trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let mut page = Page::default();
        page.fact("digest", "sha256:0123456789abcdef0123456789abcdef");
        let mut table = Table::new(&["PID", "NAME"], 2);
        for (pid, name) in [("1", "in\u{1b}[2Jit"), ("22", "\u{202e}evil\nname"), ("3", "x")] {
            table.row(vec![Cell::number(pid), Cell::new(name, Tone::Good)]);
        }
        page.table("PROCESSES", table);
        page
    }

    #[test]
    fn what_is_piped_is_plain_and_whole() {
        insta::assert_snapshot!(page().render(Sheet::default()), @r"
        digest      sha256:0123456789abcdef0123456789abcdef

        PROCESSES
          PID  NAME
            1  in�[2Jit
           22  �evil�name
          … and 1 more: --all shows them
        ");
    }

    #[test]
    fn on_a_terminal_lines_are_as_wide_as_it_is() {
        let sheet = Sheet { columns: Some(40), colours: true };
        let text = page().render(sheet);
        assert!(text.lines().all(|line| measure_text_width(line) <= 40), "{text}");
        assert!(text.contains("\u{1b}[32m") && text.contains('…'), "{text:?}");
        let plain = page().render(Sheet { colours: false, ..sheet });
        assert!(!plain.contains('\u{1b}'), "{plain:?}");
    }
}
