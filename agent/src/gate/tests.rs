use std::collections::BTreeMap;

use proptest::prelude::*;
use prost::Message as _;

use super::images::{FILES, File, RegularFile};
use super::*;
use kybernate_packager::criu::messages::{
    CORE, Core, Credentials, IDS, Ids, Limit, Limits, MOUNTS, MountEntry as Mount, ProcessCore,
    SECCOMP, Seccomp, SeccompFilter, ThreadCore,
};
use kybernate_packager::criu::{Inventory, Magic, Plugins, Process};
use kybernate_packager::runtime_spec::defaults;

mod cgroups;
mod labels;
mod memory;
mod mounts;
mod namespaces;
mod network;
mod opened;
mod pages;
mod remaps;
mod sockets;

/// Bits of the capabilities containerd gives by default.
const DEFAULT_CAPABILITIES: u32 = 0xa804_25fb;
const SYS_ADMIN: u32 = 1 << 21;

/// A dump of one process, as CRIU writes it, to be spoiled by tests.
struct Dump {
    inventory: Inventory,
    tree: Vec<Process>,
    cores: BTreeMap<u32, Core>,
    ids: BTreeMap<u32, Ids>,
    mounts: Vec<Mount>,
    files: Vec<File>,
    seccomp: Option<Seccomp>,
    /// Files with any name, without content.
    others: Vec<String>,
}

fn ids(base: u32) -> Ids {
    let id = |number| Some(base + number);
    let (pid, network, ipc, uts, mount) = (id(1), id(2), id(3), id(4), id(5));
    Ids { pid, network, ipc, uts, mount, user: Some(1), ..Ids::default() }
}

fn core() -> Core {
    let set = || vec![DEFAULT_CAPABILITIES, 0];
    let credentials = Credentials {
        permitted: set(),
        effective: set(),
        bounding: set(),
        inheritable: vec![0, 0],
        no_new_privs: Some(1),
        ..Credentials::default()
    };
    Core {
        process: Some(ProcessCore { state: 1, ..ProcessCore::default() }),
        ids: None,
        thread: Some(ThreadCore {
            credentials: Some(credentials),
            seccomp_mode: Some(0),
            ..ThreadCore::default()
        }),
    }
}

fn mount(id: u32, parent: u32, kind: i32, path: &str) -> Mount {
    let (root, path) = ("/".to_owned(), path.to_owned());
    Mount { kind, id, parent, device: id, root, path, ..Mount::default() }
}

fn locked(id: u32, parent: u32, kind: i32, path: &str, root: &str) -> Mount {
    let (flags, super_flags) = (1, Some(0));
    Mount { flags, super_flags, root: root.to_owned(), ..mount(id, parent, kind, path) }
}

impl Default for Dump {
    fn default() -> Self {
        let masked =
            Mount { external_key: Some("/dev/null".to_owned()), ..mount(6, 2, 5, "/proc/keys") };
        Self {
            inventory: Inventory {
                img_version: 2,
                root_ids: Some(Ids { user: Some(1), ..ids(100) }),
                lsm: Some(0),
                ..Inventory::default()
            },
            tree: vec![Process { pid: 1, ppid: 0, threads: vec![1] }],
            cores: BTreeMap::from([(1, core())]),
            ids: BTreeMap::from([(1, ids(0))]),
            mounts: vec![
                mount(1, 0, 17, "/"),
                mount(2, 1, 1, "/proc"),
                locked(3, 1, 2, "/sys", "/"),
                mount(4, 1, 5, "/dev"),
                locked(5, 2, 1, "/proc/sys", "/sys"),
                masked,
            ],
            files: vec![File {
                kind: 1,
                id: 0,
                regular: Some(RegularFile::default()),
                ..File::default()
            }],
            seccomp: Some(Seccomp::default()),
            others: vec!["mm-1.img".to_owned(), "pages-1.img".to_owned()],
        }
    }
}

