//! `kyb inspect`, and what it needs of a registry.

use bytes::Bytes;
use kybernate_packager::store::Store;
use kybernate_spec::{Annotations, Descriptor, Manifest, media_type};

use crate::artifact::{put, put_document};
use crate::dump::dump;
use crate::kyb::{Ran, kyb};
use crate::registry::{Registry, open};

async fn run(scratch: &tempfile::TempDir, line: &str) -> Ran {
    kyb(scratch.path(), line.split(' ')).await
}

/// Finds the file in which docker-registry keeps a layer of the checkpoint at `path`.
async fn kept(registry: &Registry, path: &str, media_type: &str) -> std::path::PathBuf {
    let location = registry.at(path);
    let store = open(&location).await;
    let index = store.resolve(&location).await.unwrap();
    let index: kybernate_spec::Index = serde_json::from_slice(&index.content).unwrap();
    let child = store.manifest(&index.manifests.last().unwrap().digest).await.unwrap();
    let child: Manifest = serde_json::from_slice(&child.content).unwrap();
    let layer = child.layers.iter().find(|layer| layer.media_type == media_type).unwrap();
    let hex = layer.digest.hex();
    registry.data().join("docker/registry/v2/blobs/sha256").join(&hex[..2]).join(hex).join("data")
}

#[tokio::test]
async fn what_is_inside_is_shown_without_the_pages() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = tempfile::tempdir().unwrap();
    dump(scratch.path(), 600);
    let at = format!("{}/a/b:v1", registry.address());
    assert_eq!(run(&scratch, &format!("pack dump {at}")).await.code, 0);
    fs_err::remove_file(kept(&registry, "a/b:v1", media_type::PAGES).await).unwrap();

    let inside = run(&scratch, &format!("inspect {at} --json")).await.json()["inside"].clone();
    let process = &inside["processes"][0];
    assert_eq!((&process["pid"], &process["state"]), (&1.into(), &"unknown".into()));
    assert_eq!(process["regions"][0]["storedBytes"], 600 * 4096);
    assert_eq!(inside["memory"][0]["storedBytes"], 600 * 4096);
    let told = run(&scratch, &format!("inspect {at}")).await;
    assert!(told.out.contains("PROCESSES") && told.out.contains("2.34 MiB"), "{told:?}");
    assert!(!told.out.contains('\u{1b}'), "{told:?}");

    let only = run(&scratch, &format!("inspect {at} --facts-only --json")).await.json();
    assert!(only.get("inside").is_none(), "{only}");
}

#[tokio::test]
async fn images_that_were_changed_are_refused_and_the_facts_are_shown() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = tempfile::tempdir().unwrap();
    dump(scratch.path(), 8);
    let at = format!("{}/a/b:v1", registry.address());
    assert_eq!(run(&scratch, &format!("pack dump {at}")).await.code, 0);
    let pack = kept(&registry, "a/b:v1", media_type::IMAGES_PACK).await;
    let mut content = fs_err::read(&pack).unwrap();
    let last = content.len() - 1;
    content[last] ^= 1;
    fs_err::write(&pack, content).unwrap();
    run(&scratch, &format!("inspect {at}")).await.ended(2, "refused (integrity): ");
    assert_eq!(run(&scratch, &format!("inspect {at} --facts-only")).await.code, 0);
}

#[tokio::test]
async fn images_that_nobody_can_decode_are_told_beside_the_rest() {
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), 8);
    let image = dump.join("core-1.img");
    let mut bytes = fs_err::read(&image).unwrap();
    bytes.extend([3, 0, 0, 0, 0xff, 0xff, 0xff]);
    fs_err::write(&image, bytes).unwrap();
    assert_eq!(run(&scratch, "pack dump oci:layout:v1").await.code, 0);
    let told = run(&scratch, "inspect oci:layout:v1").await;
    assert_eq!(told.code, 0, "{told:?}");
    assert!(told.out.contains("COULD NOT BE READ\n  IMAGE       WHAT\n  core-1.img"), "{told:?}");
}

