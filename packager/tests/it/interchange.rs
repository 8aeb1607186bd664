//! `kyb export` and `kyb import`: what goes out comes in again, and what is hostile does not.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use kybernate_packager::criu::{PagemapEntry, PagemapHead};
use kybernate_spec::{Descriptor, Index};
use prost::Message as _;
use serde_json::Value;
use tar::EntryType;

use crate::dump::dump;
use crate::inspecting::source_image;
use crate::kyb::{Ran, kyb};
use crate::registry::open;

const CRIU: &str = "application/vnd.containerd.container.criu.checkpoint.criu.tar";
const EXPORT: &str = "--format containerd --name example.com/job:v1 --insecure-no-signature";

async fn run(scratch: &tempfile::TempDir, line: &str) -> Ran {
    kyb(scratch.path(), line.split_whitespace()).await
}

/// Packs a dump on an image, with something that the container had written.
async fn packed(scratch: &tempfile::TempDir, more: &str) {
    dump(scratch.path(), 600);
    let store = open(&format!("oci:{}/layout", scratch.path().display()).parse().unwrap()).await;
    let image = source_image(&store).await;
    let mut diff = tar::Builder::new(fs_err::File::create(scratch.path().join("rw.tar")).unwrap());
    let mut header = tar::Header::new_gnu();
    header.set_size(4);
    diff.append_data(&mut header, "srv/note", &b"kept"[..]).unwrap();
    diff.finish().unwrap();
    let line = format!(
        "pack dump oci:layout:v1 --image oci:layout@{} --rootfs-diff rw.tar {more}",
        image.digest
    );
    let ran = run(scratch, &line).await;
    assert_eq!(ran.code, 0, "{ran:?}");
}

fn names(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs_err::read_dir(directory).unwrap();
    entries
        .map(|entry| {
            let entry = entry.unwrap();
            let content = fs_err::read(entry.path()).unwrap();
            (entry.file_name().into_string().unwrap(), content)
        })
        .collect()
}

fn parse<T: serde::de::DeserializeOwned>(layout: &Path, descriptor: Option<&Descriptor>) -> T {
    let path = match descriptor {
        Some(descriptor) => layout.join("blobs/sha256").join(descriptor.digest.hex()),
        None => layout.join("index.json"),
    };
    serde_json::from_slice(&fs_err::read(path).unwrap()).unwrap()
}

