//! How an operation ends: on the disk first, then for whoever watches.

use kybernate_packager::spans::Span;
use kybernate_spec::chain;

use super::cancel::ENDS;
use super::record::step_times;
use super::{Conclusion, Driver, OperationsError, Record, RefusedBy};

impl Driver {
    /// Ends the operation, and its span with what it did.
    pub(crate) async fn close_within(&self, span: Span, conclusion: Option<Conclusion>) {
        let problem = conclusion.as_ref().map_or(Some("interrupted"), Conclusion::problem);
        self.close(conclusion).await;
        span.steps(&self.progress.steps());
        if let Some(problem) = problem {
            span.fail(problem);
        }
    }

    /// Ends the operation; without a conclusion it stays open for the next agent.
    pub(crate) async fn close(&self, conclusion: Option<Conclusion>) {
        let Some(conclusion) = conclusion else { return };
        if let Err(error) = self.finish(|record| record.conclude(conclusion)).await {
            tracing::error!(error = %chain(&error), operation.id = self.id(), "failed to close it");
        }
    }

    /// Ends the operation. Nobody is told before the disk has how: an agent that came after us would
    /// tell otherwise.
    pub(crate) async fn finish(
        &self,
        change: impl FnOnce(&mut Record),
    ) -> Result<(), OperationsError> {
        self.progress.finish();
        let snapshot = self.progress.snapshot();
        {
            let mut entries = self.operations.entries();
            let Some(entry) = entries.get_mut(&*self.id) else { return Ok(()) };
            let mut ended = entry.record.clone();
            ended.finished_at = Some(jiff::Timestamp::now());
            ended.times = step_times(&snapshot);
            ended.sizes.transferred_bytes = snapshot.transferred;
            ended.made.clear();
            change(&mut ended);
            entry.ending = Some(ended);
            entry.committed.get_or_insert(ENDS);
        }
        if self.is_concluded() {
            self.end();
        }
        let written = self.operations.write(&self.id, Vec::new()).await;
        self.end();
        written
    }

    /// Whether the disk has how it ends, though perhaps not that everything is taken away.
    fn is_concluded(&self) -> bool {
        let entries = self.operations.entries();
        entries.get(&*self.id).is_some_and(|entry| entry.record.conclusion.is_some())
    }

    /// Tells that it has ended.
    fn end(&self) {
        {
            let mut entries = self.operations.entries();
            let Some(entry) = entries.get_mut(&*self.id) else { return };
            let Some(record) = entry.ending.take() else { return };
            self.operations.metrics.ended(&record);
            tracing::info!(
                operation.id = record.id,
                operation.kind = ?record.kind,
                operation.state = ?record.state,
                operation.refused_by = record.refused_by.map(RefusedBy::name),
                container = record.container,
                reference = record.reference,
                error = record.error,
                "the operation has ended"
            );
            entry.record = record;
        }
        self.publish();
    }
}
