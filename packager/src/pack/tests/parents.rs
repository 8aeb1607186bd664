//! CRIU's own increments, in directories as `--track-mem` and `--parent-path` leave them.

use std::os::unix::fs::symlink;

use super::*;

/// Where pages of an entry are: here, or in the parent.
#[derive(Clone, Copy, PartialEq)]
enum In {
    Own,
    Parent,
}

/// An entry: first page, number of pages, and where they are.
type Entry = (u64, u64, In);

const START: u64 = 0x10_0000;

/// Writes a pagemap and its pages file, which has of `content` what is its own.
fn pagemap(directory: &Path, name: &str, id: u32, entries: &[Entry], content: &[u8]) {
    let mut messages = vec![PagemapHead { pages_id: id }.encode_to_vec()];
    let mut pages = Vec::new();
    let start = if name.contains("shmem") { 0 } else { START };
    for (first, count, place) in entries {
        let entry = PagemapEntry {
            address: start + first * 4096,
            flags: Some(if *place == In::Own { 4 } else { 1 }),
            pages: Some(*count),
            ..PagemapEntry::default()
        };
        messages.push(entry.encode_to_vec());
        if *place == In::Own {
            let bytes = |pages: u64| usize::try_from(pages * 4096).unwrap();
            pages.extend(&content[bytes(*first)..bytes(first + count)]);
        }
    }
    write_image(&directory.join(name), Magic::PAGEMAP, &messages);
    fs::write(directory.join(format!("pages-{id}.img")), pages).unwrap();
}

/// The directory of a pre-dump.
fn predump(directory: &Path, entries: &[Entry], content: &[u8]) {
    fs::create_dir(directory).unwrap();
    pagemap(directory, "pagemap-1.img", 9, entries, content);
    fs::write(directory.join("stats-dump"), "not looked at").unwrap();
}

/// The dump itself, in `directory/dump`.
fn last(directory: &Path, entries: &[Entry], content: &[u8]) -> PathBuf {
    fs::create_dir_all(directory).unwrap();
    let dump = dump(directory, &[(START, content.to_vec())]);
    pagemap(&dump, "pagemap-1.img", 1, entries, content);
    dump
}

/// The content of 768 pages, after so many changes of single pages.
fn content(changes: usize) -> Vec<u8> {
    let mut content = noise(3 * MIB, 1);
    for (number, page) in [105, 55, 300].into_iter().enumerate().take(changes) {
        let change = noise(4096, 100 + u64::try_from(number).unwrap());
        content[page * 4096..(page + 1) * 4096].copy_from_slice(&change);
    }
    content
}

const LAST: &[Entry] =
    &[(0, 50, In::Parent), (50, 10, In::Own), (60, 700, In::Parent), (760, 8, In::Own)];

/// A dump with two parents beside it: what changed was page 105, then page 55.
fn chain(top: &Path) -> PathBuf {
    predump(&top.join("0"), &[(0, 768, In::Own)], &content(0));
    // In pieces of its own, with page 300 as it was even earlier.
    let middle = [(0, 100, In::Parent), (100, 10, In::Own), (110, 658, In::Parent)];
    predump(&top.join("1"), &middle, &content(1));
    symlink("../0", top.join("1/parent")).unwrap();
    let dump = last(top, LAST, &content(2));
    symlink("../1", dump.join("parent")).unwrap();
    dump
}

/// What one full dump would have been.
fn full(top: &Path) -> PathBuf {
    let entries: Vec<Entry> =
        LAST.iter().map(|(first, pages, _)| (*first, *pages, In::Own)).collect();
    last(top, &entries, &content(2))
}

