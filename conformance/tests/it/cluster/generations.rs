//! Restored pods are taken again, and restored once more: from node to node as far as CRIU's versions
//! allow.

use serde_json::Value;

use super::pod::Wanted;
use super::story::Story;
use super::{kubelet, what_is_around_it_is_the_pods};
use crate::harness::said;

/// Restored pods, and the checkpoints that were taken of them.
pub(super) struct Second {
    /// Taken on a, of one that was restored on a: reference, and what it said.
    of_a: (String, Value),
    /// The same of b.
    of_b: (String, Value),
}

/// Says that a pod is the only one that goes on from its checkpoint.
const MOVES: (&str, &str) = ("restore-as.kybernate.io/main", "move");

/// Starts the pod that goes on on the node where it was taken.
pub(super) fn begin(story: &Story) {
    let home = Wanted { node: "a", ..Wanted::restored("home", &story.pinned) };
    let filled = Wanted { node: "a", ..Wanted::restored("filled", &story.with_scratch) };
    story.apply(&[home.with(MOVES.0, MOVES.1), filled]);
}

/// A pod of the other node that wants what was moved already, or else to start cold.
fn moves_too<'a>(name: &'a str, story: &'a Story) -> Wanted<'a> {
    let wanted = Wanted::restored(name, &story.pinned).with(MOVES.0, MOVES.1);
    wanted.with("on-failure.kybernate.io/main", "cold")
}

/// A workload that was moved is nobody else's, until somebody says that it is gone.
fn it_is_moved_once(story: &Story) {
    let words = ["refused (claim)", "it was moved already", "on node \"a\""];
    let told = story.wait_told("default", "twice", &words);
    assert!(!told.contains("Started container") && !told.contains("Container started"), "{told}");
    story.delete("default", &["twice"]);
    let (name, digest) = story.pinned.split_once("@sha256:").unwrap();
    let (repository, _tag) = name.rsplit_once(':').unwrap();
    let claim = format!("{repository}:sha256-{digest}.claim");
    story.scenario.testbed.b.run(&["crane", "delete", "--insecure", &claim]).unwrap();
    story.apply(&[moves_too("late", story)]);
    story.goes_on("late", &story.before);
    story.delete("default", &["late"]);
}

impl Second {
    /// Takes the restored pods again, and restores what is taken.
    pub(super) fn take(story: &Story) -> Self {
        let (a, b) = (&story.scenario.testbed.a, &story.scenario.testbed.b);
        let of_b = story.goes_on("restored", &story.before);
        // On b its emptyDir goes along by itself, on a when somebody asks for it: nobody did so when
        // the source was taken.
        let second = story.take(b, &story.container("restored"), "pods/source:b", &[]);
        // It is not the worse for it.
        story.goes_on("restored", &of_b);
        story.stage(b, &second);
        let of_a = story.goes_on("home", &story.before);
        what_is_around_it_is_the_pods(story, "home", a);
        assert_eq!(story.exec("home", &["ls", "/scratch"]), "");
        // Here it was asked for by the node's policy.
        story.goes_on("filled", &story.before);
        assert_eq!(story.exec("filled", &["cat", "/scratch/file"]), "left\n");
        story.delete("default", &["filled"]);
        story.exec("home", &["sh", "-c", "echo home >/scratch/file"]);
        let along = ["--capture-mount", "/scratch"];
        let home = story.take(a, &story.container("home"), "pods/source:a", &along);
        story.goes_on("home", &of_a);
        story.apply(&[moves_too("twice", story)]);
        story.stage(b, &home);
        story.delete("default", &["home"]);

        // What a newer CRIU has written is not even staged where an older one is.
        let words = ["stage", &second, "--tier", "ram", "--plain-http"];
        let output = story.scenario.kyb(a, &words).unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        story.apply(&[
            Wanted::restored("b-b", &second),
            Wanted::restored("a-b", &home),
            Wanted { node: "a", ..Wanted::restored("b-a", &second) },
        ]);
        Self { of_a: (home, of_a), of_b: (second, of_b) }
    }

    /// The same process in the third pod, and in the fourth.
    pub(super) fn go_on(&self, story: &Story) {
        let told = story.wait_told("default", "b-a", &["refused (compatibility)"]);
        assert!(told.contains("CRIU"), "{told}");
        story.delete("default", &["b-a"]);
        assert_ne!(self.of_a.0, self.of_b.0);
        story.goes_on("a-b", &self.of_a.1);
        let third = story.goes_on("b-b", &self.of_b.1);
        // What lay in its emptyDir lies in that of the new pod.
        assert_eq!(story.exec("b-b", &["cat", "/scratch/file"]).trim(), "here");
        assert_eq!(story.exec("a-b", &["cat", "/scratch/file"]).trim(), "home");
        let b = &story.scenario.testbed.b;
        story.take(b, &story.container("b-b"), "pods/source:bb", &[]);
        kubelet::it_comes_in(story, "b-b", &third);
        story.delete("default", &["a-b", "b-b"]);
        it_is_moved_once(story);
    }
}