#[tokio::test]
async fn what_is_exported_is_what_containerd_writes() {
    let scratch = tempfile::tempdir().unwrap();
    packed(&scratch, "").await;
    let told = run(&scratch, &format!("export oci:layout:v1 out {EXPORT} --json")).await.json();
    let out = scratch.path().join("out");
    let top: Index = parse(&out, None);
    assert_eq!(top.manifests.len(), 2);
    assert_eq!(top.manifests[0].annotations["io.containerd.image.name"], "example.com/job:v1");
    assert_eq!(told["index"], Value::from(top.manifests[0].digest.to_string()));
    let index: Index = parse(&out, Some(&top.manifests[0]));
    let kinds: Vec<&str> = index.manifests.iter().map(|entry| &*entry.media_type).collect();
    insta::assert_json_snapshot!(kinds, @r#"
    [
      "application/vnd.oci.image.manifest.v1+json",
      "application/vnd.containerd.container.criu.checkpoint.criu.tar",
      "application/vnd.containerd.container.checkpoint.config.v1+proto",
      "application/vnd.oci.image.layer.v1.tar+gzip"
    ]
    "#);
    assert_eq!(index.annotations["io.containerd.checkpoint.snapshotter"], "overlayfs");
    assert_eq!(index.annotations["org.opencontainers.image.ref.name"], told["image"]);
    let blob = |entry: &Descriptor| {
        fs_err::File::open(out.join("blobs/sha256").join(entry.digest.hex())).unwrap()
    };
    let unpacked = scratch.path().join("criu");
    tar::Archive::new(blob(&index.manifests[1])).unpack(&unpacked).unwrap();
    assert_eq!(names(&unpacked), names(&scratch.path().join("dump")));
    let layer = flate2::read::GzDecoder::new(blob(&index.manifests[3]));
    let mut layer = tar::Archive::new(layer);
    let mut note = layer.entries().unwrap().next().unwrap().unwrap();
    let mut text = String::new();
    note.read_to_string(&mut text).unwrap();
    assert_eq!((note.path().unwrap().to_str(), &*text), (Some("srv/note"), "kept"));
}

#[tokio::test]
async fn what_is_exported_is_imported_again() {
    let scratch = tempfile::tempdir().unwrap();
    packed(&scratch, "").await;
    for file in ["out.tar", "out"] {
        let ran = run(&scratch, &format!("export oci:layout:v1 {file} {EXPORT}")).await;
        assert_eq!(ran.code, 0, "{ran:?}");
    }
    let import = "--format containerd --namespace shop --container job";
    let one = run(&scratch, &format!("import out.tar oci:a:v1 {import} --json")).await.json();
    let two = run(&scratch, &format!("import oci:out:v1 oci:b:v1 {import} --json")).await.json();
    assert_eq!(one["digest"], two["digest"], "equal input, equal digests");
    assert_eq!(one["runnable"], true);
    let unpack = run(&scratch, "unpack oci:a:v1 again --insecure-no-signature").await;
    assert_eq!(unpack.code, 0, "{unpack:?}");
    assert_eq!(names(&scratch.path().join("again")), names(&scratch.path().join("dump")));
    let facts = run(&scratch, "inspect oci:a:v1 --facts-only --json").await.json();
    let config = facts["config"].to_string();
    assert!(config.contains("shop") && config.contains(r#""architecture":"amd64""#), "{config}");
    assert!(config.contains(r#""criu":"""#), "what is not known is not made up: {config}");
    let left: Vec<_> = fs_err::read_dir(scratch.path()).unwrap().collect();
    assert!(left.iter().all(|entry| {
        !entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(".kybernate")
    }));
}

#[tokio::test]
async fn what_the_other_format_cannot_hold_is_a_reason_not_to() {
    let scratch = tempfile::tempdir().unwrap();
    let facts = r#"{"version":"1.0","needs":{"mounts":[
        {"destination":"/data","type":"bind","options":["rbind"],"external":true}]}}"#;
    fs_err::write(scratch.path().join("facts.json"), facts).unwrap();
    let shm = scratch.path().join("shm.tar");
    tar::Builder::new(fs_err::File::create(shm).unwrap()).finish().unwrap();
    packed(&scratch, "--facts facts.json --volume /dev/shm=shm.tar").await;
    let export = |more: &str| format!("export oci:layout:v1 out.tar {EXPORT} {more}");
    run(&scratch, &export("")).await.ended(2, "/dev/shm");
    run(&scratch, &export("--without-volumes")).await.ended(2, "\"/data\"");
    run(&scratch, &export("--without-volumes --mount /data=/srv --mount /x=/y"))
        .await
        .ended(2, "/x");
    assert!(!scratch.path().join("out.tar").exists());
    let ran = run(&scratch, &export("--without-volumes --mount /data=/srv")).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    run(&scratch, &export("--without-volumes --mount /data=/srv")).await.ended(1, "exists");

    let bare = tempfile::tempdir().unwrap();
    dump(bare.path(), 3);
    assert_eq!(run(&bare, "pack dump oci:layout:v1").await.code, 0);
    run(&bare, &format!("export oci:layout:v1 out.tar {EXPORT}")).await.ended(2, "none");
    run(&bare, "export oci:layout:v1 out.tar --format containerd").await.ended(64, "--key");
}

/// A tar in memory.
type Building = tar::Builder<Vec<u8>>;

/// Puts another tar of CRIU's images into a layout that was exported.
fn replace_criu(out: &Path, criu: &[u8]) {
    let put = |content: &[u8], kind: &str| {
        let descriptor = Descriptor::of(kind, content);
        fs_err::write(out.join("blobs/sha256").join(descriptor.digest.hex()), content).unwrap();
        descriptor
    };
    let mut top: Index = parse(out, None);
    let mut index: Index = parse(out, Some(&top.manifests[0]));
    let place = index.manifests.iter().position(|entry| entry.media_type == CRIU).unwrap();
    index.manifests[place] = put(criu, CRIU);
    let index = put(&serde_json::to_vec(&index).unwrap(), &top.manifests[0].media_type);
    top.manifests[0].digest = index.digest;
    top.manifests[0].size = index.size;
    fs_err::write(out.join("index.json"), serde_json::to_vec(&top).unwrap()).unwrap();
}

#[tokio::test]
async fn what_is_hostile_stays_outside_and_leaves_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    packed(&scratch, "").await;
    assert_eq!(run(&scratch, &format!("export oci:layout:v1 out {EXPORT}")).await.code, 0);
    let good = names(&scratch.path().join("dump"));
    let tar = |change: &dyn Fn(&mut Building)| {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, content) in &good {
            let mut header = tar::Header::new_gnu();
            header.set_size(u64::try_from(content.len()).unwrap());
            builder.append_data(&mut header, name, &**content).unwrap();
        }
        change(&mut builder);
        builder.into_inner().unwrap()
    };
    let odd = |name: &str, kind: EntryType, target: &str| {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(kind);
        header.set_size(0);
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_cksum();
        tar(&move |builder| builder.append(&header, &[][..]).unwrap())
    };
    let mut cut = tar(&|_| {});
    cut.truncate(cut.len() / 2);
    let cases = [
        (odd("../escaped.img", EntryType::Regular, ""), "../escaped.img"),
        (odd("/srv/escaped.img", EntryType::Regular, ""), "/srv/escaped.img"),
        (odd("parent", EntryType::Symlink, "/etc"), "symbolic link"),
        (odd("files.img", EntryType::Link, "pstree.img"), "hard link"),
        (odd("tty.img", EntryType::Char, ""), "device"),
        (odd("criu.conf", EntryType::Regular, ""), "none of CRIU's images"),
        (odd("sub/files.img", EntryType::Regular, ""), "none of CRIU's images"),
        (odd("pstree.img", EntryType::Regular, ""), "twice"),
        (cut, "ends early"),
        (b"no tar at all".to_vec(), "early"),
        (Vec::new(), "no tar"),
    ];
    for (criu, why) in cases {
        replace_criu(&scratch.path().join("out"), &criu);
        let ran = run(&scratch, "import oci:out:v1 oci:in:v1 --format containerd").await;
        ran.ended(2, why);
        assert!(!scratch.path().join("in").exists(), "{why}: something is left");
        assert!(!scratch.path().join("escaped.img").exists());
    }
    // Without its last image it is a tar, but no dump.
    let half = {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(u64::try_from(good["inventory.img"].len()).unwrap());
        builder.append_data(&mut header, "inventory.img", &*good["inventory.img"]).unwrap();
        builder.into_inner().unwrap()
    };
    replace_criu(&scratch.path().join("out"), &half);
    run(&scratch, "import oci:out:v1 oci:in:v1 --format containerd").await.ended(2, "pstree.img");
}

