//! An agent that is asked from another machine: by whom, and for how long.

use std::path::Path;
use std::process::Output;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair,
};
use rustix::process::Signal;
use serde_json::Value;

use crate::failures::victims::END_LIMIT;
use crate::harness::{at_once, nodes, refused_here, said, start};

const PORT: u16 = 7443;
/// The operator may do most of what a cluster needs, the keeper the rest, the reader nothing but look;
/// nobody else has a rule.
const NETWORK: &str = r#"
[staging.ram]
budget = "128MiB"
[network]
listen = "ADDRESS"
certificate = "/srv/share/agent.crt"
key = "/srv/share/agent.key"
client_ca = "/srv/share/callers.crt"
[[registry]]
host = "10.77.0.1:5000"
plain_http = true
[[caller]]
who = "certificate:operator"
may = ["read", "checkpoint", "restore", "stage"]
namespaces = ["default"]
[[caller]]
who = "certificate:keeper"
may = ["suspend", "stage"]
namespaces = ["*"]
[[caller]]
who = "certificate:reader"
may = ["read"]
namespaces = ["default"]
"#;

/// Makes an authority whose certificate is in a file.
fn authority(file: &Path) -> CertifiedIssuer<'static, KeyPair> {
    let mut authority = CertificateParams::new(vec![]).unwrap();
    authority.distinguished_name.push(DnType::CommonName, "authority of the callers");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    fs::write(file, authority.pem()).unwrap();
    authority
}

/// Writes somebody's certificate and key; the agents have addresses, the others have none.
fn issue(share: &Path, name: &str, addresses: &[&str], authority: &Issuer<'_, KeyPair>) {
    let addresses: Vec<String> = addresses.iter().map(|&address| address.to_owned()).collect();
    let purpose = if addresses.is_empty() {
        ExtendedKeyUsagePurpose::ClientAuth
    } else {
        ExtendedKeyUsagePurpose::ServerAuth
    };
    let mut parameters = CertificateParams::new(addresses).unwrap();
    parameters.extended_key_usages = vec![purpose];
    parameters.distinguished_name.push(DnType::CommonName, name);
    let key = KeyPair::generate().unwrap();
    let certificate = parameters.signed_by(&key, authority).unwrap();
    fs::write(share.join(format!("{name}.crt")), certificate.pem()).unwrap();
    fs::write(share.join(format!("{name}.key")), key.serialize_pem()).unwrap();
}

/// Numbers of texts in a request, and the texts; and numbers of those fields that are to be 1.
type Fields<'a> = (&'a [(u8, &'a str)], &'a [u8]);

/// A node whose agent is asked from the other one.
#[derive(Clone, Copy, Debug)]
struct Asked<'a> {
    scenario: &'a Scenario,
    node: &'a Node,
}

