use kybernate_spec::checkpoint::{
    CpuFacts, DeviceFacts, DeviceStorage, Gpu, GpuFacts, NeededMount, XsaveFacts,
};

use super::*;

/// A checkpoint that has something for every rule, and a node it restores on.
#[derive(Clone)]
struct Scene {
    config: CheckpointConfig,
    index: Digest,
    runnable: Option<Digest>,
    node: NodeFacts,
    image: Option<Digest>,
    offer: Offer,
}

/// A change to the scene, and what the rule's sentence must have in it then.
type Change = (fn(&mut Scene), &'static [&'static str]);

/// What breaks a rule, and what leaves it open. Some rules only ever do one of them.
struct Case {
    rule: Rule,
    broken: Option<Change>,
    unknown: Option<Change>,
}

fn gpu(uuid: &str) -> Gpu {
    Gpu {
        uuid: uuid.to_owned(),
        model: "NVIDIA H200".to_owned(),
        memory_bytes: 143_771 << 20,
        compute_capability: "9.0".to_owned(),
    }
}

fn node() -> NodeFacts {
    let xsave = XsaveFacts { features: 0b111, bytes: 832, bytes_max: 2440 };
    NodeFacts {
        architecture: "amd64".into(),
        kernel: "6.12.3-amd64".into(),
        page_bytes: 4096,
        cgroup: "v2".into(),
        lsm: "apparmor".into(),
        cpu: CpuFacts {
            vendor: "GenuineIntel".into(),
            model: "A".into(),
            features: ["avx", "avx2", "constant_tsc", "fpu", "xsave"].map(str::to_owned).into(),
            xsave: Some(xsave),
        },
        criu: "4.1.1".into(),
        runtime: "runc 1.1.15+ds1".into(),
        containerd: "1.7.24".into(),
        os: "Debian 13".into(),
        seccomp: Some(true),
        devices: Some(["/dev/kvm".to_owned()].into()),
        gpu: Some(GpuFacts {
            driver: "580.105.08".into(),
            cuda: "13.0".into(),
            devices: vec![gpu("GPU-a"), gpu("GPU-b")],
        }),
    }
}

fn scene() -> Scene {
    let mut config = CheckpointConfig { node: Some(node()), ..CheckpointConfig::default() };
    config.source.image_digest = Some(Digest::of(b"source"));
    config.device = DeviceFacts {
        storage: DeviceStorage::Pages,
        gpus: vec!["GPU-a".into()],
        streams: Vec::new(),
    };
    config.needs.identity.seccomp = true;
    config.needs.devices = vec!["/dev/kvm".into()];
    config.needs.host_namespaces = vec!["network".into()];
    let mount = |destination: &str, external| NeededMount {
        destination: destination.to_owned(),
        kind: "bind".to_owned(),
        options: Vec::new(),
        external,
    };
    config.needs.mounts = vec![
        mount("/data", true),
        mount("/proc", false),
        mount("/dev/shm", true),
        mount("/sys/fs/cgroup", true),
    ];
    Scene {
        config,
        index: Digest::of(b"index"),
        runnable: Some(Digest::of(b"runnable")),
        node: node(),
        image: Some(Digest::of(b"source")),
        offer: Offer {
            mounts: vec!["/data".into()],
            devices: vec!["/dev/kvm".into()],
            host_namespaces: vec!["network".into()],
        },
    }
}

impl Scene {
    fn examine(&self) -> Report {
        let subject = Subject {
            config: &self.config,
            index: Some(&self.index),
            runnable: self.runnable.as_ref(),
            volumes: vec!["/dev/shm"],
        };
        let (image, offer) = (self.image.as_ref(), self.offer.clone());
        examine(&subject, &Target { node: &self.node, image, offer })
    }

    fn there(&mut self) -> &mut NodeFacts {
        self.config.node.as_mut().unwrap()
    }

    fn gpus(&mut self) -> &mut GpuFacts {
        self.node.gpu.as_mut().unwrap()
    }
}

fn after(change: impl FnOnce(&mut Scene)) -> Report {
    let mut scene = scene();
    change(&mut scene);
    scene.examine()
}

fn find(report: &Report, rule: Rule) -> &Finding {
    report.findings.iter().find(|found| found.rule == rule).unwrap()
}

const fn case(rule: Rule, broken: Option<Change>, unknown: Option<Change>) -> Case {
    Case { rule, broken, unknown }
}

