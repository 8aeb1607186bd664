//! The agent's API (`spec/proto/kybernate/agent/v1/agent.proto`).

use std::sync::Arc;

use futures::stream::{BoxStream, StreamExt as _};
use kybernate_packager::agent_api as api;
use kybernate_packager::agent_api::agent_server::Agent;
use kybernate_packager::trace_parent::TraceParent;
use kybernate_spec::chain;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use crate::access::{Asker, Place, Right};
use crate::app::{App, Rejection};
use crate::operations::{CancelCause, Filter};
use crate::restore;
use crate::suspend;

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

    /// Finds out who asks for `method`.
    fn asker<T>(&self, request: &Request<T>, method: &'static str) -> Asker {
        Asker::of(request.extensions(), method, &self.app)
    }

    /// Finds an operation that `asker` may see; to others there is none.
    fn operation(&self, asker: &Asker, id: &str) -> Result<api::Operation, Rejection> {
        let operation = self.app.operations.present(id).filter(|one| asker.sees(one));
        operation.ok_or_else(|| Rejection::NoOperation(id.to_owned()))
    }

    /// Returns the tiers. What is staged there is only for who may see every namespace.
    fn tiers(&self, asker: &Asker) -> Vec<api::NodeTier> {
        let mut tiers = self.app.staging.to_api();
        if !asker.has(Right::Read, Place::Everywhere) {
            for tier in &mut tiers {
                tier.staged.clear();
            }
        }
        tiers
    }
}

#[tonic::async_trait]
impl Agent for Service {
    type WatchStream = BoxStream<'static, Result<api::Operation, Status>>;

    async fn checkpoint(
        &self,
        request: Request<api::CheckpointRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        let place = Place::Namespace(&request.get_ref().containerd_namespace);
        let asker = self.asker(&request, "Checkpoint");
        asker.may(Right::Checkpoint, place)?;
        let wanted = request.get_ref();
        let named = [&wanted.reference, &wanted.base].into_iter().filter(|name| !name.is_empty());
        for reference in named {
            asker.may_reach((reference, wanted.plain_http), &self.app.config, place)?;
        }
        let (limit, trace) = (deadline(request.metadata())?, trace(request.metadata()));
        let mut request = request.into_inner();
        request.timeout_seconds = shorter(request.timeout_seconds, limit);
        Ok(Response::new(self.app.checkpoint(request, trace).await?))
    }

    async fn restore(
        &self,
        request: Request<api::RestoreRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        let (asker, wanted) = (self.asker(&request, "Restore"), request.get_ref());
        let place = Place::Namespace(&wanted.containerd_namespace);
        asker.may_restore(wanted.allow.as_ref(), place)?;
        asker.may_reach((&wanted.reference, wanted.plain_http), &self.app.config, place)?;
        let (limit, trace) = (deadline(request.metadata())?, trace(request.metadata()));
        let mut request = request.into_inner();
        request.timeout_seconds = shorter(request.timeout_seconds, limit);
        Ok(Response::new(self.app.restore(request, trace).await?))
    }

    async fn stage(
        &self,
        request: Request<api::StageRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        let place = Place::Namespace(&request.get_ref().containerd_namespace);
        let asker = self.asker(&request, "Stage");
        asker.may(Right::Stage, place)?;
        let wanted = request.get_ref();
        asker.may_reach((&wanted.reference, wanted.plain_http), &self.app.config, place)?;
        let (limit, trace) = (deadline(request.metadata())?, trace(request.metadata()));
        let mut request = request.into_inner();
        request.timeout_seconds = shorter(request.timeout_seconds, limit);
        Ok(Response::new(self.app.stage(request, trace).await?))
    }

    async fn provide(
        &self,
        request: Request<api::ProvideRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        let (asker, wanted) = (self.asker(&request, "Provide"), request.get_ref());
        let place = Place::Namespace(&wanted.containerd_namespace);
        asker.may_restore(wanted.allow.as_ref(), place)?;
        asker.may_reach((&wanted.reference, wanted.plain_http), &self.app.config, place)?;
        let (limit, trace) = (deadline(request.metadata())?, trace(request.metadata()));
        let mut request = request.into_inner();
        request.timeout_seconds = shorter(request.timeout_seconds, limit);
        Ok(Response::new(self.app.provide(request, trace).await?))
    }

