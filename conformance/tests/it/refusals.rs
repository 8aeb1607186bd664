//! What a rule refuses: exit code 2, the reason, and nothing made.

use std::process::Stdio;

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use kybernate_conformance::node::Node;
use kybernate_conformance::process::Process;
use kybernate_conformance::scenario::{PASSWORD, Scenario};

use crate::failures::victims::{END_LIMIT, processes};
use crate::harness::{at_once, checkpoint, on_both, refused, restore, said, start};

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

/// Stands in for runc, and says that it is another one.
const RUNC: &str = "#!/bin/sh\n[ \"$1\" = --version ] && exec cat /run/runc-version\n\
                    exec /usr/sbin/runc.real \"$@\"\n";

#[test]
fn a_checkpoint_of_another_runtime_is_warned_of_and_restored() {
    let mut scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "job", 16, &[]).unwrap();
    let reference = scenario.reference("refusal/runtime:v1");
    checkpoint(&scenario, a, "job", &reference);
    let b = &scenario.testbed.b;
    b.run(&["mv", "/usr/sbin/runc", "/usr/sbin/runc.real"]).unwrap();
    fs::write(b.path("/usr/sbin/runc"), RUNC).unwrap();
    b.run(&["chmod", "755", "/usr/sbin/runc"]).unwrap();
    for (version, rule) in [
        ("runc version 1.3.6", None),
        ("runc version 1.0.3", Some("runtime.version")),
        ("crun version 1.20", Some("runtime.name")),
    ] {
        fs::write(scenario.node("b").path("/run/runc-version"), version).unwrap();
        // The agent believes what it saw for a minute.
        scenario.next_agent("b", "").unwrap();
        let b = scenario.node("b");
        let told = scenario.kyb_json(b, &["compat", &reference, "--plain-http"]).unwrap();
        assert_eq!(told["verdict"], "compatible", "{version}: {told}");
        let rules = told["rules"].as_array().unwrap().iter();
        let broken: Vec<_> = rules
            .filter(|one| one["outcome"] == "broken" && one["severity"] == "warn")
            .filter_map(|one| one["rule"].as_str())
            .collect();
        assert_eq!(broken, Vec::from_iter(rule), "{version}: {told}");
        let output = restore(&scenario, b, &reference, "job", &[]);
        assert!(output.status.success(), "{version}: {}", said(&output));
        scenario.wait_for_ticks(b, "job").unwrap();
        scenario.remove(b, "job").unwrap();
    }
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

/// CRIU takes the second of two from one directory for a part of the first, and mounts it as its source is.
#[test]
fn a_volume_that_would_come_back_writable_is_refused() {
    const DATA: &str = "/var/lib/kybernate/data";
    let scenario = start();
    let (a, b) = (&scenario.testbed.a, &scenario.testbed.b);
    for node in [a, b] {
        fs::create_dir_all(node.path(DATA).join("sub")).unwrap();
    }
    let all = format!("type=bind,src={DATA},dst=/data,options=rbind:ro");
    let part = format!("type=bind,src={DATA}/sub,dst=/sub,options=rbind:ro");
    scenario.run_workload(a, "twice", 16, &["--mount", &all, "--mount", &part]).unwrap();
    let reference = scenario.reference("refusal/twice:v1");
    checkpoint(&scenario, a, "twice", &reference);
    let (all, part) = (format!("{DATA}:/data:ro"), format!("{DATA}/sub:/sub:ro"));
    let both = ["--allow-mount", &all, "--allow-mount", &part];
    refused(&scenario, b, &reference, &both, "\"/sub\" is writable");
    // Who may write there gets what CRIU makes.
    let part = format!("{DATA}/sub:/sub");
    let output = restore(
        &scenario,
        b,
        &reference,
        "twice",
        &["--allow-mount", &all, "--allow-mount", &part],
    );
    assert!(output.status.success(), "{}", said(&output));
    let sh = |script| {
        b.told(&["ctr", "task", "exec", "--exec-id", "sh", "twice", "sh", "-c", script]).unwrap()
    };
    assert_eq!(sh("for d in data sub; do echo > /$d/x && echo $d; done 2> /dev/null"), "sub\n");
    scenario.end().unwrap();
}

