//! `[access]`: who may do what, and how that is proven.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Mistakes, Period};

/// Who may do what. While nothing is set here, everybody may do everything.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AccessSettings {
    /// File of rules (TOML): who may pull, push and delete where. Without it, whoever proves an
    /// identity may do everything. Read again when it changes, as all files of this section are.
    #[schemars(extend("format" = "file"))]
    pub policy: Option<PathBuf>,
    /// File of users and bcrypt hashes, as `htpasswd -B` writes it.
    #[schemars(extend("format" = "file"))]
    pub htpasswd: Option<PathBuf>,
    /// How clients without credentials are told to bring some; both ways are accepted always.
    pub challenge: Challenge,
    /// What tokens for this registry are made out to (claim `aud`), and who makes our own (`iss`).
    pub service: String,
    /// URL of the token server that clients are sent to; without it, it is this registry's own.
    #[schemars(example = "https://auth.example.com/token")]
    pub realm: Option<String>,
    /// How long a token of our own is good; an upload that has begun goes on without it.
    pub token_life: Period,
    /// File of the keys that sign our own tokens (PEM); made below the root when it is not set.
    #[schemars(extend("format" = "file"))]
    pub token_keys: Option<PathBuf>,
    /// Others whose tokens are accepted.
    pub issuers: Vec<IssuerSettings>,
}

/// How clients are told to prove who they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Challenge {
    /// By password if there are users and no realm is set, else by token.
    Auto,
    /// By password with each request.
    Basic,
    /// By a token, which they get for their password or from elsewhere.
    Bearer,
}

/// Somebody whose tokens are accepted.
#[derive(Debug, Clone, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct IssuerSettings {
    /// What the policy calls it: `token:NAME:…` and `claim:NAME:…`.
    #[schemars(example = &"ci")]
    pub name: String,
    /// Its claim `iss`.
    #[schemars(example = "https://token.actions.example.com")]
    pub issuer: String,
    /// What its claim `aud` must be, or list.
    #[schemars(example = "registry.example.com")]
    pub audience: String,
    /// Its public keys (JSON Web Key Set): a file, or a URL that is asked every ten minutes.
    #[schemars(example = "https://token.actions.example.com/.well-known/jwks")]
    pub jwks: String,
    /// Whether what its tokens list in the claim `access` may be done whatever the policy says, as
    /// with a token server that decides by itself. Otherwise that claim only limits a token.
    #[serde(default)]
    #[schemars(example = false)]
    pub decides: bool,
}

impl Default for AccessSettings {
    fn default() -> Self {
        Self {
            policy: None,
            htpasswd: None,
            challenge: Challenge::Auto,
            service: "kybernate-registry".to_owned(),
            realm: None,
            token_life: Period(Duration::from_mins(5)),
            token_keys: None,
            issuers: Vec::new(),
        }
    }
}

impl AccessSettings {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        let files = [
            ("policy", &self.policy),
            ("htpasswd", &self.htpasswd),
            ("token_keys", &self.token_keys),
        ];
        for (key, file) in files {
            if file.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
                mistakes.add(key, "is empty; name a file, or leave the setting out");
            }
        }
        if !is_quotable(&self.service) {
            mistakes.add("service", "has no letters, or some that cannot be; write a name such as \"registry.example.com\"");
        }
        if let Some(realm) = &self.realm
            && !(is_quotable(realm) && realm.contains("://"))
        {
            mistakes
                .add("realm", "is no URL; write one such as \"https://auth.example.com/token\"");
        }
        let life = Duration::from_mins(1)..=Duration::from_hours(24);
        self.token_life.check(life, "token_life", mistakes);
        let mut below = mistakes.within("issuers");
        for (number, issuer) in self.issuers.iter().enumerate() {
            let before = self.issuers.iter().take(number);
            let mut mistakes = below.item(number);
            issuer.check(&mut mistakes);
            for earlier in before {
                if earlier.name == issuer.name {
                    mistakes.add("name", "is the name of another issuer; choose another");
                }
                if earlier.issuer == issuer.issuer {
                    mistakes.add("issuer", "is configured already; remove one of them");
                }
            }
            if issuer.issuer == self.service {
                mistakes.add("issuer", "is our own `service`; tokens of ours need no setting");
            }
        }
    }
}

impl IssuerSettings {
    /// Whether the keys are at a URL.
    pub fn keys_are_published(&self) -> bool {
        self.jwks.contains("://")
    }

    fn check(&self, mistakes: &mut Mistakes<'_>) {
        let word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if self.name.is_empty() || !self.name.bytes().all(word) {
            let told = "is no word; write letters, digits and dashes, such as \"ci\"";
            mistakes.add("name", told);
        }
        for (key, text) in [("issuer", &self.issuer), ("audience", &self.audience)] {
            if text.is_empty() {
                mistakes.add(key, "is empty; write what the tokens have there");
            }
        }
        if self.jwks.is_empty() {
            mistakes.add("jwks", "is empty; name a file or a URL");
        } else if self.keys_are_published()
            && !self.jwks.starts_with("https://")
            && !is_loopback(&self.jwks)
        {
            mistakes.add("jwks", "is not safe to fetch; write an https:// URL");
        }
    }
}

/// Whether a text can stand between quotes in a header.
fn is_quotable(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\');
    !text.is_empty() && text.bytes().all(good)
}

fn is_loopback(url: &str) -> bool {
    let rest = url.strip_prefix("http://").unwrap_or_default();
    let authority = rest.split('/').next().unwrap_or_default();
    let host = authority.rsplit_once(':').map_or(authority, |(host, _port)| host);
    host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}
