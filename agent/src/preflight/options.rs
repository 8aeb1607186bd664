//! What CRIU is told by a configuration file (criu(8), "CONFIGURATION FILES").

use std::collections::BTreeMap;
use std::path::Path;

use super::view::read;
use crate::criu_config::MARK;

/// The file for containers that name none. runc hands it to CRIU when it is there.
pub(crate) const DEFAULT_FILE: &str = "/etc/criu/runc.conf";

/// Options, without their dashes, and their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CriuOptions(BTreeMap<String, String>);

impl CriuOptions {
    /// Reads a file; none has no options.
    pub(crate) fn of(file: &Path) -> Self {
        Self::parse(&read(file).unwrap_or_default())
    }

    /// Reads what a file has.
    pub(crate) fn parse(text: &str) -> Self {
        let option = |line: &str| {
            let line = line.split('#').next()?.trim();
            let (name, value) = line.split_once([' ', '\t', '=']).unwrap_or((line, ""));
            let name = name.trim_start_matches('-');
            (!name.is_empty()).then(|| (name.to_owned(), value.trim().to_owned()))
        };
        // What was for an operation before chooses nothing for the next.
        Self(text.lines().filter(|line| !line.contains(MARK)).filter_map(option).collect())
    }

    /// Whether an option is set.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Returns an option that is a size: a number, with K, M or G for powers of 1024.
    pub(crate) fn bytes(&self, name: &str) -> Option<u64> {
        let value = self.0.get(name)?;
        let digits = value.trim_end_matches(|c: char| !c.is_ascii_digit());
        let unit = match value.get(digits.len()..)?.chars().next() {
            None => 1,
            Some('K' | 'k') => 1 << 10,
            Some('M' | 'm') => 1 << 20,
            Some('G' | 'g') => 1 << 30,
            Some(_) => return None,
        };
        digits.parse::<u64>().ok()?.checked_mul(unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_as_criu_reads_them() {
        let options = CriuOptions::parse("# ours\ntcp-close\nghost-limit 4M # more\n--x=1\n\n");
        assert!(options.has("tcp-close") && options.has("x") && !options.has("ours"));
        assert_eq!(options.bytes("ghost-limit"), Some(4 << 20));
        assert_eq!(options.bytes("tcp-close"), None);
        assert_eq!(CriuOptions::of(Path::new("/nowhere")), CriuOptions::default());
    }
}
