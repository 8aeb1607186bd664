//! Our certificate and key, and the authorities of those who call. The files are looked at again when
//! somebody connects: what has changed counts from then on, and what is wrong leaves in force what was
//! there before.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, io};

use fs_err as fs;
use rustls::crypto::aws_lc_rs;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// Longest file: thousands of authorities.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// What connections are made with.
pub(crate) struct Certificates {
    paths: Paths,
    // Held while files are read, on threads that may block, so that they are read once at a time.
    state: Mutex<State>,
}

/// The files.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    /// Our certificate and those that lead to its authority (PEM).
    pub(crate) certificate: PathBuf,
    /// Its private key (PEM).
    pub(crate) key: PathBuf,
    /// The authorities of client certificates (PEM).
    pub(crate) client_ca: PathBuf,
}

struct State {
    config: Arc<ServerConfig>,
    /// What was read last, good or bad; nothing when it could not be read.
    seen: Option<[Vec<u8>; 3]>,
}

/// Why files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Mistake {
    /// One cannot be read.
    #[error("failed to read a certificate")]
    Read(#[source] io::Error),
    /// One is too long.
    #[error("{0:?} has more than {FILE_BYTES_MAX} bytes")]
    Long(PathBuf),
    /// Something is not in it.
    #[error("there is no {1} (PEM) in {0:?}")]
    Empty(PathBuf, &'static str),
    /// What is in it is not good.
    #[error("{0:?} cannot be used")]
    Tls(PathBuf, #[source] rustls::Error),
    /// The authorities are not good.
    #[error("{0:?} names no authorities")]
    Authorities(PathBuf, #[source] rustls::server::VerifierBuilderError),
}

impl Certificates {
    /// Reads the files. Blocks.
    pub(crate) fn open(paths: Paths) -> Result<Self, Mistake> {
        let contents = paths.read()?;
        let config = paths.parse(&contents)?;
        Ok(Self { paths, state: Mutex::new(State { config, seen: Some(contents) }) })
    }

    /// Returns what the files say. Blocks.
    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let read = self.paths.read();
        let (seen, parsed) = match read {
            Ok(contents) if state.seen.as_ref() == Some(&contents) => {
                return Arc::clone(&state.config);
            }
            Ok(contents) => {
                let parsed = self.paths.parse(&contents);
                (Some(contents), parsed)
            }
            Err(_) if state.seen.is_none() => return Arc::clone(&state.config),
            Err(error) => (None, Err(error)),
        };
        state.seen = seen;
        match parsed {
            Ok(config) => {
                tracing::info!(file = ?self.paths.certificate, "certificates were read again");
                state.config = config;
            }
            Err(error) => {
                let error = kybernate_spec::chain(&error);
                tracing::error!(
                    %error,
                    "certificates were not read again: what was there before stays in force"
                );
            }
        }
        Arc::clone(&state.config)
    }
}

impl Paths {
    fn read(&self) -> Result<[Vec<u8>; 3], Mistake> {
        Ok([read(&self.certificate)?, read(&self.key)?, read(&self.client_ca)?])
    }

    fn parse(&self, contents: &[Vec<u8>; 3]) -> Result<Arc<ServerConfig>, Mistake> {
        let [certificate, key, client_ca] = contents;
        let unusable = |path: &Path| {
            let path = path.to_owned();
            move |error| Mistake::Tls(path, error)
        };
        let chain = certificates(&self.certificate, certificate)?;
        let key = PrivateKeyDer::from_pem_slice(key)
            .ok()
            .ok_or_else(|| Mistake::Empty(self.key.clone(), "unencrypted private key"))?;
        let mut roots = RootCertStore::empty();
        for root in certificates(&self.client_ca, client_ca)? {
            roots.add(root).map_err(unusable(&self.client_ca))?;
        }
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .build()
                .map_err(|error| Mistake::Authorities(self.client_ca.clone(), error))?;
        // Also tells when key and certificate do not belong together, as when only one of them has
        // been replaced yet.
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| {
                builder.with_client_cert_verifier(verifier).with_single_cert(chain, key)
            })
            .map_err(unusable(&self.certificate))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        // Whoever resumes a session is not asked for a certificate again, which may have expired by then.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Mistake> {
    let mut content = Vec::new();
    let file = fs::File::open(path).map_err(Mistake::Read)?;
    let length = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut content).map_err(Mistake::Read)?;
    if u64::try_from(length).is_ok_and(|length| length <= FILE_BYTES_MAX) {
        Ok(content)
    } else {
        Err(Mistake::Long(path.to_owned()))
    }
}

fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Mistake> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.ok().filter(|all| !all.is_empty());
    all.ok_or_else(|| Mistake::Empty(path.to_owned(), "certificate"))
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").field("paths", &self.paths).finish_non_exhaustive()
    }
}
