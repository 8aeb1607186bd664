//! Documents: the index, the checkpoint manifest and the facts.

#![expect(
    clippy::indexing_slicing,
    reason = "into documents made here; a wrong place fails the test that makes every vector"
)]

use kybernate_spec::{Reason, media_type};
use serde_json::{Value, json};

use super::super::artifact::{Artifact, Part, Pool};
use super::super::good::elsewhere_manifest;

/// Name, what is wrong, and the change of a document that makes it so.
type Change = (&'static str, &'static str, fn(&mut Value));

pub(super) fn add(pool: &mut Pool) -> anyhow::Result<()> {
    kinds(pool)?;
    digests(pool)?;
    lengths(pool)?;
    json_text(pool)?;
    members(pool)?;
    children(pool)?;
    manifest(pool)?;
    facts(pool)?;
    sizes(pool)
}

fn kinds(pool: &mut Pool) -> anyhow::Result<()> {
    let changes: [Change; 3] = [
        ("an-image-index", "an index without artifact type", |index| {
            index.as_object_mut().map(|members| members.remove("artifactType"));
        }),
        ("another-artifact", "an index of another artifact type", |index| {
            index["artifactType"] = json!("application/vnd.example.thing.v1+json");
        }),
        ("an-image", "an image manifest", |index| {
            *index = json!({
                "schemaVersion": 2,
                "mediaType": media_type::OCI_MANIFEST,
                "artifactType": media_type::CHECKPOINT,
                "config": elsewhere_manifest("f"),
                "layers": [],
            });
        }),
    ];
    for (name, what, change) in changes {
        let artifact = Artifact::small().index(change);
        pool.bad(name, "1", Reason::NotACheckpoint, what, artifact)?;
    }
    Ok(())
}

fn digests(pool: &mut Pool) -> anyhow::Result<()> {
    let changed: [(&str, &str, Part); 6] = [
        ("index-changed", "an index whose bytes were changed", Part::Index),
        ("manifest-changed", "a manifest whose bytes were changed", Part::Manifest),
        ("config-changed", "facts whose bytes were changed", Part::Config),
        ("pack-changed", "a pack whose bytes were changed", Part::Pack),
        ("page-index-changed", "a page index whose bytes were changed", Part::PageIndex),
        ("shard-changed", "a shard whose first byte was changed", Part::Shard),
    ];
    for (name, what, part) in changed {
        let change = match part {
            // White space: what the document says stays the same.
            Part::Index | Part::Manifest | Part::Config => |bytes: &mut Vec<u8>| {
                if let Some(last) = bytes.iter_mut().rfind(|byte| **byte == b',') {
                    *last = b' ';
                }
            },
            Part::Pack => |bytes: &mut Vec<u8>| {
                if let Some(last) = bytes.last_mut() {
                    *last ^= 1;
                }
            },
            // The length of the file: 8192 becomes 8191, as many pages.
            Part::PageIndex => |bytes: &mut Vec<u8>| {
                let at = 32 + 4 + 1 + 49 + 4 + 1;
                bytes.splice(at..at + 2, 8191_u16.to_le_bytes());
            },
            Part::Shard => |bytes: &mut Vec<u8>| {
                if let Some(first) = bytes.first_mut() {
                    *first ^= 1;
                }
            },
        };
        let reason = match part {
            Part::Shard => Reason::ChunkHash,
            _ => Reason::DigestMismatch,
        };
        pool.bad(name, "1", reason, what, Artifact::small().called(name).stored(part, change))?;
    }
    Ok(())
}