impl Dump {
    fn images(&self) -> Vec<(String, Vec<u8>)> {
        let one = |magic, message: Vec<u8>| image(magic, &[message]);
        let each = |magic, messages: Vec<Vec<u8>>| image(magic, &messages);
        let mut images = vec![
            ("inventory.img".to_owned(), inventory(&self.inventory)),
            (
                "pstree.img".to_owned(),
                each(Magic::PSTREE, self.tree.iter().map(prost::Message::encode_to_vec).collect()),
            ),
            (
                "mountpoints-13.img".to_owned(),
                each(MOUNTS, self.mounts.iter().map(prost::Message::encode_to_vec).collect()),
            ),
            (
                "files.img".to_owned(),
                each(FILES, self.files.iter().map(prost::Message::encode_to_vec).collect()),
            ),
        ];
        for (pid, core) in &self.cores {
            images.push((format!("core-{pid}.img"), one(CORE, core.encode_to_vec())));
        }
        for (pid, ids) in &self.ids {
            images.push((format!("ids-{pid}.img"), one(IDS, ids.encode_to_vec())));
        }
        if let Some(seccomp) = &self.seccomp {
            images.push(("seccomp.img".to_owned(), one(SECCOMP, seccomp.encode_to_vec())));
        }
        images
    }
}

/// Frames messages as CRIU does.
fn image(magic: Magic, messages: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = 0x5456_4319_u32.to_le_bytes().to_vec();
    bytes.extend(magic.0.to_le_bytes());
    for message in messages {
        bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
        bytes.extend(message);
    }
    bytes
}

fn inventory(inventory: &Inventory) -> Vec<u8> {
    // The one image without the common magic.
    image(Magic::INVENTORY, &[inventory.encode_to_vec()])[4..].to_vec()
}

fn summarise(images: &[(String, Vec<u8>)], others: &[String]) -> Result<Summary, String> {
    let told = |error: summary::SummaryError| kybernate_spec::chain(&error).to_string();
    let mut builder = Builder::default();
    for name in others {
        builder.name(name).map_err(told)?;
    }
    for (name, content) in images {
        builder.name(name).map_err(told)?;
        builder.image(name, &**content).map_err(told)?;
    }
    builder.finish().map_err(told)
}

fn expected() -> Expected {
    let set = |paths: &[&str]| paths.iter().map(ToString::to_string).collect();
    Expected {
        capabilities: set(defaults::CAPABILITIES),
        no_new_privileges: true,
        masked: set(&["/proc/keys"]),
        read_only: set(&["/sys", "/proc/sys"]),
        ..Expected::default()
    }
}

/// Spoils a dump and returns what is wrong with it, undecodable or not.
fn check(spoil: impl FnOnce(&mut Dump, &mut Expected)) -> String {
    let (mut dump, mut expected) = (Dump::default(), expected());
    spoil(&mut dump, &mut expected);
    match summarise(&dump.images(), &dump.others) {
        Ok(summary) => judge(&summary, &expected).join("; "),
        Err(reason) => reason,
    }
}

fn credentials(dump: &mut Dump) -> &mut Credentials {
    let core = dump.cores.get_mut(&1).unwrap();
    core.thread.as_mut().unwrap().credentials.as_mut().unwrap()
}

fn assert_refused(reason: &str, spoil: impl FnOnce(&mut Dump, &mut Expected)) {
    let found = check(spoil);
    assert!(found.contains(reason), "{reason:?} is not in {found:?}");
}

#[test]
fn an_ordinary_container_passes() {
    assert_eq!(check(|_, _| {}), "");
    let dump = Dump::default();
    let identity = summarise(&dump.images(), &dump.others).unwrap().identity();
    assert_eq!(identity.uids, [0].into());
    assert!(identity.no_new_privileges && !identity.seccomp);
    assert_eq!(identity.capabilities.len(), defaults::CAPABILITIES.len());
}

#[test]
fn capabilities_in_any_set_count() {
    type Pick = fn(&mut Credentials) -> &mut Vec<u32>;
    let sets: [Pick; 5] = [
        |c| &mut c.inheritable,
        |c| &mut c.permitted,
        |c| &mut c.effective,
        |c| &mut c.bounding,
        |c| &mut c.ambient,
    ];
    for set in sets {
        assert_refused("CAP_SYS_ADMIN", |dump, _| *set(credentials(dump)) = vec![SYS_ADMIN, 0]);
    }
    assert_refused("CAP_BPF", |dump, _| credentials(dump).permitted = vec![0, 1 << 7]);
    assert_refused("CAP_64", |dump, _| credentials(dump).bounding = vec![0, 0, 1]);
    let allowed = check(|dump, expected| {
        credentials(dump).bounding = vec![SYS_ADMIN | DEFAULT_CAPABILITIES, 0];
        expected.capabilities.insert("CAP_SYS_ADMIN".to_owned());
    });
    assert_eq!(allowed, "");
}