#[tokio::test]
async fn a_chain_of_parents_becomes_what_one_full_dump_would_have_been() {
    let scratch = tempfile::tempdir().unwrap();
    let top = scratch.path();
    let (chained, whole) = (chain(&top.join("chain").tap()), full(&top.join("whole")));
    for dump in [&chained, &whole] {
        // Memory that is shared, of which the parents have the first half.
        let own = if *dump == chained { In::Parent } else { In::Own };
        let name = "pagemap-shmem-5.img";
        pagemap(dump, name, 2, &[(0, 64, own), (64, 64, In::Own)], &noise(MIB / 2, 8));
    }
    let parent = chained.parent().unwrap().join("1");
    pagemap(&parent, "pagemap-shmem-5.img", 3, &[(0, 128, In::Own)], &noise(MIB / 2, 8));

    let (location, store) = open(&top.join("layout")).await;
    let packed = pack_and_tag(request(&chained), &location, &store).await;
    let checkpoint = Checkpoint::open(&store, &location).await.unwrap();
    let out = top.join("out");
    unpack(&store, &checkpoint, &out, Limits::default(), &Progress::default()).await.unwrap();
    let mut expected = files(&whole);
    expected.remove("dump.log");
    assert!(files(&out) == expected, "the content differs");

    let (location, store) = open(&top.join("layout-2")).await;
    let of_whole = pack_and_tag(request(&whole), &location, &store).await;
    assert_eq!(packed.index.digest, of_whole.index.digest);
    assert_eq!(packed.sizes, of_whole.sizes);
}

/// A directory, made.
trait Tap {
    fn tap(self) -> Self;
}

impl Tap for PathBuf {
    fn tap(self) -> Self {
        fs::create_dir_all(&self).unwrap();
        self
    }
}

#[tokio::test]
async fn pages_of_parents_are_compared_with_a_base_too() {
    let scratch = tempfile::tempdir().unwrap();
    let (first, store) = open(&scratch.path().join("layout")).await;
    let before = last(&scratch.path().join("before"), &[(0, 768, In::Own)], &content(0));
    pack_and_tag(request(&before), &first, &store).await;
    let base =
        Base { store: store.clone(), checkpoint: Checkpoint::open(&store, &first).await.unwrap() };
    let after = chain(&scratch.path().join("after").tap());
    let based = PackRequest { base: Some(base), ..request(&after) };
    let packed = pack(based, &store, &Progress::default()).await.unwrap();
    // Page 105, of the nearer parent, and page 55.
    assert_eq!(packed.added_bytes, 2 * 4096);
}

/// Packs a chain after a change; returns why that was refused.
async fn refusal(change: impl FnOnce(&Path, &Path)) -> String {
    let scratch = tempfile::tempdir().unwrap();
    let top = scratch.path().join("top").tap();
    let dump = chain(&top);
    change(&top, &dump);
    let layout = scratch.path().join("layout");
    let (_, store) = open(&layout).await;
    let error = pack(request(&dump), &store, &Progress::default()).await.unwrap_err();
    assert!(!layout.exists(), "something was stored");
    let text = kybernate_spec::chain(&error).to_string();
    text.replace(&top.canonicalize().unwrap().display().to_string(), "TOP")
        .replace(&scratch.path().canonicalize().unwrap().display().to_string(), "SCRATCH")
}

/// Lets the link `parent` of a directory lead somewhere else.
fn lead(directory: &Path, to: impl AsRef<Path>) {
    fs::remove_file(directory.join("parent")).unwrap();
    symlink(to, directory.join("parent")).unwrap();
}

#[tokio::test]
async fn parents_that_lead_nowhere_or_in_a_circle_are_refused() {
    let circle =
        |told: &str| assert!(told.contains("the parents lead round in a circle"), "{told}");
    circle(&refusal(|top, _| symlink("../dump", top.join("0/parent")).unwrap()).await);
    circle(&refusal(|_, dump| lead(dump, ".")).await);
    circle(&refusal(|_, dump| lead(dump, "parent")).await);
    let missing = refusal(|top, _| fs::remove_dir_all(top.join("0")).unwrap()).await;
    assert_eq!(
        missing,
        "\"TOP/1/parent\" is no dump that can be packed: its parent is not there: put the \
         parent's directory where this link leads"
    );
    let none = refusal(|_, dump| fs::remove_file(dump.join("parent")).unwrap()).await;
    assert!(none.contains("pagemap-1.img") && none.contains("has no parent link"), "{none}");
    let directory = refusal(|_, dump| {
        fs::remove_file(dump.join("parent")).unwrap();
        fs::create_dir(dump.join("parent")).unwrap();
    });
    assert!(directory.await.contains("\"parent\" is none of CRIU's images"));
    let long = refusal(|top, _| {
        for number in 0..200 {
            fs::create_dir(top.join(format!("long-{number}"))).unwrap();
            let next = format!("../long-{}", number + 1);
            symlink(next, top.join(format!("long-{number}/parent"))).unwrap();
        }
        symlink("../long-0", top.join("0/parent")).unwrap();
    });
    assert!(long.await.contains("more parents than any dump"));
}

