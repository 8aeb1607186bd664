//! Checkpoints that are past the time which they name, and rules that count no more.

use std::process::Stdio;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::scenario::Scenario;

use crate::failures::victims::END_LIMIT;
use crate::harness::{checkpoint, on_both, refused, restore, said, start};
use crate::pods::{CONFIG, WORKLOAD, command_of};
use crate::trust::{METRICS, POLICY, are_counted, costs_no_payload};

/// A rule for what a stranger has signed.
fn rule(scenario: &Scenario, until: &str) -> String {
    format!(
        "[[rule]]\nname = \"stranger\"\nrepositories = [\"{}\"]\n\
         keys = [\"/srv/share/stranger.pub\"]\n{until}",
        scenario.reference("expiry/strange")
    )
}

#[test]
fn what_is_past_its_time_is_refused_at_every_door() {
    let mut scenario = start();
    let old = rule(&scenario, "not_after = 2020-01-01T00:00:00Z\n");
    on_both(&mut scenario, |scenario, node, agent| {
        agent.kill();
        fs::write(node.path(POLICY), &old).unwrap();
        let own = format!("trust_policy = \"{POLICY}\"\nmetrics = \"unix:{METRICS}\"\n");
        let _agent = scenario.start_agent(node, &[&own, CONFIG].concat()).unwrap();
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        a_checkpoint(scenario, node);
        a_rule(scenario, node);
    });
    scenario.end().unwrap();
}

fn a_checkpoint(scenario: &Scenario, node: &Node) {
    let path = format!("expiry/{}", node.name());
    let reference = scenario.reference(&format!("{path}:v1"));
    let key = format!("node-{}", node.name());
    let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
    let valid = |time| [&words[..], &["--valid-for", time]].concat();
    let taken = scenario.kyb_json(node, &valid("1s")).unwrap();
    let digest = taken["digest"].as_str().unwrap();
    let facts = ["inspect", &reference, "--plain-http", "--facts-only"];
    let facts = scenario.kyb_json(node, &facts).unwrap();
    // Such times compare as texts do.
    let told = |fact: &str| facts["config"][fact].as_str().unwrap().to_owned();
    let end = told("notAfter");
    assert!(end > told("created"), "{facts}");
    let is_over = || *node.run(&["date", "-u", "+%Y-%m-%dT%H:%M:%SZ"]).unwrap().trim() > *end;
    assert!(wait_until(END_LIMIT, is_over));

    let reason = "it was not to be restored after";
    let output = scenario.kyb(node, &["compat", &reference, "--plain-http"]).unwrap();
    assert!(output.status.code() == Some(2) && said(&output).contains(reason), "{}", said(&output));
    costs_no_payload(scenario, node, &path, digest, reason);
    let pinned = format!("{reference}@{digest}");
    node.run(&["ctr", "image", "pull", "--plain-http", &pinned]).unwrap();
    let wish = format!("restore.kybernate.io/main={pinned}");
    let mut create = command_of(node, [&pinned, "pod"], &[&wish], &[], &WORKLOAD);
    let output = create.stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success() && said(&output).contains(reason), "{}", said(&output));
    node.output(&["ctr", "container", "rm", "pod"]).unwrap();
    let output = scenario.kyb(node, &["provide", &reference, "--plain-http"]).unwrap();
    assert!(output.status.code() == Some(2) && said(&output).contains(reason), "{}", said(&output));
    are_counted(
        node,
        &[
            r#"trust_decisions_total{kind="stage",outcome="refused",reason="expired"}"#,
            r#"trust_decisions_total{kind="provide",outcome="refused",reason="expired"}"#,
        ],
    );

    scenario.kyb_json(node, &valid("1h")).unwrap();
    let output = restore(scenario, node, &reference, "again", &[]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.remove(node, "again").unwrap();
}

fn a_rule(scenario: &Scenario, node: &Node) {
    let reference = scenario.reference(&format!("expiry/strange:{}", node.name()));
    let key = "/srv/share/stranger.key";
    let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", key];
    scenario.kyb_json(node, &words).unwrap();
    refused(scenario, node, &reference, &[], "refused (signature)");
    // What counts again is read while the agent runs.
    fs::write(node.path(POLICY), rule(scenario, "not_after = 9999-01-01T00:00:00Z\n")).unwrap();
    let is_let_in = || restore(scenario, node, &reference, "strange", &[]).status.success();
    assert!(wait_until(END_LIMIT, is_let_in), "the rule does not count");
    scenario.wait_for_ticks(node, "strange").unwrap();
    // What was let in so can be taken again.
    checkpoint(
        scenario,
        node,
        "strange",
        &scenario.reference(&format!("expiry/own:{}", node.name())),
    );
}
