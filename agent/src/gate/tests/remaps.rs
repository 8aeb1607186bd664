//! Files that CRIU links for a moment.

use super::images::{GHOST_FILE, GhostFile, REMAPS, Remap};
use super::*;
use crate::gate::remaps::CopyFact;

/// Returns the images of a dump with files, on mounts, and what is not where its name says.
fn images(files: &[(u32, &str, Option<i32>)], remaps: &[Remap]) -> Vec<(String, Vec<u8>)> {
    let mut dump = Dump::default();
    dump.files.extend(files.iter().map(|&(id, name, mount)| {
        let name = name.to_owned();
        File {
            kind: 1,
            id,
            regular: Some(RegularFile { id, name, mount, ..RegularFile::default() }),
            ..File::default()
        }
    }));
    let external_key = Some("/data".to_owned());
    dump.mounts.push(Mount { external_key, ..mount(7, 1, 0, "/data") });
    if files.iter().any(|(_, name, _)| name.starts_with("/locked/")) {
        let external_key = Some("/locked".to_owned());
        dump.mounts.push(Mount { external_key, ..locked(8, 1, 0, "/locked", "/") });
    }
    let mut images = dump.images();
    let remaps: Vec<Vec<u8>> = remaps.iter().map(prost::Message::encode_to_vec).collect();
    images.push(("remap-fpath.img".to_owned(), image(REMAPS, &remaps)));
    images
}

/// Sums up a dump with files on its root.
fn summary(files: &[(u32, &str)], remaps: &[Remap]) -> Result<Summary, String> {
    let files: Vec<_> = files.iter().map(|(id, name)| (*id, *name, Some(1))).collect();
    summarise(&images(&files, remaps), &[])
}

fn linked(name: &str, link: &str) -> String {
    let remap = Remap { file: 4, of: 7, kind: Some(0) };
    judge_alone(&summary(&[(4, name), (7, link)], &[remap]).unwrap()).join("; ")
}

#[test]
fn what_criu_links_itself_is_let_through() {
    for (name, link) in [
        ("/dev/shm/sem.x", "/dev/shm/link_remap.7"),
        ("/a/gone/too/x", "/a/link_remap.7"),
        ("/x", "/link_remap.7"),
        ("/a/x", "/link_remap.7"),
    ] {
        assert_eq!(linked(name, link), "", "{name} {link}");
    }
}

#[test]
fn nothing_else_is_linked_and_removed() {
    for (name, link) in [
        ("/a/x", "/a/passwd"),
        ("/a/x", "/a/link_remap.8"),
        ("/a/x", "/a/link_remap.07"),
        ("/a/x", "/a/link_remap.7/"),
        ("/a/x", "/b/link_remap.7"),
        ("/a/x", "/a/b/link_remap.7"),
        ("/a/x", "/a/x/link_remap.7"),
        ("/a/x", "a/link_remap.7"),
        ("/a/x", "/a/../link_remap.7"),
        ("/a/../../x", "/a/link_remap.7"),
        ("/a/x", "/a/./link_remap.7"),
        ("/a//x", "/a/link_remap.7"),
        ("", "/link_remap.7"),
        ("/a/x", ""),
    ] {
        assert!(linked(name, link).contains("is to be linked from"), "{name} {link}");
    }
}

#[test]
fn no_file_is_copied_to_where_the_nodes_files_are() {
    let copied = |name: &str, kind, of| summary(&[(4, name)], &[Remap { file: 4, of, kind }]);
    for (kind, of) in [(Some(1), 9), (None, 9 | 1 << 31)] {
        copied("/tmp/gone", kind, of).unwrap();
        for name in ["/../../../etc/cron.d/x", "/a/./x", "a/x", "", "/a//x"] {
            let refused = copied(name, kind, of).unwrap_err();
            assert!(refused.contains("to no plain path"), "{name}: {refused}");
        }
    }
}

#[test]
fn a_file_without_a_name_is_opened_by_none() {
    let files = [(4, "/tmp/gone"), (5, "/tmp/gone"), (6, "/tmp/linked"), (7, "/tmp/link_remap.7")];
    let remaps = [Remap { file: 4, of: 9, kind: Some(1) }, Remap { file: 6, of: 7, kind: Some(0) }];
    let paths = summary(&files, &remaps).unwrap().paths();
    // Another of the same name is there, and so is what one is linked from.
    assert_eq!(paths.opened, ["/tmp/gone", "/tmp/link_remap.7", "/tmp/linked"]);
    assert_eq!(paths.made, ["/tmp/gone"]);
    assert_eq!(summary(&files[..1], &remaps[..1]).unwrap().paths().opened, [""; 0]);
}