#[test]
fn every_thread_is_looked_at() {
    assert_refused("CAP_SYS_ADMIN", |dump, _| {
        dump.tree[0].threads = vec![1, 7];
        let mut other = core();
        other.process = None;
        let thread = other.thread.as_mut().unwrap();
        thread.credentials.as_mut().unwrap().permitted = vec![SYS_ADMIN, 0];
        dump.cores.insert(7, other);
    });
}

#[test]
fn privileges_filters_and_profiles_must_be_as_strict() {
    assert_refused("may gain privileges", |dump, _| credentials(dump).no_new_privs = None);
    assert_refused("may gain privileges", |dump, _| credentials(dump).no_new_privs = Some(0));
    assert_refused("seccomp filter", |_, expected| expected.seccomp = true);
    assert_refused("security profile \"docker\"", |dump, _| {
        credentials(dump).lsm_profile = Some("docker".to_owned());
    });
    assert_refused("security module", |dump, _| dump.inventory.lsm = Some(2));
}

#[test]
fn only_the_plugins_of_the_plan_are_let_in() {
    let dump = |names: &[&str], expects: &[&str]| {
        let names = names.iter().map(ToString::to_string).collect();
        let expects = expects.iter().map(ToString::to_string).collect();
        check(|dump, expected| {
            dump.inventory.plugins = Some(Plugins { names });
            expected.plugins = expects;
        })
    };
    let cuda = "cuda_plugin";
    assert_eq!(dump(&[], &[]), "");
    assert_eq!(dump(&[cuda], &[cuda]), "");
    // Nothing is to be brought back, or by somebody else.
    for other in [cuda, "amdgpu_plugin", "inet-remap", ""] {
        assert!(dump(&[other], &[]).contains(&format!("needs CRIU's plugin {other:?}")));
    }
    for names in [&["amdgpu_plugin", cuda][..], &[cuda, "CUDA_PLUGIN"], &[cuda, "cuda_plugin "]] {
        assert!(dump(names, &[cuda]).contains("needs CRIU's plugin"), "{names:?}");
    }
    // The plugin would leave it where it is.
    assert!(dump(&[], &[cuda]).contains("has not dumped it"));
    let wrong = dump(&["amdgpu_plugin"], &[cuda]);
    assert!(wrong.contains("needs CRIU's plugin") && wrong.contains("has not dumped it"));
    // CRIU 4.0 names none.
    let unnamed = check(|_, expected| expected.plugins = [cuda.to_owned()].into());
    assert_eq!(unnamed, "");
}

#[test]
fn a_seccomp_filter_must_be_there() {
    let filtered = |filters: Vec<SeccompFilter>| {
        move |dump: &mut Dump, expected: &mut Expected| {
            let thread = dump.cores.get_mut(&1).unwrap().thread.as_mut().unwrap();
            (thread.seccomp_mode, thread.seccomp_filter) = (Some(2), Some(0));
            dump.seccomp = Some(Seccomp { filters });
            expected.seccomp = true;
        }
    };
    let real = SeccompFilter { program: NOTHING.to_vec(), ..SeccompFilter::default() };
    assert_eq!(check(filtered(vec![real])), "");
    assert_refused("seccomp filter 0", filtered(Vec::new()));
    assert_refused("seccomp filter 0", filtered(vec![SeccompFilter::default()]));
}

/// `SECCOMP_RET_ERRNO` and `SECCOMP_RET_ALLOW` for every call.
const NOTHING: [u8; 8] = [6, 0, 0, 0, 1, 0, 5, 0];
const EVERYTHING: [u8; 8] = [6, 0, 0, 0, 0, 0, 0xff, 0x7f];

