//! The agent's API (`spec/proto/kybernate/agent/v1/agent.proto`).

use std::sync::Arc;

use futures::stream::{BoxStream, StreamExt as _};
use kybernate_packager::agent_api as api;
use kybernate_packager::agent_api::agent_server::Agent;
use kybernate_spec::chain;
use tonic::{Request, Response, Status};

use crate::app::{App, Rejection};

/// Serves the API.
#[derive(Clone, Debug)]
pub struct Service {
    app: Arc<App>,
}

impl Service {
    /// Serves this agent.
    pub const fn new(app: Arc<App>) -> Self {
        Self { app }
    }
}

#[tonic::async_trait]
impl Agent for Service {
    type WatchStream = BoxStream<'static, Result<api::Operation, Status>>;

    async fn checkpoint(
        &self,
        request: Request<api::CheckpointRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        Ok(Response::new(self.app.checkpoint(request.into_inner()).await?))
    }

    async fn restore(
        &self,
        request: Request<api::RestoreRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        Ok(Response::new(self.app.restore(request.into_inner()).await?))
    }

    async fn get_node(
        &self,
        _: Request<api::GetNodeRequest>,
    ) -> Result<Response<api::Node>, Status> {
        let report = self.app.report().await;
        let facts = serde_json::to_string(&report.facts);
        let keys = self.app.config.sign_keys.iter();
        Ok(Response::new(api::Node {
            name: self.app.config.node.clone(),
            facts_json: facts.map_err(|error| Status::internal(error.to_string()))?,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            sign_keys: keys.map(|key| key.name.clone()).collect(),
            problems: report.problems,
        }))
    }

    async fn list(
        &self,
        request: Request<api::ListRequest>,
    ) -> Result<Response<api::ListResponse>, Status> {
        let namespace = request.into_inner().containerd_namespace;
        // Operations are of most interest when containerd is away.
        let (containers, containers_problem) = match self.app.containers(&namespace).await {
            Ok(containers) => (containers, String::new()),
            Err(error) => (Vec::new(), chain(&error).to_string()),
        };
        let mut operations = self.app.operations.list();
        operations.retain(|one| namespace.is_empty() || one.containerd_namespace == namespace);
        Ok(Response::new(api::ListResponse { containers, operations, containers_problem }))
    }

    async fn watch(
        &self,
        request: Request<api::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let id = Some(request.into_inner().operation_id).filter(|id| !id.is_empty());
        let watched = self.app.operations.watch(id.clone());
        let watched = watched.ok_or_else(|| Rejection::NoOperation(id.unwrap_or_default()))?;
        // Open streams must not hold up the end of the agent.
        let ended = self.app.tasks.stopped();
        Ok(Response::new(watched.take_until(ended).map(Ok).boxed()))
    }

    async fn report_tagged(
        &self,
        request: Request<api::ReportTaggedRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        let id = request.into_inner().operation_id;
        let operation = self.app.operations.tagged(&id).await.map_err(Rejection::from)?;
        Ok(Response::new(operation.ok_or(Rejection::NoOperation(id))?))
    }
}
