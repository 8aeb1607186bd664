//! Encrypted connections (TLS 1.2 and 1.3), and who a client certificate speaks of.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use self::certificate::names;
use self::validity::Validity;
use crate::access::follow::{Followed, View, mistake};
use crate::access::subject::CertificateNames;
use crate::config::{Mistake, TlsSettings};
use crate::metrics::TlsMetrics;
use crate::tasks::Tasks;

mod certificate;
mod validity;

/// How long a handshake may take.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);

/// Makes connections encrypted, with the certificate that is in force when they begin.
#[derive(Debug, Clone)]
pub struct Tls(View<Secured>);

/// Certificates and keys, read and not followed yet.
#[derive(Debug)]
pub struct TlsFiles(Followed<Secured>);

/// What connections are made with.
#[derive(Debug)]
struct Secured {
    config: Arc<ServerConfig>,
    /// When the certificate is good, where it can be read.
    validity: Option<Validity>,
}

/// The paths of the files, in the order in which they are read.
#[derive(Debug, Clone)]
struct Paths {
    certificate: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
    client_required: bool,
}

impl TlsFiles {
    /// Reads what `settings` names; nothing when it names nothing. Blocks.
    pub fn read(settings: &TlsSettings) -> Result<Option<Self>, Vec<Mistake>> {
        let Some((certificate, key)) = settings.certificate.clone().zip(settings.key.clone())
        else {
            return Ok(None);
        };
        let (client_ca, client_required) = (settings.client_ca.clone(), settings.client_required);
        let paths = Paths { certificate, key, client_ca, client_required };
        let all = [&paths.certificate, &paths.key].into_iter().chain(&paths.client_ca);
        let all: Vec<_> = all.cloned().collect();
        let files = Followed::open("TLS certificate", all, move |contents| paths.parse(contents))?;
        Ok(Some(Self(files)))
    }

    /// Says why clients will refuse the certificate now, if they will.
    pub fn doubt(&self) -> Option<String> {
        let doubt = self.0.get().validity?.doubt(SystemTime::now())?;
        Some(format!("{}: {doubt}", self.0.first().display()))
    }

    /// Follows the files as long as tasks run.
    pub fn start(self, tasks: &Tasks) -> Tls {
        let view = self.0.view();
        self.0.follow(tasks);
        Tls(view)
    }
}

impl Tls {
    /// Makes a connection encrypted and returns who the client's certificate speaks of.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<(TlsStream<S>, Option<Arc<CertificateNames>>)> {
        let accepting = TlsAcceptor::from(Arc::clone(&self.0.get().config)).accept(stream);
        let stream = tokio::time::timeout(HANDSHAKE_TIME_MAX, accepting).await??;
        let (_, connection) = stream.get_ref();
        let certificate = connection.peer_certificates().and_then(<[_]>::first);
        let names = certificate.map(|certificate| Arc::new(names(certificate)));
        Ok((stream, names))
    }

    /// Keeps figures of the certificate up to date as long as tasks run.
    pub(crate) fn report(&self, metrics: TlsMetrics, tasks: &Tasks) {
        let mut view = self.0.clone();
        let tell = move |secured: &Secured| {
            if let Some(validity) = secured.validity {
                metrics.set_not_after(validity.until);
            }
        };
        tell(&view.get());
        tasks.spawn(|cancel| async move {
            loop {
                tokio::select! {
                    next = view.changed() => match next {
                        Some(next) => tell(&next),
                        None => return,
                    },
                    () = cancel.cancelled() => return,
                }
            }
        });
    }
}

impl Paths {
    fn parse(&self, contents: &[Vec<u8>]) -> Result<Secured, Vec<Mistake>> {
        let refuse = |path: &PathBuf, told: &str| vec![mistake(path, None, told)];
        let [certificate, key, ca @ ..] = contents else {
            return Err(refuse(&self.certificate, "the file was not read"));
        };
        let chain = certificates(certificate)
            .ok_or_else(|| refuse(&self.certificate, "there is no certificate (PEM) in it"))?;
        let validity = Validity::of(&chain);
        let key = PrivateKeyDer::from_pem_slice(key)
            .ok()
            .ok_or_else(|| refuse(&self.key, "there is no unencrypted private key (PEM) in it"))?;
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| refuse(&self.certificate, &error.to_string()))?;
        let builder = match (&self.client_ca, ca) {
            (Some(path), [ca, ..]) => {
                let verifier = self.verifier(ca, provider);
                builder.with_client_cert_verifier(verifier.map_err(|told| refuse(path, &told))?)
            }
            _ => builder.with_no_client_auth(),
        };
        // Also tells when key and certificate do not belong together, as when only one of them has
        // been replaced yet.
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|error| refuse(&self.certificate, &format!("cannot be used: {error}")))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        if let Some(doubt) = validity.and_then(|validity| validity.doubt(SystemTime::now())) {
            // Used all the same: a clock that is wrong must not keep the registry from starting.
            tracing::warn!(file = ?self.certificate, "{doubt}");
        }
        Ok(Secured { config: Arc::new(config), validity })
    }

    fn verifier(
        &self,
        ca: &[u8],
        provider: Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ClientCertVerifier>, String> {
        let mut roots = RootCertStore::empty();
        for root in certificates(ca).ok_or("there is no certificate (PEM) in it")? {
            roots.add(root).map_err(|error| format!("an authority cannot be used: {error}"))?;
        }
        let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        let builder = if self.client_required { builder } else { builder.allow_unauthenticated() };
        builder.build().map_err(|error| error.to_string())
    }
}

fn certificates(pem: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    all.ok().filter(|all| !all.is_empty())
}