impl Asked<'_> {
    fn address(&self) -> String {
        format!("{}:{PORT}", self.node.address())
    }

    /// Returns the node that asks.
    fn other(&self) -> &Node {
        let [a, b] = nodes(self.scenario);
        if self.node.name() == a.name() { b } else { a }
    }

    /// Asks as somebody.
    fn ask(&self, who: &str, words: &[&str]) -> Output {
        let (certificate, key) = (format!("/srv/share/{who}.crt"), format!("/srv/share/{who}.key"));
        let url = format!("https://{}", self.address());
        let agent = ["--agent", &url, "--agent-ca", "/srv/share/callers.crt"];
        let own = ["--agent-cert", &certificate, "--agent-key", &key];
        self.scenario.kyb(self.other(), &[words, &agent, &own].concat()).unwrap()
    }

    /// Calls a method with a time (`grpc-timeout`), and returns the status that gRPC has for it.
    fn call(&self, method: &str, time: &str, (texts, ones): Fields<'_>) -> String {
        let mut message = Vec::new();
        for (number, text) in texts {
            message.extend([number << 3 | 2, u8::try_from(text.len()).unwrap()]);
            message.extend(text.as_bytes());
        }
        message.extend(ones.iter().flat_map(|number| [number << 3, 1]));
        let mut body = vec![0];
        body.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
        body.extend(message);
        let request = format!("request-{}", self.node.name());
        fs::write(self.scenario.testbed.share().join(&request), body).unwrap();
        let (request, time) = (format!("@/srv/share/{request}"), format!("grpc-timeout: {time}"));
        let url = format!("https://{}/kybernate.agent.v1.Agent/{method}", self.address());
        let tls = ["--cacert", "/srv/share/callers.crt", "--cert", "/srv/share/operator.crt"];
        let tls =
            [&["curl", "-s", "--http2"], &tls[..], &["--key", "/srv/share/operator.key"]].concat();
        let says = ["-H", "content-type: application/grpc", "-H", "te: trailers", "-H", &time];
        let sends = ["--data-binary", &request, "-o", "/dev/null", "-D", "-", &url];
        let answer = self.other().run(&[&tls[..], &says, &sends].concat()).unwrap();
        let status = answer.lines().find_map(|line| line.strip_prefix("grpc-status: "));
        status.unwrap_or_else(|| panic!("{method}: {answer}")).trim().to_owned()
    }

    /// Waits until its agent has ended everything, and returns all operations.
    fn ended(&self) -> Vec<Value> {
        let mut all = Vec::new();
        let ended = wait_until(END_LIMIT, || {
            let told = self.scenario.kyb_json(self.node, &["ps", "--operations"]).unwrap();
            all = told["operations"].as_array().cloned().unwrap_or_default();
            all.iter().all(|one| one["state"] != "running")
        });
        assert!(ended, "{all:?}");
        all
    }

    fn reference(&self, tag: &str) -> String {
        self.scenario.reference(&format!("calls/job-{}:{tag}", self.node.name()))
    }

    /// Works for those alone who may ask.
    fn works_for_who_may_ask(&self) {
        let (reference, key) = (self.reference("v1"), format!("node-{}", self.node.name()));
        let take = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
        for who in ["operator", "reader"] {
            let output = self.ask(who, &["ps", "--json"]);
            assert!(output.status.success(), "{who}: {}", said(&output));
            assert!(said(&output).contains("\"job\""), "{who}: {}", said(&output));
        }
        refused_here(&self.ask("reader", &take), "certificate:reader");
        refused_here(&self.ask("nobody", &["ps"]), "certificate:nobody");
        let output = self.ask("other/operator", &["ps"]);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("no certificate that it accepts"), "{}", said(&output));
        // Whoever is on the way to another registry would read the node's password for that.
        let other =
            ["checkpoint", "job", "10.77.0.1:5001/x:v1", "--plain-http", "--sign-key", &key];
        refused_here(&self.ask("operator", &other), "10.77.0.1:5001/x:v1 reached by plain HTTP");
        let output = self.ask("operator", &take);
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(self.ended().last().unwrap()["state"], "done");
        self.suspends_and_evicts_for_who_may(&reference);
    }

    /// What is suspended is a namespace's; what is staged is everybody's.
    fn suspends_and_evicts_for_who_may(&self, reference: &str) {
        let stage = ["stage", reference, "--tier", "ram", "--plain-http"];
        let is_suspended = || {
            let list = self.scenario.kyb_json(self.node, &["ps", "--container", "job"]).unwrap();
            list["containers"][0]["suspendedSince"].is_string()
        };
        let works = |who: &str, words: &[&str]| {
            let output = self.ask(who, words);
            assert!(output.status.success(), "{who}: {words:?}: {}", said(&output));
        };
        for who in ["reader", "operator"] {
            refused_here(&self.ask(who, &["suspend", "job"]), &format!("certificate:{who}"));
            assert!(!is_suspended());
        }
        works("keeper", &["suspend", "job"]);
        for who in ["reader", "operator"] {
            refused_here(&self.ask(who, &["resume", "job"]), &format!("certificate:{who}"));
            assert!(is_suspended());
        }
        works("keeper", &["resume", "job"]);
        assert!(!is_suspended());
        works("operator", &stage);
        for who in ["reader", "operator"] {
            refused_here(&self.ask(who, &["evict", reference]), &format!("certificate:{who}"));
        }
        works("keeper", &["evict", reference]);
        let again = self.ask("keeper", &["evict", reference]);
        assert!(said(&again).contains("is not staged here"), "{}", said(&again));
    }

    /// Whoever asks waits for two seconds, and the registry says nothing.
    fn works_no_longer_than_they_wait(&self) {
        let (scenario, node) = (self.scenario, self.node);
        let before = scenario.traces(node).unwrap();
        let (first, second) = (self.reference("v1"), self.reference("v2"));
        let key = format!("node-{}", node.name());
        let taken: Fields<'_> = (&[(1, "job"), (3, &second), (5, &key)], &[8]);
        assert_eq!(self.call("Checkpoint", "soon", taken), "3", "it is no time");
        for (method, fields) in [
            ("Checkpoint", taken),
            ("Restore", (&[(1, &*first), (3, "back")], &[5])),
            // In memory.
            ("Stage", (&[(1, &*first)], &[2, 4])),
            ("Provide", (&[(1, &*first)], &[5])),
        ] {
            assert_eq!(self.call(method, "2S", fields), "0", "{method}");
        }
        let all = self.ended();
        for kind in ["checkpoint", "restore", "stage", "provide"] {
            let last = all.iter().rfind(|one| one["kind"] == kind).unwrap();
            assert_eq!(last["state"], "cancelled", "{last}");
            assert!(last["error"].to_string().contains("its time was over"), "{last}");
        }
        scenario.wait_for_ticks(node, "job").unwrap();
        assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
    }
}

#[test]
fn an_agent_works_for_who_may_ask_and_no_longer_than_they_wait() {
    let mut scenario = start();
    let share = scenario.testbed.share();
    let callers = authority(&share.join("callers.crt"));
    let addresses = nodes(&scenario).map(|node| node.address().to_owned());
    issue(&share, "agent", &addresses.each_ref().map(String::as_str), &callers);
    for name in ["operator", "keeper", "reader", "nobody"] {
        issue(&share, name, &[], &callers);
    }
    // Has the name, and it from somebody else.
    let others = authority(&share.join("others.crt"));
    fs::create_dir(share.join("other")).unwrap();
    issue(&share.join("other"), "operator", &[], &others);
    for (name, address) in ["a", "b"].into_iter().zip(&addresses) {
        let network = NETWORK.replace("ADDRESS", &format!("{address}:{PORT}"));
        scenario.next_agent(name, &network).unwrap();
    }
    at_once(&scenario, |node| {
        scenario.run_workload(node, "job", 24, &[]).unwrap();
        Asked { scenario: &scenario, node }.works_for_who_may_ask();
    });
    // One registry for both.
    let registry = scenario.registry.as_ref().unwrap().process().unwrap();
    registry.signal(Signal::STOP);
    at_once(&scenario, |node| Asked { scenario: &scenario, node }.works_no_longer_than_they_wait());
    registry.signal(Signal::CONT);
    scenario.end().unwrap();
}