/// What the node is: every rule breaks by a change here and stays open when a fact is missing.
fn node_cases() -> Vec<Case> {
    vec![
        case(Rule::Facts, None, Some((|s| s.config.node = None, &["no facts"]))),
        case(
            Rule::Architecture,
            Some((|s| s.node.architecture = "arm64".into(), &["\"arm64\"", "\"amd64\""])),
            Some((|s| s.there().architecture.clear(), &["was not known"])),
        ),
        case(
            Rule::CpuVendor,
            Some((
                |s| s.node.cpu.vendor = "AuthenticAMD".into(),
                &["AuthenticAMD", "GenuineIntel"],
            )),
            Some((|s| s.node.cpu.vendor.clear(), &["is not known"])),
        ),
        case(
            Rule::CpuFpu,
            Some((
                |s| s.node.cpu.xsave.as_mut().unwrap().bytes = 2696,
                &["2696 of 2440", "832 of 2440"],
            )),
            Some((|s| s.there().cpu.xsave = None, &["not known where"])),
        ),
        case(
            Rule::CpuFeatures,
            Some((
                |s| s.node.cpu.features.retain(|name| name != "avx2"),
                &["lacks 1 of the 4", ": avx2"],
            )),
            Some((|s| s.node.cpu.features.clear(), &["not known here"])),
        ),
        case(
            Rule::CpuFlags,
            Some((
                |s| s.node.cpu.features.retain(|name| name != "constant_tsc"),
                &["1 of the 1", "constant_tsc"],
            )),
            Some((|s| s.there().cpu.features.clear(), &["not known where"])),
        ),
        case(
            Rule::CpuModel,
            Some((|s| s.node.cpu.model = "B".into(), &["\"B\"", "\"A\""])),
            Some((|s| s.there().cpu.model.clear(), &["not known"])),
        ),
    ]
}

/// What runs on it.
fn software_cases() -> Vec<Case> {
    vec![
        case(
            Rule::Kernel,
            Some((|s| s.node.kernel = "6.1.9".into(), &["6.1.9", "6.12.3-amd64"])),
            Some((|s| s.node.kernel = "mainline".into(), &["mainline"])),
        ),
        case(
            Rule::PageSize,
            Some((|s| s.node.page_bytes = 65536, &["65536", "4096"])),
            Some((|s| s.there().page_bytes = 0, &["not known"])),
        ),
        case(
            Rule::Cgroup,
            Some((|s| s.node.cgroup = "v1".into(), &["\"v1\"", "\"v2\""])),
            Some((|s| s.there().cgroup.clear(), &["not known"])),
        ),
        case(
            Rule::Criu,
            Some((|s| s.node.criu = "4.1".into(), &["CRIU 4.1 ", "4.1.1"])),
            Some((|s| s.node.criu.clear(), &["is not known"])),
        ),
        case(
            Rule::RuntimeName,
            Some((|s| s.node.runtime = "crun 1.20".into(), &["\"crun\"", "\"runc\""])),
            Some((|s| s.there().runtime.clear(), &["not known"])),
        ),
        case(
            Rule::RuntimeVersion,
            Some((|s| s.node.runtime = "runc 1.0.3".into(), &["1.0.3", "1.1.15+ds1"])),
            Some((|s| s.node.runtime = "runc".into(), &["not known", "1.1.15"])),
        ),
        case(
            Rule::Containerd,
            Some((|s| s.node.containerd = "2.1.9".into(), &["2.1.9", "1.7.24"])),
            Some((|s| s.node.containerd.clear(), &["not known"])),
        ),
        case(
            Rule::Lsm,
            Some((|s| s.node.lsm = "none".into(), &["\"none\"", "\"apparmor\""])),
            Some((|s| s.there().lsm.clear(), &["not known"])),
        ),
        case(
            Rule::Seccomp,
            Some((|s| s.node.seccomp = Some(false), &["none of the seccomp filters"])),
            Some((|s| s.node.seccomp = None, &["not known"])),
        ),
    ]
}

/// What is around the process.
fn other_cases() -> Vec<Case> {
    vec![
        case(
            Rule::Image,
            Some((|s| (s.runnable, s.image) = (None, None), &["no runnable image"])),
            None,
        ),
        case(
            Rule::ImageDigest,
            Some((|s| s.image = Some(Digest::of(b"x")), &["is sha256:2d71", "was sha256:41cf"])),
            Some((|s| s.config.source.image_digest = None, &["is sha256:41cf", "not known"])),
        ),
        case(
            Rule::Mounts,
            Some((|s| s.offer.mounts.clear(), &["\"/data\"", "--allow-mount SOURCE:/data"])),
            None,
        ),
        case(
            Rule::Devices,
            Some((|s| s.offer.devices.clear(), &["--allow-device /dev/kvm"])),
            None,
        ),
        case(
            Rule::DevicesPresent,
            Some((|s| s.node.devices = Some([].into()), &["\"/dev/kvm\"", "none here"])),
            Some((|s| s.node.devices = None, &["/dev/kvm", "not known"])),
        ),
        case(
            Rule::Namespaces,
            Some((|s| s.offer.host_namespaces.clear(), &["--allow-host-namespace network"])),
            None,
        ),
    ]
}

