use std::io::Write as _;
use std::sync::Arc;

use kybernate_spec::page_index::{self, Chunk, ChunkHash, Encoding, Header, Place, Run};
use proptest::prelude::*;
use prost::Message;

use super::images::around::*;
use super::images::files::*;
use super::images::{
    CORE, Core, Credentials, FS, IDS, Ids, Memory, MemoryArea, ProcessCore, TreeEntry,
};
use super::{Inside, MemoryKind, ProcessState, Seccomp, StoredPages};
use crate::criu::messages::ThreadCore;
use crate::criu::{Magic, PagemapEntry, PagemapHead};

/// A directory of images.
struct Scene(tempfile::TempDir);

impl Scene {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn bytes(&self, name: &str, magic: Magic, records: &[Vec<u8>]) {
        let mut bytes = 0x5456_4319_u32.to_le_bytes().to_vec();
        bytes.extend(magic.0.to_le_bytes());
        for record in records {
            bytes.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
            bytes.extend(record);
        }
        fs_err::write(self.0.path().join(name), bytes).unwrap();
    }

    fn image<M: Message>(&self, name: &str, magic: Magic, records: &[M]) {
        let records: Vec<Vec<u8>> = records.iter().map(Message::encode_to_vec).collect();
        self.bytes(name, magic, &records);
    }

    /// A living process with a name.
    fn core(&self, tid: u32, name: &str) {
        let process = ProcessCore { state: 1, comm: name.into(), ..ProcessCore::default() };
        let thread = ThreadCore {
            seccomp_mode: Some(2),
            credentials: Some(Credentials {
                uid: 1000,
                euid: 1000,
                effective: vec![1, 0],
                no_new_privs: Some(1),
                ..Default::default()
            }),
            comm: Some(format!("{name}-{tid}").into_bytes()),
            ..ThreadCore::default()
        };
        let core = Core { process: Some(process), ids: None, thread: Some(thread) };
        self.image(&format!("core-{tid}.img"), CORE, &[core]);
    }

    fn tree(&self, entries: &[(u32, u32, &[u32])]) {
        let entry = |(pid, ppid, threads): &(u32, u32, &[u32])| TreeEntry {
            pid: *pid,
            ppid: *ppid,
            pgid: *pid,
            sid: *pid,
            threads: threads.to_vec(),
        };
        let entries: Vec<TreeEntry> = entries.iter().map(entry).collect();
        self.image("pstree.img", Magic::PSTREE, &entries);
    }

    /// A pages file of four pages, of which the second is zero.
    fn stored(&self) -> StoredPages {
        let mut index = tempfile::tempfile().unwrap();
        let mut out = Vec::new();
        let header = Header { hash: ChunkHash::Blake3, shards: 1, files: 1 };
        page_index::write_header(&mut out, &header).unwrap();
        let chunk = Chunk {
            stored_offset: 0,
            stored_bytes: 3 * 4096,
            plain_bytes: 3 * 4096,
            encoding: Encoding::Raw,
            hash: [0; 32],
        };
        page_index::write_shard(&mut out, &[chunk]).unwrap();
        page_index::write_file(&mut out, "pages-1.img", 4 * 4096).unwrap();
        let run = |first, pages, page| Run { first, pages, place: Place { shard: 0, page } };
        page_index::write_segment(&mut out, 4, &[run(0, 1, 0), run(2, 2, 1)]).unwrap();
        page_index::write_end(&mut out).unwrap();
        index.write_all(&out).unwrap();
        StoredPages::scan(self.0.path(), Arc::new(index)).unwrap()
    }

    fn read(&self) -> Inside {
        Inside::read(self.0.path(), &self.stored()).unwrap()
    }
}

fn pids(inside: &Inside) -> Vec<u32> {
    inside.processes.iter().map(|process| process.pid).collect()
}

#[test]
fn parents_come_before_children_and_circles_end() {
    let scene = Scene::new();
    // 5 is begun by 3, which begins itself with 4; 9 is its own parent.
    let tree: &[(u32, u32, &[u32])] =
        &[(5, 3, &[5]), (2, 1, &[2]), (1, 0, &[1]), (3, 4, &[]), (4, 3, &[]), (9, 9, &[])];
    scene.tree(tree);
    let inside = scene.read();
    assert_eq!(pids(&inside), [1, 2, 5, 3, 4, 9]);
    assert_eq!(inside.problems, []);
}

#[test]
fn a_process_that_comes_twice_is_shown_once_and_told() {
    let scene = Scene::new();
    scene.tree(&[(1, 0, &[1, 7]), (1, 0, &[1]), (2, 1, &[2, 7])]);
    let inside = scene.read();
    assert_eq!(pids(&inside), [1, 2]);
    assert_eq!(inside.processes[1].threads.len(), 1);
    assert_eq!(inside.problems[0].image, "pstree.img");
}

