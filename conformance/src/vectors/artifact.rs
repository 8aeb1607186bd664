//! Artifacts, right and wrong, and the layout that holds them all.

#![expect(
    clippy::indexing_slicing,
    reason = "into documents made here; a wrong place fails the test that makes every vector"
)]

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, ensure};
use fs_err as fs;
use kybernate_spec::{Algorithm, Hasher, Reason, annotation, media_type};
use serde_json::{Value, json};

use super::page_index::{PAGE, PageIndex, pages};
use super::{Tree, Vector};

/// A change of a document before it is stored.
type Edit = Box<dyn FnOnce(&mut Value)>;
/// A change of bytes.
type Spoil = fn(&mut Vec<u8>);

/// The file with device memory in [`Artifact::device`].
pub(super) const DEVICE_FILE: &str = "device-1f-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.img";

/// One vector's artifact; whatever is not set is as it should be.
pub(super) struct Artifact {
    /// Files of the pack, in order.
    pub(super) files: Vec<(Vec<u8>, Vec<u8>)>,
    /// The pack, when it is not what `files` make.
    pub(super) pack: Option<Vec<u8>>,
    /// The page index.
    pub(super) page_index: Vec<u8>,
    /// The shards.
    pub(super) shards: Vec<Vec<u8>>,
    /// From which shard on they are of device memory.
    pub(super) device_from: usize,
    /// The page hashes.
    pub(super) page_hashes: Option<Vec<u8>>,
    /// Volumes by destination.
    pub(super) volumes: Vec<Option<&'static str>>,
    /// Which part of a volume's tar each of those is; absent where it is the whole.
    pub(super) volume_parts: Vec<&'static str>,
    /// Length of all bulk files.
    pub(super) bulk_bytes: u64,
    /// Pages that the page index names.
    pub(super) stored_pages: u64,
    /// The runnable child's descriptor.
    pub(super) runnable: Option<Value>,
    /// What names blobs.
    pub(super) algorithm: Algorithm,
    facts: Vec<Edit>,
    manifest: Vec<Edit>,
    index: Vec<Edit>,
    texts: BTreeMap<Part, Spoil>,
    stored: BTreeMap<Part, Spoil>,
    absent: Vec<Part>,
}

/// A part of an artifact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Index,
    Manifest,
    Config,
    Pack,
    PageIndex,
    /// Every shard.
    Shard,
}

impl Artifact {
    /// An artifact of a pack with two files and a bulk file of three pages, of which two are
    /// stored.
    pub(super) fn small() -> Self {
        let shard = pages(1, 2);
        let page_index = PageIndex::new(1, 1)
            .shard(&shard)
            .file("pages-1.img", 3 * 4096)
            .runs(&[(0, 1, 0, 0), (2, 1, 0, 1)])
            .end();
        let mut small = Self::empty();
        small.files = vec![file("core-1.img", "core"), file("inventory.img", "inventory")];
        small.with_pages(page_index, vec![shard], 3 * 4096, 2)
    }

    /// An artifact of two pages, and of device memory of five pages of which two are stored.
    pub(super) fn device() -> Self {
        let (one, two) = (pages(1, 2), pages(21, 2));
        let page_index = PageIndex::new(2, 2)
            .shard(&one)
            .shard(&two)
            .file("pages-1.img", 2 * 4096)
            .run(0, 0)
            .file(DEVICE_FILE, 5 * 4096)
            .runs(&[(1, 1, 1, 0), (4, 1, 1, 1)])
            .end();
        let mut device = Self::empty().with_pages(page_index, vec![one, two], 7 * 4096, 4);
        device.files = vec![file("core-1.img", "core"), file("inventory.img", "inventory")];
        device.device_from = 1;
        device.facts(|facts| {
            let gpu = "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa";
            let stream = json!({ "file": DEVICE_FILE, "pid": 31, "gpu": gpu, "bytes": 5 * 4096 });
            facts["device"] = json!({ "storage": "device", "gpus": [gpu], "streams": [stream] });
        })
    }

