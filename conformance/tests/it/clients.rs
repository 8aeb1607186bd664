//! Programs that people use, against our registry as it is in production: with a certificate of an
//! authority of one's own, users and a policy, asking for passwords and asking for tokens.

use std::path::Path;
use std::time::Duration;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Service;

use self::site::{Ask, Site, WRONG, password, refused};

mod site;

const CA: &str = "/srv/share/ca/ca.crt";
const LAYOUT: &str = "/srv/share/image:base";
/// Starting containerd takes milliseconds; a loaded machine may need longer.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// What clients say when they are told 401, 403 or 404.
const UNAUTHORIZED: [&str; 2] = ["UNAUTHORIZED", "401"];
const DENIED: [&str; 4] = ["DENIED", "403", "denied", "not allowed"];
const UNKNOWN: [&str; 4] = ["NAME_UNKNOWN", "MANIFEST_UNKNOWN", "404", "not found"];

/// crane, oras, skopeo, cosign and kyb, with credentials in Docker's file and from a helper.
#[test]
fn tools_push_and_pull_with_users_over_tls() {
    let site = Site::start();
    site.run_as("alice", &["cosign", "generate-key-pair", "--output-key-prefix", "/tmp/key"]);
    for ask in Ask::BOTH {
        for user in ["alice", "helper"] {
            tools(&site, ask, user);
        }
        let asked = fs::read_to_string(site.scenario.testbed.share().join("helper/asked")).unwrap();
        assert!(asked.contains(&ask.host()), "the helper was asked only for {asked:?}");
        strangers(&site, ask);
    }
    site.end();
}

fn tools(site: &Site, ask: Ask, user: &str) {
    let image = |tool: &str| ask.reference(&format!("team/{user}/{tool}:v1"));
    let run = |words: &[&str]| site.run_as(user, words);
    let [oras, again, crane, skopeo, kyb, kyb_again] =
        ["oras", "oras-again", "crane", "skopeo", "kyb", "kyb-again"].map(image);

    run(&["oras", "cp", "--from-oci-layout", "--to-ca-file", CA, LAYOUT, &oras]);
    let digest = site.digest(&oras);
    let pulled = format!("/tmp/pulled-{user}");
    run(&["rm", "-rf", &pulled]);
    let pulled_tag = format!("{pulled}/oras:v1");
    run(&["mkdir", "-p", &pulled]);
    run(&["oras", "cp", "--to-oci-layout", "--from-ca-file", CA, &oras, &pulled_tag]);
    run(&["oras", "cp", "--from-oci-layout", "--to-ca-file", CA, &pulled_tag, &again]);

    let tar = format!("{pulled}/crane");
    run(&["crane", "pull", "--format", "oci", &oras, &tar]);
    run(&["crane", "push", &tar, &crane]);

    let dir = format!("dir:{pulled}/skopeo");
    let (from, to) = (format!("docker://{oras}"), format!("docker://{skopeo}"));
    run(&["skopeo", "copy", "--preserve-digests", "--src-cert-dir", "/srv/share/ca", &from, &dir]);
    run(&["skopeo", "copy", "--preserve-digests", "--dest-cert-dir", "/srv/share/ca", &dir, &to]);

    let layout = format!("oci:{pulled}/kyb:v1");
    run(&["kyb", "copy", &oras, &layout]);
    run(&["kyb", "copy", &layout, &kyb]);
    run(&["kyb", "copy", &kyb, &kyb_again]);
    for copy in [&again, &crane, &skopeo, &kyb, &kyb_again] {
        assert_eq!(site.digest(copy), digest, "{copy}");
    }

    let signed = format!("{}@{digest}", ask.reference(&format!("team/{user}/oras")));
    let sign = ["cosign", "sign", "--yes", "--key", "/tmp/key.key", "--registry-cacert", CA];
    let offline = ["--tlog-upload=false", "--use-signing-config=false", &signed];
    run(&[&sign[..], &offline].concat());
    let verify = ["cosign", "verify", "--key", "/tmp/key.pub", "--registry-cacert", CA];
    run(&[&verify[..], &["--insecure-ignore-tlog", &signed]].concat());
    // The signature is a referrer that goes where the image goes.
    run(&["kyb", "copy", &oras, &image("with-signature")]);
    let copied = format!("{}@{digest}", ask.reference(&format!("team/{user}/with-signature")));
    run(&[&verify[..], &["--insecure-ignore-tlog", &copied]].concat());
}

/// Those who may only pull, may nothing, bring nothing, or do not trust the authority.
fn strangers(site: &Site, ask: Ask) {
    let there = ask.reference("team/alice/oras:v1");
    let missing = ask.reference("team/alice/missing:v1");
    let new = ask.reference("team/bob/new:v1");
    site.run_as("bob", &["crane", "manifest", &there]);
    site.run_as("bob", &["kyb", "copy", &there, "oci:/tmp/bob:v1"]);
    site.run_as("bob", &["rm", "-rf", "/tmp/bob"]);
    site.refused("bob", &["crane", "copy", &there, &new], &DENIED);
    site.refused("bob", &["kyb", "copy", &there, &new], &DENIED);
    let to_ca = ["--from-oci-layout", "--to-ca-file", CA, LAYOUT];
    site.refused("bob", &[&["oras", "cp"], &to_ca[..], &[&new]].concat(), &DENIED);
    for reference in [&there, &missing] {
        site.refused("eve", &["crane", "manifest", reference], &UNKNOWN);
    }
    // A directory without a credential file.
    site.refused("ca", &["crane", "manifest", &there], &UNAUTHORIZED);
    site.refused("alice", &["env", "-u", "SSL_CERT_FILE", "crane", "digest", &there], &["x509"]);
    let untrusting = ["env", "-u", "SSL_CERT_FILE", "kyb", "copy", &there, "oci:/tmp/no:v1"];
    site.refused("alice", &untrusting, &["certificate"]);
}

