//! Connections that go into the dump ([`connections`]). A source that is to end holds them from before the
//! dump on: what its kernel would confirm after it, or answer at its end, nobody would have.

use std::io;
use std::time::Duration;

use super::{COPY_LIMIT, STOP_LIMIT, Taking};
use crate::checkpoint::After;
use crate::checkpoint::error::CheckpointError;
use crate::connections::{self, Connection, Ends};
use crate::network::{self, HOLD};

impl Taking<'_> {
    /// Notes the connections that CRIU is about to work on, so that whoever ends its work early puts them
    /// right, and holds those of a source that is to end.
    pub(super) async fn note_connections(&self) -> Result<(), CheckpointError> {
        if !self.source.holds.connections {
            return Ok(());
        }
        let directory = self.directory.clone();
        let noted = self.with_connections(move |found| connections::note(found, &directory)).await;
        let ends = noted.map_err(CheckpointError::Connections)?;
        if self.order.after == After::LeaveRunning || ends.is_empty() {
            return Ok(());
        }
        // For the whole pause; one that was suspended has no end by itself.
        let pause = if self.source.suspended { COPY_LIMIT } else { self.order.deadline };
        self.hold(&ends, pause + STOP_LIMIT + HOLD).await.map_err(CheckpointError::Hold)
    }

    /// Before a source is killed whose connections are held: nobody is told that they have ended.
    pub(super) async fn silence_connections(&self) {
        if !self.source.holds.connections {
            return;
        }
        let directory = self.directory.clone();
        let silenced = async {
            let silence = move |found: &[Connection]| connections::silence(found, &directory);
            let ends = self.with_connections(silence).await?;
            if ends.is_empty() { Ok(()) } else { self.hold(&ends, HOLD).await }
        };
        if let Err(error) = silenced.await {
            let told = format!("its TCP connections may not go on where it is restored: {error}");
            tracing::warn!(%error, container = self.order.container, "connections are not held");
            self.driver.note(|record| record.warnings.push(told));
        }
    }

    async fn hold(&self, ends: &[Ends], time: Duration) -> io::Result<()> {
        network::hold(self.source.pid, self.driver.id(), ends, time).await
    }

    /// Does something with the connections that the container has, and returns their ends.
    async fn with_connections(
        &self,
        work: impl FnOnce(&[Connection]) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Vec<Ends>> {
        let freezer = self.source.freezer.clone();
        let done = tokio::task::spawn_blocking(move || {
            let found = connections::of(&freezer.processes()?);
            work(&found)?;
            Ok(found.into_iter().map(|one| one.ends).collect())
        });
        done.await.map_err(io::Error::other).and_then(|done| done)
    }
}