#[test]
fn seccomp_filters_must_refuse_what_the_new_containers_do() {
    let filtered = |filters: &'static [(&'static [u8], Option<u32>)], last: u32| {
        move |dump: &mut Dump, expected: &mut Expected| {
            let thread = dump.cores.get_mut(&1).unwrap().thread.as_mut().unwrap();
            (thread.seccomp_mode, thread.seccomp_filter) = (Some(2), Some(last));
            let filters = filters.iter().map(|(program, previous)| SeccompFilter {
                program: program.to_vec(),
                previous: *previous,
                flags: None,
            });
            dump.seccomp = Some(Seccomp { filters: filters.collect() });
            (expected.seccomp, expected.refused) = (true, Refused::ALWAYS);
        }
    };
    assert_refused(
        "let kexec_file_load, kexec_load, swapoff, swapon through",
        filtered(&[(&EVERYTHING, None)], 0),
    );
    assert_eq!(check(filtered(&[(&NOTHING, None)], 0)), "");
    // One of those that a thread has is enough, and those of others are not its.
    let both: &[(&[u8], _)] = &[(&NOTHING, None), (&EVERYTHING, Some(0)), (&EVERYTHING, None)];
    assert_eq!(check(filtered(both, 1)), "");
    assert_refused("swapon through", filtered(both, 2));
    assert_refused("in a circle", filtered(&[(&NOTHING, Some(1)), (&NOTHING, Some(0))], 0));
    assert_refused("seccomp filter 7", filtered(&[(&NOTHING, Some(7))], 0));
    assert_refused("is no program", filtered(&[(&NOTHING, Some(1)), (&[6, 0], None)], 0));
    // Strict mode lets nothing through, and a node that requires no filter looks at none.
    assert_eq!(
        check(|dump, expected| {
            filtered(&[], 0)(dump, expected);
            dump.cores.get_mut(&1).unwrap().thread.as_mut().unwrap().seccomp_mode = Some(1);
        }),
        ""
    );
    assert_eq!(
        check(|dump, expected| {
            filtered(&[(&EVERYTHING, None)], 0)(dump, expected);
            expected.seccomp = false;
        }),
        ""
    );
}

/// When all threads have the same filters, CRIU writes them with the first, for all.
#[test]
fn a_seccomp_filter_may_be_that_of_all_threads() {
    let threads = |flags: Option<u32>, mode: Option<i32>| {
        move |dump: &mut Dump, expected: &mut Expected| {
            let program = NOTHING.to_vec();
            let filter = SeccompFilter { program, flags, ..SeccompFilter::default() };
            dump.seccomp = Some(Seccomp { filters: vec![filter] });
            let mut other = dump.cores[&1].clone();
            (other.process, other.thread.as_mut().unwrap().seccomp_mode) = (None, None);
            dump.cores.insert(2, other);
            dump.tree[0].threads.push(2);
            let first = dump.cores.get_mut(&1).unwrap().thread.as_mut().unwrap();
            (first.seccomp_mode, first.seccomp_filter) = (mode, Some(0));
            expected.seccomp = true;
        }
    };
    assert_eq!(check(threads(Some(1), Some(2))), "");
    for flags in [None, Some(0), Some(2)] {
        assert_refused("no seccomp filter", threads(flags, Some(2)));
    }
    assert_refused("no seccomp filter", threads(Some(1), Some(0)));
    assert_refused("no seccomp filter", threads(Some(1), None));
    // Of several, those that are for all threads.
    let strict = |flags: Option<u32>| {
        move |dump: &mut Dump, expected: &mut Expected| {
            threads(Some(1), Some(2))(dump, expected);
            let filters = &mut dump.seccomp.as_mut().unwrap().filters;
            (filters[0].program, filters[0].previous) = (EVERYTHING.to_vec(), Some(1));
            filters.push(SeccompFilter { program: NOTHING.to_vec(), flags, previous: None });
            expected.refused = Refused::ALWAYS;
        }
    };
    assert_eq!(check(strict(Some(1))), "");
    assert_refused("swapon through", strict(None));
    // The kernel would install none, and CRIU not notice.
    for (mode, filter) in [(1, None), (2, Some(0)), (2, Some(1))] {
        assert_refused("beside those that are for all threads", |dump, expected| {
            strict(Some(0))(dump, expected);
            let other = dump.cores.get_mut(&2).unwrap().thread.as_mut().unwrap();
            (other.seccomp_mode, other.seccomp_filter) = (Some(mode), filter);
        });
    }
    assert_refused("flags that no kernel tells of", threads(Some(8), Some(2)));
}

