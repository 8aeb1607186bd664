//! What was written, wherever that was, as one tree whose values know where they come from.
//!
//! serde stops at the first mistake. Here a value that cannot be read is noted, taken out of the
//! tree, and the tree is read again, so that all mistakes are told at once. Every source has a
//! stretch of offsets of its own, which is what makes one tree out of many sources.

use std::ops::Range;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer};

use super::mistake::{Found, Mistake, Origin, Place, Step, written};
use super::setting::Given;

type Value<'s> = Spanned<DeValue<'s>>;

/// Mistakes told at once; who makes more has given us another kind of file.
const MISTAKES_MAX: usize = 1000;
/// The place of tables that nobody wrote: those around a value from the environment.
const NOWHERE: Range<usize> = usize::MAX..usize::MAX;

/// The texts that settings come from, each beginning where the one before it ends.
#[derive(Debug, Default)]
pub(super) struct Sources(Vec<Source>);

#[derive(Debug)]
struct Source {
    origin: Origin,
    start: usize,
    text: String,
}

/// The tree that was read from [`Sources`].
#[derive(Debug)]
pub(super) struct Document<'s> {
    sources: &'s Sources,
    written: DeTable<'s>,
    /// What is left of it without values that cannot be read.
    left: DeTable<'s>,
    /// Where those values were: what an enclosing table misses then is no news.
    gone: Vec<Vec<Step>>,
    wrong: Vec<Mistake>,
}

/// A value in the tree.
struct Node {
    path: Vec<Step>,
    /// The places of its key, if it has one, and of itself.
    spans: [Range<usize>; 2],
}

impl Sources {
    /// Adds a text and returns where it begins.
    pub(super) fn add(&mut self, origin: Origin, text: String) -> usize {
        let start = self.0.last().map_or(0, |last| last.start + last.text.len() + 1);
        self.0.push(Source { origin, start, text });
        start
    }

    fn locate(&self, offset: usize) -> Place {
        let after = self.0.partition_point(|source| source.start <= offset);
        let source = after.checked_sub(1).and_then(|at| self.0.get(at));
        let Some(source) = source.filter(|_| offset != NOWHERE.start) else {
            return Place { origin: Origin::Default, at: None };
        };
        let at = matches!(source.origin, Origin::File(_)).then(|| {
            let before = source.text.get(..offset - source.start).unwrap_or(&source.text);
            let line = before.matches('\n').count() + 1;
            let column = before.rsplit('\n').next().unwrap_or(before).chars().count() + 1;
            (line, column)
        });
        Place { origin: source.origin.clone(), at }
    }
}

impl<'s> Document<'s> {
    /// Reads the file, when there is one, as the first source, and what was given as those after.
    pub(super) fn read(sources: &'s Sources, given: &[Given]) -> Self {
        let mut tree = DeTable::new();
        let mut wrong = Vec::new();
        let mut given = given.iter();
        for Source { origin, start, text } in &sources.0 {
            if let Origin::File(_) = origin {
                let (root, errors) = DeTable::parse_recoverable(text);
                tree = root.into_inner();
                wrong.extend(errors.iter().map(|error| Mistake {
                    place: sources.locate(start + error.span().unwrap_or_default().start),
                    setting: String::new(),
                    told: error.message().to_owned(),
                }));
            } else if let Some(given) = given.next() {
                put(&mut tree, given, text, *start);
            }
        }
        Self { sources, left: tree.clone(), written: tree, gone: Vec::new(), wrong }
    }

    /// Reads the tree into types, and notes everything that they cannot take.
    pub(super) fn take<T: DeserializeOwned>(&mut self) -> Option<T> {
        while self.wrong.len() < MISTAKES_MAX {
            let root = Spanned::new(NOWHERE, self.left.clone());
            let error = match T::deserialize(Deserializer::from(root)) {
                Ok(value) => return Some(value),
                Err(error) => error,
            };
            let span = error.span().unwrap_or(NOWHERE);
            let (place, told) = (self.sources.locate(span.start), plain(error.message()));
            let Some(path) = pick(&self.left, &span) else {
                self.wrong.push(Mistake { place, setting: String::new(), told });
                return None;
            };
            remove(&mut self.left, &path);
            // Elements move up when one before them goes, so names come from the whole tree.
            let path = pick(&self.written, &span).unwrap_or(path);
            if !self.gone.iter().any(|gone| gone.starts_with(&path)) {
                self.wrong.push(Mistake { place, setting: written(&path), told });
            }
            self.gone.push(path);
        }
        None
    }

    /// Adds what sections found, leaving out what is known to be bad, and returns all mistakes in
    /// the order of their places.
    pub(super) fn finish(self, found: Vec<Found>) -> Vec<Mistake> {
        let mut wrong = self.wrong;
        for Found { at, told } in found {
            let (span, depth) = find(&self.left, &at).unwrap_or((NOWHERE, 0));
            let (known, below) = at.split_at_checked(depth).unwrap_or_default();
            let named = pick(&self.written, &span).filter(|_| depth > 0);
            let at = [&named.unwrap_or_else(|| known.to_vec()), below].concat();
            if !self.gone.iter().any(|gone| at.starts_with(gone)) {
                let place = self.sources.locate(span.start);
                wrong.push(Mistake { place, setting: written(&at), told });
            }
        }
        wrong.sort_by(|a, b| a.place.cmp(&b.place));
        // What is read in the place of what is no TOML is no news.
        wrong.dedup_by(|next, first| next.place == first.place && first.setting.is_empty());
        wrong
    }
}

