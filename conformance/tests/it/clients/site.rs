//! A registry with certificate, users and policy, and what clients need to know about it.

use std::path::PathBuf;

use fs_err as fs;
use kybernate_conformance::node::Node;
use kybernate_conformance::preflight::preflight;
use kybernate_conformance::process::Service;
use kybernate_conformance::scenario::Scenario;
use kybernate_conformance::testbed::HUB_ADDRESS;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};

use crate::harness::{bin, said};

/// Alice may pull and push below `team`, Bob may pull there, Eve nothing anywhere.
const POLICY: &str = r#"
[[rule]]
repositories = ["team/**"]
subjects = ["user:alice"]
actions = ["pull", "push"]

[[rule]]
repositories = ["team/**"]
subjects = ["user:bob"]
actions = ["pull"]
"#;
const USERS: [(&str, &str); 3] =
    [("alice", "alice-battery-staple"), ("bob", "bob-battery-staple"), ("eve", "eve-battery")];
/// A password that is nobody's.
pub(super) const WRONG: &str = "wrong-battery-staple";

/// A credential helper, as Docker's clients run them.
const HELPER: &str = r#"#!/bin/sh
# docker-credential-testbed get: reads the server's name, prints who to be there.
[ "$1" = get ] || exit 1
read -r server
echo "$server" >>/srv/share/helper/asked
printf '{"ServerURL":"%s","Username":"alice","Secret":"%s"}\n' "$server" "alice-battery-staple"
"#;

/// How the registry tells clients to prove who they are.
#[derive(Clone, Copy)]
pub(super) enum Ask {
    /// By password with each request.
    Basic,
    /// By a token of its own token server.
    Token,
}

/// Everything that runs. The registry is on the hub; clients run on the nodes.
pub(super) struct Site {
    pub(super) scenario: Scenario,
    registries: Vec<(Service, PathBuf)>,
    /// What must not be in any log.
    secrets: Vec<String>,
}

pub(super) fn password(user: &str) -> &'static str {
    USERS.iter().find(|(name, _)| *name == user).unwrap().1
}

impl Ask {
    /// Both, for clients speak differently with each.
    pub(super) const BOTH: [Self; 2] = [Self::Basic, Self::Token];

    const fn port(self) -> u16 {
        match self {
            Self::Basic => 5443,
            Self::Token => 5444,
        }
    }

    const fn setting(self) -> &'static str {
        match self {
            Self::Basic => "basic",
            Self::Token => "bearer",
        }
    }

    /// Returns `host:port` of the registry that asks this way.
    pub(super) fn host(self) -> String {
        format!("{HUB_ADDRESS}:{}", self.port())
    }

    /// Returns a reference in the registry that asks this way.
    pub(super) fn reference(self, path: &str) -> String {
        format!("{}/{path}", self.host())
    }
}

impl Site {
    /// Starts the nodes, and a registry for each way to ask.
    pub(super) fn start() -> Self {
        preflight().unwrap();
        let scenario = Scenario::bare(&bin(), &|text| println!("{text}")).unwrap();
        let mut site = Self { scenario, registries: Vec::new(), secrets: Vec::new() };
        site.certify();
        site.admit();
        site.introduce();
        for ask in Ask::BOTH {
            site.serve(ask);
        }
        site
    }

    fn share(&self, name: &str) -> PathBuf {
        self.scenario.testbed.share().join(name)
    }

    /// Makes an authority, whose certificate the nodes see, and the registry's certificate.
    fn certify(&mut self) {
        let mut authority = CertificateParams::new(vec![]).unwrap();
        authority.distinguished_name.push(DnType::CommonName, "authority of the testbed");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority =
            CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        let mut server = CertificateParams::new(vec![HUB_ADDRESS.to_owned()]).unwrap();
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().unwrap();
        let certificate = server.signed_by(&key, &authority).unwrap();
        fs::write(self.private("tls.crt"), certificate.pem()).unwrap();
        fs::write(self.private("tls.key"), key.serialize_pem()).unwrap();
        self.secrets
            .extend(key.serialize_pem().lines().map(str::to_owned).filter(|line| is_secret(line)));
        // A directory of its own: skopeo takes every certificate in it.
        fs::create_dir(self.share("ca")).unwrap();
        fs::write(self.share("ca/ca.crt"), authority.pem()).unwrap();
    }

    /// Writes users and policy.
    fn admit(&mut self) {
        let mut users = String::new();
        for (user, password) in USERS {
            // A low cost: what is tested is not bcrypt.
            let hash = bcrypt::hash(password, 5).unwrap();
            users += &[user, ":", &hash, "\n"].concat();
            self.secrets.extend([hash, password.to_owned(), encoded(user, password)]);
        }
        self.secrets.extend([WRONG.to_owned(), encoded("alice", WRONG)]);
        // Every JSON Web Token begins with this, in every place where one could be.
        self.secrets.push("eyJ".to_owned());
        fs::write(self.private("htpasswd"), users).unwrap();
        fs::write(self.private("policy.toml"), POLICY).unwrap();
    }

