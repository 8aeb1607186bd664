//! A pod whose containers share one PID namespace.

use super::left;
use super::pod::Wanted;
use super::story::{PODS, Story};
use crate::harness::{at_once, said};

const NAMES: [&str; 2] = ["shared-a", "shared-b"];

/// Its container is not the first in its PID namespace, so that nobody could give its processes
/// their ids back: it is refused before anything is paused.
pub(super) fn is_refused(story: &Story) {
    let image = story.scenario.image();
    let pods = ["a", "b"].into_iter().zip(NAMES).map(|(node, name)| {
        let mut pod = Wanted { node, ..Wanted::new(name, &image) }.pod();
        pod["spec"]["shareProcessNamespace"] = true.into();
        pod
    });
    story.cluster.apply(&pods.collect::<Vec<_>>()).unwrap();
    at_once(&story.scenario, |node| {
        let name = if node.name() == "a" { NAMES[0] } else { NAMES[1] };
        story.wait_ready(name);
        let (id, none) = (story.container(name), story.scenario.reference("pods/shared:none"));
        left::shows(node, &id);
        let preflight = ["preflight", &id, "--namespace", PODS];
        let checkpoint = ["checkpoint", &id, &none, "--plain-http", "--namespace", PODS];
        for words in [&preflight[..], &checkpoint] {
            let output = story.scenario.kyb(node, words).unwrap();
            let told = said(&output);
            assert_eq!(output.status.code(), Some(2), "{name}: {told}");
            assert!(told.contains("shared-pid-namespace"), "{name}: {told}");
            assert!(told.contains("it shares its PID namespace with others"), "{name}: {told}");
        }
    });
    story.delete("default", &NAMES);
}
