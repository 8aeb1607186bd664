//! What every reader must read.

#![expect(
    clippy::indexing_slicing,
    reason = "into documents made here; a wrong place fails the test that makes every vector"
)]

use kybernate_spec::{Algorithm, Reason, media_type};
use serde_json::json;

use super::artifact::{Artifact, DEVICE_FILE, Part, Pool, file, sparse};
use super::page_index::{CHUNK, PAGE, PageIndex, SHA256, pages};

pub(super) fn add(pool: &mut Pool) -> anyhow::Result<()> {
    files(pool)?;
    segments(pool)?;
    shards(pool)?;
    proofs(pool)?;
    documents(pool)?;
    layers(pool)?;
    device(pool)
}

fn files(pool: &mut Pool) -> anyhow::Result<()> {
    let mut packed = Artifact::empty();
    packed.files = vec![file("core-1.img", "core"), file("inventory.img", "inventory")];
    pool.good("pack-only", "no bulk file and no shard", packed, &[])?;
    pool.good("nothing", "neither a file in the pack nor a bulk file", Artifact::empty(), &[])?;

    let mut none = Artifact::empty();
    none.files = vec![file("core-1.img", "")];
    none.page_index = PageIndex::new(0, 1).file("pages-1.img", 0).end();
    pool.good("no-bytes", "files without a byte", none, &[("pages-1.img", Vec::new())])?;

    let mut names = Artifact::empty();
    let digits = format!("core-{}.img", "0123456789abcdefABCD");
    let long = format!("amdgpu-{}.img", "A-b_9".repeat(12));
    for name in [
        &*long,
        "autofs-1F.img",
        "binfmt-misc-3.img",
        "binfmt-misc.img",
        &digits,
        "core-1.img",
        "descriptors.json",
        "eventpoll-tfd.img",
        "ids-1.img",
        "inventory.img",
        "pagemap-shmem-12.img",
        "seccomp.img",
        "tmpfs-4.tar.gz.img",
        "tmpfs-dev-52.tar.gz.img",
    ] {
        names.files.push(file(name, name));
    }
    names.files.sort();
    pool.good("names", "every kind of name that a file of the pack may have", names, &[])?;

    let shard = pages(2, 1);
    let index = PageIndex::new(1, 2)
        .shard(&shard)
        .file("descriptors.json", 10)
        .hole()
        .file("ghost-file-2.img", 4096)
        .run(0, 0)
        .end();
    let images = Artifact::empty().with_pages(index, vec![shard.clone()], 4106, 1);
    let bulk = [("descriptors.json", vec![0; 10]), ("ghost-file-2.img", shard)];
    pool.good("images-in-shards", "bulk files that are not pages", images, &bulk)
}