#[test]
fn privileges_beyond_the_defaults_are_refused() {
    let mut scenario = start();
    let a = &scenario.testbed.a;
    scenario.run_workload(a, "mighty", 16, &["--cap-add", "CAP_SYS_ADMIN"]).unwrap();
    let reference = scenario.reference("refusal/mighty:v1");
    checkpoint(&scenario, a, "mighty", &reference);
    at_once(&scenario, |node| {
        refused(&scenario, node, &reference, &[], "CAP_SYS_ADMIN");
        let output = restore(&scenario, node, &reference, "may", &["--allow-cap", "CAP_SYS_ADMIN"]);
        assert!(output.status.success(), "{}", said(&output));
    });

    scenario.run_workload(a, "host", 16, &["--net-host"]).unwrap();
    let host = scenario.reference("refusal/host:v1");
    let words = ["checkpoint", "host", &host, "--plain-http", "--sign-key", "node-a"];
    let output = scenario.kyb(a, &words).unwrap();
    let is_taken = output.status.success();
    assert!(is_taken || said(&output).contains("network"), "{}", said(&output));

    scenario.run_workload(a, "open", 16, &["--allow-new-privs"]).unwrap();
    let open = scenario.reference("refusal/open:v1");
    checkpoint(&scenario, a, "open", &open);
    for name in ["a", "b"] {
        scenario.next_agent(name, "require_seccomp = true\n").unwrap();
    }
    at_once(&scenario, |node| {
        if is_taken {
            refused(&scenario, node, &host, &["--allow-no-seccomp"], "network");
        }
        let privileges = "--allow-new-privileges";
        refused(&scenario, node, &open, &["--allow-no-seccomp"], privileges);
        refused(&scenario, node, &open, &[privileges], "no seccomp filter");
        let all = [privileges, "--allow-no-seccomp"];
        let output = restore(&scenario, node, &open, "free", &all);
        assert!(output.status.success(), "{}", said(&output));
    });
    scenario.end().unwrap();
}

/// Mounts something after the preflight that CRIU dumps and no restore takes back; and puts something
/// into a dump that whoever reads it waits for.
const HOOKS: &str = r#"
[[hooks]]
name = "mount"
when = "before"
command = ["/bin/sh", "-c", "nsenter -t $KYBERNATE_PID -m busybox mount --bind /proc/sys /tmp"]
on_request = true
[[hooks]]
name = "stall"
when = "while_paused"
command = ["/bin/sh", "-c", "cd /run/kybernate/stage/*/images && mkfifo core-999.img"]
on_request = true
"#;

/// What the process may that reads the images of a dump.
const CONFINED: [&str; 8] = [
    "Uid:\t65534\t65534\t65534\t65534\n",
    "Gid:\t65534\t65534\t65534\t65534\n",
    "Groups:\t \n",
    "CapInh:\t0000000000000000\n",
    "CapPrm:\t0000000000000000\n",
    "CapEff:\t0000000000000000\n",
    "CapAmb:\t0000000000000000\n",
    "NoNewPrivs:\t1\n",
];

/// Its limits, in seconds and bytes. The last one is set last.
const LIMITS: [(&str, &str); 5] = [
    ("Max cpu time", "3600"),
    ("Max address space", "1073741824"),
    ("Max core file size", "0"),
    ("Max file size", "0"),
    ("Max processes", "0"),
];

/// Returns a limit of a process, when both of it are the same.
fn limit(process: Process, name: &str) -> Option<String> {
    let limits = fs::read_to_string(format!("/proc/{}/limits", process.pid)).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = line.split_whitespace();
    let (soft, hard) = (words.next()?, words.next()?);
    (soft == hard).then(|| soft.to_owned())
}