#[test]
fn a_file_without_a_name_leads_nowhere() {
    let judged = |name: &str, mode, target: Option<&str>| {
        let target = target.map(str::to_owned);
        let ghost = GhostFile { user: 0, group: 0, mode, target }.encode_to_vec();
        // Its content comes behind it, and is of any length.
        let content = [image(GHOST_FILE, &[ghost]), vec![7; 5]].concat();
        let mut images = Dump::default().images();
        images.push((name.to_owned(), content));
        summarise(&images, &[]).map(drop)
    };
    for mode in [0o100_644, 0o104_755, 0o040_755, 0o010_600] {
        judged("ghost-file-1f.img", mode, None).unwrap();
    }
    for mode in [0o120_777, 0o020_666, 0o060_660, 0o140_755, 0o644] {
        let told = judged("ghost-file-1f.img", mode, Some("/proc/self/fd/126/../..")).unwrap_err();
        assert!(told.contains("neither a file, a directory nor a pipe"), "{mode:o}: {told}");
    }
    for name in ["ghost-file-1F.img", "ghost-file-01f.img", "ghost-file-x.img"] {
        let told = judged(name, 0o100_644, None).unwrap_err();
        assert!(told.contains("no name that CRIU gives a file"), "{name}: {told}");
    }
    let mut images = Dump::default().images();
    images.push(("ghost-file-1.img".to_owned(), image(GHOST_FILE, &[])));
    assert!(summarise(&images, &[]).unwrap_err().contains("must have a record"));
}

#[test]
fn open_files_are_where_they_are_looked_for() {
    assert_refused("files.img has no open file", |dump, _| {
        dump.files.clear();
        dump.others.push("reg-files.img".to_owned());
    });
}

#[test]
fn a_link_is_of_files_that_are_there_once() {
    let remap = |kind| Remap { file: 4, of: 7, kind };
    let files = [(4, "/a/x"), (7, "/a/link_remap.7")];
    for kind in [None, Some(0)] {
        let links = summary(&files, &[remap(kind)]).unwrap().links;
        assert_eq!(links.len(), 1, "{kind:?}");
        assert_eq!((&*links[0].name, &*links[0].link), ("/a/x", "/a/link_remap.7"));
    }
    for files in [&files[..1], &files[1..], &[]] {
        let refused = summary(files, &[remap(Some(0))]).unwrap_err();
        assert!(refused.contains("is linked and is none"), "{refused}");
    }
    // CRIU would take the one or the other.
    let twice = [files[0], files[1], (7, "/a/link_remap.7")];
    let reasons = judge_alone(&summary(&twice, &[remap(Some(0))]).unwrap());
    assert_eq!(reasons.len(), 1, "{reasons:?}");
    assert!(summary(&files, &[remap(Some(3))]).unwrap_err().contains("unknown kind 3"));
    // Copies and what is in /proc have no other file.
    for remap in [remap(Some(1)), remap(Some(2)), Remap { file: 4, of: 1 << 31 | 1, kind: None }] {
        assert_eq!(summary(&files[..1], &[remap]).unwrap().links, []);
    }
    for twice in [[remap(Some(1)), remap(Some(0))], [remap(Some(2)), remap(Some(1))]] {
        assert!(summary(&files, &twice).unwrap_err().contains("twice without its name"));
    }
}

#[test]
fn a_copy_is_on_a_mount_that_holds_files() {
    let copied = |name: &str, mount| {
        let remap = Remap { file: 4, of: 9, kind: Some(1) };
        summarise(&images(&[(4, name, mount)], &[remap]), &[])
    };
    for (name, mount) in [("/tmp/x", 1), ("/x", 1), ("/dev/shm/x", 4), ("/data/a/x", 7)] {
        copied(name, Some(mount)).unwrap();
    }
    for (name, mount) in [
        // Another process's files, whoever it is.
        ("/proc/1/root/etc/cron.d/x", Some(2)),
        ("/proc/1/root/etc/cron.d/x", Some(1)),
        ("/sys/x", Some(3)),
        // On the root, below what is mounted there.
        ("/dev/shm/x", Some(1)),
        ("/tmp/x", Some(4)),
        ("/tmp/x", Some(-1)),
        ("/tmp/x", Some(77)),
        ("/tmp/x", None),
        ("/data", Some(7)),
    ] {
        let refused = copied(name, mount).unwrap_err();
        assert!(refused.contains("is on no such mount"), "{name} {mount:?}: {refused}");
    }
    let remap = Remap { file: 4, of: 9, kind: Some(1) };
    assert!(summary(&[], &[remap]).unwrap_err().contains("is copied and is none"));
}

