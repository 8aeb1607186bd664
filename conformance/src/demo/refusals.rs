//! What must not work: each is refused with its reason, and nothing is made.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use fs_err as fs;
use kybernate_spec::media_type;
use serde_json::Value;

use super::{Story, last_line, list, number, role, text};
use crate::command::tail;
use crate::node::Node;
use crate::scenario::Scenario;

/// Tells all refusals.
pub(super) fn tell(
    story: &Story,
    scenario: &Scenario,
    reference: &str,
    digest: &str,
) -> anyhow::Result<()> {
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    story.chapter("what is refused (exit code 2), leaving nothing behind");
    let before = scenario.traces(b)?;
    let before_a = scenario.traces(a)?;

    let key = "/srv/share/stranger.pub";
    let verified = scenario.kyb(b, &["verify", reference, "--plain-http", "--key", key])?;
    story.refused("another key, kyb verify", &verified, "key")?;
    stranger(story, scenario)?;

    changed_on_our_disk(story, scenario, reference, digest)?;
    changed_elsewhere(story, scenario, reference)?;
    privileges(story, scenario)?;
    let left = scenario.traces(b)?;
    ensure!(left == before, "something was left on b:\n{before}\nbecame\n{left}");

    story.chapter("b → a: a's CRIU is older than b's");
    let back = scenario.reference("demo/counter:back");
    let words = ["checkpoint", "counter", &back, "--plain-http", "--sign-key", "node-b"];
    scenario.kyb_json(b, &words)?;
    let output = scenario.kyb(a, &["restore", &back, "--plain-http", "--name", "back"])?;
    story.refused("restore on a", &output, "CRIU 4.1")?;
    let left = scenario.traces(a)?;
    ensure!(left == before_a, "something was left on a:\n{before_a}\nbecame\n{left}");
    Ok(())
}

/// A checkpoint signed by a key that the node does not trust.
fn stranger(story: &Story, scenario: &Scenario) -> anyhow::Result<()> {
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    let reference = scenario.reference("demo/counter:stranger");
    let key = "/srv/share/stranger.key";
    let words = ["checkpoint", "counter", &reference, "--plain-http", "--sign-key", key];
    scenario.kyb_json(a, &words)?;
    let output = restore(scenario, b, &reference)?;
    story.refused("another key, kyb restore", &output, "key")
}

/// One byte of a shard changes on our registry's disk. It is not served; the next push heals it.
fn changed_on_our_disk(
    story: &Story,
    scenario: &Scenario,
    reference: &str,
    digest: &str,
) -> anyhow::Result<()> {
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    let whole = "oci:/srv/share/whole:v1";
    let saved = scenario.kyb(a, &["copy", reference, whole, "--plain-http"])?;
    ensure!(saved.status.success(), "kyb copy: {}", tail(&saved));
    let shard = shard_of(scenario, reference)?;
    flip(&blob_file(&scenario.registry_root(), &shard)?)?;
    let output = restore(scenario, b, reference)?;
    story.line(&format!("one byte changed on our registry's disk: {}", last_line(&output)));
    ensure!(!output.status.success(), "a changed shard was restored");
    let exact = format!("{}@{digest}", scenario.reference("demo/counter"));
    let deep = ["verify", &exact, "--plain-http", "--key", "/srv/share/node-a.pub", "--deep"];
    let output = scenario.kyb(b, &deep)?;
    ensure!(!output.status.success(), "kyb verify --deep accepts a changed shard");
    // The unchanged bytes come from where the artifact is whole.
    let healed = scenario.kyb(a, &["copy", whole, reference, "--plain-http"])?;
    ensure!(healed.status.success(), "kyb copy: {}", tail(&healed));
    let verified = scenario.kyb(b, &deep)?;
    ensure!(verified.status.success(), "the push did not heal it: {}", tail(&verified));
    story.line("pushed again: healed, every byte verified");
    Ok(())
}

/// One byte of a shard changes behind a registry that does not look.
fn changed_elsewhere(story: &Story, scenario: &Scenario, reference: &str) -> anyhow::Result<()> {
    let b = &scenario.testbed.b;
    let peer = scenario.start_peer()?;
    let copy = scenario.peer_reference("demo/counter:moved");
    let copied = scenario.kyb(b, &["copy", reference, &copy, "--plain-http"])?;
    ensure!(copied.status.success(), "kyb copy: {}", tail(&copied));
    let shard = shard_of(scenario, reference)?;
    flip(&blob_file(&scenario.peer_root(), &shard)?)?;
    let output = restore(scenario, b, &copy)?;
    drop(peer);
    story.refused("one byte changed behind docker-registry", &output, "hash")
}

/// A process with more capabilities than a restored container has.
fn privileges(story: &Story, scenario: &Scenario) -> anyhow::Result<()> {
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "mighty", 8, &["--cap-add", "CAP_SYS_ADMIN"])?;
    let reference = scenario.reference("demo/counter:mighty");
    let words = ["checkpoint", "mighty", &reference, "--plain-http", "--sign-key", "node-a"];
    scenario.kyb_json(a, &words)?;
    scenario.remove(a, "mighty")?;
    let output = restore(scenario, b, &reference)?;
    story.refused("more privileges than the target allows", &output, "CAP_SYS_ADMIN")
}

fn restore(
    scenario: &Scenario,
    node: &Node,
    reference: &str,
) -> anyhow::Result<std::process::Output> {
    Ok(scenario.kyb(node, &["restore", reference, "--plain-http", "--name", "refused"])?)
}

/// Returns the digest of a checkpoint's largest shard.
fn shard_of(scenario: &Scenario, reference: &str) -> anyhow::Result<String> {
    let b = &scenario.testbed.b;
    let read = |reference: &str| -> anyhow::Result<Value> {
        let text = b.run(&["crane", "manifest", "--insecure", reference])?;
        serde_json::from_str(&text).context("crane printed no manifest")
    };
    let index = read(reference)?;
    let child = list(&index, "manifests").find(|child| role(child) == Some("checkpoint"));
    let child = text(child.context("no checkpoint child")?, "digest")?;
    let repository = reference.rsplit_once(':').map_or(reference, |(repository, _)| repository);
    let manifest = read(&format!("{repository}@{child}"))?;
    let shards = list(&manifest, "layers")
        .filter(|layer| text(layer, "mediaType").is_ok_and(|kind| kind == media_type::PAGES));
    let largest = shards.max_by_key(|layer| number(layer, "size"));
    text(largest.context("no shard")?, "digest")
}

/// Finds a blob's file in a registry's directory, ours or docker-registry's.
fn blob_file(root: &Path, digest: &str) -> anyhow::Result<PathBuf> {
    let hex = digest.strip_prefix("sha256:").context("not a sha256 digest")?;
    let (two, _) = hex.split_at_checked(2).context("a short digest")?;
    let ours = root.join("blobs/sha256").join(two).join(hex);
    let theirs = root.join("docker/registry/v2/blobs/sha256").join(two).join(hex).join("data");
    let found = [ours, theirs].into_iter().find(|path| path.is_file());
    found.with_context(|| format!("no file for {digest} in {}", root.display()))
}

/// Changes one byte in the middle of a file, behind the back of who serves it.
fn flip(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::FileExt as _;
    let file = fs::OpenOptions::new().read(true).write(true).open(path)?;
    let middle = file.metadata()?.len() / 2;
    let mut byte = [0];
    file.file().read_exact_at(&mut byte, middle)?;
    let [value] = byte;
    file.file().write_all_at(&[value ^ 1], middle)?;
    Ok(())
}