fn segments(pool: &mut Pool) -> anyhow::Result<()> {
    let what = "two of three pages; bad vectors are changes of this";
    pool.good("small", what, Artifact::small(), &small())?;

    let holes = PageIndex::new(0, 1).file("pages-1.img", 9 << 20).hole().hole().hole().end();
    let holes = Artifact::empty().with_pages(holes, Vec::new(), 9 << 20, 0);
    pool.good(
        "holes",
        "three segments, nothing stored",
        holes,
        &[("pages-1.img", vec![0; 9 << 20])],
    )?;

    let shard = pages(3, 5);
    let run = PageIndex::new(1, 1).shard(&shard).file("pages-1.img", 5 * 4096).run(0, 0).end();
    let run = Artifact::empty().with_pages(run, vec![shard.clone()], 5 * 4096, 5);
    pool.good("run", "one run", run, &[("pages-1.img", shard.clone())])?;

    let length = 4 * 4096 + 1;
    let cut = PageIndex::new(1, 1).shard(&shard).file("pages-1.img", length).run(0, 0).end();
    let cut = Artifact::empty().with_pages(cut, vec![shard.clone()], length, 5);
    let content = shard.get(..4 * PAGE + 1).unwrap_or_default().to_vec();
    pool.good(
        "cut",
        "a last page that is cut, whatever is stored behind",
        cut,
        &[("pages-1.img", content)],
    )?;

    let scattered: Vec<u16> = (0..10).map(|number| number * 37).chain([1000, 1023]).collect();
    let shard = pages(4, 14);
    let bitmap = PageIndex::new(1, 1)
        .shard(&shard)
        .file("pages-1.img", 4 << 20)
        .bitmap(0, 2, scattered.clone())
        .end();
    let bitmap = Artifact::empty().with_pages(bitmap, vec![shard.clone()], 4 << 20, 12);
    let stored: Vec<(usize, &[u8])> =
        scattered.iter().map(|page| usize::from(*page)).zip(shard.chunks(PAGE).skip(2)).collect();
    let content = sparse(4 << 20, &stored);
    pool.good(
        "bitmap",
        "pages by their bits, from the shard's third",
        bitmap,
        &[("pages-1.img", content)],
    )?;

    let shard = pages(5, 6);
    let place = |page: usize, count: usize| {
        shard.get(page * PAGE..(page + count) * PAGE).unwrap_or_default()
    };
    let list = PageIndex::new(1, 1)
        .shard(&shard)
        .file("pages-1.img", (4 << 20) + 4096)
        .runs(&[(1, 2, 0, 4), (3, 1, 0, 0), (1023, 1, 0, 2)])
        .bitmap(0, 3, [0])
        .end();
    let content = sparse(
        CHUNK + PAGE,
        &[(1, place(4, 2)), (3, place(0, 1)), (1023, place(2, 1)), (1024, place(3, 1))],
    );
    let list = Artifact::empty().with_pages(list, vec![shard.clone()], (4 << 20) + 4096, 5);
    pool.good(
        "list",
        "runs in another order than in the shard, a bitmap where a run would do",
        list,
        &[("pages-1.img", content)],
    )
}

fn shards(pool: &mut Pool) -> anyhow::Result<()> {
    let (one, two, three) = (pages(6, 2), pages(7, 1), pages(8, 1));
    let several = PageIndex::new(3, 1)
        .shard(&one)
        .shard(&two)
        .shard(&three)
        .file("pages-1.img", 4 * 4096)
        .runs(&[(0, 1, 2, 0), (1, 2, 0, 0), (3, 1, 1, 0)])
        .end();
    let shards = vec![one.clone(), two.clone(), three.clone()];
    let content = [&*three, &one, &two].concat();
    let several = Artifact::empty().with_pages(several, shards.clone(), 4 * 4096, 4);
    pool.good("shards", "a file from three shards", several, &[("pages-1.img", content)])?;

    let shared = PageIndex::new(1, 2)
        .shard(&one)
        .file("pages-2.img", 4096)
        .run(0, 1)
        .file("pages-1.img", 4096)
        .run(0, 0)
        .end();
    let (first, second) = one.split_at(PAGE);
    let bulk = [("pages-1.img", first.to_vec()), ("pages-2.img", second.to_vec())];
    let shared = Artifact::empty().with_pages(shared, vec![one.clone()], 8192, 2);
    pool.good(
        "shared-shard",
        "two files from one shard, not in order of their names",
        shared,
        &bulk,
    )?;

    let unused = PageIndex::new(3, 1)
        .shard(&one)
        .shard(&two)
        .shard(&three)
        .file("pages-1.img", 4096)
        .run(0, 1)
        .end();
    let unused = Artifact::empty().with_pages(unused, shards, 4096, 1).facts(|facts| {
        let base = format!("sha256:{}", "5".repeat(64));
        facts["lineage"] = json!({ "generation": 1, "base": base });
    });
    pool.good(
        "increment",
        "an increment: shards of its base of which little or nothing is used",
        unused,
        &[("pages-1.img", second.to_vec())],
    )?;

    let hashed =
        PageIndex::hashed(SHA256, 1, 1).shard(&one).file("pages-1.img", 8192).run(0, 0).end();
    let hashed = Artifact::empty().with_pages(hashed, vec![one.clone()], 8192, 2);
    pool.good("sha256-chunks", "chunks with SHA-256", hashed, &[("pages-1.img", one)])
}

