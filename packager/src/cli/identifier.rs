//! Names of containers and namespaces, as containerd has them.

/// Longest name (containerd, package `identifiers`).
const BYTES_MAX: usize = 76;

/// Reads a name: words of letters and digits, joined by one `-`, `_` or `.` each.
pub(super) fn identifier(text: &str) -> Result<String, String> {
    let mut words = text.split(['-', '_', '.']);
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric());
    if text.len() <= BYTES_MAX && words.all(is_word) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "it must have 1 to {BYTES_MAX} letters and digits, with single \"-\", \"_\" or \".\" between"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_containerds() {
        for good in ["a", "job-2", "k8s.io", "A_b.c-9", &"x".repeat(76)] {
            assert_eq!(identifier(good).as_deref(), Ok(good));
        }
        for bad in ["", "-a", "a-", "a--b", "a/b", "a b", "ä", "..", &"x".repeat(77)] {
            assert!(identifier(bad).is_err(), "{bad:?}");
        }
    }
}
