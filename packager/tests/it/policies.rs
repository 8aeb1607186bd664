//! Policies, as people use them.

use kybernate_packager::policy::Policy;
use serde_json::Value;
use tempfile::TempDir;

use crate::dump::dump;
use crate::kyb::{Ran, kyb};

async fn run(scratch: &TempDir, line: &str) -> Ran {
    kyb(scratch.path(), line.split(' ')).await
}

/// A directory with the key pairs `ours` and `other`, and a checkpoint of the namespace `shop` in
/// the layout `team`, signed with `ours`, and in `bare`, unsigned.
async fn scene() -> TempDir {
    let scratch = tempfile::tempdir().unwrap();
    dump(scratch.path(), 3);
    for prefix in ["ours", "other"] {
        assert_eq!(run(&scratch, &format!("keygen {prefix}")).await.code, 0);
    }
    let facts = r#"{"version": "1.0", "source": {"namespace": "shop"}}"#;
    fs_err::write(scratch.path().join("facts.json"), facts).unwrap();
    let packed =
        run(&scratch, "pack dump oci:team:v1 --facts facts.json --sign-key ours.key").await;
    assert_eq!(packed.code, 0, "{packed:?}");
    let packed = run(&scratch, "pack dump oci:bare:v1 --facts facts.json").await;
    assert_eq!(packed.code, 0, "{packed:?}");
    scratch
}

fn policy(scratch: &TempDir, text: &str) {
    let directory = scratch.path().canonicalize().unwrap();
    let text = text.replace("HERE", &directory.display().to_string());
    fs_err::write(scratch.path().join("policy.toml"), text).unwrap();
}

fn rule_of(ran: &Ran) -> Value {
    let told: Value = serde_json::from_str(&ran.out).unwrap();
    told["error"]["rule"].clone()
}

#[tokio::test]
async fn a_policy_decides_by_repository_namespace_and_key() {
    let scratch = scene().await;
    policy(
        &scratch,
        "[[rule]]\nname = 'shops'\nrepositories = ['oci:HERE/*']\nkeys = ['ours.pub']\n\
         source_namespaces = ['shop']\ntarget_namespaces = ['shop', 'lab']\n",
    );
    let verified = run(&scratch, "verify oci:team:v1 --policy policy.toml --json").await.json();
    assert_eq!(verified["rule"], "shops");
    assert!(verified["signature"].is_string() && verified["warning"].is_null(), "{verified}");
    for target in ["shop", "lab"] {
        let line = format!("verify oci:team:v1 --policy policy.toml --target-namespace {target}");
        assert_eq!(run(&scratch, &line).await.code, 0);
    }
    let line = "verify oci:team:v1 --policy policy.toml --target-namespace bank --json";
    let bank = run(&scratch, line).await;
    bank.ended(2, "no rule of the policy lets checkpoints of oci:");
    assert_eq!(rule_of(&bank), "policy");
    let bare = run(&scratch, "unpack oci:bare:v1 out --policy policy.toml --json").await;
    bare.ended(2, "the policy wants a signature by a key of rule \"shops\"");
    assert_eq!(rule_of(&bare), "signature");
    assert!(!scratch.path().join("out").exists());
    let out = run(&scratch, "unpack oci:team:v1 out --policy policy.toml").await;
    assert_eq!(out.code, 0, "{out:?}");

    let other = "[[rule]]\nrepositories = ['oci:HERE/*']\nkeys = ['other.pub']\n";
    policy(&scratch, other);
    let refused = run(&scratch, "verify oci:team:v1 --policy policy.toml").await;
    refused.ended(2, "by none of the trusted keys");
    policy(&scratch, &format!("{other}not_after = 2020-01-01T00:00:00Z\n"));
    let outdated = run(&scratch, "verify oci:team:v1 --policy policy.toml").await;
    outdated.ended(2, "rule \"rule[0]\" counted until 2020-01-01T00:00:00Z");
}

#[tokio::test]
async fn a_rule_may_only_warn_or_not_look_at_all() {
    let scratch = scene().await;
    let rule = "[[rule]]\nname = 'try'\nrepositories = ['oci:HERE/**']\nkeys = ['other.pub']\n";
    policy(&scratch, &format!("{rule}mode = 'warn'\n"));
    for name in ["team", "bare"] {
        let line = format!("verify oci:{name}:v1 --policy policy.toml");
        let told = run(&scratch, &line).await;
        assert!(told.code == 0 && told.out.starts_with("tolerated sha256:"), "{told:?}");
        let told = run(&scratch, &format!("{line} --json")).await.json();
        assert!(told["warning"].as_str().unwrap().contains("signed"), "{told}");
        assert!(told["key"].is_null() && told["rule"] == "try", "{told}");
    }
    policy(&scratch, "[[rule]]\nrepositories = ['oci:HERE/bare']\nmode = 'off'\n");
    let out = run(&scratch, "unpack oci:bare:v1 out --policy policy.toml").await;
    assert!(out.code == 0 && out.out.contains("does not look at signatures"), "{out:?}");
    run(&scratch, "verify oci:team:v1 --policy policy.toml").await.ended(2, "no rule");
}

#[tokio::test]
async fn what_is_past_its_time_is_refused_by_every_policy() {
    let scratch = scene().await;
    let facts = r#"{"version": "1.0", "notAfter": "2020-01-01T00:00:00Z"}"#;
    fs_err::write(scratch.path().join("facts.json"), facts).unwrap();
    let packed = run(&scratch, "pack dump oci:old:v1 --facts facts.json --sign-key ours.key").await;
    assert_eq!(packed.code, 0, "{packed:?}");
    for mode in ["enforce", "warn", "off"] {
        policy(
            &scratch,
            &format!(
                "[[rule]]\nrepositories = ['oci:HERE/**']\nkeys = ['ours.pub']\nmode = '{mode}'\n"
            ),
        );
        let refused = run(&scratch, "verify oci:old:v1 --policy policy.toml --json").await;
        refused.ended(2, "was not to be restored after 2020-01-01T00:00:00Z");
        assert_eq!(rule_of(&refused), "policy");
    }
}