/// Shards whose proof has a border or a gap in it.
fn proofs(pool: &mut Pool) -> anyhow::Result<()> {
    let large = pages(9, 1026);
    let index = PageIndex::hashed(SHA256, 1, 1)
        .shard(&large)
        .file("pages-1.img", 6 * 4096)
        .runs(&[(0, 2, 0, 0), (2, 4, 0, 1022)])
        .end();
    let content =
        [large.get(..2 * PAGE).unwrap_or_default(), large.get(1022 * PAGE..).unwrap_or_default()];
    let chunks = Artifact::empty().with_pages(index, vec![large.clone()], 6 * 4096, 6);
    pool.good(
        "two-chunks",
        "a run over the border of two chunks",
        chunks,
        &[("pages-1.img", content.concat())],
    )?;

    let mut wrong = PageIndex::hashed(SHA256, 1, 1).shard(&large);
    // The last byte of the second chunk's hash.
    if let Some(last) = wrong.bytes.last_mut() {
        *last ^= 1;
    }
    let index = wrong.clone().file("pages-1.img", 4096).run(0, 0).end();
    let unread = Artifact::empty().with_pages(index, vec![large.clone()], 4096, 1);
    pool.good(
        "unused-chunk",
        "a chunk with a wrong hash that no page needs: a reader need not read it",
        unread,
        &[("pages-1.img", content.concat().get(..PAGE).unwrap_or_default().to_vec())],
    )?;
    pool.or(Reason::ChunkHash);

    let proven = Artifact::small().called("proven-by-chunks");
    let shard = proven.shards.first().cloned().unwrap_or_default();
    let proven = proven.manifest(|manifest| {
        manifest["layers"][2]["digest"] = json!(format!("sha256:{}", "c".repeat(64)));
    });
    pool.put_blob(&format!("sha256/{}", "c".repeat(64)), shard.clone())?;
    pool.good("proven-by-chunks", "a shard with another digest than its layer says: its chunks prove it, or its digest refutes it", proven, &[("amdgpu-proven-by-chunks.img", shard)])?;
    pool.or(Reason::DigestMismatch);
    Ok(())
}

fn device(pool: &mut Pool) -> anyhow::Result<()> {
    let (one, two) = (pages(1, 2), pages(21, 2));
    let (first, second) = two.split_at(PAGE);
    let memory = sparse(5 * PAGE, &[(1, first), (4, second)]);
    let files = [("pages-1.img", one), (DEVICE_FILE, memory)];
    pool.good("device", "device memory in a shard of its own", Artifact::device(), &files)?;
    let all = Artifact::device().facts(|facts| {
        let whole: serde_json::Value =
            serde_json::from_str(include_str!("facts.json")).unwrap_or_default();
        let gpu = facts["device"]["gpus"][0].clone();
        facts["node"] = whole["node"].clone();
        facts["node"]["gpu"] = json!({
            "driver": "615.10",
            "cuda": "13.4",
            "devices": [
                { "uuid": gpu, "model": "A", "memoryBytes": 1, "computeCapability": "9.0" },
            ],
        });
        facts["device"].as_object_mut().map(|device| device.remove("gpus"));
    });
    pool.good("device-all-gpus", "device memory of a GPU of the node's", all, &files)?;
    let none = Artifact::small().facts(|facts| facts["device"] = json!({ "storage": "device" }));
    pool.good("device-none", "processes without device memory that a driver keeps", none, &small())
}

/// What `Artifact::small` becomes.
fn small() -> Vec<(&'static str, Vec<u8>)> {
    let shard = pages(1, 2);
    let (one, two) = shard.split_at(PAGE);
    vec![("pages-1.img", sparse(3 * PAGE, &[(0, one), (2, two)]))]
}

