//! What a cluster needs of ours to keep its pods: a registry, an agent on each node, their keys, and
//! the workload's image. All end with the nodes.

use std::path::Path;

use fs_err as fs;

use super::{Cluster, REGISTRY};
use crate::command::{self, wait_until};
use crate::image;
use crate::node::command_in;
use crate::scenario::{PASSWORD, START_TIMEOUT, ScenarioError, agent_config, keygen};
use crate::testbed::state::State;

/// What an agent is told for pods.
pub const PODS: &str = "[staging.ram]\nbudget = \"4GiB\"\n\
                        [[registry]]\nhost = \"10.77.0.1:5000\"\nplain_http = true\n";
/// Starts a program that outlives the shell; the first argument is its log.
const DAEMON: &str = r#"log=$1; shift; "$@" >"$log" 2>&1 </dev/null &"#;

/// Starts all of it. `bin` holds our programs.
pub fn start(state: &State, cluster: &Cluster, bin: &Path) -> Result<(), ScenarioError> {
    let share = state.directory.join("share");
    for node in &state.nodes {
        keygen(bin, &share.join(format!("node-{}", node.name)))?;
    }
    fs::write(share.join("password"), PASSWORD)?;
    let daemon = ["sh", "-c", DAEMON, "sh"];
    let registry = ["/var/lib/kybernate/registry.log", "kybernate-registry", "serve", "--listen"];
    let root = [REGISTRY, "--root", "/var/lib/kybernate/registry"];
    command::run(&mut cluster.on_hub(&[&daemon[..], &registry, &root].concat()))?;
    for node in &state.nodes {
        let inside = format!("/proc/{}/root/etc/kybernate", node.init.pid);
        fs::create_dir_all(&inside)?;
        fs::write(Path::new(&inside).join("agent.toml"), agent_config(&node.name, PODS))?;
        let agent = ["/var/lib/kybernate/agent.log", "kybernate-agent", "serve"];
        command::run(&mut command_in(node.init, &[&daemon[..], &agent].concat()))?;
        let answers = || command::run(&mut command_in(node.init, &["kyb", "ps", "--json"])).is_ok();
        if !wait_until(START_TIMEOUT, answers) {
            let what = format!("an answer of the agent on {}", node.name);
            return Err(ScenarioError::Timeout(what));
        }
    }
    push(state, cluster)
}

fn push(state: &State, cluster: &Cluster) -> Result<(), ScenarioError> {
    let share = state.directory.join("share");
    let Some(node) = state.nodes.last() else { return Ok(()) };
    let busybox = format!("/proc/{}/root/usr/bin/busybox", node.init.pid);
    image::build(&share.join("image"), Path::new(&busybox), "base")?;
    let url = format!("http://{REGISTRY}/v2/");
    let answers = || {
        let words = ["curl", "-sf", "-m", "2", &url];
        command::run(&mut cluster.on_hub(&words)).is_ok()
    };
    if !wait_until(START_TIMEOUT, answers) {
        return Err(ScenarioError::Timeout("an answer of the registry".to_owned()));
    }
    let image = format!("{REGISTRY}/demo/counter:base");
    let copy = ["oras", "copy", "--from-oci-layout", "--to-plain-http", "/srv/share/image:base"];
    command::run(&mut command_in(node.init, &[&copy[..], &[&image]].concat()))?;
    Ok(())
}
