//! Device memory: what the facts say of it, and where it lies.

#![expect(
    clippy::indexing_slicing,
    reason = "into documents made here; a wrong place fails the test that makes every vector"
)]

use kybernate_spec::Reason;
use serde_json::{Value, json};

use super::super::artifact::{Artifact, DEVICE_FILE, Pool, file};
use super::super::page_index::{PageIndex, pages};

/// Name, what is wrong, and the change of the facts that makes it so.
type Change = (&'static str, &'static str, fn(&mut Value));

pub(super) fn add(pool: &mut Pool) -> anyhow::Result<()> {
    let changes: [Change; 8] = [
        ("device-elsewhere", "files with device memory that is said to be in the pages", |facts| {
            facts["device"]["storage"] = json!("pages");
        }),
        ("device-no-file", "device memory that no file holds", |facts| {
            let one = facts["device"]["streams"][0].clone();
            let mut other = one.clone();
            other["pid"] = json!(2);
            other["file"] = json!("device-2-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.img");
            facts["device"]["streams"] = json!([one, other]);
        }),
        ("device-no-stream", "a file with device memory that the facts do not name", |facts| {
            facts["device"]["streams"] = json!([]);
        }),
        ("device-length", "device memory of another length than its file", |facts| {
            facts["device"]["streams"][0]["bytes"] = json!(4096);
        }),
        ("device-gpu", "device memory of a GPU that was not used", |facts| {
            facts["device"]["gpus"] = json!(["GPU-bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb"]);
        }),
        ("device-process", "device memory of another process than its file's", |facts| {
            facts["device"]["streams"][0]["pid"] = json!(2);
        }),
        ("device-name", "device memory in a file that is called otherwise", |facts| {
            facts["device"]["streams"][0]["file"] = json!("pages-1.img");
        }),
        ("device-twice", "a file with device memory that is named twice", |facts| {
            let one = facts["device"]["streams"][0].clone();
            facts["device"]["streams"] = json!([one, one]);
        }),
    ];
    for (name, what, change) in changes {
        pool.bad(name, "5", Reason::Device, what, Artifact::device().facts(change))?;
    }
    let partial = Artifact::device().facts(|facts| {
        facts["device"]["streams"][0].as_object_mut().map(|stream| stream.remove("gpu"));
    });
    pool.bad("device-member", "3", Reason::Document, "device memory of no GPU", partial)?;

    let mut swapped = Artifact::device();
    swapped.device_from = 0;
    pool.bad("device-pages", "5", Reason::Shards, "pages in a shard of device memory", swapped)?;
    let mut swapped = Artifact::device();
    swapped.device_from = 2;
    pool.bad("device-shard", "5", Reason::Shards, "device memory in a shard of pages", swapped)?;

    let shard = pages(1, 1);
    let index = PageIndex::new(1, 1).shard(&shard).file("pages-1.img", 4096).run(0, 0).end();
    let mut packed = Artifact::empty().with_pages(index, vec![shard], 4096, 1);
    packed.files = vec![file(DEVICE_FILE, "device")];
    pool.bad("device-pack", "4", Reason::FileName, "device memory in the pack", packed)
}