#[tokio::test]
async fn a_file_that_is_no_checkpoint_is_told_from_one() {
    let scratch = tempfile::tempdir().unwrap();
    fs_err::write(scratch.path().join("text"), "hello").unwrap();
    let import = |source: &str| format!("import {source} oci:in:v1 --format containerd");
    run(&scratch, &import("text")).await.ended(2, "\"text\": it ends early");
    fs_err::write(scratch.path().join("long"), "what is no tar\n".repeat(100)).unwrap();
    for format in ["containerd", "cri", "podman"] {
        let ran = run(&scratch, &format!("import long oci:in:v1 --format {format}")).await;
        ran.ended(2, "failed to import \"long\": it is no tar");
        assert!(ran.told.len() < 400, "{ran:?}");
    }
    packed(&scratch, "").await;
    run(&scratch, &import("oci:layout:v1")).await.ended(2, "no checkpoint of containerd");
    run(&scratch, &import("rw.tar")).await.ended(2, "no image layout");
    run(&scratch, &import("Nothing")).await.ended(64, "no file");
    run(&scratch, &import("oci:nothing:v1")).await.ended(1, "not found");
}

/// Reads a tar: names and contents.
fn members(tar: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut archive = tar::Archive::new(tar);
    let mut found = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        let name = entry.path().unwrap().display().to_string();
        assert!(found.insert(name, content).is_none());
    }
    found
}

