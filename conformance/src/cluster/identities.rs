//! Who is who in a cluster: certificates, tokens, and the files that programs read them from.
//!
//! Everything is made anew for each cluster and lives as long as it does.

use fs_err::os::unix::fs::OpenOptionsExt as _;
use std::io;
use std::path::Path;

use fs_err as fs;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use serde_json::json;

use super::{API_PORT, DIRECTORY};

/// Who may do everything.
const ADMINISTRATORS: &str = "system:masters";

/// Why they could not be made.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file could not be written.
    #[error("failed to write the cluster's identities")]
    Io(#[from] io::Error),
    /// A certificate could not be made.
    #[error("failed to make the cluster's certificates")]
    Certificate(#[from] rcgen::Error),
    /// There is no random number.
    #[error("failed to make the cluster's tokens")]
    Random(#[from] getrandom::Error),
}

/// Writes all of them into a directory, which nodes see as [`DIRECTORY`].
pub(super) fn write(directory: &Path, address: &str, nodes: &[&str]) -> Result<(), IdentityError> {
    certify(directory, address)?;
    let mut tokens = String::new();
    let mut introduce = |file: &str, user: &str, group: &str| {
        let token = random()?;
        tokens += &[&token, ",", user, ",", user, ",\"", group, "\"\n"].concat();
        let config = kubeconfig(address, &token);
        secret(&directory.join(file), config.as_bytes())?;
        Ok::<(), IdentityError>(())
    };
    introduce("admin.conf", "kubernetes-admin", ADMINISTRATORS)?;
    let own = "system:authenticated";
    introduce("controller-manager.conf", "system:kube-controller-manager", own)?;
    introduce("scheduler.conf", "system:kube-scheduler", own)?;
    for node in nodes {
        let user = format!("system:node:{node}");
        introduce(&format!("kubelet-{node}.conf"), &user, "system:nodes")?;
    }
    Ok(secret(&directory.join("tokens.csv"), tokens.as_bytes())?)
}

/// Makes an authority, the certificates of the API server and of its calls to kubelets, and the key
/// that service accounts' tokens are signed with.
fn certify(directory: &Path, address: &str) -> Result<(), IdentityError> {
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.distinguished_name.push(DnType::CommonName, "authority of the testbed's cluster");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    fs::write(directory.join("ca.crt"), authority.pem())?;
    let issue = |name: &str, names: &[&str], purpose, group: &str| {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut parameters = CertificateParams::new(names)?;
        parameters.extended_key_usages = vec![purpose];
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.distinguished_name.push(DnType::OrganizationName, group);
        let key = KeyPair::generate()?;
        let certificate = parameters.signed_by(&key, &authority)?;
        fs::write(directory.join(format!("{name}.crt")), certificate.pem())?;
        secret(&directory.join(format!("{name}.key")), key.serialize_pem().as_bytes())?;
        Ok::<(), IdentityError>(())
    };
    let names = [address, "kubernetes", "kubernetes.default.svc"];
    issue("apiserver", &names, ExtendedKeyUsagePurpose::ServerAuth, "testbed")?;
    let client = ExtendedKeyUsagePurpose::ClientAuth;
    issue("kubelet-client", &[], client, ADMINISTRATORS)?;
    let accounts = KeyPair::generate()?;
    fs::write(directory.join("accounts.pub"), accounts.public_key_pem())?;
    Ok(secret(&directory.join("accounts.key"), accounts.serialize_pem().as_bytes())?)
}

/// Returns how somebody with a token finds the API server. JSON is YAML.
fn kubeconfig(address: &str, token: &str) -> String {
    let authority = format!("{DIRECTORY}/ca.crt");
    let server = format!("https://{address}:{API_PORT}");
    let cluster = json!({ "server": server, "certificate-authority": authority });
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "testbed", "cluster": cluster }],
        "users": [{ "name": "self", "user": { "token": token } }],
        "contexts": [{ "name": "only", "context": { "cluster": "testbed", "user": "self" } }],
        "current-context": "only",
    })
    .to_string()
}

fn random() -> Result<String, getrandom::Error> {
    let (high, low) = (getrandom::u64()?, getrandom::u64()?);
    Ok(format!("{high:016x}{low:016x}"))
}

fn secret(file: &Path, content: &[u8]) -> io::Result<()> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    io::Write::write_all(&mut options.open(file)?, content)
}
