//! An agent that is asked from another machine: by whom, and for how long.

use std::path::Path;
use std::process::Output;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::scenario::Scenario;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair,
};
use rustix::process::Signal;
use serde_json::Value;

use crate::failures::victims::END_LIMIT;
use crate::harness::{refused_here, said, start};

const AGENT: &str = "https://10.77.0.12:7443";
/// The operator may do what a cluster needs, the reader nothing but look; nobody else has a rule.
const NETWORK: &str = r#"
[network]
listen = "10.77.0.12:7443"
certificate = "/srv/share/agent.crt"
key = "/srv/share/agent.key"
client_ca = "/srv/share/callers.crt"
[[caller]]
who = "certificate:operator"
may = ["read", "checkpoint", "restore"]
namespaces = ["default"]
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

/// Writes somebody's certificate and key; the agent has an address, the others have none.
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

/// Asks node b's agent from node a, as somebody.
fn ask(scenario: &Scenario, who: &str, words: &[&str]) -> Output {
    let (certificate, key) = (format!("/srv/share/{who}.crt"), format!("/srv/share/{who}.key"));
    let agent = ["--agent", AGENT, "--agent-ca", "/srv/share/callers.crt"];
    let own = ["--agent-cert", &certificate, "--agent-key", &key];
    scenario.kyb(&scenario.testbed.a, &[words, &agent, &own].concat()).unwrap()
}

/// Calls a method with a time (`grpc-timeout`), and returns the status that gRPC has for it. `fields`
/// are the numbers of texts in the request, and the texts; `plain_http` is the number of that flag.
fn call(
    scenario: &Scenario,
    method: &str,
    time: &str,
    fields: &[(u8, &str)],
    plain_http: u8,
) -> String {
    let mut message = Vec::new();
    for (number, text) in fields {
        message.extend([number << 3 | 2, u8::try_from(text.len()).unwrap()]);
        message.extend(text.as_bytes());
    }
    message.extend([plain_http << 3, 1]);
    let mut body = vec![0];
    body.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    body.extend(message);
    fs::write(scenario.testbed.share().join("request"), body).unwrap();
    let (url, time) =
        (format!("{AGENT}/kybernate.agent.v1.Agent/{method}"), format!("grpc-timeout: {time}"));
    let tls = ["--cacert", "/srv/share/callers.crt", "--cert", "/srv/share/operator.crt"];
    let tls =
        [&["curl", "-s", "--http2"], &tls[..], &["--key", "/srv/share/operator.key"]].concat();
    let says = ["-H", "content-type: application/grpc", "-H", "te: trailers", "-H", &time];
    let sends = ["--data-binary", "@/srv/share/request", "-o", "/dev/null", "-D", "-", &url];
    let answer = scenario.testbed.a.run(&[&tls[..], &says, &sends].concat()).unwrap();
    let status = answer.lines().find_map(|line| line.strip_prefix("grpc-status: "));
    status.unwrap_or_else(|| panic!("{method}: {answer}")).trim().to_owned()
}

/// Waits until node b's agent has ended everything, and returns the last operation.
fn last(scenario: &Scenario) -> Value {
    let mut all = Vec::new();
    let ended = wait_until(END_LIMIT, || {
        let told = scenario.kyb_json(&scenario.testbed.b, &["ps", "--operations"]).unwrap();
        all = told["operations"].as_array().cloned().unwrap_or_default();
        all.iter().all(|one| one["state"] != "running")
    });
    assert!(ended, "{all:?}");
    all.pop().unwrap()
}

#[test]
fn an_agent_works_for_who_may_ask_and_no_longer_than_they_wait() {
    let mut scenario = start();
    let share = scenario.testbed.share();
    let callers = authority(&share.join("callers.crt"));
    issue(&share, "agent", &["10.77.0.12"], &callers);
    for name in ["operator", "reader", "nobody"] {
        issue(&share, name, &[], &callers);
    }
    // Has the name, and it from somebody else.
    let others = authority(&share.join("others.crt"));
    fs::create_dir(share.join("other")).unwrap();
    issue(&share.join("other"), "operator", &[], &others);
    scenario.next_agent("b", NETWORK).unwrap();
    let b = &scenario.testbed.b;
    scenario.run_workload(b, "job", 24, &[]).unwrap();
    let reference = scenario.reference("calls/job:v1");
    let take = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", "node-b"];

    for who in ["operator", "reader"] {
        let output = ask(&scenario, who, &["ps", "--json"]);
        assert!(output.status.success(), "{who}: {}", said(&output));
        assert!(said(&output).contains("\"job\""), "{who}: {}", said(&output));
    }
    refused_here(&ask(&scenario, "reader", &take), "certificate:reader");
    refused_here(&ask(&scenario, "nobody", &["ps"]), "certificate:nobody");
    let output = ask(&scenario, "other/operator", &["ps"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("no certificate that it accepts"), "{}", said(&output));
    let output = ask(&scenario, "operator", &take);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(last(&scenario)["state"], "done");

    // The registry says nothing, and whoever asks waits for two seconds.
    let before = scenario.traces(b).unwrap();
    let second = scenario.reference("calls/job:v2");
    let taken = [(1, "job"), (3, &*second), (5, "node-b")];
    let restored = [(1, &*reference), (3, "back")];
    assert_eq!(call(&scenario, "Checkpoint", "soon", &taken, 8), "3", "it is no time");
    let registry = scenario.registry.as_ref().unwrap().process().unwrap();
    registry.signal(Signal::STOP);
    for (method, fields, plain_http) in [("Checkpoint", &taken[..], 8), ("Restore", &restored, 5)] {
        assert_eq!(call(&scenario, method, "2S", fields, plain_http), "0", "{method}");
        let last = last(&scenario);
        assert_eq!(last["state"], "cancelled", "{method}: {last}");
        assert!(last["error"].to_string().contains("its time was over"), "{method}: {last}");
        scenario.wait_for_ticks(b, "job").unwrap();
        assert_eq!(scenario.traces(b).unwrap(), before, "{method}: something is left");
    }
    registry.signal(Signal::CONT);
    scenario.end().unwrap();
}