/// Writes a tar of names and contents.
fn archive(members: &BTreeMap<String, Vec<u8>>) -> Vec<u8> {
    let mut builder = Building::new(Vec::new());
    for (name, content) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(u64::try_from(content.len()).unwrap());
        builder.append_data(&mut header, name, &**content).unwrap();
    }
    builder.into_inner().unwrap()
}

const CRI: &str = "--format cri --insecure-no-signature";

#[tokio::test]
async fn what_goes_to_an_archive_comes_from_it_again() {
    let scratch = tempfile::tempdir().unwrap();
    let facts = r#"{"version":"1.0","created":"2026-11-21T14:00:00Z","source":{
        "namespace":"shop","container":"job","image":"example.com/job:1"}}"#;
    fs_err::write(scratch.path().join("facts.json"), facts).unwrap();
    packed(&scratch, "--facts facts.json").await;
    let ran = run(&scratch, &format!("export oci:layout:v1 job.tar {CRI}")).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let found = members(&fs_err::read(scratch.path().join("job.tar")).unwrap());
    for (name, content) in names(&scratch.path().join("dump")) {
        assert_eq!(found[&format!("checkpoint/{name}")], content, "{name}");
    }
    let config: Value = serde_json::from_slice(&found["config.dump"]).unwrap();
    assert_eq!(
        (&config["name"], &config["rootfsImageName"]),
        (&"job".into(), &"example.com/job:1".into())
    );
    let spec: Value = serde_json::from_slice(&found["spec.dump"]).unwrap();
    assert_eq!(spec["annotations"]["io.container.manager"], "cri-o");
    assert!(found.contains_key("rootfs-diff.tar") && !found.contains_key("deleted.files"));

    let image = open(&format!("oci:{}/layout", scratch.path().display()).parse().unwrap()).await;
    let image = source_image(&image).await.digest;
    let import = format!("import job.tar oci:a:v1 --format cri --image oci:layout@{image}");
    let told = run(&scratch, &format!("{import} --json")).await.json();
    assert_eq!(told["runnable"], true);
    let unpack = run(&scratch, "unpack oci:a:v1 again --insecure-no-signature").await;
    assert_eq!(unpack.code, 0, "{unpack:?}");
    assert_eq!(names(&scratch.path().join("again")), names(&scratch.path().join("dump")));
    let facts =
        run(&scratch, "inspect oci:a:v1 --facts-only --json").await.json()["config"].clone();
    assert_eq!(facts["source"]["namespace"], "shop");
    assert_eq!(facts["created"], "2026-11-21T14:00:00Z");
    assert!(facts.get("node").is_none(), "{facts}");
}

/// Finds the real checkpointctl; says so when it was left out.
fn checkpointctl() -> Option<PathBuf> {
    let cache = option_env!("KYBERNATE_CACHE").unwrap_or("/var/cache/kybernate");
    let binary = Path::new(cache).join("tools/bin/checkpointctl-v1.6.0");
    if binary.exists() {
        return Some(binary);
    }
    let left_out = std::env::var_os("KYBERNATE_WITHOUT_GO").is_some_and(|set| !set.is_empty());
    assert!(left_out, "there is no {}: `make test` builds it", binary.display());
    eprintln!("SKIPPED: there is no {}", binary.display());
    None
}