#[test]
fn the_tree_and_the_cores_must_name_the_same_threads() {
    assert_refused("process 9 has a core but is not in the tree", |dump, _| {
        dump.cores.insert(9, core());
    });
    assert_refused("\"core-2.img\" is missing", |dump, _| {
        dump.tree.push(Process { pid: 2, ppid: 1, threads: vec![2] });
    });
    assert_refused("listed twice", |dump, _| dump.tree.push(dump.tree[0].clone()));
    assert_refused("no credentials", |dump, _| {
        dump.cores.get_mut(&1).unwrap().thread.as_mut().unwrap().credentials = None;
    });
    assert_refused("version 3 are not known", |dump, _| dump.inventory.img_version = 3);
    assert_refused("\"pstree.img\" is missing", |dump, _| {
        dump.tree.clear();
        dump.cores.clear();
    });
}

#[test]
fn a_zombie_needs_no_credentials() {
    let passed = check(|dump, _| {
        // As CRIU has it: its thread's number is whatever was in memory.
        dump.tree.push(Process { pid: 2, ppid: 1, threads: vec![3_108_758_720] });
        let process = Some(ProcessCore { state: 2, ..ProcessCore::default() });
        dump.cores.insert(2, Core { process, ids: None, thread: None });
    });
    assert_eq!(passed, "");
}

#[test]
fn a_file_in_the_guise_of_another_is_refused() {
    for name in ["core-01.img", "core-a.img", "fdinfo-02.img", "ids-+1.img", "mountpoints-013.img"]
    {
        assert_refused("is no name that CRIU gives", |dump, _| dump.others.push(name.to_owned()));
    }
}

#[test]
fn namespaces_of_the_host_are_refused_unless_allowed() {
    type Spoil = fn(&mut Ids);
    let spoils: [(&str, Spoil); 5] = [
        ("pid", |ids| ids.pid = Some(101)),
        ("network", |ids| ids.network = Some(102)),
        ("ipc", |ids| ids.ipc = Some(103)),
        ("uts", |ids| ids.uts = None),
        ("mount", |ids| ids.mount = Some(105)),
    ];
    for (name, spoil) in spoils {
        let reason = format!("in the host's {name} namespace");
        assert_refused(&reason, |dump, _| spoil(dump.ids.get_mut(&1).unwrap()));
    }
    let allowed = |dump: &mut Dump, expected: &mut Expected| {
        dump.ids.get_mut(&1).unwrap().network = Some(102);
        expected.host_namespaces.insert("network".to_owned());
    };
    assert_eq!(check(allowed), "");
    assert_refused("network namespace of their own", |_, expected| {
        expected.host_namespaces.insert("network".to_owned());
    });
    assert_refused("user namespace", |dump, _| dump.ids.get_mut(&1).unwrap().user = Some(9));
    assert_refused("two places at once", |dump, _| {
        dump.cores.get_mut(&1).unwrap().ids = Some(ids(50));
    });
    assert_refused("namespaces of their own", |dump, _| {
        dump.tree.push(Process { pid: 2, ppid: 1, threads: vec![2] });
        dump.cores.insert(2, core());
        dump.ids.insert(2, ids(50));
    });
}

#[test]
fn files_that_reach_out_are_refused() {
    for kind in [12, 14, 15, 16, 19, 0, 99] {
        assert_refused("reach beyond a container", |dump, _| {
            dump.files.push(File { kind, id: 0, ..File::default() });
        });
    }
    assert_refused("\"/etc/shadow\" is outside", |dump, _| {
        let name = "/etc/shadow".to_owned();
        let regular = Some(RegularFile { name, external: Some(true), ..RegularFile::default() });
        dump.files.push(File { kind: 1, id: 0, regular, ..File::default() });
    });
    for name in ["apparmor.img", "userns-1.img", "binfmt-misc.img", "creds-1.img", "rlimit-1.img"] {
        assert_refused("more than a container", |dump, _| dump.others.push(name.to_owned()));
    }
}