    async fn evict(
        &self,
        request: Request<api::EvictRequest>,
    ) -> Result<Response<api::EvictResponse>, Status> {
        self.asker(&request, "Evict").may(Right::Stage, Place::Everywhere)?;
        let evicted = self.app.evict(request.get_ref()).await?;
        Ok(Response::new(api::EvictResponse { evicted }))
    }

    async fn suspend(
        &self,
        request: Request<api::SuspendRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        let place = Place::Namespace(&request.get_ref().containerd_namespace);
        self.asker(&request, "Suspend").may(Right::Suspend, place)?;
        let (limit, trace) = (deadline(request.metadata())?, trace(request.metadata()));
        let request = request.into_inner();
        let seconds = shorter(request.timeout_seconds, limit);
        let wanted = suspend::Wanted::parse(request.container, request.containerd_namespace)?;
        let order = suspend::Order::suspend(wanted, seconds);
        Ok(Response::new(self.app.change(order, trace).await?))
    }

    async fn resume(
        &self,
        request: Request<api::ResumeRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        let place = Place::Namespace(&request.get_ref().containerd_namespace);
        self.asker(&request, "Resume").may(Right::Suspend, place)?;
        let trace = trace(request.metadata());
        let request = request.into_inner();
        let wanted = suspend::Wanted::parse(request.container, request.containerd_namespace)?;
        Ok(Response::new(self.app.change(suspend::Order::Resume { wanted }, trace).await?))
    }

    async fn get_node(
        &self,
        request: Request<api::GetNodeRequest>,
    ) -> Result<Response<api::Node>, Status> {
        let asker = self.asker(&request, "GetNode");
        asker.may(Right::Read, Place::Anywhere)?;
        let mut report = self.app.report().await;
        report.problems.extend(self.app.staging.problems());
        self.app.staging.look().await;
        let facts = serde_json::to_string(&report.facts);
        let keys = self.app.config.sign_keys.iter();
        Ok(Response::new(api::Node {
            name: self.app.config.node.clone(),
            facts_json: facts.map_err(|error| Status::internal(error.to_string()))?,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            sign_keys: keys.map(|key| key.name.clone()).collect(),
            problems: report.problems,
            tiers: self.tiers(&asker),
        }))
    }

    async fn list(
        &self,
        request: Request<api::ListRequest>,
    ) -> Result<Response<api::ListResponse>, Status> {
        let asker = self.asker(&request, "List");
        let request = request.into_inner();
        let place = match &*request.containerd_namespace {
            "" => Place::Anywhere,
            name => Place::Namespace(name),
        };
        asker.may(Right::Read, place)?;
        let filter = Filter {
            namespace: request.containerd_namespace.clone(),
            container: request.container.clone(),
            states: request.states().collect(),
        };
        self.app.staging.look().await;
        let mut containers = Vec::new();
        let mut containers_problem = String::new();
        if !request.operations_only {
            // Operations are of most interest when containerd is away.
            match self.app.containers(&filter.namespace).await {
                Ok(found) => containers = found,
                Err(error) => containers_problem = chain(&error).to_string(),
            }
        }
        containers.retain(|one| filter.container.is_empty() || one.id == filter.container);
        let reads = |namespace: &str| asker.has(Right::Read, Place::Namespace(namespace));
        containers.retain(|one| reads(&one.containerd_namespace));
        let mut operations = self.app.operations.list(&filter);
        operations.retain(|one| reads(&one.containerd_namespace));
        let tiers = self.tiers(&asker);
        Ok(Response::new(api::ListResponse { containers, operations, containers_problem, tiers }))
    }

    async fn watch(
        &self,
        request: Request<api::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let asker = self.asker(&request, "Watch");
        let id = Some(request.into_inner().operation_id).filter(|id| !id.is_empty());
        match &id {
            Some(id) => drop(self.operation(&asker, id)?),
            None => asker.may(Right::Read, Place::Anywhere)?,
        }
        let watched = self.app.operations.watch(id.clone());
        let watched = watched.ok_or_else(|| Rejection::NoOperation(id.unwrap_or_default()))?;
        // Open streams must not hold up the end of the agent.
        let ended = self.app.tasks.stopped();
        let seen = watched.filter(move |one| std::future::ready(asker.sees(one)));
        Ok(Response::new(seen.take_until(ended).map(Ok).boxed()))
    }

