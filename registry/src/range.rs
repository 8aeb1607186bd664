//! `Range` of a GET and `Content-Range` of an upload's chunk.

use std::ops::Range;

/// How many ranges one request may name; with more it gets everything. RFC 9110, 17.15 asks for
/// such a bound. Clients that ask for several ask for a few.
const RANGES_MAX: usize = 16;

/// What a GET is to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Everything: there is no range, or one that may be ignored (RFC 9110, 14.2).
    Whole,
    /// These bytes.
    Part(Range<u64>),
    /// These parts, two or more, in this order.
    Several(Vec<Range<u64>>),
    /// Nothing: 416.
    Unsatisfiable,
}

/// The first and last byte of a chunk, as the distribution specification has it: `<start>-<end>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentRange {
    /// The first byte.
    pub start: u64,
    /// How many bytes.
    pub length: u64,
}

impl Wanted {
    /// Reads a `Range` header for content of `length` bytes.
    ///
    /// Other units, what cannot be read, too many ranges and ranges that together are longer than
    /// the content are ignored, as RFC 9110 allows. A range that ends before it starts is answered
    /// with 416, since whoever wrote it expects no content. Of several, those outside are left out.
    pub fn of(header: Option<&str>, length: u64) -> Self {
        // Names of units have no case (RFC 9110, 14.1).
        let written = header.and_then(|text| text.trim().split_once('='));
        let of_bytes = written.filter(|(unit, _)| unit.eq_ignore_ascii_case("bytes"));
        let Some((_, ranges)) = of_bytes else { return Self::Whole };
        let mut parts = Vec::new();
        for (count, range) in ranges.split(',').enumerate() {
            match Self::one(range, length) {
                Self::Part(part) if count < RANGES_MAX => parts.push(part),
                Self::Unsatisfiable if count < RANGES_MAX => {}
                _ => return Self::Whole,
            }
        }
        let total = parts.iter().map(|part| part.end - part.start).try_fold(0, u64::checked_add);
        match (parts.len(), parts.pop()) {
            (_, None) => Self::Unsatisfiable,
            (1, Some(part)) => Self::Part(part),
            _ if total.is_none_or(|total| total > length) => Self::Whole,
            (_, Some(last)) => {
                parts.push(last);
                Self::Several(parts)
            }
        }
    }

    /// Reads one range: a part, nothing, or, where it cannot be read, everything.
    fn one(range: &str, length: u64) -> Self {
        let Some((first, last)) = range.split_once('-') else { return Self::Whole };
        let (first, last) = (first.trim(), last.trim());
        if !is_digits(first) || !is_digits(last) || (first.is_empty() && last.is_empty()) {
            return Self::Whole;
        }
        // Digits that are no u64 name a byte further than any.
        let number = |text: &str| text.parse().unwrap_or(u64::MAX);
        let part = if first.is_empty() {
            length.saturating_sub(number(last))..length
        } else if last.is_empty() {
            number(first)..length
        } else if number(last) < number(first) {
            return Self::Unsatisfiable;
        } else {
            number(first)..number(last).saturating_add(1).min(length)
        };
        if part.is_empty() { Self::Unsatisfiable } else { Self::Part(part) }
    }
}

impl ContentRange {
    /// Reads a `Content-Range` header; `bytes ` before and `/…` after it are allowed.
    pub fn parse(header: &str) -> Option<Self> {
        let text = header.trim();
        let text =
            text.strip_prefix("bytes ").or_else(|| text.strip_prefix("bytes=")).unwrap_or(text);
        let text = text.split_once('/').map_or(text, |(range, _)| range);
        let (first, last) = text.split_once('-')?;
        if first.is_empty() || last.is_empty() || !is_digits(first) || !is_digits(last) {
            return None;
        }
        let (start, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        let length = last.checked_sub(start)?.checked_add(1)?;
        Some(Self { start, length })
    }
}

fn is_digits(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests;