/// containerd 1.7 and 2.1, told of the authority by `hosts.toml` and by options.
#[test]
fn containerd_pushes_and_pulls_with_users_over_tls() {
    let site = Site::start();
    let user = format!("alice:{}", password("alice"));
    for ask in Ask::BOTH {
        let image = ask.reference("team/base:v1");
        site.run_as("alice", &["oras", "cp", "--from-oci-layout", LAYOUT, &image]);
        let digest = site.digest(&image);
        for node in [&site.scenario.testbed.a, &site.scenario.testbed.b] {
            // Where the newer one takes the options of a client, it is not its server that pulls.
            let own: &[&str] = if node.name() == "b" { &["--local"] } else { &[] };
            let by_options = [own, &["--tlscacert", CA]].concat();
            for (way, how) in [
                ("hosts", &["--hosts-dir", "/srv/share/certs.d"][..]),
                ("options", &by_options[..]),
            ] {
                let pushed = ask.reference(&format!("team/{way}-{}:v1", node.name()));
                let pull = [&["ctr", "image", "pull"], how, &["--user"]].concat();
                node.run(&[&pull[..], &[&user, &image]].concat()).unwrap();
                node.run(&["ctr", "image", "tag", &image, &pushed]).unwrap();
                let push = [&["ctr", "image", "push"], how, &["--user", &user, &pushed]].concat();
                node.run(&push).unwrap();
                assert_eq!(site.digest(&pushed), digest, "{pushed}");
                forget(node, &[&image, &pushed]);
                node.run(&[&pull[..], &[&user, &pushed]].concat()).unwrap();
                let words = ["ctr", "run", "--rm", &pushed, "job", "cat", "/etc/os-release"];
                assert!(!node.told(&words).unwrap().is_empty());
                forget(node, &[&pushed]);

                let wrong = format!("alice:{WRONG}");
                refused(node, &[&pull[..], &[&wrong, &image]].concat(), &UNAUTHORIZED);
                let eve = format!("eve:{}", password("eve"));
                refused(node, &[&pull[..], &[&eve, &image]].concat(), &UNKNOWN);
            }
        }
    }
    site.end();
}

/// Removes images and waits until their content is gone, so that the next pull is one.
fn forget(node: &Node, images: &[&str]) {
    node.run(&[&["ctr", "image", "rm", "--sync"], images].concat()).unwrap();
}

/// containerd 2.1 fetches a layer in several ranges at once when it is told to.
#[test]
fn containerd_pulls_ranges_in_parallel_with_users_over_tls() {
    let site = Site::start();
    let node = &site.scenario.testbed.b;
    let containerd = second_containerd(&site, node);
    let layer = site.scenario.testbed.share().join("layer.tar");
    let user = format!("alice:{}", password("alice"));
    for ask in Ask::BOTH {
        // A new one each time: what containerd has already is not pulled.
        write_layer(&layer);
        let image = ask.reference("team/large:v1");
        let words = ["crane", "append", "--oci-empty-base", "-f", "/srv/share/layer.tar", "-t"];
        site.run_as("alice", &[&words[..], &[&image]].concat());
        let ctr = ["ctr", "-a", "/run/ranges/containerd.sock", "image"];
        let pull = ["pull", "--hosts-dir", "/srv/share/certs.d", "--user", &user, &image];
        node.run(&[&ctr[..], &pull].concat()).unwrap();
        let found = node.run(&[&ctr[..], &["ls"]].concat()).unwrap();
        assert!(found.contains(&site.digest(&image)), "{found}");
        let log = site.log(ask);
        let range = |line: &&str| line.contains("http.status=206") && line.contains("containerd");
        let ranges = log.lines().filter(range).count();
        assert!(ranges >= 4, "the layer was pulled in {ranges} ranges");
    }
    drop(containerd);
    site.end();
}

/// Starts a second containerd beside the node's own, with ranges of 1 MiB.
fn second_containerd(site: &Site, node: &Node) -> Service {
    let config = r#"version = 3
root = "/var/lib/kybernate/ranges"
state = "/run/ranges"
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"]
[grpc]
address = "/run/ranges/containerd.sock"
[plugins."io.containerd.transfer.v1.local"]
max_concurrent_downloads = 3
concurrent_layer_fetch_buffer = 1048576
"#;
    fs::write(node.path("/etc/containerd/ranges.toml"), config).unwrap();
    let mut command = node.command(&["containerd", "--config", "/etc/containerd/ranges.toml"]);
    let log = fs::File::create(site.scenario.testbed.private().join("ranges.log")).unwrap();
    command.stderr(log.into_parts().0);
    let service = Service::start(&mut command).unwrap();
    let version = ["ctr", "-a", "/run/ranges/containerd.sock", "version"];
    assert!(wait_until(START_TIMEOUT, || node.run(&version).is_ok()), "containerd does not answer");
    service
}

/// Writes a layer of 6 MiB that does not compress.
fn write_layer(path: &Path) {
    let mut noise = vec![0; 6 << 20];
    getrandom::fill(&mut noise).unwrap();
    let mut tar = tar::Builder::new(fs::File::create(path).unwrap());
    let mut header = tar::Header::new_ustar();
    header.set_size(noise.len().try_into().unwrap());
    header.set_mode(0o644);
    tar.append_data(&mut header, "noise", &*noise).unwrap();
    tar.into_inner().unwrap();
}
