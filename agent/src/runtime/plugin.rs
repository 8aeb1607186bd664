//! What containerd tells of its parts.

use std::path::PathBuf;

use containerd_client::services::v1::PluginsRequest;
use containerd_client::services::v1::introspection_client::IntrospectionClient;

use super::{Namespace, RuntimeError};

/// The content store of containerd's own, and what it calls the directory of it.
const CONTENT: &str = "type==io.containerd.content.v1";
const ROOT: &str = "root";

impl Namespace {
    /// Returns the directory of containerd's content store; `None` when it does not say or another
    /// program keeps the content.
    pub(crate) async fn content_directory(&self) -> Result<Option<PathBuf>, RuntimeError> {
        let request = self.quick(PluginsRequest { filters: vec![CONTENT.to_owned()] });
        let answer = IntrospectionClient::new(self.channel()).plugins(request).await;
        let answer = answer.map_err(|status| self.error("ask for", "its plugins", status))?;
        let mut plugins = answer.into_inner().plugins.into_iter();
        let found = plugins.find_map(|mut plugin| plugin.exports.remove(ROOT));
        Ok(found.map(PathBuf::from).filter(|root| root.is_absolute()))
    }
}