/// What a checkpoint is not taken for, since no container could have it.
#[test]
fn what_no_container_may_have_needs_no_container_to_be_found() {
    type Spoil = fn(&mut Dump);
    let alone = |spoil: &dyn Fn(&mut Dump)| {
        let mut dump = Dump::default();
        spoil(&mut dump);
        judge_alone(&summarise(&dump.images(), &dump.others).unwrap()).join("; ")
    };
    let spoils: [(&str, Spoil); 9] = [
        ("kind 12", |dump| dump.files.push(File { kind: 12, id: 0, ..File::default() })),
        ("kind 14", |dump| dump.files.push(File { kind: 14, id: 0, ..File::default() })),
        ("\"tunfile.img\"", |dump| dump.others.push("tunfile.img".to_owned())),
        ("plugin \"cuda\"", |dump| {
            dump.inventory.plugins = Some(Plugins { names: vec!["cuda".to_owned()] });
        }),
        ("namespaces of their own", |dump| {
            dump.tree.push(Process { pid: 2, ppid: 1, threads: vec![2] });
            dump.cores.insert(2, core());
            dump.ids.insert(2, ids(50));
        }),
        ("user namespace", |dump| dump.ids.get_mut(&1).unwrap().user = Some(9)),
        ("\"/debug\" (kind 11)", |dump| dump.mounts.push(mount(20, 1, 11, "/debug"))),
        ("stacked on \"/proc\"", |dump| dump.mounts.push(mount(20, 2, 1, "/proc"))),
        ("no root file system", |dump| dump.mounts.clear()),
    ];
    for (reason, spoil) in spoils {
        let found = alone(&spoil);
        assert!(found.contains(reason), "{reason:?} is not in {found:?}");
    }
    // Some container may have these.
    let spoils: [Spoil; 6] = [
        |_| {},
        |dump| credentials(dump).permitted = vec![SYS_ADMIN, 0],
        |dump| credentials(dump).lsm_profile = Some("docker".to_owned()),
        |dump| dump.ids.get_mut(&1).unwrap().network = Some(102),
        |dump| dump.mounts[2].flags = 0,
        |dump| {
            let external_key = Some("/data".to_owned());
            dump.mounts.push(Mount { external_key, ..mount(20, 1, 0, "/data") });
        },
    ];
    for spoil in spoils {
        assert_eq!(alone(&spoil), "");
    }
}

#[test]
fn an_image_with_a_second_record_is_refused() {
    let mut images = Dump::default().images();
    let core = images.iter_mut().find(|(name, _)| name == "core-1.img").unwrap();
    let record = core.1[8..].to_vec();
    core.1.extend(record);
    assert!(summarise(&images, &[]).unwrap_err().contains("one record"));
}

proptest! {
    #[test]
    fn spoiled_images_are_survived(
        victim in 0_usize..7,
        position in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<bool>(),
    ) {
        let mut images = Dump::default().images();
        let content = &mut images[victim].1;
        let position = position.index(content.len());
        if cut {
            content.truncate(position);
        } else {
            content[position] = byte;
        }
        if let Ok(summary) = summarise(&images, &[]) {
            judge(&summary, &expected());
        }
    }

    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        for name in ["inventory.img", "pstree.img", "core-1.img", "mountpoints-1.img", "files.img",
            "seccomp.img", "ids-1.img", "fdinfo-1.img", "remap-fpath.img"]
        {
            let mut builder = Builder::default();
            let _refused = builder.image(name, &*bytes);
            // Behind a true beginning, too.
            let magic = match name {
                "core-1.img" => CORE,
                "mountpoints-1.img" => MOUNTS,
                "files.img" => FILES,
                "seccomp.img" => SECCOMP,
                "ids-1.img" => IDS,
                "remap-fpath.img" => images::REMAPS,
                "fdinfo-1.img" => images::DESCRIPTORS,
                _ => Magic::PSTREE,
            };
            let _refused = builder.image(name, &*image(magic, std::slice::from_ref(&bytes)));
        }
    }
}
