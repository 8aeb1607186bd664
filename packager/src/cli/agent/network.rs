//! An agent over the network.

use std::path::{Path, PathBuf};

use clap::Args;
use fs_err as fs;
use kybernate_spec::chain;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::super::aside::aside;
use super::{Failure, kept_alive};

/// How to reach the agent of another machine.
#[derive(Clone, Debug, Args)]
pub(super) struct NetworkAgent {
    /// The agent of another machine, instead of a socket.
    #[arg(
        long,
        value_name = "https://HOST:PORT",
        env = "KYB_AGENT",
        conflicts_with = "agent_socket",
        requires_all = ["agent_ca", "agent_cert", "agent_key"],
        value_parser = address
    )]
    agent: Option<String>,
    /// Authority of its certificate (PEM).
    #[arg(long, value_name = "FILE", env = "KYB_AGENT_CA")]
    agent_ca: Option<PathBuf>,
    /// Certificate to prove oneself with (PEM).
    #[arg(long, value_name = "FILE", env = "KYB_AGENT_CERT")]
    agent_cert: Option<PathBuf>,
    /// The certificate's private key (PEM).
    #[arg(long, value_name = "FILE", env = "KYB_AGENT_KEY")]
    agent_key: Option<PathBuf>,
}

impl NetworkAgent {
    /// Connects, when an agent of another machine was named.
    pub(super) async fn connect(&self) -> Result<Option<Channel>, Failure> {
        let Self {
            agent: Some(agent),
            agent_ca: Some(ca),
            agent_cert: Some(certificate),
            agent_key: Some(key),
        } = self
        else {
            return Ok(None);
        };
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(read(ca).await?))
            .identity(Identity::from_pem(read(certificate).await?, read(key).await?));
        let failed = |error: tonic::transport::Error| {
            let text = chain(&error).to_string();
            Failure::failed(format!("failed to reach the agent at {agent}: {text}"))
        };
        let endpoint = Endpoint::from_shared(agent.clone()).map_err(failed)?;
        let endpoint = endpoint.tcp_nodelay(true).tls_config(tls).map_err(failed)?;
        let endpoint = kept_alive(endpoint);
        Ok(Some(endpoint.connect().await.map_err(failed)?))
    }

    /// Whether an agent of another machine was named.
    pub(super) const fn is_named(&self) -> bool {
        self.agent.is_some()
    }
}

async fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let path = path.to_owned();
    let read = aside(move || fs::read(path)).await.map_err(Failure::failed)?;
    read.map_err(|error| Failure::usage(chain(&error).to_string()))
}

fn address(text: &str) -> Result<String, String> {
    let host = text.strip_prefix("https://").filter(|host| !host.is_empty());
    let plain = host.is_some_and(|host| !host.contains(['/', '@', '?', '#']));
    if plain { Ok(text.to_owned()) } else { Err("it must be https://HOST:PORT".to_owned()) }
}