/// Only the first name of each counts: CRIU links it to the others from within the container.
#[test]
fn copies_are_made_at_the_top_of_their_mount() {
    let files = [
        (4, "/tmp/a/x", Some(1)),
        (5, "/tmp/b/x", Some(1)),
        (6, "/top", Some(1)),
        (8, "/data/deep/er/x", Some(7)),
        (9, "/tmp/y", Some(1)),
    ];
    let copy = |file, of| Remap { file, of, kind: Some(1) };
    let old = Remap { file: 9, of: 4 | 1 << 31, kind: None };
    let remaps = [copy(4, 1), copy(5, 1), copy(6, 2), copy(8, 3), old];
    let before = images(&files, &remaps);
    let summary = summarise(&before, &[]).unwrap();
    let tops: Vec<(u32, &str, i32)> =
        summary.copies.iter().map(|copy| (copy.number, &*copy.top, copy.mount)).collect();
    assert_eq!(tops, [(1, "", 1), (3, "/data", 7), (4, "", 1)]);
    let allowed = Expected { external_mounts: ["/data".to_owned()].into(), ..expected() };
    let reasons = judge(&summary, &allowed).join("; ");
    assert!(reasons.contains("\"/tmp/a/x\" would be made by its path"), "{reasons}");
    assert!(reasons.contains("\"/data/deep/er/x\"") && !reasons.contains("/tmp/b/x"), "{reasons}");
    assert_eq!(judge_alone(&summary), Vec::<String>::new(), "it is taken, and amended");

    let after = amended(&before, &summary.copies);
    let amended_summary = summarise(&after, &[]).unwrap();
    assert_eq!(amended_summary.copies, []);
    assert_eq!(judge(&amended_summary, &allowed), Vec::<String>::new());
    for (name, bytes) in &before {
        let now = &after.iter().find(|(now, _)| now == name).unwrap().1;
        match &**name {
            "files.img" => assert!(now.starts_with(bytes) && now.len() > bytes.len()),
            "remap-fpath.img" => {
                assert!(now.ends_with(&bytes[8..]) && now.starts_with(&bytes[..8]));
                assert!(now.len() > bytes.len());
            }
            _ => assert_eq!(now, bytes, "{name}"),
        }
    }
}

#[test]
fn images_that_are_amended_are_such_as_criu_reads() {
    let dumped =
        |file| images(&[(file, "/tmp/a/x", Some(1))], &[Remap { file, of: 1, kind: Some(1) }]);
    let refused = summarise(&dumped(u32::MAX), &[]).unwrap_err();
    assert!(refused.contains("the largest numbers there are"), "{refused}");
    let before = dumped(4);
    let copies = summarise(&before, &[]).unwrap().copies;
    assert_eq!(copies[0].spare, 5, "the next one, as CRIU itself would have it");
    let after = amended(&before, &copies);
    let of = |name: &str| &after.iter().find(|(found, _)| found == name).unwrap().1;
    let length = before.iter().find(|(name, _)| name == "files.img").unwrap().1.len();
    let added = &of("files.img")[length..];
    // All fields that CRIU requires are there, also those that are nothing.
    let file = [
        &[8, 1, 16, 5, 26, 49][..],
        &[8, 5, 16, 0, 24, 0],
        &[42, 10, 8, 0, 16, 0, 24, 0, 32, 0, 40, 0],
        &[50, 27],
        b"/kybernate-",
    ]
    .concat();
    assert!(added[4..].starts_with(&file), "{added:?}");
    assert!(added.ends_with(&[56, 2]), "{added:?}");
    assert_eq!(usize::from(added[0]), added.len() - 4);
    let record = [6, 0, 0, 0, 8, 5, 16, 1, 24, 1];
    assert!(of("remap-fpath.img")[8..].starts_with(&record[..]));
}

/// Amends a dump on a disk.
fn amended(images: &[(String, Vec<u8>)], copies: &[CopyFact]) -> Vec<(String, Vec<u8>)> {
    let place = tempfile::tempdir().unwrap();
    for (name, bytes) in images {
        fs_err::write(place.path().join(name), bytes).unwrap();
    }
    amend(place.path(), copies).unwrap();
    let read = |name: &String| fs_err::read(place.path().join(name)).unwrap();
    images.iter().map(|(name, _)| (name.clone(), read(name))).collect()
}

/// CRIU makes it writable for that, and what fails in the middle leaves the file there.
#[test]
fn nothing_is_made_on_what_comes_from_outside_for_reading_only() {
    let copy = Remap { file: 4, of: 9, kind: Some(1) };
    let link = Remap { file: 4, of: 7, kind: Some(0) };
    for (name, remap) in [("/locked/x", copy), ("/locked/a/x", copy), ("/locked/x", link)] {
        let files = [(4, name, Some(8)), (7, "/locked/link_remap.7", Some(8))];
        let refused = summarise(&images(&files, &[remap]), &[]).unwrap_err();
        assert!(refused.contains("comes from outside for reading only"), "{name}: {refused}");
    }
}

#[test]
fn a_path_with_an_end_in_the_middle_is_none() {
    // For CRIU it is a file whose name is `passwd`.
    let files = [(7, "/l/passwd\0/x"), (9, "/l/passwd\0/link_remap.9")];
    let reasons =
        judge_alone(&summary(&files, &[Remap { file: 7, of: 9, kind: Some(0) }]).unwrap());
    assert!(reasons.join("; ").contains("which would be removed and is not CRIU's"), "{reasons:?}");
    let copied = summary(&files, &[Remap { file: 7, of: 1, kind: Some(1) }]).unwrap_err();
    assert!(copied.contains("is copied to no plain path"), "{copied}");
}