/// Content that is shorter, longer, elsewhere, or not as long as its descriptor says.
fn lengths(pool: &mut Pool) -> anyhow::Result<()> {
    for (name, what, part) in [
        ("pack-cut", "a pack whose last byte is missing", Part::Pack),
        ("config-cut", "facts whose last byte is missing", Part::Config),
        ("page-index-cut", "a page index whose last byte is missing", Part::PageIndex),
        ("shard-cut", "a shard whose last byte is missing", Part::Shard),
    ] {
        let artifact = Artifact::small().called(name).stored(part, |bytes| {
            bytes.pop();
        });
        pool.bad(name, "1", Reason::DigestMismatch, what, artifact)?;
    }
    for (name, what, part) in [
        ("pack-longer", "a pack with a byte behind it", Part::Pack),
        ("shard-longer", "a shard with a byte behind it", Part::Shard),
    ] {
        let artifact = Artifact::small().called(name).stored(part, |bytes| bytes.push(0));
        pool.bad(name, "1", Reason::DigestMismatch, what, artifact)?;
    }
    for (name, what, part) in [
        ("index-missing", "an index that is not there", Part::Index),
        ("manifest-missing", "a manifest that is not there", Part::Manifest),
        ("config-missing", "facts that are not there", Part::Config),
        ("pack-missing", "a pack that is not there", Part::Pack),
        ("page-index-missing", "a page index that is not there", Part::PageIndex),
        ("shard-missing", "a shard that is not there", Part::Shard),
    ] {
        let artifact = Artifact::small().called(name).without(part);
        pool.bad(name, "1", Reason::Missing, what, artifact)?;
    }
    let size = Artifact::small().index(|index| index["manifests"][0]["size"] = json!(3));
    pool.bad(
        "manifest-size",
        "1",
        Reason::DigestMismatch,
        "a descriptor with another size than its manifest",
        size,
    )
}

