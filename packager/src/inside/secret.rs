//! What looks like a secret, by its name or by itself.
//!
//! This is a courtesy to those who look over a shoulder, not a protection: whoever can read the
//! checkpoint can read all of the process's memory.

/// What is shown instead.
pub const MASK: &str = "********";

/// Parts of names of secrets, in capitals.
const NAMES: &[&str] = &[
    "PASSW",
    "PASSPHRASE",
    "PWD",
    "SECRET",
    "TOKEN",
    "APIKEY",
    "CREDENTIAL",
    "PRIVATE",
    "COOKIE",
    "SESSION",
    "DSN",
    "CONNECTION_STRING",
    "CONNSTR",
    "AUTH",
    "SALT",
    "OTP",
    "BEARER",
];

/// Ends of names of secrets, in capitals.
const ENDS: &[&str] = &["_KEY", "-KEY", "_PASS", "-PASS", "_PW", "_PIN"];

/// Names that look like one and are none.
const HARMLESS: &[&str] = &["PWD", "OLDPWD", "AUTHOR", "AUTHORS"];

/// Beginnings of secrets that services hand out, and of keys.
const BEGINNINGS: &[&str] = &[
    "-----BEGIN ",
    "AKIA",
    "ASIA",
    "AIza",
    "ghp_",
    "gho_",
    "ghs_",
    "github_pat_",
    "glpat-",
    "hf_",
    "npm_",
    "pypi-",
    "sk-",
    "sk_live_",
    "xoxb-",
    "xoxp-",
    "eyJ",
];

/// Shortest run of letters and digits that may be a key.
const KEY_CHARS_MIN: usize = 24;

/// Returns the value of a variable, or the mask.
pub fn value<'a>(name: &str, value: &'a str) -> &'a str {
    if !value.is_empty() && (is_name(name) || is_value(value)) { MASK } else { value }
}

/// Returns arguments with the mask where they look like secrets: `--password=x`, `--password x`,
/// `NAME=x`, and what looks like one by itself.
pub fn arguments(arguments: &[String]) -> Vec<String> {
    let mut shown = Vec::with_capacity(arguments.len());
    let mut follows = false;
    for argument in arguments {
        let option = argument.starts_with('-');
        if follows && !option {
            shown.push(MASK.to_owned());
            follows = false;
            continue;
        }
        follows = false;
        match argument.split_once('=') {
            Some((name, text)) => shown.push(format!("{name}={}", value(name, text))),
            None if option => {
                follows = is_name(argument);
                shown.push(argument.clone());
            }
            None => shown.push(value("", argument).to_owned()),
        }
    }
    shown
}

fn is_name(name: &str) -> bool {
    let name = name.trim_start_matches('-').to_ascii_uppercase();
    if HARMLESS.contains(&&*name) {
        return false;
    }
    name == "KEY"
        || NAMES.iter().any(|part| name.contains(part))
        || name.replace(['_', '-'], "").contains("APIKEY")
        || ENDS.iter().any(|end| name.ends_with(end))
}

fn is_value(value: &str) -> bool {
    BEGINNINGS.iter().any(|begin| value.starts_with(begin))
        || has_password(value)
        || value.split(|c: char| !c.is_ascii_alphanumeric() && c != '+' && c != '_').any(is_key)
}

/// Whether it is an address with a password, as `https://user:password@host`.
fn has_password(value: &str) -> bool {
    value.split("://").skip(1).any(|rest| {
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        authority.rsplit_once('@').is_some_and(|(user, _)| user.contains(':'))
    })
}

/// Whether it is long and mixed enough to have been made by chance.
fn is_key(word: &str) -> bool {
    let kinds: [fn(&u8) -> bool; 3] =
        [u8::is_ascii_digit, u8::is_ascii_lowercase, u8::is_ascii_uppercase];
    let has = |kind: &fn(&u8) -> bool| word.as_bytes().iter().any(kind);
    let mixed = kinds.iter().filter(|kind| has(kind)).count();
    let digits = word.bytes().filter(u8::is_ascii_digit).count();
    // Words joined by underscores have few digits; hexadecimal and base64 have many.
    word.len() >= KEY_CHARS_MIN && mixed >= 2 && digits.saturating_mul(8) >= word.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_masked_by_their_name() {
        for name in ["DB_PASSWORD", "GITHUB_TOKEN", "aws_secret_access_key", "Api-Key", "KEY"] {
            assert_eq!(value(name, "x1"), MASK, "{name}");
        }
        for name in ["PATH", "HOME", "PWD", "MONKEY", "KEYBOARD", "AUTHOR", "HOSTNAME"] {
            assert_eq!(value(name, "/x/y"), "/x/y", "{name}");
        }
    }

    #[test]
    fn secrets_are_masked_by_what_they_are() {
        for secret in [
            "postgres://app:hunter2@db.example.com/app",
            "http://a.example/?x=1 https://u:p@b.example",
            "-----BEGIN PRIVATE KEY-----\nMC4",
            "eyJhbGciOiJIUzI1NiJ9.e30.x",
            "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822c",
            "AKIAIOSFODNN7EXAMPLE",
        ] {
            assert_eq!(value("X", secret), MASK, "{secret}");
        }
        for plain in [
            "",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin",
            "https://example.com/a@b",
            "postgres://db.example.com:5432/app",
            "en_GB.UTF-8",
            "a_rather_long_name_of_a_model_without_numbers",
            "3.14.159",
        ] {
            assert_eq!(value("X", plain), plain);
        }
    }

    #[test]
    fn arguments_that_follow_a_secret_option_are_masked() {
        let given = ["serve", "--token", "abc", "--port=80", "--api-key=abc", "--password", "-v"];
        let shown = arguments(&given.map(str::to_owned));
        assert_eq!(
            shown,
            ["serve", "--token", MASK, "--port=80", "--api-key=********", "--password", "-v"]
        );
    }
}