fn gpu_cases() -> Vec<Case> {
    vec![
        case(
            Rule::GpuCount,
            Some((|s| s.gpus().devices.clear(), &["0 GPUs here", "used 1"])),
            Some((|s| s.node.gpu = None, &["not known"])),
        ),
        case(
            Rule::GpuModel,
            Some((
                |s| s.gpus().devices.iter_mut().for_each(|gpu| gpu.model = "NVIDIA L4".into()),
                &["NVIDIA L4", "NVIDIA H200"],
            )),
            Some((|s| s.gpus().devices[0].model.clear(), &["NVIDIA H200"])),
        ),
        case(
            Rule::GpuCapability,
            Some((
                |s| {
                    let gpus = s.gpus().devices.iter_mut();
                    gpus.for_each(|gpu| gpu.compute_capability = "8.9".into());
                },
                &["here: 8.9", "used: 9.0"],
            )),
            Some((|s| s.there().gpu = None, &["of the checkpoint are not known"])),
        ),
        case(
            Rule::GpuMemory,
            Some((
                |s| s.gpus().devices.iter_mut().for_each(|gpu| gpu.memory_bytes = 1 << 30),
                &["1073741824 bytes", "150754820096 bytes"],
            )),
            Some((|s| s.gpus().devices[1].memory_bytes = 0, &["150754820096 bytes"])),
        ),
        case(
            Rule::GpuDriver,
            Some((|s| s.gpus().driver = "580.95.05".into(), &["580.95.05", "580.105.08"])),
            Some((|s| s.gpus().driver.clear(), &["is not known"])),
        ),
        case(
            Rule::GpuCuda,
            Some((|s| s.gpus().cuda = "12.8".into(), &["12.8", "13.0"])),
            Some((|s| s.gpus().cuda.clear(), &["not known"])),
        ),
        case(
            Rule::GpuUuid,
            Some((
                |s| {
                    s.gpus().driver = "570.10".into();
                    s.gpus().devices.remove(0);
                },
                &["GPU-b takes the place of GPU-a", "before 580", "570.10"],
            )),
            Some((|s| s.config.device.gpus = vec!["GPU-x".into()], &["does not describe"])),
        ),
        case(
            Rule::GpuStorage,
            Some((
                |s| s.config.device.storage = DeviceStorage::Device,
                &["takes driver 615", "580.105.08"],
            )),
            Some((
                |s| {
                    s.config.device.storage = DeviceStorage::Device;
                    s.gpus().driver.clear();
                },
                &["not known"],
            )),
        ),
    ]
}

#[test]
fn every_rule_holds_breaks_and_stays_open() {
    let good = scene().examine();
    let cases = [node_cases(), software_cases(), other_cases(), gpu_cases()];
    let cases: Vec<Case> = cases.into_iter().flatten().collect();
    assert_eq!(cases.iter().map(|case| case.rule).collect::<Vec<_>>(), Rule::ALL);
    for Case { rule, broken, unknown } in cases {
        let holding = find(&good, rule);
        assert_eq!(holding.outcome, Outcome::Holds, "{holding:?}");
        for (change, wanted) in [(broken, Outcome::Broken), (unknown, Outcome::Unknown)] {
            let Some((change, words)) = change else { continue };
            let report = after(change);
            let found = find(&report, rule);
            assert_eq!(found.outcome, wanted, "{found:?}");
            for word in words {
                assert!(found.message.contains(word), "{word:?} is missing in {found:?}");
            }
            // What weighs decides, and what decides is told.
            let verdict = match (rule.severity(), wanted) {
                (Severity::Refuse, Outcome::Broken) => Verdict::Incompatible,
                (Severity::Refuse, _) => Verdict::Unknown,
                _ => Verdict::Compatible,
            };
            let told = report.obstacles().any(|found| found.rule == rule);
            assert_eq!(told, rule.severity() == Severity::Refuse, "{found:?}");
            assert!(verdict == Verdict::Compatible || report.verdict() != Verdict::Compatible);
        }
    }
}

#[test]
fn a_node_like_the_source_or_newer_is_good() {
    let newer: [fn(&mut Scene); 7] = [
        |_| {},
        |s| (s.config.node.as_mut().unwrap().criu, s.node.criu) = ("4.2.0".into(), "4.2".into()),
        |s| s.node.criu = "4.2".into(),
        |s| s.node.criu = "4.10.0".into(),
        |s| s.node.kernel = "6.12.1".into(),
        |s| s.node.containerd = "2.1.9".into(),
        |s| s.node.cpu.features.extend(["amx_tile".into()]),
    ];
    for change in newer {
        let report = after(change);
        assert_eq!(report.verdict(), Verdict::Compatible, "{:?}", report.obstacles().next());
    }
}