#[test]
fn threads_say_who_they_are() {
    let scene = Scene::new();
    scene.tree(&[(1, 0, &[1, 2])]);
    scene.core(1, "job");
    scene.core(2, "job");
    let inside = scene.read();
    let process = &inside.processes[0];
    assert_eq!((&*process.name, process.state), ("job", ProcessState::Alive));
    let thread = &process.threads[1];
    assert_eq!((thread.id, &*thread.name, thread.seccomp), (2, "job-2", Seccomp::Filter));
    let credentials = thread.credentials.as_ref().unwrap();
    assert_eq!((credentials.effective_uid, credentials.no_new_privileges), (1000, true));
    assert_eq!(credentials.effective_capabilities, ["CAP_CHOWN".to_owned()].into());
}

#[test]
fn memory_is_counted_by_kind_and_by_what_is_stored() {
    let scene = Scene::new();
    let area = |start, pages: u64, status| MemoryArea {
        start,
        end: start + pages * 4096,
        protection: 3,
        status,
        ..MemoryArea::default()
    };
    // Heap and private memory; a guard that is no mapping.
    let mappings = vec![area(0x1000, 2, 1 << 5), area(0x8000, 4, 1 << 9), area(0x9000, 1, 1 << 16)];
    let memory = Memory { mappings, ..Memory::default() };
    scene.image("mm-1.img", Magic::MM, &[memory]);
    // Pages 0 and 1 are the heap's, 2 and 3 the private memory's; page 1 is zero.
    let head = PagemapHead { pages_id: 1 }.encode_to_vec();
    let entry = |address| {
        let (flags, pages) = (Some(4), Some(2));
        PagemapEntry { address, flags, pages, ..PagemapEntry::default() }.encode_to_vec()
    };
    scene.bytes("pagemap-1.img", Magic::PAGEMAP, &[head, entry(0x1000), entry(0x9000)]);
    scene.tree(&[(1, 0, &[1])]);
    let inside = scene.read();
    let bytes: Vec<_> =
        inside.memory.iter().map(|m| (m.kind, m.mapped_bytes, m.stored_bytes)).collect();
    assert_eq!(
        bytes,
        [(MemoryKind::PrivateAnonymous, 4 * 4096, 2 * 4096), (MemoryKind::Heap, 2 * 4096, 4096)]
    );
    assert_eq!(inside.processes[0].regions.len(), 2);
    assert_eq!(inside.problems, []);
}

#[test]
fn open_files_say_what_they_are() {
    let scene = Scene::new();
    scene.tree(&[(1, 0, &[1])]);
    let ids = Ids { files: 4, fs: 1, uts: Some(9), ..Ids::default() };
    scene.image("ids-1.img", IDS, &[ids]);
    let file = |id, kind| File { kind, id, ..File::default() };
    let inet = Inet {
        inode: 0xab,
        family: 2,
        kind: 1,
        protocol: 6,
        state: 1,
        local_port: 80,
        remote_port: 9000,
        local: vec![u32::from_le_bytes([127, 0, 0, 1])],
        remote: vec![u32::from_le_bytes([10, 1, 2, 3])],
        ..Inet::default()
    };
    let regular = Regular {
        flags: 0o2001,
        position: 7,
        name: "/var/log/x".to_owned(),
        size: Some(9),
        ..Regular::default()
    };
    let unix = Unix { kind: 1, state: 10, backlog: 5, name: b"\0ab".to_vec(), ..Unix::default() };
    scene.image(
        "files.img",
        FILES,
        &[
            File { regular: Some(regular), ..file(1, 1) },
            File { inet: Some(inet), ..file(2, 4) },
            File { unix: Some(unix), ..file(3, 5) },
            File { eventfd: Some(Eventfd { counter: 3 }), ..file(4, 6) },
            file(5, 99),
        ],
    );
    scene.image("remap-fpath.img", REMAPS, &[Remap { file: 1, kind: Some(1) }]);
    scene.image("tcp-stream-ab.img", TCP_STREAM, &[TcpStream { receive_queue: 4, send_queue: 6 }]);
    let descriptors = [5, 4, 3, 2, 1].map(|id| Descriptor { id, fd: id + 10, flags: 1 });
    scene.image("fdinfo-4.img", FDINFO, &descriptors);
    scene.image("utsns-9.img", UTS, &[Uts { host_name: "box".to_owned(), ..Uts::default() }]);
    let inside = scene.read();
    insta::assert_json_snapshot!((&inside.processes[0].files, &inside.sockets, &inside.namespaces));
}

