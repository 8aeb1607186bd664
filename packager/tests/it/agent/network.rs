//! An agent of another machine, over TLS.

use std::path::Path;

use fs_err as fs;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use super::{AgentServer, Arc, Fake, JoinSet, Script, kyb};

/// Somebody who signs certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn sign(&self) -> (String, String) {
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    /// Writes a certificate, its key and the authority into files with these beginnings.
    fn write(&self, directory: &Path, name: &str) {
        let (certificate, key) = self.sign();
        fs::write(directory.join(format!("{name}.crt")), certificate).unwrap();
        fs::write(directory.join(format!("{name}.key")), key).unwrap();
        fs::write(directory.join(format!("{name}.ca")), self.0.pem()).unwrap();
    }
}

#[tokio::test]
async fn kyb_asks_an_agent_of_another_machine_with_a_certificate() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, foreign) = (Authority::new(), Authority::new());
    ours.write(directory.path(), "ours");
    foreign.write(directory.path(), "foreign");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://{}", listener.local_addr().unwrap());
    let (certificate, key) = ours.sign();
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(certificate, key))
        .client_ca_root(Certificate::from_pem(ours.0.pem()));
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        let service = AgentServer::new(Fake(Arc::new(Script::default())));
        let mut server = Server::builder().tls_config(tls).unwrap();
        let server = server.add_service(service);
        server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
    });
    let asked = async |address: &str, ca: &str, proof: &str| {
        let files = [format!("{ca}.ca"), format!("{proof}.crt"), format!("{proof}.key")];
        let [ca, certificate, key] = files.each_ref().map(String::as_str);
        let named = ["--agent-ca", ca, "--agent-cert", certificate, "--agent-key", key];
        kyb(directory.path(), ["node", "--agent", address].into_iter().chain(named)).await
    };
    let ran = asked(&address, "ours", "ours").await;
    assert!(ran.code == 0 && ran.out.contains("6.12-told"), "{ran:?}");
    for (ca, proof) in [("foreign", "ours"), ("ours", "foreign")] {
        let ran = asked(&address, ca, proof).await;
        assert!(ran.code == 1 && ran.told.contains("the agent"), "{ca} {proof}: {ran:?}");
    }
    let ran = asked(&address.replace("https:", "http:"), "ours", "ours").await;
    assert_eq!(ran.code, 64, "{ran:?}");
    let ran = asked(&address, "none", "ours").await;
    assert!(ran.code == 64 && ran.told.contains("none.ca"), "{ran:?}");
    let ran = kyb(directory.path(), ["node", "--agent", &address]).await;
    assert!(ran.code == 64 && ran.told.contains("--agent-ca"), "{ran:?}");
}