#[tokio::test]
async fn what_is_wrong_with_a_policy_is_wrong_usage() {
    let scratch = scene().await;
    policy(&scratch, "[[rule]]\nrepositories = ['a']\nkeys = ['none.pub']\n\nmode = 'on'\n");
    // Nothing is asked of a registry for that.
    let told = run(&scratch, "verify localhost:1/a/b:v1 --policy policy.toml").await;
    told.ended(64, "policy.toml:3:9: rule[0].keys[0]: none.pub cannot be read");
    assert!(told.told.contains("policy.toml:5:8: rule[0].mode: must be enforce"), "{told:?}");
    run(&scratch, "verify oci:team:v1").await.ended(64, "--policy");
    let both = "verify oci:team:v1 --policy policy.toml --key ours.pub";
    run(&scratch, both).await.ended(64, "cannot be used with");
    let target = "verify oci:team:v1 --key ours.pub --target-namespace a";
    run(&scratch, target).await.ended(64, "cannot be used with");
}

#[tokio::test]
async fn lists_and_chains_say_what_a_policy_says() {
    let scratch = scene().await;
    let rule = "[[rule]]\nname = 'shops'\nrepositories = ['oci:HERE/*']\nkeys = ['ours.pub']\n";
    let signed = async |layout: &str, more: &str| {
        let told = run(&scratch, &format!("ls oci:{layout} --policy policy.toml{more}")).await;
        assert_eq!(told.code, 0, "{told:?}");
        let listed = format!("ls oci:{layout} --policy policy.toml --json{more}");
        let listed = run(&scratch, &listed).await.json();
        let chain = format!("tree oci:{layout}:v1 --policy policy.toml --json{more}");
        let chain = run(&scratch, &chain).await.json();
        let signed = listed["checkpoints"][0]["signed"].clone();
        assert_eq!(chain["links"][0]["signed"], signed);
        (told.out, signed)
    };
    policy(&scratch, rule);
    let (told, verified) = signed("team", "").await;
    assert!(told.contains("verified, ") && told.contains("rule shops"), "{told}");
    assert!(verified["state"] == "verified" && verified["rule"] == "shops", "{verified}");
    let (told, refused) = signed("bare", "").await;
    assert!(told.contains("refused, not-signed"), "{told}");
    assert!(refused["state"] == "refused" && refused["objection"] == "not-signed", "{refused}");
    let (told, refused) = signed("team", " --target-namespace bank").await;
    assert!(told.contains("refused, no-rule"), "{told}");
    assert!(refused["message"].as_str().unwrap().contains("into namespace \"bank\""), "{refused}");
    policy(&scratch, &format!("{rule}mode = 'warn'\n"));
    let (told, tolerated) = signed("bare", "").await;
    assert!(told.contains("tolerated, rule shops"), "{told}");
    assert!(tolerated["message"].as_str().unwrap().contains("is not signed"), "{tolerated}");
    policy(&scratch, "[[rule]]\nname = 'any'\nrepositories = ['oci:HERE/*']\nmode = 'off'\n");
    let (told, looked) = signed("bare", "").await;
    assert!(told.contains("not looked at, rule any"), "{told}");
    assert_eq!(looked["state"], "notLooked");
    let both = "ls oci:team --policy policy.toml --key ours.pub";
    run(&scratch, both).await.ended(64, "cannot be used with");
}

#[tokio::test]
async fn a_base_must_be_let_into_the_new_checkpoints_namespace() {
    let scratch = scene().await;
    let rule = "[[rule]]\nrepositories = ['oci:HERE/*']\nkeys = ['ours.pub']\n";
    policy(&scratch, rule);
    let pack = |base: &str, facts: &str| {
        format!(
            "pack dump oci:new:v1 --base oci:{base}:v1 --base-policy policy.toml --facts {facts}"
        )
    };
    let packed = run(&scratch, &pack("team", "facts.json")).await;
    assert!(packed.code == 0 && packed.out.contains("generation 1"), "{packed:?}");
    run(&scratch, &pack("bare", "facts.json")).await.ended(2, "a signature by a key of rule");
    let bank = r#"{"version": "1.0", "source": {"namespace": "bank"}}"#;
    fs_err::write(scratch.path().join("bank.json"), bank).unwrap();
    let foreign = run(&scratch, &pack("team", "bank.json")).await;
    foreign.ended(2, "taken in namespace \"shop\", into namespace \"bank\"");
    let both = format!("{} --base-key ours.pub", pack("team", "facts.json"));
    run(&scratch, &both).await.ended(64, "cannot be used with");
}

/// The policy that the documentation shows can be read.
#[test]
fn the_example_is_a_policy() {
    let directory = tempfile::tempdir().unwrap();
    let key = kybernate_packager::key::SigningKey::generate().unwrap().public().to_pem();
    fs_err::write(directory.path().join("shop.pub"), key).unwrap();
    let readme = include_str!("../../README.md");
    let (_, rest) = readme.split_once("```toml\n").unwrap();
    let (example, _) = rest.split_once("```").unwrap();
    let file = directory.path().join("policy.toml");
    fs_err::write(&file, example).unwrap();
    let policy = Policy::read(&file).unwrap();
    assert_eq!(policy.rules().len(), 2);
}