fn documents(pool: &mut Pool) -> anyhow::Result<()> {
    let minimal = Artifact::empty().facts(|facts| *facts = json!({ "version": "1.0" }));
    pool.good("facts-minimal", "facts with a version alone", minimal, &[])?;
    let whole = Artifact::small().facts(|facts| {
        let sizes = facts["sizes"].clone();
        *facts = serde_json::from_str(include_str!("facts.json")).unwrap_or_default();
        facts["sizes"] = sizes;
    });
    pool.good("facts-whole", "every fact there is", whole, &small())?;
    let newer = Artifact::small().facts(|facts| facts["version"] = json!("1.7"));
    pool.good("newer-minor", "a later version of the same major", newer, &small())?;
    let major = Artifact::small().facts(|facts| facts["version"] = json!("1"));
    pool.good("major-alone", "a version without a minor", major, &small())?;

    let unknown = Artifact::small()
        .facts(|facts| {
            facts["later"] = json!({ "a": [1, { "b": null }] });
            facts["sizes"]["later"] = json!(-1);
        })
        .manifest(|manifest| {
            manifest["annotations"]["example.org/later"] = json!("x");
            manifest["later"] = json!(true);
            manifest["layers"][0]["annotations"]["example.org/later"] = json!("x");
            manifest["layers"][0]["later"] = json!({});
        })
        .index(|index| {
            index["annotations"]["io.kybernate.later"] = json!("x");
            index["annotations"]["io.kybernate.format.version"] = json!("7.0");
            index["later"] = json!([]);
        });
    pool.good("unknown-members", "members and annotations that nobody knows", unknown, &small())?;

    let elsewhere = Artifact::small().manifest(|manifest| {
        manifest["layers"][1]["data"] = json!("bm90IHRoZSBwYWNr");
        manifest["layers"][1]["urls"] = json!(["http://127.0.0.1:9/nowhere"]);
    });
    pool.good(
        "data-and-urls",
        "a descriptor whose data and urls lead elsewhere",
        elsewhere,
        &small(),
    )?;

    let untyped = Artifact::small().manifest(|manifest| {
        manifest.as_object_mut().map(|members| members.remove("mediaType"));
    });
    pool.good("no-media-type", "a manifest that does not say its media type", untyped, &small())?;

    let platform = Artifact::small().index(|index| {
        index["manifests"][0]["platform"] = json!({ "architecture": "amd64", "os": "linux" });
    });
    pool.good("another-platform", "a checkpoint child with a platform", platform, &small())?;

    let mut sha512 = Artifact::small();
    sha512.algorithm = Algorithm::Sha512;
    pool.good("sha512", "everything named by SHA-512", sha512, &small())?;

    let subject = Artifact::small().index(|index| index["subject"] = elsewhere_manifest("d"));
    pool.good("subject", "a subject on the index, which is not there", subject, &small())?;

    for (name, what, kind) in [
        ("runnable", "a runnable child", media_type::OCI_MANIFEST),
        ("runnable-docker", "a runnable child of Docker's type", media_type::DOCKER_MANIFEST),
    ] {
        let mut runnable = Artifact::small();
        let mut child = elsewhere_manifest("e");
        child["mediaType"] = json!(kind);
        child["platform"] = json!({ "architecture": "arm64", "os": "linux", "variant": "v8" });
        runnable.runnable = Some(child);
        pool.good(name, what, runnable, &small())?;
    }
    let signed = Artifact::small().text(Part::Index, |text| text.extend(b"\n\n"));
    pool.good("white-space", "white space behind a document", signed, &small())
}

fn layers(pool: &mut Pool) -> anyhow::Result<()> {
    let mut hashed = Artifact::small();
    hashed.page_hashes = Some(
        pages(1, 2)
            .chunks(PAGE)
            .flat_map(|page| blake3::hash(page).as_bytes().get(..16).unwrap_or_default().to_vec())
            .collect(),
    );
    pool.good("page-hashes", "hashes of the stored pages", hashed, &small())?;

    let mut volumes = Artifact::small();
    volumes.volumes = vec![Some("/dev/shm"), Some("/data/..data"), Some("/")];
    pool.good("volumes", "three captured mounts", volumes, &small())?;
    let mut parts = Artifact::small();
    parts.volumes = vec![Some("/dev/shm"), Some("/dev/shm"), Some("/dev/shm"), Some("/")];
    parts.volume_parts = vec!["0", "1", "2"];
    pool.good("volume-parts", "a captured mount in three parts, and another", parts, &small())?;

    let reversed = Artifact::small().manifest(|manifest| {
        if let Some(layers) = manifest["layers"].as_array_mut() {
            layers.reverse();
        }
    });
    pool.good("layers-in-any-order", "the page index last", reversed, &small())
}

/// Describes a manifest that is not there.
pub(super) fn elsewhere_manifest(digit: &str) -> serde_json::Value {
    json!({
        "mediaType": media_type::OCI_MANIFEST,
        "digest": format!("sha256:{}", digit.repeat(64)),
        "size": 1000,
    })
}
