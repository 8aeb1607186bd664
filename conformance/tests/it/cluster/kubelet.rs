//! What kubelet's own checkpoint API writes comes in, and is a checkpoint like any other.

use serde_json::Value;

use super::story::Story;

/// Has the kubelet of node b take a checkpoint of a pod there, and imports it.
pub(super) fn it_comes_in(story: &Story, pod: &str, before: &Value) {
    let b = &story.scenario.testbed.b;
    let path = format!("/api/v1/nodes/b/proxy/checkpoint/default/{pod}/main");
    let told = story.cluster.kubectl(&["create", "--raw", &path, "-f", "/dev/null"]).unwrap();
    let told: Value = serde_json::from_str(&told).unwrap();
    let archive = told["items"][0].as_str().unwrap();
    story.goes_on(pod, before);

    let (image, ours) = (story.scenario.image(), story.scenario.reference("pods/kubelet:v1"));
    let words = ["import", archive, &ours, "--format", "cri", "--image", &image, "--plain-http"];
    let signed = ["--sign-key", "/srv/share/node-b.key"];
    let imported = story.scenario.kyb_json(b, &[&words[..], &signed].concat()).unwrap();
    assert_eq!((&imported["runnable"], &imported["signed"]), (&true.into(), &true.into()));
    let words = ["verify", &ours, "--key", "/srv/share/node-b.pub", "--deep", "--plain-http"];
    story.scenario.kyb_json(b, &words).unwrap();
    let seen = story.scenario.kyb_json(b, &["inspect", &ours, "--plain-http"]).unwrap();
    assert_eq!(seen["config"]["source"]["namespace"], "default", "{seen}");
    assert_eq!(seen["config"]["source"]["container"], "main", "{seen}");
    assert!(seen.to_string().contains("/workload"), "{seen}");
    b.run(&["rm", archive]).unwrap();
}
