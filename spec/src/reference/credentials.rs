//! Names and passwords that somebody wrote before a host, as URLs have them. A reference holds
//! none, and what complains about one must not repeat them.

use std::borrow::Cow;
use std::ops::Range;

use super::SCHEME_END;

/// What stands for credentials that are left out.
const LEFT_OUT: &str = "***";

/// Fewest letters of what is taken for a digest that somebody has cut or mistyped.
const DIGEST_LETTERS_MIN: usize = 6;

/// Returns a word of a command line or of a file without the credentials that it holds, as in
/// `https://user:password@registry.example.com/name`. The rest of it stays, so that people see which
/// word is meant.
pub fn without_credentials(word: &str) -> Cow<'_, str> {
    match credentials(word) {
        Some(range) => {
            let before = word.get(..range.start).unwrap_or_default();
            let after = word.get(range.end..).unwrap_or_default();
            Cow::Owned(format!("{before}{LEFT_OUT}{after}"))
        }
        None => Cow::Borrowed(word),
    }
}

/// Finds what stands before the host, without the `@` that ends it. Passwords hold anything, also
/// `@` and `/`: rather too much is found than too little.
pub(super) fn credentials(word: &str) -> Option<Range<usize>> {
    if let Some(at) = word.find(SCHEME_END) {
        let begin = at + SCHEME_END.len();
        let rest = word.get(begin..)?;
        let end = rest.rmatch_indices('@').find(|(at, _)| !is_digest(rest.get(at + 1..)))?.0;
        return Some(begin..begin + end);
    }
    if word.starts_with("oci:") {
        return None;
    }
    let is_end = |at: usize| {
        let (Some(before), after) = (word.get(..at), word.get(at + 1..)) else { return false };
        let Some((user, password)) = before.split_once(':') else { return false };
        let before_a_host = after.is_some_and(|after| after.contains(['/', '.']));
        !user.contains('/') && !is_digest(after) && (before_a_host || !password.contains('/'))
    };
    let end = word.rmatch_indices('@').map(|(at, _)| at).find(|at| is_end(*at))?;
    Some(0..end)
}

/// Whether what follows an `@` is a digest, or was meant to be one.
fn is_digest(text: Option<&str>) -> bool {
    text.and_then(|text| text.split_once(':')).is_some_and(|(algorithm, hex)| {
        algorithm.starts_with("sha")
            && hex.len() >= DIGEST_LETTERS_MIN
            && hex.bytes().all(|letter| letter.is_ascii_hexdigit())
    })
}
