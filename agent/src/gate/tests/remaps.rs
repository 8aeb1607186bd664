//! Files that CRIU links for a moment.

use super::images::{REMAPS, Remap};
use super::*;

/// Sums up a dump with files and what is not where its name says.
fn summary(files: &[(u32, &str)], remaps: &[Remap]) -> Result<Summary, String> {
    let mut dump = Dump::default();
    dump.files.extend(files.iter().map(|(id, name)| File {
        kind: 1,
        regular: Some(RegularFile { id: *id, name: (*name).to_owned(), ..RegularFile::default() }),
    }));
    let mut images = dump.images();
    let remaps: Vec<Vec<u8>> = remaps.iter().map(prost::Message::encode_to_vec).collect();
    images.push(("remap-fpath.img".to_owned(), image(REMAPS, &remaps)));
    summarise(&images, &[])
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
    for (kind, of) in [(Some(1), 9), (None, 9 | 1 << 31), (Some(2), 9)] {
        copied("/tmp/gone", kind, of).unwrap();
        for name in ["/../../../etc/cron.d/x", "/a/./x", "a/x", "", "/a//x"] {
            let refused = copied(name, kind, of).unwrap_err();
            assert!(refused.contains("to no plain path"), "{name}: {refused}");
        }
    }
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
        assert_eq!(summary(&[], &[remap]).unwrap().links, []);
    }
}
