//! What `fuzz/` and the replay of its corpus give the bytes of others to.
//!
//! Each function is one parser, and panics where it breaks a promise. They are compiled for tests
//! and for fuzzing only. [`TARGETS`] has them all: each has a file in `fuzz/fuzz_targets` and seeds
//! in `fuzz/corpus`, under the name `packager_` and its own.

#![expect(clippy::missing_panics_doc, reason = "to panic is what these functions are for")]

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use fs_err as fs;
use jiff::Timestamp;
use kybernate_spec::checkpoint::{CheckpointConfig, DeviceStorage};
use kybernate_spec::page_index::{ChunkHash, Header, PAGES_PER_SEGMENT, Reader, Record};
use kybernate_spec::{Digest, document, page_index as index};
use tempfile::TempDir;

pub use crate::pack::fuzz::parents;

use crate::bundle::{self, Proof};
use crate::criu::{NameClass, classify};
use crate::inside::Inside;
use crate::interchange::{Archive, ForeignSource, ImportError, Imported, containerd, cri};
use crate::key::{PublicKey, SigningKey};
use crate::outline::Outline;
use crate::policy::{Policy, Question};
use crate::progress::Progress;
use crate::stored::StoredPages;
use crate::{artifact, images_pack};

/// Takes what others wrote.
pub type Parser = fn(&[u8]);

/// Every parser and its name.
pub const TARGETS: [(&str, Parser); 8] = [
    ("archive", archive),
    ("bundle", bundle),
    ("containerd", containerd),
    ("documents", documents),
    ("images", images),
    ("page_index", page_index),
    ("parents", parents),
    ("policy", policy),
];

/// A page index.
pub fn page_index(bytes: &[u8]) {
    let Ok(mut reader) = Reader::new(bytes) else { return };
    let (mut shards, mut files) = (0, 0);
    loop {
        match reader.next_record() {
            Err(_refused) => return,
            Ok(None) => break,
            Ok(Some(Record::Shard(chunks))) => {
                shards += 1;
                assert!(chunks.len() <= 64);
            }
            Ok(Some(Record::File { name, .. })) => {
                files += 1;
                assert!(!name.is_empty() && name.len() <= 255);
            }
            Ok(Some(Record::Segment(runs))) => {
                let mut end = 0;
                for run in runs {
                    assert!(run.pages > 0 && run.first >= end, "they overlap");
                    end = run.first + run.pages;
                    let shard = reader.shard_pages().get(usize::from(run.place.shard));
                    let last = u32::from(run.place.page) + u32::from(run.pages);
                    assert!(shard.is_some_and(|pages| last <= *pages), "beyond its shard");
                }
                assert!(end <= PAGES_PER_SEGMENT);
            }
        }
    }
    assert_eq!((shards, files), (reader.header().shards, reader.header().files));
}

/// A pack of images, and CRIU's images that are in it.
pub fn images(bytes: &[u8]) {
    let Ok(directory) = tempfile::tempdir() else { return };
    let (dump, scratch) = (directory.path().join("dump"), directory.path().join("scratch"));
    if [&dump, &scratch].into_iter().any(|path| fs::create_dir(path).is_err()) {
        return;
    }
    let read = images_pack::read(bytes, |name, content| {
        assert!(classify(name) == NameClass::Image && !name.contains('/'), "{name:?}");
        fs::write(dump.join(name), content)
    });
    if read.is_err() {
        return;
    }
    if let Some(stored) = nothing_stored(&dump, directory.path()) {
        let _told: io::Result<Inside> = Inside::read(&dump, &stored);
    }
    crate::pack::fuzz::scan(&dump, &scratch);
}

/// Returns what is stored of a dump without pages.
fn nothing_stored(dump: &Path, place: &Path) -> Option<StoredPages> {
    let path = place.join("index");
    let mut content = Vec::new();
    let header = Header { hash: ChunkHash::Blake3, shards: 0, files: 0 };
    index::write_header(&mut content, &header).ok()?;
    index::write_end(&mut content).ok()?;
    fs::write(&path, content).ok()?;
    StoredPages::scan(dump, Arc::new(fs::File::open(path).ok()?.into_file())).ok()
}