    /// An artifact of nothing.
    pub(super) fn empty() -> Self {
        Self {
            files: Vec::new(),
            pack: None,
            page_index: PageIndex::new(0, 0).end(),
            shards: Vec::new(),
            device_from: usize::MAX,
            page_hashes: None,
            volumes: Vec::new(),
            volume_parts: Vec::new(),
            bulk_bytes: 0,
            stored_pages: 0,
            runnable: None,
            algorithm: Algorithm::Sha256,
            facts: Vec::new(),
            manifest: Vec::new(),
            index: Vec::new(),
            texts: BTreeMap::new(),
            stored: BTreeMap::new(),
            absent: Vec::new(),
        }
    }

    /// Sets everything that has to do with pages.
    pub(super) fn with_pages(
        mut self,
        page_index: Vec<u8>,
        shards: Vec<Vec<u8>>,
        bulk_bytes: u64,
        stored_pages: u64,
    ) -> Self {
        self.page_index = page_index;
        self.shards = shards;
        self.bulk_bytes = bulk_bytes;
        self.stored_pages = stored_pages;
        self
    }

    /// Changes the facts.
    pub(super) fn facts(mut self, edit: impl FnOnce(&mut Value) + 'static) -> Self {
        self.facts.push(Box::new(edit));
        self
    }

    /// Changes the checkpoint manifest.
    pub(super) fn manifest(mut self, edit: impl FnOnce(&mut Value) + 'static) -> Self {
        self.manifest.push(Box::new(edit));
        self
    }

    /// Changes the index.
    pub(super) fn index(mut self, edit: impl FnOnce(&mut Value) + 'static) -> Self {
        self.index.push(Box::new(edit));
        self
    }

    /// Changes a part's bytes before its digest is computed.
    pub(super) fn text(mut self, part: Part, edit: Spoil) -> Self {
        self.texts.insert(part, edit);
        self
    }

    /// Changes the bytes that are stored, not their digest. The artifact's content must be unlike
    /// that of every other: give it a name of its own with [`Artifact::called`].
    pub(super) fn stored(mut self, part: Part, edit: Spoil) -> Self {
        self.stored.insert(part, edit);
        self
    }

    /// Leaves a part out of the layout.
    pub(super) fn without(mut self, part: Part) -> Self {
        self.absent.push(part);
        self
    }

    /// Gives every part content that no other artifact has.
    pub(super) fn called(mut self, name: &'static str) -> Self {
        let seed = u32::from(*blake3::hash(name.as_bytes()).as_bytes().first().unwrap_or(&0));
        let shard = pages(seed, 2);
        let bulk = format!("amdgpu-{name}.img");
        self.page_index = PageIndex::new(1, 1).shard(&shard).file(bulk, 8192).run(0, 0).end();
        self.shards = vec![shard];
        (self.bulk_bytes, self.stored_pages) = (8192, 2);
        self.files = vec![file("core-1.img", name)];
        self.facts(move |facts| facts["source"] = json!({ "container": name }))
    }

    fn pack(&self) -> Vec<u8> {
        if let Some(pack) = &self.pack {
            return pack.clone();
        }
        pack(&self.files)
    }

    fn config(&mut self) -> Value {
        let pack_bytes: usize = self.files.iter().map(|(_, content)| content.len()).sum();
        let mut facts = json!({
            "version": "1.0",
            "sizes": {
                "processes": 1,
                "threads": 1,
                "dumpBytes": u64::try_from(pack_bytes).unwrap_or(0).saturating_add(self.bulk_bytes),
                "bulkBytes": self.bulk_bytes,
                "pageBytes": self.stored_pages * 4096,
            },
        });
        for edit in std::mem::take(&mut self.facts) {
            edit(&mut facts);
        }
        facts
    }