#[tokio::test]
async fn what_goes_to_checkpointctl_is_shown() {
    let Some(checkpointctl) = checkpointctl() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let facts = r#"{"version":"1.0","created":"2026-11-21T14:00:00Z","source":{
        "namespace":"shop","container":"job","image":"example.com/job:1"}}"#;
    fs_err::write(scratch.path().join("facts.json"), facts).unwrap();
    packed(&scratch, "--facts facts.json").await;
    let ran = run(&scratch, &format!("export oci:layout:v1 job.tar {CRI}")).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let told = |words: &[&str]| {
        let output = Command::new(&checkpointctl)
            .args(words)
            .arg(scratch.path().join("job.tar"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let wrong = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?}: {text}{wrong}");
        text
    };
    let shown = told(&["show"]);
    for part in ["job", "example.com/job:1", "CRI-O", "2.3 MiB"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let inspected = told(&["inspect", "--metadata", "--mounts"]);
    assert!(inspected.contains("io.kubernetes.pod.namespace: shop"), "{inspected}");
}

/// What Podman leaves of a container: compressed, with a list of what was deleted, a volume, and a
/// `/dev/shm` of its own.
fn podmans(dump: &Path) -> BTreeMap<String, Vec<u8>> {
    let one = |name: &str, content: &[u8]| {
        archive(&BTreeMap::from([(name.to_owned(), content.to_vec())]))
    };
    let mut found: BTreeMap<String, Vec<u8>> = names(dump)
        .into_iter()
        .map(|(name, content)| (format!("checkpoint/{name}"), content))
        .collect();
    let config = r#"{"id":"7479782e6f8c","name":"pod","rootfsImageName":"example.com/job:1",
        "createdTime":"2026-11-21T20:09:15Z","runtime":"runc",
        "namedVolumes":[{"volumeName":"data","dest":"/data"}]}"#;
    let spec = r#"{"annotations":{"io.container.manager":"libpod"},"mounts":[
        {"destination":"/dev/shm","type":"bind","source":"/x","options":["bind"]}],
        "linux":{"namespaces":[{"type":"pid"},{"type":"ipc"},{"type":"uts"},{"type":"network"}]}}"#;
    for (name, content) in [
        ("config.dump", config.as_bytes().to_vec()),
        ("spec.dump", spec.as_bytes().to_vec()),
        ("network.status", b"null".to_vec()),
        ("stats-dump", b"stats".to_vec()),
        ("devshm-checkpoint.tar", one("note", b"shm")),
        ("volumes/data.tar", one("file", b"volume")),
        ("rootfs-diff.tar", one("srv/new", b"new")),
        ("deleted.files", br#"["/etc/old"]"#.to_vec()),
    ] {
        found.insert(name.to_owned(), content);
    }
    found
}