#[tokio::test]
async fn a_parent_lies_beneath_the_directory_that_holds_the_dump() {
    let elsewhere = |told: &str| {
        assert_eq!(
            told,
            "\"TOP/dump/parent\" is no dump that can be packed: it leads to \"SCRATCH/secret\": \
             parents must lie beneath \"TOP\", put them there"
        );
    };
    let secret = |top: &Path| {
        let secret = top.parent().unwrap().join("secret");
        predump(&secret, &[(0, 768, In::Own)], &noise(3 * MIB, 99));
        secret
    };
    elsewhere(&refusal(|top, dump| lead(dump, secret(top))).await);
    elsewhere(
        &refusal(|top, dump| {
            secret(top);
            lead(dump, "../../secret");
        })
        .await,
    );
    // Round a corner that looks as if it were inside.
    elsewhere(
        &refusal(|top, dump| {
            symlink(secret(top), top.join("inside")).unwrap();
            lead(dump, "../inside");
        })
        .await,
    );
    // A file of a parent that is a link to somewhere else.
    for file in ["pages-9.img", "pagemap-1.img"] {
        let link = refusal(|top, _| {
            let secret = secret(top);
            fs::remove_file(top.join("0").join(file)).unwrap();
            symlink(secret.join(file), top.join("0").join(file)).unwrap();
        });
        let link = link.await;
        assert!(
            link.contains(&format!("TOP/0/{file}")) && link.contains("no regular file"),
            "{link}"
        );
    }
}

#[tokio::test]
async fn an_absolute_link_to_a_parent_beside_the_dump_is_followed() {
    let scratch = tempfile::tempdir().unwrap();
    let top = scratch.path().join("top").tap();
    let dump = chain(&top);
    lead(&dump, top.join("1"));
    let (location, store) = open(&scratch.path().join("layout")).await;
    let packed = pack_and_tag(request(&dump), &location, &store).await;
    assert_eq!(packed.sizes.page_bytes, 3 * MIB);
}

#[tokio::test]
async fn parents_that_do_not_have_what_they_should_are_refused() {
    // Page 300 and what follows is in no parent.
    let hole = refusal(|top, _| {
        pagemap(&top.join("0"), "pagemap-1.img", 9, &[(0, 300, In::Own)], &content(0));
    });
    assert_eq!(
        hole.await,
        "\"TOP/0/pagemap-1.img\" is no dump that can be packed: the page at 0x22c000 is in none of \
         the parents"
    );
    let gap = refusal(|top, _| {
        let entries = [(0, 300, In::Own), (301, 467, In::Own)];
        pagemap(&top.join("0"), "pagemap-1.img", 9, &entries, &content(0));
    });
    assert!(gap.await.contains("0x22c000 is in none"));
    // CRIU's chain ends at the first parent that has no such pagemap.
    let ends = refusal(|top, _| fs::remove_file(top.join("1/pagemap-1.img")).unwrap()).await;
    assert!(ends.contains("0x100000 is in none"), "{ends}");
    let deeper = refusal(|top, _| {
        pagemap(&top.join("0"), "pagemap-1.img", 9, &[(0, 768, In::Parent)], &[]);
    });
    assert!(deeper.await.contains("0x100000 is in none"));
    let short = refusal(|top, _| {
        let pages = fs::OpenOptions::new().write(true).open(top.join("0/pages-9.img")).unwrap();
        pages.set_len(MIB).unwrap();
    });
    assert!(short.await.contains("1048576 bytes, but its pagemap pagemap-1.img describes 3145728"));
    let order = refusal(|top, _| {
        let entries = [(0, 300, In::Own), (200, 568, In::Own)];
        pagemap(&top.join("0"), "pagemap-1.img", 9, &entries, &content(0));
    });
    assert!(order.await.contains("out of order"));
    let huge = refusal(|top, _| {
        let entry = |address, pages| {
            let entry = PagemapEntry { address, flags: Some(4), pages, ..PagemapEntry::default() };
            entry.encode_to_vec()
        };
        let head = PagemapHead { pages_id: 9 }.encode_to_vec();
        let messages = [head, entry(START, Some(1 << 51))];
        write_image(&top.join("0/pagemap-1.img"), Magic::PAGEMAP, &messages);
    });
    let huge = huge.await;
    assert!(huge.contains("describes 9223372036854775808"), "{huge}");
}
