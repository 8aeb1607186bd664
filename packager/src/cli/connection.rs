//! How to reach registries, as command lines say it.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgAction, Args};
use kybernate_packager::store::{ConnectOptions, Store, StoreError};
use kybernate_spec::{Location, Reference};

/// How to reach a registry.
#[derive(Clone, Debug, Args)]
pub(super) struct Connection {
    /// Speak plain HTTP also to registries that are not on this machine: to all that are named, or
    /// to those of this host; may be given more than once then.
    #[arg(
        long,
        value_name = "HOST[:PORT]",
        env = "KYB_PLAIN_HTTP",
        hide_env_values = true,
        action = ArgAction::Append,
        num_args = 0..=1,
        require_equals = true,
        value_delimiter = ',',
        default_missing_value = "*"
    )]
    plain_http: Vec<Plain>,
}

/// Which registries are spoken to over plain HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Plain {
    All,
    /// That of this host on this port, or on any when none is written.
    Host(String),
}

impl FromStr for Plain {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Switches are set to such words elsewhere.
        let is_switch = ["0", "1", "true", "false", "yes", "no", "on", "off"]
            .contains(&&*text.to_ascii_lowercase());
        if is_switch || text.contains(['/', '@']) {
            let told = "it must be HOST[:PORT], as registry.example.com:5000, or * for all";
            return Err(told.to_owned());
        }
        Ok(if text == "*" { Self::All } else { Self::Host(text.to_ascii_lowercase()) })
    }
}

impl Plain {
    fn is_of(&self, reference: &Reference) -> bool {
        let Self::Host(wanted) = self else { return true };
        reference.registry.eq_ignore_ascii_case(wanted)
            || reference.host().eq_ignore_ascii_case(wanted)
    }
}

impl Connection {
    /// Opens what is at `location`.
    pub(super) async fn open(&self, location: &Location) -> Result<Store, StoreError> {
        let plain_http = match location {
            Location::Registry(reference) => self.is_plain(reference),
            Location::Layout(_) => false,
        };
        Store::open(location, &ConnectOptions { plain_http, notes: notes() }).await
    }

    /// Whether a registry is spoken to over plain HTTP wherever it is.
    pub(super) fn is_plain(&self, reference: &Reference) -> bool {
        self.plain_http.iter().any(|plain| plain.is_of(reference))
    }
}

/// Returns where uploads under way are noted: in the user's cache (XDG Base Directory
/// Specification).
fn notes() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("kybernate/uploads"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        connection: Connection,
        reference: String,
    }

    fn plain(line: &[&str], registry: &str) -> bool {
        let line = std::iter::once("kyb").chain(line.iter().copied()).chain(["r.example.com/a"]);
        let line: Line = clap::Parser::try_parse_from(line).unwrap();
        assert_eq!(line.reference, "r.example.com/a", "it takes no word that is not its own");
        line.connection.is_plain(&format!("{registry}/a").parse().unwrap())
    }

    #[test]
    fn plain_http_is_for_all_or_for_the_hosts_that_are_named() {
        for registry in ["a.example.com", "b.example.com:5000"] {
            assert!(!plain(&[], registry));
            assert!(plain(&["--plain-http"], registry));
            assert!(plain(&["--plain-http=c.example.com", "--plain-http"], registry));
        }
        for (named, registry, expected) in [
            ("a.example.com", "a.example.com", true),
            ("A.example.com", "a.example.com:5000", true),
            ("a.example.com:5000", "a.example.com:5000", true),
            ("a.example.com:5000", "a.example.com:5001", false),
            ("a.example.com:5000", "a.example.com", false),
            ("a.example.com", "b.example.com", false),
            ("b.example.com,a.example.com", "a.example.com", true),
            ("[fd00::1]", "[fd00::1]:5000", true),
            ("[fd00::1]:5000", "[fd00::1]:5000", true),
        ] {
            let option = format!("--plain-http={named}");
            assert_eq!(plain(&[&option], registry), expected, "{named} {registry}");
        }
        assert!(plain(
            &["--plain-http=a.example.com", "--plain-http=b.example.com"],
            "b.example.com"
        ));
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for word in
            ["https://a.example.com", "me:hunter2@a.example.com", "a.example.com/team", "True"]
        {
            let option = format!("--plain-http={word}");
            let told = <Line as clap::Parser>::try_parse_from(["kyb", &option, "r.example.com/a"]);
            assert!(told.unwrap_err().to_string().contains("HOST[:PORT]"), "{word}");
        }
    }
}
