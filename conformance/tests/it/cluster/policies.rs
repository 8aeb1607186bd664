//! What becomes of a pod that is not restored, or not for the first time.

use serde_json::json;

use super::pod::{Wanted, secret};
use super::story::{READY, Story};
use crate::harness::at_once;

/// How the pods are called of one node.
struct Names {
    node: &'static str,
    sick: &'static str,
    again: &'static str,
    never: &'static str,
    cold: &'static str,
}

/// Both nodes have them, since their kubelets have a containerd each.
const NAMES: [Names; 2] = [
    Names { node: "a", sick: "sick-a", again: "again-a", never: "never-a", cold: "cold-a" },
    Names { node: "b", sick: "sick-b", again: "again-b", never: "never-b", cold: "cold-b" },
];

/// Looks at the pods of both nodes at a time.
fn on_both(story: &Story, look: impl Fn(&Names) + Sync) {
    at_once(&story.scenario, |node| {
        look(NAMES.iter().find(|names| names.node == node.name()).unwrap());
    });
}

/// A digest that nothing has.
fn none(pinned: &str) -> String {
    let (name, _) = pinned.split_once('@').unwrap();
    format!("{name}@sha256:{}", "0".repeat(64))
}

/// Starts all of them at once.
pub(super) fn begin(story: &Story, references: &References) {
    let pinned = &*story.pinned;
    let References { none, unsigned } = references;
    let restart = "on-restart.kybernate.io/main";
    let failure = "on-failure.kybernate.io/main";
    let both = NAMES.iter().flat_map(|names| {
        let cold = Wanted::restored(names.cold, none).with(failure, "cold");
        let pods = [
            Wanted::restored(names.sick, pinned).watched(),
            Wanted::restored(names.again, pinned).watched().with(restart, "restore"),
            // What one annotation forbids the other does not allow.
            Wanted::restored(names.never, pinned).with(restart, "fail").with(failure, "cold"),
            Wanted { image: pinned, ..cold },
        ];
        pods.map(|pod| Wanted { node: names.node, ..pod })
    });
    let on_b = [
        Wanted { image: pinned, ..Wanted::restored("missing", none) },
        Wanted::restored("unsigned", unsigned).with(failure, "cold"),
        Wanted::restored("unclear", pinned).with(restart, "maybe"),
    ];
    story.apply(&both.chain(on_b).collect::<Vec<_>>());
    // A namespace gets its account a moment later.
    let other = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "other" } });
    story.cluster.apply(&[other, secret("other", "new")]).unwrap();
    let account = ["wait", "--for=create", READY, "-n", "other", "serviceaccount/default"];
    story.cluster.kubectl(&account).unwrap();
    story.apply(&[Wanted { namespace: "other", ..Wanted::restored("refused", pinned) }]);
}

/// Checkpoints that are not as they should be.
pub(super) struct References {
    /// Nothing is there.
    none: String,
    /// A copy without its signature.
    unsigned: String,
}

impl References {
    pub(super) fn make(story: &Story) -> Self {
        let copy = story.scenario.reference("pods/unsigned:v1");
        let words = ["crane", "copy", "--insecure", &story.pinned, &copy];
        story.scenario.testbed.b.run(&words).unwrap();
        let (_, digest) = story.pinned.split_once('@').unwrap();
        Self { none: none(&story.pinned), unsigned: format!("{copy}@{digest}") }
    }
}

/// What a rule refuses is no crash without a word: the reason is where people look for it.
pub(super) fn refusals_are_told(story: &Story) {
    let failed = "kybernate-runc: failed to restore from";
    let namespaces = "taken in namespace \"default\", into namespace \"other\"";
    story.wait_told("other", "refused", &[failed, "refused (", namespaces]);
    story.delete("other", &["refused"]);

    // It fails unless told otherwise.
    story.wait_told("default", "missing", &[failed, "is not staged on this node"]);
    // What was refused for its signature is not started from the same image either.
    let told = story.wait_told("default", "unsigned", &[failed, "refused (signature)"]);
    assert!(!told.contains("Started container") && !told.contains("Container started"), "{told}");
    let words = ["it is fresh, restore or fail", "on-restart.kybernate.io/main", "maybe"];
    story.wait_told("default", "unclear", &words);
    story.delete("default", &["missing", "unsigned", "unclear"]);
}

/// A pod that says so starts without the checkpoint that is not there.
pub(super) fn it_starts_cold(story: &Story) {
    on_both(story, |names| {
        story.is_fresh(names.cold);
        story.delete("default", &[names.cold]);
    });
}

/// A liveness probe that fails ends a restored container; then it is as its pod says.
pub(super) fn the_sick_are_restarted(story: &Story) {
    on_both(story, |&Names { sick, again, .. }| {
        for name in [sick, again] {
            story.goes_on(name, &story.before);
            story.exec(name, &["sh", "-c", "echo changed >/dev/shm/note; : >/sick"]);
        }
        for name in [sick, again] {
            story.wait_restarted(name);
            story.wait_told("default", name, &["Liveness probe failed"]);
        }
        story.is_fresh(sick);
        // It went back to where the checkpoint was taken, and its files with it.
        story.goes_on(again, &story.before);
        story.exec(again, &["sh", "-c", "! test -e /sick"]);
        assert_eq!(story.exec(again, &["cat", "/dev/shm/note"]), "kept\n");
        story.delete("default", &[sick, again]);
    });
}

/// A pod that wants to be restored once only fails when its container has ended.
pub(super) fn it_is_restored_once(story: &Story) {
    on_both(story, |names| {
        story.goes_on(names.never, &story.before);
        story.kill(names.never);
        let words = ["it was restored before, and its pod wants it to fail"];
        story.wait_told("default", names.never, &words);
        story.delete("default", &[names.never]);
    });
}