#[tokio::test]
async fn what_podman_exports_is_imported() {
    let scratch = tempfile::tempdir().unwrap();
    packed(&scratch, "").await;
    let store = open(&format!("oci:{}/layout", scratch.path().display()).parse().unwrap()).await;
    let image = source_image(&store).await.digest;
    let tar = archive(&podmans(&scratch.path().join("dump")));
    let compressed = zstd::encode_all(&*tar, 1).unwrap();
    fs_err::write(scratch.path().join("pod.tar.zst"), compressed).unwrap();
    let import = format!("--format podman --namespace default --image oci:layout@{image}");
    let ran = run(&scratch, &format!("import pod.tar.zst oci:in:v1 {import}")).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let config =
        run(&scratch, "inspect oci:in:v1 --facts-only --json").await.json()["config"].clone();
    assert_eq!(config["source"]["container"], "pod");
    let shm = &config["needs"]["mounts"][0];
    assert_eq!((&shm["destination"], &shm["external"]), (&"/dev/shm".into(), &true.into()));
    let layout = scratch.path().join("in");
    let top: Index = parse(&layout, None);
    let index: Index = parse(&layout, top.manifests.last());
    let text = serde_json::to_string(&index).unwrap();
    assert!(text.contains("runnable"), "{text}");
    let child: kybernate_spec::Manifest = parse(&layout, index.manifests.last());
    let volumes: Vec<&str> = child
        .layers
        .iter()
        .filter_map(|layer| layer.annotations.get("io.kybernate.volume.destination"))
        .map(String::as_str)
        .collect();
    assert_eq!(volumes, ["/dev/shm", "/data"]);
    let runnable: kybernate_spec::Manifest = parse(&layout, index.manifests.first());
    let diff = runnable.layers.last().unwrap().digest.hex().to_owned();
    let diff = fs_err::read(layout.join("blobs/sha256").join(diff)).unwrap();
    let diff = members(&zstd::decode_all(&*diff).unwrap());
    assert_eq!(diff.keys().collect::<Vec<_>>(), ["etc/.wh.old", "srv/new"]);
}

