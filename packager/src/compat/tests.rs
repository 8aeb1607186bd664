use super::*;
use kybernate_spec::checkpoint::CpuFacts;

fn node() -> NodeFacts {
    NodeFacts {
        architecture: "amd64".into(),
        kernel: "6.12.3-amd64".into(),
        page_bytes: 4096,
        cgroup: "v1".into(),
        lsm: "none".into(),
        cpu: CpuFacts {
            vendor: "GenuineIntel".into(),
            model: "A".into(),
            features: ["avx", "avx2"].map(str::to_owned).into(),
        },
        criu: "4.1.1".into(),
        runtime: "runc 1.1.15".into(),
        containerd: "1.7.24".into(),
        os: "Debian 13".into(),
    }
}

fn check(change: impl FnOnce(&mut NodeFacts)) -> Vec<String> {
    let config = CheckpointConfig { node: Some(node()), ..CheckpointConfig::default() };
    let mut here = node();
    change(&mut here);
    compare(&config, &here).iter().map(ToString::to_string).collect()
}

#[test]
fn a_node_like_the_source_or_newer_is_good() {
    assert_eq!(check(|_| {}), [""; 0]);
    assert_eq!(check(|here| here.criu = "4.2".into()), [""; 0]);
    assert_eq!(check(|here| here.criu = "4.10.0".into()), [""; 0]);
    assert_eq!(check(|here| here.kernel = "6.12.1".into()), [""; 0]);
    assert_eq!(check(|here| here.containerd = "2.1.9".into()), [""; 0]);
    assert_eq!(check(|here| here.cpu.features.extend(["amx".into()])), [""; 0]);
}

#[test]
fn an_older_criu_is_refused() {
    assert_eq!(
        check(|here| here.criu = "4.0.9".into()),
        ["CRIU 4.0.9 here is older than CRIU 4.1.1, which took the checkpoint"]
    );
    assert_eq!(check(|here| here.criu = "4.1".into()).len(), 1);
    assert_eq!(check(|here| here.criu = "unknown".into()).len(), 1);
}

#[test]
fn every_reason_is_given_at_once() {
    let reasons = check(|here| {
        here.architecture = "arm64".into();
        here.kernel = "6.1".into();
        here.cpu.features.remove("avx2");
    });
    assert_eq!(
        reasons,
        [
            "the CPU architecture is \"arm64\" here, but was \"amd64\" where the checkpoint was taken",
            "kernel 6.1 here is older than 6.12.3-amd64, on which the checkpoint was taken",
            "this CPU lacks avx2, which the checkpoint's process may use",
        ]
    );
}

#[test]
fn without_facts_nothing_is_known() {
    assert_eq!(compare(&CheckpointConfig::default(), &node()), [Incompatibility::UnknownFacts]);
}
