//! `[tls]`: encrypted connections and client certificates.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Mistakes;

/// Encrypted connections. The files are read again when they change.
#[derive(Debug, Clone, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TlsSettings {
    /// File of our certificate and those that lead to its authority (PEM). With it, connections
    /// that are not encrypted are not served.
    #[schemars(extend("format" = "file"))]
    pub certificate: Option<PathBuf>,
    /// File of the certificate's private key (PEM).
    #[schemars(extend("format" = "file"))]
    pub key: Option<PathBuf>,
    /// File of the authorities whose client certificates prove something (PEM).
    #[schemars(extend("format" = "file"))]
    pub client_ca: Option<PathBuf>,
    /// Whether clients without a certificate are not served at all.
    pub client_required: bool,
}

impl TlsSettings {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        match (&self.certificate, &self.key) {
            (Some(_), None) => mistakes.add("key", "is missing; name the certificate's key"),
            (None, Some(_)) => {
                mistakes.add("certificate", "is missing; name the key's certificate");
            }
            (None, None) if self.client_ca.is_some() => {
                mistakes.add("client_ca", "needs encrypted connections; set certificate and key");
            }
            _ => {}
        }
        if self.client_required && self.client_ca.is_none() {
            let told = "needs authorities to check certificates with; set client_ca";
            mistakes.add("client_required", told);
        }
    }
}