fn json_text(pool: &mut Pool) -> anyhow::Result<()> {
    for (name, what, part) in [
        ("index-cut-short", "an index that ends in the middle", Part::Index),
        ("manifest-cut-short", "a manifest that ends in the middle", Part::Manifest),
        ("config-cut-short", "facts that end in the middle", Part::Config),
    ] {
        let artifact = Artifact::small().text(part, |text| {
            text.pop();
        });
        pool.bad(name, "1", Reason::Document, what, artifact)?;
    }
    let twice: fn(&mut Vec<u8>) = |text| {
        // The second is the one that is there already.
        let again = br#"{"schemaVersion":2,"#;
        text.splice(0..1, again.iter().copied());
    };
    for (name, what, part) in [
        ("index-member-twice", "an index with a member twice", Part::Index),
        ("manifest-member-twice", "a manifest with a member twice", Part::Manifest),
    ] {
        pool.bad(name, "1", Reason::Document, what, Artifact::small().text(part, twice))?;
    }
    let config = Artifact::small().text(Part::Config, |text| {
        text.splice(
                0..1,
                br#"{"notAfter":"2100-01-01T00:00:00Z","notAfter":"2000-01-01T00:00:00Z","#
                    .iter()
                    .copied(),
            );
    });
    pool.bad(
        "config-member-twice",
        "1",
        Reason::Document,
        "facts with a member twice, of which readers would take one or the other",
        config,
    )?;
    let deep = Artifact::small().text(Part::Config, |text| {
        text.splice(0..1, br#"{"later":[{"\u0061":1,"a":2}],"#.iter().copied());
    });
    pool.bad(
        "member-twice-below",
        "1",
        Reason::Document,
        "a member twice in an object that nobody knows, once escaped",
        deep,
    )?;
    let large = Artifact::small().text(Part::Manifest, |text| text.resize((4 << 20) + 1, b' '));
    pool.bad(
        "manifest-large",
        "1",
        Reason::DocumentTooLarge,
        "a manifest of 4 MiB and a byte, most of it white space",
        large,
    )?;
    let large = Artifact::small().text(Part::Config, |text| text.resize((1 << 20) + 1, b' '));
    pool.bad(
        "config-large",
        "3",
        Reason::DocumentTooLarge,
        "facts of 1 MiB and a byte, most of it white space",
        large,
    )
}

fn members(pool: &mut Pool) -> anyhow::Result<()> {
    let index: [Change; 4] = [
        ("index-no-children", "an index without the member `manifests`", |index| {
            index.as_object_mut().map(|members| members.remove("manifests"));
        }),
        ("index-and-manifest", "an index that is a manifest too", |index| {
            index["config"] = elsewhere_manifest("f");
            index["layers"] = json!([]);
        }),
        ("index-schema-1", "an index of schema version 1", |index| {
            index["schemaVersion"] = json!(1);
        }),
        ("index-children-no-list", "an index whose children are no list", |index| {
            index["manifests"] = json!({});
        }),
    ];
    for (name, what, change) in index {
        pool.bad(name, "1", Reason::Document, what, Artifact::small().index(change))?;
    }
    let manifest: [Change; 10] = [
        ("manifest-no-layers", "a manifest without the member `layers`", |manifest| {
            manifest.as_object_mut().map(|members| members.remove("layers"));
        }),
        ("manifest-and-index", "a manifest that is an index too", |manifest| {
            manifest["manifests"] = json!([]);
        }),
        ("manifest-schema-3", "a manifest of schema version 3", |manifest| {
            manifest["schemaVersion"] = json!(3);
        }),
        ("manifest-no-config", "a manifest without config", |manifest| {
            manifest.as_object_mut().map(|members| members.remove("config"));
        }),
        ("size-negative", "a layer of less than no bytes", |manifest| {
            manifest["layers"][0]["size"] = json!(-1);
        }),
        ("size-a-text", "a layer whose size is a text", |manifest| {
            manifest["layers"][0]["size"] = json!("120");
        }),
        ("digest-uppercase", "a digest in uppercase", |manifest| {
            let digest = format!("sha256:{}", "A".repeat(64));
            manifest["layers"][1]["digest"] = json!(digest);
        }),
        ("digest-short", "a digest with a digit too few", |manifest| {
            let digest = format!("sha256:{}", "a".repeat(63));
            manifest["layers"][1]["digest"] = json!(digest);
        }),
        ("digest-unknown", "a digest of an algorithm that does not count", |manifest| {
            let digest = format!("md5:{}", "a".repeat(32));
            manifest["layers"][1]["digest"] = json!(digest);
        }),
        ("digest-a-path", "a digest that leads out of the layout", |manifest| {
            manifest["layers"][1]["digest"] = json!("sha256:../../../../../../etc/hostname");
        }),
    ];
    for (name, what, change) in manifest {
        pool.bad(name, "1", Reason::Document, what, Artifact::small().manifest(change))?;
    }
    Ok(())
}

fn children(pool: &mut Pool) -> anyhow::Result<()> {
    let changes: [Change; 4] = [
        ("no-checkpoint-child", "an index without a checkpoint child", |index| {
            index["manifests"] = json!([elsewhere_manifest("e")]);
        }),
        ("two-checkpoint-children", "an index with two checkpoint children", |index| {
            let child = index["manifests"][0].clone();
            index["manifests"] = json!([child, child]);
        }),
        ("two-other-children", "an index with two runnable children", |index| {
            let child = index["manifests"][0].clone();
            index["manifests"] = json!([elsewhere_manifest("e"), elsewhere_manifest("f"), child]);
        }),
        ("a-child-index", "an index whose other child is an index", |index| {
            let child = index["manifests"][0].clone();
            let mut other = elsewhere_manifest("e");
            other["mediaType"] = json!(media_type::OCI_INDEX);
            index["manifests"] = json!([other, child]);
        }),
    ];
    for (name, what, change) in changes {
        pool.bad(name, "1", Reason::Children, what, Artifact::small().index(change))?;
    }
    Ok(())
}

fn manifest(pool: &mut Pool) -> anyhow::Result<()> {
    let docker = Artifact::small()
        .index(|index| index["manifests"][0]["mediaType"] = json!(media_type::DOCKER_MANIFEST));
    pool.bad(
        "manifest-of-docker",
        "1",
        Reason::Manifest,
        "a checkpoint child of Docker's media type",
        docker,
    )?;
    let changes: [Change; 5] = [
        ("manifest-subject", "a subject on the checkpoint child", |manifest| {
            manifest["subject"] = elsewhere_manifest("d");
        }),
        ("manifest-no-artifact-type", "a manifest without artifact type", |manifest| {
            manifest.as_object_mut().map(|members| members.remove("artifactType"));
        }),
        ("manifest-artifact-type", "a manifest of another artifact type", |manifest| {
            manifest["artifactType"] = json!("application/vnd.kybernate.checkpoint.v2+json");
        }),
        ("manifest-media-type", "a manifest that calls itself Docker's", |manifest| {
            manifest["mediaType"] = json!(media_type::DOCKER_MANIFEST);
        }),
        ("config-media-type", "a config of an ordinary image's type", |manifest| {
            manifest["config"]["mediaType"] = json!(media_type::OCI_CONFIG);
        }),
    ];
    for (name, what, change) in changes {
        pool.bad(name, "1", Reason::Manifest, what, Artifact::small().manifest(change))?;
    }
    Ok(())
}

fn facts(pool: &mut Pool) -> anyhow::Result<()> {
    let changes: [(Reason, Change); 9] = [
        (Reason::Unsupported, ("version-2", "format 2.0", |facts| facts["version"] = json!("2.0"))),
        (
            Reason::Unsupported,
            ("version-10", "format 10.0, which begins with a 1", |facts| {
                facts["version"] = json!("10.0");
            }),
        ),
        (
            Reason::Unsupported,
            ("version-empty", "an empty version", |facts| facts["version"] = json!("")),
        ),
        (
            Reason::Document,
            ("version-missing", "facts without a version", |facts| {
                facts.as_object_mut().map(|members| members.remove("version"));
            }),
        ),
        (
            Reason::Document,
            ("version-a-number", "a version that is a number", |facts| {
                facts["version"] = json!(1.0);
            }),
        ),
        (Reason::Document, ("facts-a-list", "facts that are a list", |facts| *facts = json!([]))),
        (
            Reason::Document,
            ("bulk-bytes-negative", "less than no bulk bytes", |facts| {
                facts["sizes"]["bulkBytes"] = json!(-1);
            }),
        ),
        (
            Reason::Document,
            ("bulk-bytes-half", "half a byte", |facts| facts["sizes"]["bulkBytes"] = json!(0.5)),
        ),
        (
            Reason::Document,
            ("device-storage", "device memory in a place that nobody knows", |facts| {
                facts["device"] = json!({ "storage": "cloud" });
            }),
        ),
    ];
    for (reason, (name, what, change)) in changes {
        pool.bad(name, "3", reason, what, Artifact::small().facts(change))?;
    }
    Ok(())
}

fn sizes(pool: &mut Pool) -> anyhow::Result<()> {
    let changes: [(Reason, Change); 4] = [
        (
            Reason::Sizes,
            (
                "bulk-bytes-less",
                "fewer bulk bytes than the files have, and fewer in the dump",
                |facts| {
                    facts["sizes"]["bulkBytes"] = json!(3 * 4096 - 1);
                    facts["sizes"]["dumpBytes"] = json!(3 * 4096 - 1 + 13);
                },
            ),
        ),
        (
            Reason::Sizes,
            ("bulk-bytes-missing", "facts without the bulk bytes", |facts| {
                facts["sizes"].as_object_mut().map(|members| members.remove("bulkBytes"));
            }),
        ),
        (
            Reason::Sizes,
            ("dump-bytes-more", "more bytes in the dump than in its files", |facts| {
                facts["sizes"]["dumpBytes"] = json!(3 * 4096 + 14);
            }),
        ),
        (
            Reason::Sizes,
            ("page-bytes-more", "more bytes in pages than there are", |facts| {
                facts["sizes"]["pageBytes"] = json!(3 * 4096);
            }),
        ),
    ];
    for (reason, (name, what, change)) in changes {
        pool.bad(name, "3", reason, what, Artifact::small().facts(change))?;
    }
    let mut huge = Artifact::small();
    huge.bulk_bytes = 1 << 62;
    huge.page_index = super::super::page_index::PageIndex::new(1, 1)
        .shard(huge.shards.first().map_or(&[], Vec::as_slice))
        .file("pages-1.img", 1 << 62)
        .end();
    pool.bad("dump-huge", "3", Reason::TooLarge, "4 EiB of memory", huge)
}
