//! What a rule refuses: exit code 2, the reason, and nothing made.

use fs_err as fs;
use kybernate_conformance::scenario::PASSWORD;

use crate::harness::{checkpoint, refused, restore, said, start};

#[test]
fn a_checkpoint_of_a_newer_criu_is_refused_by_an_older_one() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(b, "young", 16, &[]).unwrap();
    let reference = scenario.reference("refusal/young:v1");
    checkpoint(&scenario, b, "young", &reference);
    refused(&scenario, a, &reference, &[], "older than CRIU");
    scenario.end().unwrap();
}

#[test]
fn nobodys_strangers_and_unsigned_checkpoints_are_refused() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "job", 16, &[]).unwrap();

    let unsigned = scenario.reference("refusal/unsigned:v1");
    let words = ["checkpoint", "job", &unsigned, "--plain-http", "--unsigned"];
    scenario.kyb_json(a, &words).unwrap();
    refused(&scenario, b, &unsigned, &[], "is not signed");
    // The node's configuration does not permit that.
    refused(&scenario, b, &unsigned, &["--insecure-no-signature"], "allow_unsigned");

    let strange = scenario.reference("refusal/strange:v1");
    let key = "/srv/share/stranger.key";
    let words = ["checkpoint", "job", &strange, "--plain-http", "--sign-key", key];
    scenario.kyb_json(a, &words).unwrap();
    refused(&scenario, b, &strange, &[], "by none of the trusted keys");
    refused(&scenario, b, &strange, &["--key", "/srv/share/stranger.pub"], "allow_request_keys");

    // cosign's own signature is as good as ours.
    let digest = scenario.kyb_json(b, &["inspect", &unsigned, "--plain-http"]).unwrap();
    let digest = digest["digest"].as_str().unwrap().to_owned();
    let exact = format!("{}@{digest}", scenario.reference("refusal/unsigned"));
    let password = format!("COSIGN_PASSWORD={PASSWORD}");
    let sign = [
        "env",
        &password,
        "cosign",
        "sign",
        "--yes",
        "--key",
        "/srv/share/node-b.key",
        "--tlog-upload=false",
        "--use-signing-config=false",
        "--allow-http-registry",
        &exact,
    ];
    b.run(&sign).unwrap();
    let verify = ["verify", &exact, "--plain-http", "--key", "/srv/share/node-b.pub"];
    let verified = scenario.kyb(b, &verify).unwrap();
    assert!(verified.status.success(), "{}", said(&verified));
    let output = restore(&scenario, b, &unsigned, "signed-by-cosign", &[]);
    assert!(output.status.success(), "{}", said(&output));
    scenario.end().unwrap();
}

#[test]
fn a_host_mount_needs_to_be_allowed_by_name() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    for node in [a, b] {
        fs::create_dir_all(node.path("/var/lib/kybernate/data")).unwrap();
    }
    let mount = "type=bind,src=/var/lib/kybernate/data,dst=/data,options=rbind:rw";
    scenario.run_workload(a, "mounted", 16, &["--mount", mount]).unwrap();
    let reference = scenario.reference("refusal/mounted:v1");
    checkpoint(&scenario, a, "mounted", &reference);
    refused(&scenario, b, &reference, &[], "--allow-mount");
    let allow = ["--allow-mount", "/var/lib/kybernate/data:/data"];
    let output = restore(&scenario, b, &reference, "mounted", &allow);
    assert!(output.status.success(), "{}", said(&output));
    scenario.wait_for_ticks(b, "mounted").unwrap();
    scenario.end().unwrap();
}

#[test]
fn privileges_beyond_the_defaults_are_refused() {
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    scenario.run_workload(a, "mighty", 16, &["--cap-add", "CAP_SYS_ADMIN"]).unwrap();
    let reference = scenario.reference("refusal/mighty:v1");
    checkpoint(&scenario, a, "mighty", &reference);
    refused(&scenario, b, &reference, &[], "CAP_SYS_ADMIN");
    let output = restore(&scenario, b, &reference, "mighty", &["--allow-cap", "CAP_SYS_ADMIN"]);
    assert!(output.status.success(), "{}", said(&output));

    scenario.run_workload(a, "open", 16, &["--allow-new-privs"]).unwrap();
    let reference = scenario.reference("refusal/open:v1");
    checkpoint(&scenario, a, "open", &reference);
    refused(&scenario, b, &reference, &[], "--allow-new-privileges");

    scenario.run_workload(a, "host", 16, &["--net-host"]).unwrap();
    let reference = scenario.reference("refusal/host:v1");
    let words = ["checkpoint", "host", &reference, "--plain-http", "--sign-key", "node-a"];
    let output = scenario.kyb(a, &words).unwrap();
    if output.status.success() {
        refused(&scenario, b, &reference, &[], "network");
    } else {
        assert!(said(&output).contains("network"), "{}", said(&output));
    }
    scenario.end().unwrap();
}

/// Mounts something after the preflight that CRIU dumps and no restore takes back.
const MOUNT_HOOK: &str = r#"
[[hooks]]
name = "mount"
when = "before"
command = ["/bin/sh", "-c", "nsenter -t $KYBERNATE_PID -m busybox mount --bind /proc/sys /tmp"]
"#;

#[test]
fn a_dump_that_nobody_restores_is_not_stored_and_its_source_not_stopped() {
    let mut scenario = start();
    scenario.agent_a.take().unwrap().kill();
    scenario.agent_a = Some(scenario.start_agent(&scenario.testbed.a, MOUNT_HOOK).unwrap());
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let reference = scenario.reference("refusal/lost:v1");
    let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", "node-a", "--stop"];
    let output = scenario.kyb(a, &words).unwrap();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("nobody could restore the dump") && text.contains("\"/tmp\""), "{text}");
    scenario.wait_for_ticks(a, "job").unwrap();
    let output = scenario.kyb(a, &["inspect", &reference, "--plain-http"]).unwrap();
    assert!(!output.status.success(), "{}", said(&output));
    // The next one does not come as far as that.
    let output = scenario.kyb(a, &["preflight", "job"]).unwrap();
    assert!(said(&output).contains("refuse mount"), "{}", said(&output));
    scenario.end().unwrap();
}
