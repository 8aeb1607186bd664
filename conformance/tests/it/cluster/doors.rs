//! A pod's checkpoint without Kubernetes: by `kyb restore`, and by containerd alone.

use crate::harness::{refused_here, said};
use crate::provisions::{containerd_restores, goes_on};

use super::story::Story;

/// What a pod has from its kubelet is somebody else's to give: a network, and files.
const GIVE: &str = "set -e; mkdir /srv/given; cd /srv/given
    : > net; unshare --net=net true; mkdir secret scratch token shm; : > end
    for name in hosts hostname resolv.conf; do cp /etc/$name .; done";
const TAKE: &str = "umount /srv/given/net; rm -r /srv/given";

/// Where it has them.
const GIVEN: [&str; 6] = [
    "hosts:/etc/hosts",
    "hostname:/etc/hostname",
    "resolv.conf:/etc/resolv.conf",
    "end:/dev/termination-log",
    "secret:/secret:ro",
    "scratch:/scratch",
];
/// Its token, which its image has below a link: the agent follows that.
const TOKEN: &str = "/srv/given/token:/var/run/secrets/kubernetes.io/serviceaccount:ro";
/// Who restores without the agent has to be told where it leads.
const TOKEN_OUTSIDE: &str = "/srv/given/token:/run/secrets/kubernetes.io/serviceaccount:ro";

/// And what such a pod may: its profile is none, and it may gain privileges.
const ALLOWED: [&str; 4] = [
    "--allow-host-namespace",
    "network:/srv/given/net",
    "--allow-new-privileges",
    "--allow-no-seccomp",
];

/// It is the same process by either.
pub(super) fn lead_outside(story: &Story) {
    let (scenario, b) = (&story.scenario, &story.scenario.testbed.b);
    b.run(&["sh", "-c", GIVE]).unwrap();
    let mut words = vec!["--plain-http".to_owned()];
    for given in GIVEN {
        words.extend(["--allow-mount".to_owned(), format!("/srv/given/{given}")]);
    }
    words.extend(ALLOWED.map(str::to_owned));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();

    let restore = ["restore", &story.pinned, "--name", "outside", "--allow-mount", TOKEN];
    let output = scenario.kyb(b, &[&restore[..], &words].concat()).unwrap();
    assert!(output.status.success(), "{}", said(&output));
    goes_on(b, (scenario, "outside"), &story.before);
    scenario.remove(b, "outside").unwrap();

    let provide = ["provide", &story.pinned, "--allow-mount"];
    let refused = |token: &str, more: &[&str], reason: &str| {
        let words = [&provide[..], &[token], more, &words].concat();
        refused_here(&scenario.kyb(b, &words).unwrap(), reason);
    };
    refused(TOKEN_OUTSIDE, &[], "has no place for what was in \"/dev/shm\"");
    let shm = ["--allow-mount", "/srv/given/shm:/dev/shm"];
    refused(TOKEN, &shm, "--allow-mount SOURCE:/run/secrets/kubernetes.io/serviceaccount");
    let words = [&provide[..], &[TOKEN_OUTSIDE], &shm, &words].concat();
    let told = scenario.kyb_json(b, &words).unwrap();
    let image = told["image"].as_str().unwrap();
    containerd_restores(b, (scenario, "alone"), image, &story.before);
    scenario.remove(b, "alone").unwrap();
    b.run(&["ctr", "image", "rm", "--sync", image]).unwrap();
    b.run(&["sh", "-c", TAKE]).unwrap();
}