/// Manifests, indexes and configs.
pub fn documents(bytes: &[u8]) {
    if let Ok(read) = document::parse_index(bytes) {
        let text = serde_json::to_vec(&read).unwrap_or_default();
        let again = document::parse_index(&text).ok().map(|again| serde_json::to_vec(&again).ok());
        assert_eq!(again, Some(Some(text)), "it is written as something else");
        assert!(document::parse_manifest(bytes).is_err(), "it is both");
    }
    if let Ok(read) = document::parse_manifest(bytes) {
        let text = serde_json::to_vec(&read).unwrap_or_default();
        let again = document::parse_manifest(&text).map(|again| serde_json::to_vec(&again).ok());
        assert_eq!(again.ok(), Some(Some(text)), "it is written as something else");
    }
    if artifact::check_manifest(bytes, DeviceStorage::Device).is_ok() {
        assert!(Outline::parse(bytes, None).is_ok(), "only we can read it");
    }
    let _refused: Result<(), _> = artifact::check_config(bytes);
    if let Ok(outline) = Outline::parse(bytes, None) {
        assert!(outline.own_artifact_type().is_none_or(|own| Some(own) == outline.artifact_type));
    }
}

/// A policy file.
pub fn policy(bytes: &[u8]) {
    let Some((_directory, path)) = file(bytes, "policy.toml") else { return };
    let policy = match Policy::read(&path) {
        Ok(policy) => policy,
        Err(wrong) => {
            let lines = bytes.split(|byte| *byte == b'\n').count();
            assert!(!wrong.is_empty(), "nothing is wrong");
            let is_there = |(line, column): (usize, usize)| line <= lines && column > 0;
            assert!(wrong.iter().all(|mistake| mistake.at.is_none_or(is_there)), "{wrong:?}");
            return;
        }
    };
    assert!(!policy.rules().is_empty(), "it says nothing");
    for namespace in ["", "shop"] {
        let question = Question {
            repository: "registry.example.com/shop/web",
            source_namespace: "shop",
            target_namespace: namespace,
        };
        if let Ok(demand) = policy.ask(question, Timestamp::UNIX_EPOCH) {
            let _whose = (demand.mode(), demand.keys());
        }
    }
}

/// A signature, which none of our keys has made.
pub fn bundle(bytes: &[u8]) {
    static OURS: OnceLock<Option<PublicKey>> = OnceLock::new();
    let make = || SigningKey::generate().ok().map(|key| key.public().clone());
    let Some(key) = OURS.get_or_init(make) else { return };
    let digest = Digest::of(b"something");
    let proof = bundle::verify(bytes, &digest, std::slice::from_ref(key));
    assert!(!matches!(proof, Ok(Proof::By(_))), "it is forged");
}

/// An archive of kubelet's checkpoint API, or of Podman.
pub fn archive(bytes: &[u8]) {
    let Some((directory, archive)) = file(bytes, "archive") else { return };
    let facts = CheckpointConfig::default();
    let scratch = Some(directory.path().to_owned());
    let request = cri::ImportRequest { archive, previous: None, facts, image: None, scratch };
    imported(async { cri::import(request, &Progress::default()).await });
}

/// An image layout in a tar, as containerd exports it, with its index of a checkpoint.
pub fn containerd(bytes: &[u8]) {
    let Some((directory, path)) = file(bytes, "layout.tar") else { return };
    let Ok(archive) = Archive::open(&path) else { return };
    let request = containerd::ImportRequest {
        source: ForeignSource::Archive(Arc::new(archive)),
        location: None,
        name: None,
        facts: CheckpointConfig::default(),
        image: None,
        mount_from: None,
        scratch: Some(directory.path().to_owned()),
    };
    imported(async { containerd::import(request, &Progress::default()).await });
}

/// What came in is a directory of CRIU's files, whatever the names in it were.
fn imported(work: impl Future<Output = Result<Imported, ImportError>>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return };
    let Ok(imported) = runtime.block_on(work) else { return };
    let entries = fs::read_dir(&imported.request.dump);
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        assert!(classify(&name) != NameClass::Foreign, "{name:?} has come in");
        assert!(entry.file_type().is_ok_and(|kind| kind.is_file()), "{name:?} is no file");
    }
}

fn file(bytes: &[u8], name: &str) -> Option<(TempDir, std::path::PathBuf)> {
    let directory = tempfile::tempdir().ok()?;
    let path = directory.path().join(name);
    fs::write(&path, bytes).ok()?;
    Some((directory, path))
}

#[cfg(test)]
mod tests;
