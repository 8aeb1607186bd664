//! `[notify]`: who is told what happens.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use http::Uri;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Mistakes, Pattern, Period};

/// Who is told what happens.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Notify {
    /// Events kept for endpoints that do not take them, about 1 KiB each; the oldest go first, and
    /// the endpoint is told how many.
    pub keep: usize,
    /// Where events are sent.
    pub endpoint: Vec<NotifyEndpoint>,
}

/// Somebody who is told what happens, one event per request.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NotifyEndpoint {
    /// What logs and figures call it; what it was not sent yet is kept under this name.
    #[schemars(extend("examples" = ["ci"]))]
    pub name: String,
    /// Where events are posted.
    #[schemars(extend("examples" = ["https://ci.example.com/events"]))]
    pub url: String,
    /// Which events; pushes, deletes and mounts when left out.
    #[serde(default = "changes")]
    pub actions: Vec<NotifyAction>,
    /// Whether blobs count as well as manifests: then their pushes are told too, as `push` of an
    /// `application/octet-stream`. Each then waits for one more sync of the disk.
    #[serde(default)]
    pub blobs: bool,
    /// Patterns of the repositories; all of them when left out.
    #[serde(default)]
    pub repositories: Vec<Pattern>,
    /// File of a token that is sent along (`Authorization: Bearer`); read for each request.
    #[serde(default)]
    #[schemars(extend("format" = "file"))]
    pub bearer: Option<PathBuf>,
    /// File of a secret that requests are signed with (HMAC-SHA-256, as Standard Webhooks does);
    /// read for each request.
    #[serde(default)]
    #[schemars(extend("format" = "file"))]
    pub secret: Option<PathBuf>,
    /// How long it may take to answer.
    #[serde(default = "timeout")]
    pub timeout: Period,
    /// The longest time between two attempts; the first are a second apart.
    #[serde(default = "retry_max")]
    pub retry_max: Period,
}

/// What may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NotifyAction {
    /// A manifest was pushed, or a tag was set; or a blob was pushed, to whom `blobs` is set for.
    Push,
    /// A manifest was pulled.
    Pull,
    /// A blob was mounted from another repository.
    Mount,
    /// A manifest or a tag was deleted.
    Delete,
}

impl Default for Notify {
    fn default() -> Self {
        Self { keep: 10_000, endpoint: Vec::new() }
    }
}

fn changes() -> Vec<NotifyAction> {
    vec![NotifyAction::Push, NotifyAction::Delete, NotifyAction::Mount]
}

fn timeout() -> Period {
    Period(Duration::from_secs(5))
}

fn retry_max() -> Period {
    Period(Duration::from_mins(5))
}

impl Notify {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        if !(1..=1_000_000).contains(&self.keep) {
            let told = format!("{} is out of range; write a number from 1 to 1000000", self.keep);
            mistakes.add("keep", told);
        }
        let mut below = mistakes.within("endpoint");
        for (number, endpoint) in self.endpoint.iter().enumerate() {
            let mut mistakes = below.item(number);
            endpoint.check(&mut mistakes);
            if self.endpoint.iter().take(number).any(|other| other.name == endpoint.name) {
                mistakes.add("name", "is the name of another endpoint; choose another");
            }
        }
    }
}

impl NotifyEndpoint {
    /// Whether it is to be told of something; `pushed_blob` says that it is the push of a blob.
    pub(crate) fn wants(&self, action: NotifyAction, pushed_blob: bool, repository: &str) -> bool {
        self.actions.contains(&action)
            && (self.blobs || !pushed_blob)
            && (self.repositories.is_empty() || Pattern::any(&self.repositories, repository))
    }

    fn check(&self, mistakes: &mut Mistakes<'_>) {
        let word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if self.name.is_empty() || !self.name.bytes().all(word) {
            let told = "is no word; write letters, digits and dashes, such as \"ci\"";
            mistakes.add("name", told);
        }
        self.check_url(mistakes);
        if self.actions.is_empty() {
            mistakes.add("actions", "is empty; write which, or leave the setting out");
        }
        for (key, file) in [("bearer", &self.bearer), ("secret", &self.secret)] {
            if file.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
                mistakes.add(key, "is empty; name a file, or leave the setting out");
            }
        }
        let second = Duration::from_secs(1);
        self.timeout.check(second / 10..=second * 60, "timeout", mistakes);
        self.retry_max.check(second..=second * 3600, "retry_max", mistakes);
    }

    /// Tells nothing of the URL itself: what it holds may be secret.
    fn check_url(&self, mistakes: &mut Mistakes<'_>) {
        let uri: Option<Uri> = self.url.parse().ok();
        let authority = uri.as_ref().and_then(Uri::authority);
        let (Some(scheme), Some(authority)) = (uri.as_ref().and_then(Uri::scheme_str), authority)
        else {
            let told = "is no URL; write one such as \"https://ci.example.com/events\"";
            return mistakes.add("url", told);
        };
        if !matches!(scheme, "http" | "https") {
            mistakes.add("url", "is neither http nor https; write an https:// URL");
        }
        if authority.as_str().contains('@') {
            mistakes.add("url", "holds credentials; put a token into a file and name it in bearer");
        }
        let host = authority.host().trim_matches(['[', ']']);
        let loopback = host == "localhost"
            || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
        if scheme == "http" && self.bearer.is_some() && !loopback {
            mistakes.add("bearer", "would be sent unencrypted; write an https:// URL");
        }
    }
}