    /// Writes what clients read: Docker's credential files, one per user, one that names a helper,
    /// and containerd's `hosts.toml`.
    fn introduce(&self) {
        let hosts = Ask::BOTH.map(Ask::host);
        for (user, password) in USERS {
            let auth = encoded(user, password);
            let entries = hosts.each_ref().map(|host| format!(r#""{host}":{{"auth":"{auth}"}}"#));
            self.credentials(user, &format!(r#"{{"auths":{{{}}}}}"#, entries.join(",")));
        }
        let entries = hosts.each_ref().map(|host| format!(r#""{host}":"testbed""#));
        self.credentials("helper", &format!(r#"{{"credHelpers":{{{}}}}}"#, entries.join(",")));
        for host in &hosts {
            let directory = self.share(&format!("certs.d/{host}"));
            fs::create_dir_all(&directory).unwrap();
            // Twice: what a host does not have is looked for at the server, which is the same.
            let ca = "ca = \"/srv/share/ca/ca.crt\"\n";
            let toml = format!(
                "server = \"https://{host}\"\n{ca}[host.\"https://{host}\"]\n\
                 capabilities = [\"pull\", \"resolve\", \"push\"]\n{ca}"
            );
            fs::write(directory.join("hosts.toml"), toml).unwrap();
        }
        let helper = self.scenario.testbed.b.path("/usr/bin/docker-credential-testbed");
        fs::write(&helper, HELPER).unwrap();
        self.scenario
            .testbed
            .b
            .run(&["chmod", "+x", "/usr/bin/docker-credential-testbed"])
            .unwrap();
    }

    fn credentials(&self, name: &str, config: &str) {
        fs::create_dir(self.share(name)).unwrap();
        fs::write(self.share(name).join("config.json"), config).unwrap();
    }

    fn serve(&mut self, ask: Ask) {
        let file = |name: &str| self.private(name).display().to_string();
        let name = ask.setting();
        let config = format!(
            "listen = \"{}\"\nroot = \"{}\"\n\
             [log]\nfilter = \"debug,kybernate_registry=trace\"\n\
             [tls]\ncertificate = \"{}\"\nkey = \"{}\"\n\
             [access]\nhtpasswd = \"{}\"\npolicy = \"{}\"\nchallenge = \"{name}\"\n",
            ask.host(),
            file(&format!("registry-{name}")),
            file("tls.crt"),
            file("tls.key"),
            file("htpasswd"),
            file("policy.toml"),
        );
        let path = self.private(&format!("{name}.toml"));
        fs::write(&path, config).unwrap();
        let log = self.private(&format!("{name}.log"));
        let mut command = self.scenario.testbed.hub.command(&bin().join("kybernate-registry"));
        command.args(["serve", "--config"]).arg(path);
        command.stderr(fs::File::create(&log).unwrap().into_parts().0);
        let mut service = Service::start(&mut command).unwrap();
        service.wait_for_line("listening on").unwrap();
        self.registries.push((service, log));
    }

    fn private(&self, name: &str) -> PathBuf {
        self.scenario.testbed.private().join(name)
    }

    /// Returns what a registry has logged so far.
    pub(super) fn log(&self, ask: Ask) -> String {
        fs::read_to_string(self.private(&format!("{}.log", ask.setting()))).unwrap()
    }

    /// Runs a program on node b as somebody who has a credential file; it must succeed.
    pub(super) fn run_as(&self, user: &str, words: &[&str]) -> String {
        let environment = environment(user);
        let environment = environment.each_ref().map(String::as_str);
        self.scenario.testbed.b.run(&[&environment, words].concat()).unwrap()
    }

    /// Runs a program on node b as somebody; it must fail, and say one of some words.
    pub(super) fn refused(&self, user: &str, words: &[&str], told: &[&str]) {
        let environment = environment(user);
        let environment = environment.each_ref().map(String::as_str);
        refused(&self.scenario.testbed.b, &[&environment, words].concat(), told);
    }

    /// Returns the digest that a reference has for somebody who may see everything.
    pub(super) fn digest(&self, reference: &str) -> String {
        self.run_as("alice", &["crane", "digest", reference]).trim().to_owned()
    }

    /// Ends everything, and makes sure that no secret is in a log and no error in any.
    pub(super) fn end(self) {
        let logs = self.registries.iter().map(|(_, log)| fs::read_to_string(log).unwrap());
        let logs: Vec<_> = logs.collect();
        drop(self.registries);
        for log in &logs {
            assert!(log.contains("DEBUG"), "nothing is logged");
            for secret in &self.secrets {
                let line = log.lines().find(|line| line.contains(secret));
                assert_eq!(line, None, "{secret}");
            }
            assert_eq!(log.lines().find(|line| line.contains(" ERROR ")), None);
        }
        self.scenario.end().unwrap();
    }
}

/// Runs a program on a node; it must fail, and say one of some words.
pub(super) fn refused(node: &Node, words: &[&str], told: &[&str]) {
    let output = node.output(words).unwrap();
    let text = said(&output);
    assert!(!output.status.success(), "{words:?} succeeded: {text}");
    assert!(told.iter().any(|told| text.contains(told)), "{words:?}: {text}");
}

/// Returns what runs a program as somebody, who trusts the authority.
fn environment(user: &str) -> [String; 5] {
    [
        "env".to_owned(),
        // What Go's and Rust's programs read instead of the system's authorities.
        "SSL_CERT_FILE=/srv/share/ca/ca.crt".to_owned(),
        format!("DOCKER_CONFIG=/srv/share/{user}"),
        format!("REGISTRY_AUTH_FILE=/srv/share/{user}/config.json"),
        "COSIGN_PASSWORD=testbed".to_owned(),
    ]
}

/// Whether a line of a PEM file is not its frame.
fn is_secret(line: &str) -> bool {
    !line.starts_with("-----")
}

fn encoded(user: &str, password: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"))
}