#[tokio::test]
async fn what_is_hostile_in_an_archive_leaves_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let good = podmans(&dump(scratch.path(), 40));
    let with = |name: &str, content: &[u8]| {
        let mut changed = good.clone();
        changed.insert(name.to_owned(), content.to_vec());
        archive(&changed)
    };
    let without = |name: &str| {
        let mut changed = good.clone();
        changed.remove(name);
        archive(&changed)
    };
    let mut link = Building::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(EntryType::Symlink);
    header.set_size(0);
    link.append_link(&mut header, "checkpoint", "/etc").unwrap();
    let climbing = {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..4].copy_from_slice(b"../x");
        header.set_size(0);
        header.set_cksum();
        let mut builder = Building::new(Vec::new());
        builder.append(&header, &[][..]).unwrap();
        builder.into_inner().unwrap()
    };
    let cases = [
        (link.into_inner().unwrap(), "symbolic link"),
        (climbing.clone(), "../x"),
        (with("checkpoint/criu.conf", b"x"), "none of CRIU's images"),
        (with("checkpoint/a/inventory.img", b"x"), "none of CRIU's images"),
        (with("pre-checkpoint/pages-1.img", b"x"), "no link that needs it"),
        (with("deleted.files", br#"["../../etc"]"#), "was deleted"),
        (with("rootfs-diff.tar", &climbing), "../x"),
        (with("volumes/other.tar", b""), "does not say where"),
        (with("config.dump", b"no json"), "config.dump"),
        (without("spec.dump"), "no spec.dump"),
        (without("checkpoint/pstree.img"), "pstree.img"),
        (archive(&good)[..20_000].to_vec(), "early"),
        (zstd::encode_all(&*archive(&good), 1).unwrap()[..500].to_vec(), "incomplete frame"),
    ];
    for (content, why) in cases {
        fs_err::write(scratch.path().join("x.tar"), content).unwrap();
        let ran = run(&scratch, "import x.tar oci:in:v1 --format podman").await;
        assert_ne!(ran.code, 0, "{why}: {ran:?}");
        assert!(ran.told.contains(why), "{why}: {ran:?}");
        assert!(!scratch.path().join("in").exists(), "{why}: something is left");
    }
    fs_err::write(scratch.path().join("x.tar"), archive(&good)).unwrap();
    let ran = run(&scratch, "import x.tar oci:in:v1 --format podman").await;
    assert_eq!(ran.code, 0, "without an image it is not runnable: {ran:?}");
}

/// What an archive holds, by name.
type Members = BTreeMap<String, Vec<u8>>;

/// Podman's two archives of an increment: the earlier dump, then one that has every other page of
/// its own and leads to it.
fn increment(dump: &Path) -> (Members, Members, Vec<u8>) {
    let mut whole = podmans(dump);
    let pages = whole["checkpoint/pages-1.img"].clone();
    let earlier: Members = ["inventory.img", "pagemap-1.img", "pages-1.img"]
        .map(|name| {
            (format!("pre-checkpoint/{name}"), whole[&format!("checkpoint/{name}")].clone())
        })
        .into_iter()
        .chain([("config.dump".to_owned(), b"{}".to_vec())])
        .collect();
    let head = PagemapHead { pages_id: 1 }.encode_to_vec();
    let entries = (0..40_u64).map(|page| {
        let flags = if page % 2 == 0 { 4 } else { 1 };
        let address = 0x10_0000 + page * 4096;
        PagemapEntry { address, flags: Some(flags), pages: Some(1), ..PagemapEntry::default() }
            .encode_to_vec()
    });
    let mut pagemap = whole["checkpoint/pagemap-1.img"][..8].to_vec();
    for message in std::iter::once(head).chain(entries) {
        pagemap.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
        pagemap.extend(message);
    }
    whole.insert("checkpoint/pagemap-1.img".to_owned(), pagemap);
    let own: Vec<u8> = pages.chunks(4096).step_by(2).flatten().copied().collect();
    whole.insert("checkpoint/pages-1.img".to_owned(), own);
    (earlier, whole, pages)
}

#[tokio::test]
async fn podmans_increments_are_one_checkpoint() {
    let scratch = tempfile::tempdir().unwrap();
    let good = dump(scratch.path(), 40);
    let whole = podmans(&good);
    let (earlier, later, pages) = increment(&good);
    let put = |name: &str, content: &[u8]| fs_err::write(scratch.path().join(name), content);
    let linked = |target: &str| linked(&later, target);
    put("pre.tar.zst", &zstd::encode_all(&*archive(&earlier), 1).unwrap()).unwrap();
    put("job.tar", &linked("../pre-checkpoint")).unwrap();
    put("whole.tar", &archive(&whole)).unwrap();
    put("elsewhere.tar", &linked("/etc")).unwrap();
    let both: Members = later.iter().chain(&earlier).map(|(n, c)| (n.clone(), c.clone())).collect();
    put("loose.tar", &archive(&both)).unwrap();
    for (line, why) in [
        ("job.tar oci:in:v1", "with --previous FILE"),
        ("pre.tar.zst oci:in:v1", "it is a pre-checkpoint"),
        ("whole.tar oci:in:v1 --previous pre.tar.zst", "leave --previous out"),
        ("job.tar oci:in:v1 --previous whole.tar", "no pre-checkpoint"),
        ("job.tar oci:in:v1 --previous absent.tar", "absent.tar"),
        ("elsewhere.tar oci:in:v1 --previous pre.tar.zst", "leads to \"/etc\""),
        ("loose.tar oci:in:v1", "no link that needs it"),
    ] {
        let ran = run(&scratch, &format!("import {line} --format podman")).await;
        assert!(ran.code != 0 && ran.told.contains(why), "{line}: {ran:?}");
        assert!(!scratch.path().join("in").exists(), "{line}: something is left");
    }
    let line = "import job.tar oci:in:v1 --previous pre.tar.zst --format podman";
    let ran = run(&scratch, line).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let ran = run(&scratch, "unpack oci:in:v1 out --insecure-no-signature").await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let out = scratch.path().join("out");
    assert!(fs_err::read(out.join("pages-1.img")).unwrap() == pages, "the pages differ");
    assert!(!out.join("parent").exists());
}

/// Makes an archive with the link of an increment.
fn linked(members: &Members, target: &str) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(EntryType::Symlink);
    header.set_size(0);
    let mut link = Building::new(Vec::new());
    link.append_link(&mut header, "checkpoint/parent", target).unwrap();
    let link = link.into_inner().unwrap();
    // Without the two blocks that end it.
    [&link[..link.len() - 1024], &archive(members)].concat()
}