#[test]
fn every_reason_is_given_at_once() {
    let report = after(|s| {
        s.node.architecture = "arm64".into();
        s.node.kernel = "6.1".into();
        s.node.cpu.features.remove("avx2");
        s.offer.devices.clear();
    });
    let rules: Vec<&str> = report.obstacles().map(|found| found.rule.as_str()).collect();
    assert_eq!(rules, ["architecture", "cpu.features", "kernel", "devices"]);
    assert_eq!(report.verdict(), Verdict::Incompatible);
}

#[test]
fn without_facts_nothing_is_known_and_that_is_said_once() {
    let report = after(|s| s.config.node = None);
    assert_eq!(report.verdict(), Verdict::Unknown);
    let rules: Vec<Rule> = report.obstacles().map(|found| found.rule).collect();
    assert_eq!(rules, [Rule::Facts]);
}

/// What is not in the checkpoint cannot be in the way.
#[test]
fn rules_about_what_is_not_there_hold_on_a_node_nobody_knows() {
    let report = after(|s| {
        s.config.device = DeviceFacts::default();
        s.config.needs.devices.clear();
        s.config.needs.identity.seccomp = false;
        (s.node.gpu, s.node.devices, s.node.seccomp) = (None, None, None);
    });
    assert_eq!(report.verdict(), Verdict::Compatible);
    assert_eq!(report.gpu_pairs, []);
}

#[test]
fn features_of_the_kernel_are_no_instructions() {
    let report = after(|s| {
        s.there().cpu.features.extend(["ibrs", "tsc_adjust", "ibpb_exit_to_user"].map(Into::into));
    });
    assert_eq!(report.verdict(), Verdict::Compatible);
    assert_eq!(find(&report, Rule::CpuFlags).outcome, Outcome::Broken);
    let report = after(|s| s.there().cpu.features.extend(["avx10_2".into(), "fma".into()]));
    assert_eq!(find(&report, Rule::CpuFeatures).outcome, Outcome::Broken);
    // Elsewhere all features are instructions.
    let report = after(|s| {
        s.there().architecture = "arm64".into();
        s.there().cpu.features.extend(["sve2".into()]);
    });
    assert!(find(&report, Rule::CpuFeatures).message.ends_with(": sve2"));
}

#[test]
fn registers_must_be_saved_alike() {
    let broken: [fn(&mut Scene); 3] = [
        |s| s.there().cpu.xsave.as_mut().unwrap().features |= 1 << 9,
        |s| s.node.cpu.xsave.as_mut().unwrap().bytes_max += 64,
        |s| s.node.cpu.features.retain(|name| name != "xsave"),
    ];
    for change in broken {
        assert_eq!(find(&after(change), Rule::CpuFpu).outcome, Outcome::Broken);
    }
    let none = after(|s| s.there().cpu.features.retain(|name| name != "xsave"));
    assert_eq!(find(&none, Rule::CpuFpu).outcome, Outcome::Holds);
}

#[test]
fn each_gpu_gets_one_of_its_own() {
    let pair = |from: &str, to: &str| Pair { from: from.to_owned(), to: to.to_owned() };
    let report = after(|s| s.config.device.gpus.clear());
    assert_eq!(report.gpu_pairs, [pair("GPU-a", "GPU-a"), pair("GPU-b", "GPU-b")]);
    // GPU-b stays, GPU-a goes to the smallest that is large enough.
    let report = after(|s| {
        s.config.device.gpus.clear();
        let sized = |uuid, bytes| Gpu { memory_bytes: bytes, ..gpu(uuid) };
        s.gpus().devices =
            vec![sized("GPU-c", 1 << 40), sized("GPU-d", 1 << 39), sized("GPU-e", 1), gpu("GPU-b")];
    });
    assert_eq!(report.gpu_pairs, [pair("GPU-a", "GPU-d"), pair("GPU-b", "GPU-b")]);
    assert_eq!(report.verdict(), Verdict::Compatible);
    // One short: the one that is here keeps its place, the other is alone.
    let report = after(|s| {
        s.config.device.gpus.clear();
        s.gpus().devices.remove(0);
    });
    assert_eq!(report.gpu_pairs, []);
    assert!(find(&report, Rule::GpuUuid).message.ends_with("the place of GPU-a"));
}

#[test]
fn a_container_may_be_made_of_the_checkpoint_itself() {
    let own: [fn(&mut Scene); 3] = [
        |s| s.image = None,
        |s| s.image = Some(s.index.clone()),
        |s| s.image.clone_from(&s.runnable),
    ];
    for change in own {
        assert_eq!(find(&after(change), Rule::ImageDigest).outcome, Outcome::Holds);
    }
    // Without a runnable image, the source's will do.
    assert_eq!(after(|s| s.runnable = None).verdict(), Verdict::Compatible);
}