/// Says it without words of Rust.
fn plain(message: &str) -> String {
    let mut told = message.replacen("unknown field", "unknown setting", 1);
    for kind in ["usize", "u64", "u32", "u16", "u8"] {
        let number = told.strip_suffix(kind).filter(|told| told.ends_with("expected "));
        if let Some(before) = number {
            told = format!("{before}a whole number");
        }
    }
    told
}

/// Puts one setting above what was there.
fn put<'s>(tree: &mut DeTable<'s>, given: &Given, text: &'s str, start: usize) {
    let span = start..start + text.len();
    let value = match DeValue::parse(text) {
        Ok(value) if !given.setting.is_text() => moved(value, start).into_inner(),
        // What cannot be read is left to the type, which says what it expects.
        _ => DeValue::String(text.into()),
    };
    let Some((last, tables)) = given.setting.path.split_last() else { return };
    let mut table = tree;
    for key in tables {
        let empty = || Spanned::new(NOWHERE, DeValue::Table(DeTable::new()));
        let key = Spanned::new(NOWHERE, key.clone().into());
        let entry = table.entry(key).or_insert_with(empty);
        if !entry.get_ref().is_table() {
            *entry = empty();
        }
        let DeValue::Table(deeper) = entry.get_mut() else { return };
        table = deeper;
    }
    table.remove(last.as_str());
    let key = Spanned::new(span.clone(), last.clone().into());
    table.insert(key, Spanned::new(span, value));
}

/// Moves a value and what is in it along by `start`.
fn moved(value: Value<'_>, start: usize) -> Value<'_> {
    let along = |span: Range<usize>| span.start + start..span.end + start;
    let span = along(value.span());
    let value = match value.into_inner() {
        DeValue::Array(items) => {
            DeValue::Array(items.into_iter().map(|item| moved(item, start)).collect())
        }
        DeValue::Table(table) => {
            let entries = table.into_iter().map(|(key, value)| {
                (Spanned::new(along(key.span()), key.into_inner()), moved(value, start))
            });
            DeValue::Table(entries.collect())
        }
        other => other,
    };
    Spanned::new(span, value)
}

/// Returns the path of what stands at `span`, or else of the least that encloses it.
fn pick(tree: &DeTable<'_>, span: &Range<usize>) -> Option<Vec<Step>> {
    let mut all = Vec::new();
    list(tree, &[], &mut all);
    let exact = all.iter().find(|node| node.spans.contains(span));
    let encloses = |outer: &Range<usize>| outer.start <= span.start && span.end <= outer.end;
    let around = all.iter().filter(|node| node.spans.iter().any(encloses));
    let least = around.min_by_key(|node| node.spans.iter().map(Range::len).sum::<usize>());
    exact.or(least).map(|node| node.path.clone())
}

fn list(table: &DeTable<'_>, above: &[Step], all: &mut Vec<Node>) {
    for (key, value) in table {
        let path = [above, &[Step::Key(key.get_ref().clone().into_owned())]].concat();
        list_value(value, key.span(), path, all);
    }
}

fn list_value(value: &Value<'_>, key: Range<usize>, path: Vec<Step>, all: &mut Vec<Node>) {
    match value.get_ref() {
        DeValue::Table(table) => list(table, &path, all),
        DeValue::Array(items) => {
            for (number, item) in items.iter().enumerate() {
                let path = [&*path, &[Step::Item(number)]].concat();
                list_value(item, item.span(), path, all);
            }
        }
        _ => {}
    }
    all.push(Node { path, spans: [key, value.span()] });
}

fn remove(tree: &mut DeTable<'_>, path: &[Step]) {
    let Some((Step::Key(key), rest)) = path.split_first() else { return };
    if rest.is_empty() {
        tree.remove(key.as_str());
    } else if let Some(value) = tree.get_mut(key.as_str()) {
        remove_below(value.get_mut(), rest);
    }
}

fn remove_below(value: &mut DeValue<'_>, path: &[Step]) {
    match (value, path) {
        (DeValue::Table(table), path) => remove(table, path),
        (DeValue::Array(items), [Step::Item(number)]) => {
            let numbered = items.iter().cloned().enumerate();
            let left = numbered.filter(|(at, _)| at != number).map(|(_, item)| item).collect();
            *items = left;
        }
        (DeValue::Array(items), [Step::Item(number), rest @ ..]) => {
            if let Some(item) = items.get_mut(*number) {
                remove_below(item.get_mut(), rest);
            }
        }
        _ => {}
    }
}

/// Returns the place of the value at `path`, or of the nearest table around it, and how many steps
/// lead there.
fn find(tree: &DeTable<'_>, path: &[Step]) -> Option<(Range<usize>, usize)> {
    let (Step::Key(key), rest) = path.split_first()? else { return None };
    let (mut value, mut depth) = (tree.get(key.as_str())?, 1);
    for step in rest {
        let deeper = match step {
            Step::Key(key) => value.get_ref().get(key.as_str()),
            Step::Item(number) => value.get_ref().get(*number),
        };
        match deeper {
            Some(deeper) => (value, depth) = (deeper, depth + 1),
            None => break,
        }
    }
    Some((value.span(), depth))
}