    /// Puts the artifact into the pool and returns the digest and size of its index.
    fn store(mut self, pool: &mut Pool) -> anyhow::Result<(String, u64)> {
        let mut layers = Vec::new();
        let index = std::mem::take(&mut self.page_index);
        layers.push(self.layer(pool, Part::PageIndex, media_type::PAGE_INDEX, index)?);
        let pack = self.pack();
        layers.push(self.layer(pool, Part::Pack, media_type::IMAGES_PACK, pack)?);
        for (number, shard) in std::mem::take(&mut self.shards).into_iter().enumerate() {
            let is_device = number >= self.device_from;
            let kind = if is_device { media_type::DEVICE } else { media_type::PAGES };
            layers.push(self.layer(pool, Part::Shard, kind, shard)?);
        }
        if let Some(hashes) = self.page_hashes.take() {
            layers.push(self.put(pool, None, media_type::PAGE_HASHES, hashes)?);
        }
        for (number, destination) in std::mem::take(&mut self.volumes).into_iter().enumerate() {
            // An empty tar is two blocks of zeros.
            let mut layer = self.put(pool, None, media_type::VOLUME, vec![0; 1024])?;
            layer["annotations"] = json!({ (annotation::TITLE): format!("volume-{number}") });
            if let Some(destination) = destination {
                layer["annotations"][annotation::DESTINATION] = json!(destination);
            }
            if let Some(part) = self.volume_parts.get(number) {
                layer["annotations"][annotation::PART] = json!(part);
            }
            layers.push(layer);
        }
        let facts = self.config().to_string().into_bytes();
        let config = self.put(pool, Some(Part::Config), media_type::CHECKPOINT_CONFIG, facts)?;
        let mut manifest = json!({
            "schemaVersion": 2,
            "mediaType": media_type::OCI_MANIFEST,
            "artifactType": media_type::CHECKPOINT,
            "config": config,
            "layers": layers,
            "annotations": { (annotation::FORMAT_VERSION): "1.0" },
        });
        for edit in std::mem::take(&mut self.manifest) {
            edit(&mut manifest);
        }
        let manifest = manifest.to_string().into_bytes();
        let mut child = self.put(pool, Some(Part::Manifest), media_type::OCI_MANIFEST, manifest)?;
        child["artifactType"] = json!(media_type::CHECKPOINT);
        child["platform"] = json!({ "architecture": "unknown", "os": "unknown" });
        child["annotations"] = json!({ (annotation::ROLE): "checkpoint" });
        let children: Vec<Value> = self.runnable.take().into_iter().chain([child]).collect();
        let mut index = json!({
            "schemaVersion": 2,
            "mediaType": media_type::OCI_INDEX,
            "artifactType": media_type::CHECKPOINT,
            "manifests": children,
            "annotations": { (annotation::FORMAT_VERSION): "1.0" },
        });
        for edit in std::mem::take(&mut self.index) {
            edit(&mut index);
        }
        let index = index.to_string().into_bytes();
        let stored = self.put(pool, Some(Part::Index), media_type::OCI_INDEX, index)?;
        let digest = stored["digest"].as_str().unwrap_or_default().to_owned();
        Ok((digest, stored["size"].as_u64().unwrap_or(0)))
    }

    fn layer(
        &self,
        pool: &mut Pool,
        part: Part,
        media_type: &str,
        content: Vec<u8>,
    ) -> anyhow::Result<Value> {
        let mut layer = self.put(pool, Some(part), media_type, content)?;
        let title = format!("{part:?}").to_lowercase();
        layer["annotations"] = json!({ (annotation::TITLE): title });
        Ok(layer)
    }

    fn put(
        &self,
        pool: &mut Pool,
        part: Option<Part>,
        media_type: &str,
        mut content: Vec<u8>,
    ) -> anyhow::Result<Value> {
        if let Some(edit) = part.and_then(|part| self.texts.get(&part)) {
            edit(&mut content);
        }
        let mut hasher = Hasher::new(self.algorithm);
        hasher.update(&content);
        let digest = hasher.finish();
        let descriptor = json!({
            "mediaType": media_type,
            "digest": digest.to_string(),
            "size": content.len(),
        });
        if let Some(edit) = part.and_then(|part| self.stored.get(&part)) {
            edit(&mut content);
        }
        if part.is_none_or(|part| !self.absent.contains(&part)) {
            let path = format!("blobs/{}/{}", digest.algorithm(), digest.hex());
            pool.put(path, content)?;
        }
        Ok(descriptor)
    }
}

/// A file of a pack.
pub(super) fn file(name: impl AsRef<[u8]>, content: impl AsRef<[u8]>) -> (Vec<u8>, Vec<u8>) {
    (name.as_ref().to_vec(), content.as_ref().to_vec())
}

