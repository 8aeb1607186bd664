//! `[network]` and `[[caller]]`: who may ask this agent for what.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use super::ConfigError;
use super::reader::Reader;
use crate::access::{Right, Rule, glob};
use crate::door::{Certificates, Paths};

/// Where callers from the network come in.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// Where the agent listens.
    pub listen: SocketAddr,
    /// Our certificate, and the authorities of those who call.
    pub(crate) certificates: Arc<Certificates>,
}

/// Reads `[network]`.
pub(super) fn network(file: &mut Reader<'_>) -> Option<NetworkConfig> {
    let mut table = file.table("network");
    let listen = table.text("listen");
    let files = ["certificate", "key", "client_ca"].map(|key| (key, table.text(key)));
    let written = listen.is_some() || files.iter().any(|(_, path)| path.is_some());
    let mut paths = Vec::new();
    for (key, path) in files {
        let place = table.place(key);
        match path.map(PathBuf::from) {
            Some(path) if path.is_absolute() => paths.push(path),
            Some(path) => table.wrong(ConfigError::RelativePath(place, path)),
            None if written => table.wrong(ConfigError::Missing(place)),
            None => {}
        }
    }
    let place = table.place("listen");
    let address = listen.as_ref().and_then(|text| text.parse().ok());
    match (listen, address) {
        (Some(text), None) => table.wrong(ConfigError::Bounds(place, "IP:PORT", text)),
        (None, _) if written => table.wrong(ConfigError::Missing(place)),
        _ => {}
    }
    let certificates = <[PathBuf; 3]>::try_from(paths).ok().and_then(|paths| {
        let [certificate, key, client_ca] = paths;
        let place = table.place("certificate");
        let opened = Certificates::open(Paths { certificate, key, client_ca });
        opened.map_err(|mistake| table.wrong(ConfigError::Tls(place, mistake))).ok()
    });
    table.finish();
    Some(NetworkConfig { listen: address?, certificates: Arc::new(certificates?) })
}

/// Reads one `[[caller]]`.
pub(super) fn caller(table: &mut Reader<'_>) -> Option<Rule> {
    let text = table.required("who");
    let who = text.parse().ok();
    if who.is_none() && !text.is_empty() {
        let place = table.place("who");
        let wanted = "uid:NUMBER or certificate:NAME";
        table.wrong(ConfigError::Bounds(place, wanted, text));
    }
    let wanted = "some of read, checkpoint, restore, suspend, stage, allow";
    let may = each(table, "may", wanted, |word| word.parse::<Right>().ok());
    let namespaces = each(table, "namespaces", "patterns of containerd's namespaces", glob);
    Some(Rule { who: who?, may, namespaces })
}

/// Reads a list of texts that must be there, and must have one at least.
pub(super) fn each<T>(
    table: &mut Reader<'_>,
    key: &str,
    wanted: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Vec<T> {
    let place = table.place(key);
    let Some(words) = table.texts(key) else {
        table.wrong(ConfigError::Missing(place));
        return Vec::new();
    };
    if words.is_empty() {
        table.wrong(ConfigError::Bounds(place.clone(), wanted, String::new()));
    }
    let mut parsed = Vec::new();
    for word in words {
        match parse(&word) {
            Some(one) => parsed.push(one),
            None => table.wrong(ConfigError::Bounds(place.clone(), wanted, word)),
        }
    }
    parsed
}
