//! Connections that go into the dump ([`connections`]).

use std::io;

use super::Taking;
use crate::checkpoint::error::CheckpointError;
use crate::connections;

impl Taking<'_> {
    /// Notes the connections that CRIU is about to work on, so that whoever ends its work early puts them
    /// right.
    pub(super) async fn note_connections(&self) -> Result<(), CheckpointError> {
        if !self.source.keeps {
            return Ok(());
        }
        let (freezer, directory) = (self.source.freezer.clone(), self.directory.clone());
        let noted = tokio::task::spawn_blocking(move || {
            connections::note(&connections::of(&freezer.processes()?), &directory)
        });
        let noted = noted.await.map_err(io::Error::other).and_then(|noted| noted);
        noted.map_err(CheckpointError::Connections)
    }
}