/// Returns the pack of these files, in this order.
pub(super) fn pack(files: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let mut pack = b"KYBFILES\x01\x00\x00\x00".to_vec();
    pack.extend(u32::try_from(files.len()).unwrap_or(u32::MAX).to_le_bytes());
    for (name, content) in files {
        pack.extend(u16::try_from(name.len()).unwrap_or(u16::MAX).to_le_bytes());
        pack.extend(u64::try_from(content.len()).unwrap_or(u64::MAX).to_le_bytes());
        pack.extend(name);
        pack.extend(content);
    }
    pack
}

/// Every vector and the files of the layout that holds them.
#[derive(Debug, Default)]
pub struct Pool {
    /// Files of the layout by path.
    pub files: BTreeMap<String, Vec<u8>>,
    /// What is expected of readers.
    pub vectors: Vec<Vector>,
    entries: Vec<Value>,
}

impl Pool {
    fn put(&mut self, path: String, content: Vec<u8>) -> anyhow::Result<()> {
        let before = self.files.get(&path);
        ensure!(before.is_none_or(|before| *before == content), "two contents for {path}");
        self.files.insert(path, content);
        Ok(())
    }

    /// Adds a vector that must be read.
    pub(super) fn good(
        &mut self,
        name: &'static str,
        what: &'static str,
        artifact: Artifact,
        bulk: &[(&str, Vec<u8>)],
    ) -> anyhow::Result<()> {
        let mut tree = Tree::new();
        for (name, content) in &artifact.files {
            let name = String::from_utf8_lossy(name);
            super::insert(&mut tree, &name, content);
        }
        for (name, content) in bulk {
            super::insert(&mut tree, name, content);
        }
        self.add(Vector { name, section: "1-8", what, files: Some(tree), reason: None }, artifact)
    }

    /// Adds a vector that must be refused.
    pub(super) fn bad(
        &mut self,
        name: &'static str,
        section: &'static str,
        reason: Reason,
        what: &'static str,
        artifact: Artifact,
    ) -> anyhow::Result<()> {
        let reason = Some(reason);
        self.add(Vector { name, section, what, files: None, reason }, artifact)
    }

    /// Stores a blob under a name that is not its own.
    pub(super) fn put_blob(&mut self, name: &str, content: Vec<u8>) -> anyhow::Result<()> {
        self.put(format!("blobs/{name}"), content)
    }

    /// Lets the last vector be refused too.
    pub(super) fn or(&mut self, reason: Reason) {
        if let Some(last) = self.vectors.last_mut() {
            last.reason = Some(reason);
        }
    }

    fn add(&mut self, vector: Vector, artifact: Artifact) -> anyhow::Result<()> {
        let name = vector.name;
        ensure!(self.vectors.iter().all(|other| other.name != name), "two vectors {name}");
        let stored = artifact.store(self).with_context(|| format!("vector {name}"))?;
        self.entries.push(json!({
            "mediaType": media_type::OCI_INDEX,
            "digest": stored.0,
            "size": stored.1,
            "annotations": { (annotation::REF_NAME): name },
        }));
        self.vectors.push(vector);
        Ok(())
    }

    /// Adds what makes it a layout.
    pub(super) fn finish(mut self) -> Self {
        let index = json!({
            "schemaVersion": 2,
            "mediaType": media_type::OCI_INDEX,
            "manifests": self.entries,
        });
        let marker = br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec();
        self.files.insert("oci-layout".to_owned(), marker);
        self.files.insert("index.json".to_owned(), format!("{index:#}\n").into_bytes());
        self
    }

    /// Writes the layout into a directory that has nothing else.
    pub fn write(&self, directory: &Path) -> anyhow::Result<()> {
        for (path, content) in &self.files {
            let path = directory.join(path);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(path, content)?;
        }
        Ok(())
    }
}

/// Returns a file of `length` bytes that has pages at some places: (page in the file, content).
pub(super) fn sparse(length: usize, stored: &[(usize, &[u8])]) -> Vec<u8> {
    let mut content = vec![0; length];
    for (page, bytes) in stored {
        for (byte, new) in content.iter_mut().skip(page * PAGE).zip(*bytes) {
            *byte = *new;
        }
    }
    content
}