/// Stores a container image with an environment and returns its manifest.
pub(crate) async fn source_image(store: &Store) -> Descriptor {
    let layer = put(store, media_type::OCI_LAYER_TAR, Bytes::from(vec![0; 1024])).await;
    let config = serde_json::json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": ["PATH=/bin", "DB_PASSWORD=hunter2-in-the-clear"],
            "Entrypoint": ["/job", "--token=tok-in-the-clear"],
            "Cmd": ["--port", "80"],
        },
        "rootfs": { "type": "layers", "diff_ids": [layer.digest] },
    });
    let config = Bytes::from(serde_json::to_vec(&config).unwrap());
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: None,
        config: put(store, media_type::OCI_CONFIG, config).await,
        layers: vec![layer],
        subject: None,
        annotations: Annotations::new(),
    };
    put_document(store, media_type::OCI_MANIFEST, &manifest).await
}

#[tokio::test]
async fn secrets_of_the_image_are_masked_unless_asked_for() {
    let scratch = tempfile::tempdir().unwrap();
    dump(scratch.path(), 8);
    let layout = format!("oci:{}/layout", scratch.path().display());
    let store = open(&layout.parse().unwrap()).await;
    let image = source_image(&store).await;
    let line = format!("pack dump oci:layout:v1 --image oci:layout@{}", image.digest);
    assert_eq!(run(&scratch, &line).await.code, 0);
    for line in ["inspect oci:layout:v1", "inspect oci:layout:v1 --json"] {
        let ran = run(&scratch, line).await;
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(!ran.out.contains("in-the-clear") && ran.out.contains("********"), "{ran:?}");
        let shown = run(&scratch, &format!("{line} --show-secrets")).await;
        assert!(shown.out.contains("hunter2-in-the-clear"), "{shown:?}");
        assert!(shown.out.contains("--token=tok-in-the-clear"), "{shown:?}");
    }
}

/// Writes a number as protobuf does.
fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(u8::try_from(number & 0x7f).unwrap() | 0x80);
        number >>= 7;
    }
    out.push(u8::try_from(number).unwrap());
}

/// Puts arguments into the first pages of the dump, and says in the images where they are.
fn with_arguments(dump: &std::path::Path, at: usize, arguments: &[u8]) {
    let pages = dump.join("pages-1.img");
    let mut content = fs_err::read(&pages).unwrap();
    content[at..at + arguments.len()].copy_from_slice(arguments);
    fs_err::write(pages, content).unwrap();
    let image = dump.join("mm-1.img");
    let old = fs_err::read(&image).unwrap();
    let mut message = old[12..].to_vec();
    for (key, place) in [(8 << 3, at), (9 << 3, at + arguments.len())] {
        message.push(key);
        varint(&mut message, 0x10_0000 + u64::try_from(place).unwrap());
    }
    let length = u32::try_from(message.len()).unwrap().to_le_bytes();
    fs_err::write(image, [&old[..8], &length, &message].concat()).unwrap();
}

/// What ran is not what the image would run.
#[tokio::test]
async fn the_command_is_what_ran() {
    let Some(registry) = Registry::docker() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let dump = dump(scratch.path(), 8);
    // Across the end of a page.
    with_arguments(&dump, 4080, b"/srv/job\0--rate=3\0--token\0tok-in-the-clear\0");
    let store = open(&format!("{}/a/image", registry.address()).parse().unwrap()).await;
    let image = source_image(&store).await;
    let at = format!("{}/a/b:v1", registry.address());
    let image = format!("{}/a/image@{}", registry.address(), image.digest);
    let packed = run(&scratch, &format!("pack dump {at} --image {image}")).await;
    assert_eq!(packed.code, 0, "{packed:?}");

    let told = run(&scratch, &format!("inspect {at}")).await;
    assert!(told.out.contains("/srv/job --rate=3 --token ********\n"), "{told:?}");
    assert!(told.out.contains("image runs") && !told.out.contains("in-the-clear"), "{told:?}");
    let ran = run(&scratch, &format!("inspect {at} --json --show-secrets")).await.json();
    let command = ["/srv/job", "--rate=3", "--token", "tok-in-the-clear"];
    assert_eq!(ran["ran"], serde_json::json!({ "command": command, "knownFrom": "memory" }));
    assert_eq!(ran["starts"]["command"][0], "/job");

    // Where it cannot be known it is not made up.
    let only = run(&scratch, &format!("inspect {at} --facts-only --json")).await.json();
    assert_eq!(only["ran"]["knownFrom"], "image");
    fs_err::remove_file(kept(&registry, "a/b:v1", media_type::PAGES).await).unwrap();
    let told = run(&scratch, &format!("inspect {at}")).await;
    assert!(told.out.contains("(the image's; what ran is not known)"), "{told:?}");
    assert!(told.out.contains("the arguments of the first process: "), "{told:?}");
}