    async fn preflight(
        &self,
        request: Request<api::PreflightRequest>,
    ) -> Result<Response<api::PreflightResponse>, Status> {
        let place = Place::Namespace(&request.get_ref().containerd_namespace);
        self.asker(&request, "Preflight").may(Right::Checkpoint, place)?;
        let findings = self.app.preflight(request.into_inner()).await?;
        let findings = findings.iter().map(crate::preflight::Finding::to_api).collect();
        Ok(Response::new(api::PreflightResponse { findings }))
    }

    async fn get_operation(
        &self,
        request: Request<api::GetOperationRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        let asker = self.asker(&request, "GetOperation");
        Ok(Response::new(self.operation(&asker, &request.into_inner().operation_id)?))
    }

    async fn cancel(
        &self,
        request: Request<api::CancelRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        let asker = self.asker(&request, "Cancel");
        let id = request.into_inner().operation_id;
        asker.may_change(&self.operation(&asker, &id)?)?;
        let cancelled = self.app.operations.cancel(&id, CancelCause::Asked).await;
        Ok(Response::new(cancelled.map_err(Rejection::from)?))
    }

    async fn claim(
        &self,
        request: Request<api::ClaimRequest>,
    ) -> Result<Response<api::ClaimResponse>, Status> {
        self.asker(&request, "Claim").must_be_root()?;
        let caller = crate::access::process(request.extensions());
        Ok(Response::new(restore::claim(&self.app, request.into_inner(), caller).await?))
    }

    async fn settle(
        &self,
        request: Request<api::SettleRequest>,
    ) -> Result<Response<api::SettleResponse>, Status> {
        self.asker(&request, "Settle").must_be_root()?;
        Ok(Response::new(restore::settle(&self.app, request.into_inner()).await?))
    }

    async fn report_tagged(
        &self,
        request: Request<api::ReportTaggedRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        let asker = self.asker(&request, "ReportTagged");
        let id = request.into_inner().operation_id;
        asker.may_change(&self.operation(&asker, &id)?)?;
        let operation = self.app.operations.tagged(&id).await.map_err(Rejection::from)?;
        Ok(Response::new(operation.ok_or(Rejection::NoOperation(id))?))
    }
}

/// Returns the place in a trace that a call says it has.
fn trace(metadata: &MetadataMap) -> Option<TraceParent> {
    metadata.get(TraceParent::HEADER)?.to_str().ok()?.parse().ok()
}

/// Returns how long a client waits at most, in whole seconds and at least one
/// (`grpc-timeout`, "gRPC over HTTP2").
fn deadline(metadata: &MetadataMap) -> Result<Option<u32>, Status> {
    let Some(value) = metadata.get("grpc-timeout") else { return Ok(None) };
    let understood = value.to_str().ok().and_then(seconds);
    let seconds = understood.ok_or_else(|| Status::invalid_argument("grpc-timeout is no time"))?;
    Ok(Some(seconds))
}

fn seconds(text: &str) -> Option<u32> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    // At most eight digits, says the specification.
    let number: u64 = number.parse().ok().filter(|number| *number < 100_000_000)?;
    let seconds = match unit {
        "H" => number * 3600,
        "M" => number * 60,
        "S" => number,
        "m" => number.div_ceil(1000),
        "u" => number.div_ceil(1_000_000),
        "n" => number.div_ceil(1_000_000_000),
        _ => return None,
    };
    Some(u32::try_from(seconds).unwrap_or(u32::MAX).max(1))
}

/// Returns the shorter of two bounds; 0 is none.
fn shorter(asked: u32, limit: Option<u32>) -> u32 {
    match limit {
        Some(limit) if asked == 0 || limit < asked => limit,
        _ => asked,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_read_as_grpc_writes_them() {
        let read = [("90S", 90), ("2M", 120), ("1H", 3600), ("1500m", 2), ("1n", 1), ("0S", 1)];
        for (text, expected) in read {
            assert_eq!(seconds(text), Some(expected), "{text}");
        }
        for wrong in ["", "S", "9", "-1S", "1x", "123456789S", "é"] {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_shorter_bound_counts() {
        let bounds =
            [(0, None, 0), (0, Some(5), 5), (3, Some(5), 3), (9, Some(5), 5), (9, None, 9)];
        for (asked, limit, expected) in bounds {
            assert_eq!(shorter(asked, limit), expected);
        }
    }
}
