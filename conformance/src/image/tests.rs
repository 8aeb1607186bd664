//! What the image's readers rely on.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::PathBuf;
use std::slice;

use flate2::read::GzDecoder;

use super::*;

const NAME: &str = "registry.example.com:5000/demo/workload:1";

fn built(name: &str) -> (tempfile::TempDir, PathBuf, Built) {
    let dir = tempfile::tempdir().unwrap();
    let busybox = dir.path().join("busybox");
    fs::write(&busybox, b"a static busybox").unwrap();
    let layout = dir.path().join("layout");
    let built = build(&layout, &busybox, name).unwrap();
    (dir, layout, built)
}

fn entries(layout: &Path, layer: &Descriptor) -> Vec<(String, u64, u64, u64)> {
    let blob = fs::File::open(layout.join("blobs/sha256").join(layer.digest.hex())).unwrap();
    tar::Archive::new(GzDecoder::new(blob))
        .entries()
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let header = entry.header();
            let path = entry.path().unwrap().to_str().unwrap().to_owned();
            let (uid, gid) = (header.uid().unwrap(), header.gid().unwrap());
            (path, uid, gid, header.mtime().unwrap())
        })
        .collect()
}

#[test]
fn two_builds_give_the_same_bytes() {
    let (first_dir, first_layout, first) = built(NAME);
    let (second_dir, second_layout, second) = built(NAME);
    let (first_tar, second_tar) = (first_dir.path().join("tar"), second_dir.path().join("tar"));
    archive(&first_layout, &first, &first_tar).unwrap();
    archive(&second_layout, &second, &second_tar).unwrap();

    assert_eq!(first, second);
    assert_eq!(fs::read(first_tar).unwrap(), fs::read(second_tar).unwrap());
}

#[test]
fn every_blob_matches_its_digest_and_nothing_else_is_there() {
    let (_dir, layout, built) = built(NAME);
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(layout.join("blobs/sha256")).unwrap() {
        let path = entry.unwrap().path();
        let digest = Digest::of(&fs::read(&path).unwrap());
        assert_eq!(path.file_name().unwrap().to_str(), Some(digest.hex()));
        found.insert(digest);
    }
    let named = built.layers.iter().chain([&built.config, &built.manifest]);
    assert_eq!(found, named.map(|blob| blob.digest.clone()).collect());
}

#[test]
fn the_manifest_leads_to_the_layers_and_the_configuration_to_their_content() {
    let (_dir, layout, built) = built(NAME);
    let blob = |digest: &Digest| fs::read(layout.join("blobs/sha256").join(digest.hex())).unwrap();
    let manifest: Manifest = serde_json::from_slice(&blob(&built.manifest.digest)).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&blob(&manifest.config.digest)).unwrap();

    assert_eq!(manifest.layers, built.layers);
    assert_eq!(config["config"]["Entrypoint"][0], "/workload");
    for (layer, diff_id) in
        manifest.layers.iter().zip(config["rootfs"]["diff_ids"].as_array().unwrap())
    {
        let mut tar = Vec::new();
        GzDecoder::new(&*blob(&layer.digest)).read_to_end(&mut tar).unwrap();
        assert_eq!(diff_id.as_str(), Some(&*Digest::of(&tar).to_string()));
    }
}

#[test]
fn the_layers_belong_to_root_and_have_no_time() {
    let (_dir, layout, built) = built(NAME);
    let [base, workload] = &*built.layers else { panic!("not two layers: {:?}", built.layers) };

    assert_eq!(entries(&layout, workload), [("workload".to_owned(), 0, 0, 0)]);
    let base = entries(&layout, base);
    assert!(base.iter().all(|(_, uid, gid, mtime)| (*uid, *gid, *mtime) == (0, 0, 0)), "{base:?}");
    for path in ["bin/busybox", "bin/sh", "etc/os-release", "state/", "tmp/"] {
        assert!(base.iter().any(|(name, ..)| name == path), "{path} is not in {base:?}");
    }
}

#[test]
fn a_full_reference_names_the_image_in_containerd_too() {
    for (name, tag, containerd) in [
        (NAME, "1", Some(NAME)),
        ("localhost:5000/a/b", "latest", Some("localhost:5000/a/b:latest")),
        ("v2", "v2", None),
    ] {
        let (_dir, layout, built) = built(name);
        let index: Index =
            serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
        assert_eq!(index.manifests, slice::from_ref(&built.manifest));
        assert_eq!(built.manifest.annotations.get(REF_NAME).map(String::as_str), Some(tag));
        assert_eq!(built.manifest.annotations.get(CONTAINERD_NAME).map(String::as_str), containerd);
    }
}

#[test]
fn what_is_neither_a_tag_nor_a_reference_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["", "a b", "-/x", "registry.example.com/UPPER:1"] {
        build(dir.path(), Path::new("/nonexistent"), name).unwrap_err();
    }
}

#[test]
fn the_workload_is_a_program() {
    assert_eq!(WORKLOAD.first_chunk(), Some(b"\x7fELF"));
}
