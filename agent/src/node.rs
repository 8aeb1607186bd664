//! What this node is, kept for a while: [`kybernate_packager::node`] looks.

use std::time::Duration;

use kybernate_packager::node::look;
pub(crate) use kybernate_packager::node::{NodeReport, architecture, version as numbers};
use kybernate_spec::chain;
use tokio::time::Instant;

use crate::gpu::Gpus;
use crate::runtime::Containerd;

/// How long facts are believed; programs may be upgraded under us.
const FRESH: Duration = Duration::from_mins(1);

/// Keeps the last look.
#[derive(Debug, Default)]
pub(crate) struct NodeCache {
    // Held while looking, so that requests at the same time look once. A tokio mutex because
    // looking awaits programs and containerd.
    last: tokio::sync::Mutex<Option<(Instant, NodeReport)>>,
}

impl NodeCache {
    /// Looks at the node, unless that was done just now and all was well.
    pub(crate) async fn report(&self, containerd: &Containerd, gpus: &Gpus) -> NodeReport {
        let mut last = self.last.lock().await;
        if let Some((when, report)) = &*last
            && report.problems.is_empty()
            && when.elapsed() < FRESH
        {
            return report.clone();
        }
        // The daemon that is asked to do things, not the program that happens to be installed.
        let version = containerd.version().await.map_err(|error| chain(&error).to_string());
        let (mut report, gpu) = tokio::join!(Box::pin(look(version)), gpus.facts());
        match gpu {
            None => {}
            Some(Ok(facts)) => report.facts.gpu = Some(facts),
            // What nvidia-smi said stays.
            Some(Err(error)) => tracing::warn!(error = %chain(&error), "the GPUs are not known"),
        }
        *last = Some((Instant::now(), report.clone()));
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServeArgs;

    #[tokio::test]
    async fn a_node_without_containerd_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let config = ServeArgs::default().validate().unwrap();
        let gpus = Gpus::ours(config.gpu);
        let nobody = Containerd::at(&directory.path().join("nobody.sock"));
        let report = NodeCache::default().report(&nobody, &gpus).await;
        assert!(report.problems.iter().any(|problem| problem.contains("nobody.sock")));
    }
}