/// Finds whoever reads the images of a node's dump, when the last limit is set.
fn reader(scenario: &Scenario, node: &Node) -> Process {
    let reads = |pid: u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line == b"kybernate-agent\0gate\0"
    };
    let mut reader = None;
    let reached = wait_until(END_LIMIT, || {
        reader = processes(node, reads).pop();
        let (name, most) = LIMITS[4];
        reader.is_some_and(|reader| limit(reader, name).as_deref() == Some(most))
    });
    let told = scenario.kyb_json(node, &["ps", "--operations"]).unwrap();
    assert!(reached, "nobody reads them: {reader:?}, {told}");
    reader.unwrap()
}

fn may_nothing(reader: Process) {
    let status = fs::read_to_string(format!("/proc/{}/status", reader.pid)).unwrap();
    for line in CONFINED {
        assert!(status.contains(line), "{line:?} is missing: {status}");
    }
    for (name, most) in LIMITS {
        assert_eq!(limit(reader, name).as_deref(), Some(most), "{name}");
    }
    // It has the pipes to us, and no other file.
    let files = fs::read_dir(format!("/proc/{}/fd", reader.pid)).unwrap();
    let files =
        files.map(|file| fs::read_link(file.unwrap().path()).unwrap().display().to_string());
    let others = files.filter(|file| !file.starts_with("pipe:") && file != "/dev/null");
    assert_eq!(others.collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn whoever_reads_the_images_of_a_dump_may_nothing() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        drop(agent);
        let _agent = scenario.start_agent(node, HOOKS).unwrap();
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        let before = scenario.traces(node).unwrap();
        let reference = scenario.reference(&format!("refusal/read:{}", node.name()));
        let key = format!("node-{}", node.name());
        let words = ["kyb", "checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
        let mut kyb = node.command(&[&words[..], &["--hook", "stall"]].concat());
        let kyb = kyb.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let reader = reader(scenario, node);
        may_nothing(reader);

        // There is nothing in it, which CRIU does not write.
        let end = "for file in /run/kybernate/stage/*/images/core-999.img; do : >$file; done";
        node.run(&["timeout", "50", "sh", "-c", end]).unwrap();
        let output = kyb.wait_with_output().unwrap();
        assert!(!output.status.success(), "{}", said(&output));
        assert!(said(&output).contains("cannot be judged"), "{}", said(&output));
        assert!(!reader.runs(), "it outlives the checkpoint");
        scenario.wait_for_ticks(node, "job").unwrap();
        assert_eq!(scenario.traces(node).unwrap(), before, "something is left");
    });
    scenario.end().unwrap();
}

#[test]
fn a_dump_that_nobody_restores_is_not_stored_and_its_source_not_stopped() {
    let mut scenario = start();
    on_both(&mut scenario, |scenario, node, agent| {
        agent.kill();
        let _agent = scenario.start_agent(node, HOOKS).unwrap();
        scenario.run_workload(node, "job", 16, &[]).unwrap();
        let reference = scenario.reference(&format!("refusal/lost:{}", node.name()));
        let key = format!("node-{}", node.name());
        let words = ["checkpoint", "job", &reference, "--plain-http", "--sign-key", &key];
        let words = [&words[..], &["--stop", "--hook", "mount"]].concat();
        let output = scenario.kyb(node, &words).unwrap();
        let text = said(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(
            text.contains("nobody could restore the dump") && text.contains("\"/tmp\""),
            "{text}"
        );
        scenario.wait_for_ticks(node, "job").unwrap();
        let output = scenario.kyb(node, &["inspect", &reference, "--plain-http"]).unwrap();
        assert!(!output.status.success(), "{}", said(&output));
        // The next one does not come as far as that.
        let output = scenario.kyb(node, &["preflight", "job"]).unwrap();
        assert!(said(&output).contains("refuse mount"), "{}", said(&output));
    });
    scenario.end().unwrap();
}