#[test]
fn raw_data_between_records_are_left_out() {
    let scene = Scene::new();
    let head = |id| Some(IpcHead { id, key: 7, uid: 0, mode: 0o600 });
    let set = |id| SemaphoresEntry { head: head(id), count: 3 }.encode_to_vec();
    let path = scene.0.path().join("ipcns-sem-1.img");
    scene.bytes("ipcns-sem-1.img", SEMAPHORES, &[set(1)]);
    let mut image = fs_err::read(&path).unwrap();
    // The values of three semaphores take eight bytes.
    image.extend([0xff; 8]);
    image.extend(u32::try_from(set(2).len()).unwrap().to_le_bytes());
    image.extend(set(2));
    fs_err::write(&path, image).unwrap();
    let inside = scene.read();
    assert_eq!(inside.ipc.iter().map(|object| object.id).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(inside.problems.len(), 1, "the second one's values are missing");
}

#[test]
fn a_table_of_files_that_everybody_has_is_not_shown_without_end() {
    let scene = Scene::new();
    let tree: Vec<TreeEntry> =
        (1..=400).map(|pid| TreeEntry { pid, ..TreeEntry::default() }).collect();
    scene.image("pstree.img", Magic::PSTREE, &tree);
    for pid in 1..=400 {
        scene.image(&format!("ids-{pid}.img"), IDS, &[Ids { files: 1, ..Ids::default() }]);
    }
    let name = "x".repeat(1 << 20);
    let regular = Some(Regular { name, ..Regular::default() });
    scene.image("files.img", FILES, &[File { id: 1, kind: 1, regular, ..File::default() }]);
    let many: Vec<_> = (0..1000).map(|fd| Descriptor { id: 1, fd, flags: 0 }).collect();
    scene.image("fdinfo-1.img", FDINFO, &many);
    let inside = scene.read();
    let shown: usize = inside.processes.iter().map(|process| process.files.len()).sum();
    // 256 MiB at 4 KiB each.
    assert!((60_000..66_000).contains(&shown), "{shown}");
    assert_eq!(inside.problems.len(), 1, "{:?}", inside.problems);
}

/// Every image that is looked at, by a name that is asked for, with the types it may hold.
const IMAGES: &[(&str, Magic)] = &[
    ("inventory.img", Magic::INVENTORY),
    ("pstree.img", Magic::PSTREE),
    ("core-1.img", CORE),
    ("ids-1.img", IDS),
    ("fs-1.img", FS),
    ("mm-1.img", Magic::MM),
    ("pagemap-1.img", Magic::PAGEMAP),
    ("pagemap-shmem-1.img", Magic::PAGEMAP),
    ("files.img", FILES),
    ("fdinfo-1.img", FDINFO),
    ("remap-fpath.img", REMAPS),
    ("memfd.img", MEMFDS),
    ("tty-info.img", TTYS),
    ("tcp-stream-1.img", TCP_STREAM),
    ("filelocks.img", LOCKS),
    ("mountpoints-1.img", MOUNTS),
    ("cgroup.img", CGROUP),
    ("utsns-1.img", UTS),
    ("netns-1.img", NETWORK),
    ("netdev-1.img", NETWORK_DEVICES),
    ("userns-1.img", USER),
    ("pidns-1.img", PID),
    ("ipcns-shm-1.img", SHARED_MEMORY),
    ("ipcns-msg-1.img", MESSAGES),
    ("ipcns-sem-1.img", SEMAPHORES),
];

/// A protobuf field of any of the numbers we look at, with a small or a very large value, bytes, or
/// a message of such fields.
fn field() -> impl Strategy<Value = Vec<u8>> {
    let number = 1_u8..16;
    let varint = (number.clone(), prop_oneof![0_u64..8, any::<u64>()]).prop_map(|(tag, value)| {
        let mut bytes = vec![tag << 3];
        prost::encoding::encode_varint(value, &mut bytes);
        bytes
    });
    let delimited = |content: Vec<u8>, tag: u8| {
        let mut bytes = vec![(tag << 3) | 2];
        prost::encoding::encode_varint(u64::try_from(content.len()).unwrap(), &mut bytes);
        bytes.extend(content);
        bytes
    };
    let text = (proptest::collection::vec(any::<u8>(), 0..24), number.clone())
        .prop_map(move |(content, tag)| delimited(content, tag));
    prop_oneof![varint, text].prop_recursive(4, 24, 6, move |inner| {
        (proptest::collection::vec(inner, 0..6), 1_u8..16)
            .prop_map(move |(fields, tag)| delimited(fields.concat(), tag))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Whatever the images say, they are read to an end, and what comes out can be printed.
    #[test]
    fn hostile_images_are_read_without_panic(
        images in proptest::collection::vec(
            (0..IMAGES.len(), proptest::collection::vec(
                proptest::collection::vec(field(), 0..8).prop_map(|fields| fields.concat()), 0..4)),
            1..24,
        ),
        cut in any::<prop::sample::Index>(),
    ) {
        let scene = Scene::new();
        scene.tree(&[(1, 0, &[1]), (2, 1, &[])]);
        scene.image("ids-1.img", IDS, &[Ids {
            files: 1, fs: 1, pid: Some(1), network: Some(1), uts: Some(1), user: Some(1),
            ..Ids::default()
        }]);
        for (which, records) in &images {
            let (name, magic) = IMAGES[*which];
            scene.bytes(name, magic, records);
        }
        // One of them ends early.
        let (name, _) = IMAGES[images[cut.index(images.len())].0];
        let path = scene.0.path().join(name);
        let mut bytes = fs_err::read(&path).unwrap();
        bytes.truncate(cut.index(bytes.len() + 1));
        fs_err::write(&path, bytes).unwrap();
        let inside = scene.read();
        prop_assert!(serde_json::to_vec(&inside).is_ok());
    }
}
