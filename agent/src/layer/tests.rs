use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::sync::atomic::AtomicBool;

use fs_err as fs;
use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, XattrFlags};
use tar::EntryType::{Continuous, Directory, Link, Regular, Symlink};
use tar::{Builder, Header};

use super::*;
use crate::checkpoint::{Tree as Captured, capture};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn compress(plain: &[u8]) -> Vec<u8> {
    zstd::encode_all(plain, 1).unwrap()
}

/// Unpacks a layer into a directory of its own within another one.
fn unpack(compressed: &[u8]) -> (tempfile::TempDir, Result<Digest, LayerError>) {
    let top = tempfile::tempdir().unwrap();
    fs::create_dir(top.path().join("upper")).unwrap();
    let bytes = u64::try_from(compressed.len()).unwrap();
    let done = apply(compressed, bytes, &top.path().join("upper"), &CancellationToken::new());
    (top, done)
}

/// Returns what a directory is as a layer.
fn layer_of(upper: &Path) -> Vec<u8> {
    let out = tempfile::tempdir().unwrap();
    let (tar, stop) = (out.path().join("x.tar"), AtomicBool::new(false));
    let captured = capture(upper, Captured::Upper, None, &tar, &stop).unwrap();
    let mut plain = Vec::new();
    captured.open().unwrap().read_to_end(&mut plain).unwrap();
    plain
}

fn header(kind: EntryType, size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1);
    header.set_size(size);
    header
}

/// Appends an entry whose path nobody checks.
fn append(tar: &mut Builder<Vec<u8>>, kind: EntryType, path: &str, target: &str, content: &[u8]) {
    let mut header = header(kind, u64::try_from(content.len()).unwrap());
    let old = header.as_old_mut();
    old.name[..path.len()].copy_from_slice(path.as_bytes());
    old.linkname[..target.len()].copy_from_slice(target.as_bytes());
    header.set_cksum();
    tar.append(&header, content).unwrap();
}

/// Type, path and target of each.
type Entries<'a> = &'a [(EntryType, &'a str, &'a str)];

fn tar_of(entries: Entries<'_>) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (kind, path, target) in entries {
        append(&mut tar, *kind, path, target, b"");
    }
    tar.into_inner().unwrap()
}

fn unknown(plain: &[u8]) -> &'static str {
    match unpack(&compress(plain)).1 {
        Err(LayerError::Unknown(what)) => what,
        other => panic!("{other:?}"),
    }
}

/// Fills an upper directory with one of each.
fn fill(upper: &Path) {
    let at = |name: &str| upper.join(name);
    let attribute = |name: &str, key: &str, value: &[u8]| {
        rustix::fs::setxattr(at(name), key, value, XattrFlags::empty()).unwrap();
    };
    let mode = |name: &str, mode: u32| {
        fs::set_permissions(at(name), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    for directory in ["a", "a/b", "a/b/c", "new", "z"] {
        fs::create_dir(at(directory)).unwrap();
    }
    let large: Vec<u8> = (0..251).cycle().take(3_000_001).collect();
    fs::write(at("a/b/large"), &large).unwrap();
    fs::write(at("a/b/empty"), "").unwrap();
    let holes = std::fs::File::create(at("a/holes")).unwrap();
    holes.set_len(3 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&holes, b"x", 2 << 20).unwrap();
    fs::write(at(&format!("a/{}", "n".repeat(200))), "a long name").unwrap();
    fs::write(at("grün"), "a foreign name").unwrap();
    fs::write(at(&format!("a/{}\n{}", "l".repeat(120), "m".repeat(60))), "two lines").unwrap();
    fs::hard_link(at("a/b/empty"), at("z/again")).unwrap();
    fs::hard_link(at("grün"), at("z/green")).unwrap();
    std::os::unix::fs::symlink("../../nowhere", at("a/link")).unwrap();
    std::os::unix::fs::symlink("/etc", at("z/out")).unwrap();
    rustix::fs::mknodat(CWD, at("z/pipe"), FileType::Fifo, Mode::from_raw_mode(0o620), 0).unwrap();
    let null = rustix::fs::makedev(1, 3);
    let kind = FileType::CharacterDevice;
    rustix::fs::mknodat(CWD, at("z/null"), kind, Mode::from_raw_mode(0o666), null).unwrap();
    rustix::fs::mknodat(CWD, at("a/gone"), kind, Mode::empty(), 0).unwrap();
    let time = rustix::fs::Timespec { tv_sec: 999, tv_nsec: 0 };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, at("a/gone"), &times, rustix::fs::AtFlags::empty()).unwrap();
    attribute("new", "trusted.overlay.opaque", b"y");
    attribute("new", "user.kept", b"\0binary\n\xff\n\n");
    fs::write(at("new/program"), "#!").unwrap();
    std::os::unix::fs::chown(at("new/program"), Some(1000), Some(7)).unwrap();
    mode("new/program", 0o6755);
    attribute("new/program", "user.note", b"here");
    // CAP_NET_BIND_SERVICE, permitted and effective (linux/capability.h, VFS_CAP_REVISION_2).
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    attribute("new/program", "security.capability", &capability);
    mode("a/b", 0o000);
    mode("z", 0o1777);
    std::os::unix::fs::lchown(at("a/link"), Some(5), Some(6)).unwrap();
    for (second, name) in (1000..).zip(["a/b/large", "a/b/c", "a/b", "a", "new", "z"]) {
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(second);
        let file = fs::File::open(at(name)).unwrap();
        file.file().set_times(std::fs::FileTimes::new().set_modified(time)).unwrap();
    }
}

#[test]
fn what_was_captured_comes_back_as_it_was() {
    if !is_root() {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    fill(source.path());
    let plain = layer_of(source.path());
    let (top, done) = unpack(&compress(&plain));
    assert_eq!(done.expect("it is one of ours"), Digest::of(&plain));
    assert!(layer_of(&top.path().join("upper")) == plain, "it is another layer now");
    let about = |name: &str| fs::symlink_metadata(top.path().join("upper").join(name)).unwrap();
    assert_eq!(about("z/again").ino(), about("a/b/empty").ino());
    assert!(about("a/holes").blocks() * 512 < 1 << 20, "its zeros take room");
}

#[test]
fn a_layer_of_nothing_is_one() {
    let plain = tar_of(&[]);
    let (top, done) = unpack(&compress(&plain));
    assert_eq!(done.unwrap(), Digest::of(&plain));
    assert_eq!(fs::read_dir(top.path().join("upper")).unwrap().count(), 0);
}

#[test]
fn nothing_leads_out() {
    if !is_root() {
        return;
    }
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("theirs"), "theirs").unwrap();
    let there = outside.path().to_str().unwrap();
    let theirs = format!("{there}/theirs");
    let through = "leads/theirs";
    let cases: &[Entries<'_>] = &[
        &[(Regular, "../escaped", "")],
        &[(Regular, "a/../../escaped", "")],
        &[(Regular, &theirs, "")],
        &[(Symlink, "leads", there), (Regular, "leads/escaped", "")],
        &[(Symlink, "leads", there), (Directory, "leads/", ""), (Regular, "leads/escaped", "")],
        &[(Symlink, "leads", there), (Directory, "d/", ""), (Link, "d/mine", through)],
        &[(Link, "mine", &theirs)],
        &[(Link, "mine", "../../escaped")],
        &[(Symlink, "leads", there), (Regular, "leads/.wh.theirs", "")],
        &[(Symlink, "leads", &theirs), (Regular, "leads", "")],
    ];
    for entries in cases {
        let (top, done) = unpack(&compress(&tar_of(entries)));
        assert!(done.is_err(), "{entries:?}");
        assert!(!top.path().join("escaped").exists(), "{entries:?}");
        assert!(fs::symlink_metadata(top.path().join("upper/mine")).is_err(), "{entries:?}");
        let kept: Vec<_> = fs::read_dir(outside.path()).unwrap().collect();
        assert_eq!(kept.len(), 1, "{entries:?}");
        assert_eq!(fs::read(outside.path().join("theirs")).unwrap(), b"theirs");
    }
}

#[test]
fn what_captures_do_not_have_is_left_to_others() {
    if !is_root() {
        return;
    }
    let cases: &[(&str, Entries<'_>)] = &[
        ("follow its directory", &[(Regular, "no/directory", "")]),
        (
            "follow its directory",
            &[(Directory, "a/", ""), (Regular, "b", ""), (Regular, "a/late", "")],
        ),
        ("twice", &[(Regular, "a", ""), (Regular, "a", "")]),
        (
            "follow its directory",
            &[(Directory, "a", ""), (Regular, "a/b", ""), (Directory, "a", "")],
        ),
        ("twice", &[(Regular, ".wh.a", ""), (Regular, "a", "")]),
        ("elsewhere", &[(Directory, "./", "")]),
        ("mark", &[(Regular, ".wh..wh..opq", "")]),
        ("mark", &[(Regular, ".wh..wh.plnk", "")]),
        ("mark", &[(Regular, ".wh.", "")]),
        ("mark", &[(Regular, ".wh..", "")]),
        ("mark", &[(Regular, ".wh...", "")]),
        ("mark", &[(Directory, ".wh.etc/", "")]),
        ("mark", &[(Symlink, ".wh.etc", "etc")]),
        ("cannot make", &[(Link, "a", "b")]),
        ("form", &[(Continuous, "a", "")]),
        ("form", &[(EntryType::GNULongName, "././@LongLink", "")]),
        ("form", &[(EntryType::XGlobalHeader, "pax_global_header", "")]),
        ("twice", &[(Symlink, "a", "b"), (Regular, "a", "")]),
    ];
    for (what, entries) in cases {
        let found = unknown(&tar_of(entries));
        assert!(found.contains(what), "{found}: {entries:?}");
    }
    for (key, value) in [
        ("mtime", "1.5"),
        ("size", "1"),
        ("SCHILY.xattr.trusted.overlay.redirect", "/etc"),
        ("SCHILY.xattr.user.overlay.opaque", "y"),
        ("SCHILY.xattr.security.selinux", "x"),
    ] {
        let mut tar = Builder::new(Vec::new());
        tar.append_pax_extensions([(key, value.as_bytes())]).unwrap();
        append(&mut tar, Regular, "a", "", b"");
        assert!(unknown(&tar.into_inner().unwrap()).contains("record"), "{key}");
    }
}

/// What makes a header another one.
type Change = fn(&mut Header);

/// Others would see other entries, or the same ones otherwise.
#[test]
fn what_readers_do_not_agree_on_is_left_to_others() {
    if !is_root() {
        return;
    }
    let changed = |change: Change, content: &[u8]| {
        let mut header = header(Regular, u64::try_from(content.len()).unwrap());
        header.set_path("a").unwrap();
        change(&mut header);
        header.set_cksum();
        let mut tar = Builder::new(Vec::new());
        tar.append(&header, content).unwrap();
        tar.into_inner().unwrap()
    };
    let forms: [(Change, &[u8]); 5] = [
        (|header| header.set_entry_type(Directory), &[0; 512]),
        (|header| header.as_old_mut().linkflag = [0], b""),
        (|header| header.as_ustar_mut().unwrap().prefix[0] = b'p', b""),
        (|header| header.as_ustar_mut().unwrap().pad[8] = b't', b""),
        (|header| header.as_ustar_mut().unwrap().version = *b"  ", b""),
    ];
    for (number, (change, content)) in forms.into_iter().enumerate() {
        let found = unknown(&changed(change, content));
        assert!(found.contains("form"), "{number}: {found}");
    }
    let mut tar = tar_of(&[(Regular, "a", "")]);
    tar.extend(tar_of(&[(Regular, "b", "")]));
    assert!(unknown(&tar).contains("behind"));
    let mut tar = Builder::new(Vec::new());
    tar.append_pax_extensions([("path", &b"a"[..])]).unwrap();
    assert!(unknown(&tar.into_inner().unwrap()).contains("nothing"));
    let mut tar = Builder::new(Vec::new());
    append(&mut tar, Regular, "a", "", b"");
    let mut other = header(Link, 0);
    other.set_path("b").unwrap();
    other.set_link_name("a").unwrap();
    other.set_mode(0o4755);
    other.set_cksum();
    tar.append(&other, io::empty()).unwrap();
    assert!(unknown(&tar.into_inner().unwrap()).contains("unlike"));
}

#[test]
fn what_links_and_deep_directories_have_is_left_to_others() {
    let mut tar = Builder::new(Vec::new());
    tar.append_pax_extensions([("SCHILY.xattr.user.a", &b"1"[..])]).unwrap();
    append(&mut tar, Symlink, "a", "b", b"");
    assert!(unknown(&tar.into_inner().unwrap()).contains("attributes"));
    let deep: Vec<String> = (1..400).map(|depth| "d/".repeat(depth)).collect();
    let mut tar = Builder::new(Vec::new());
    for path in &deep {
        if path.len() > 90 {
            tar.append_pax_extensions([("path", path.as_bytes())]).unwrap();
        }
        append(&mut tar, Directory, &path[..path.len().min(90)], "", b"");
    }
    assert!(unknown(&tar.into_inner().unwrap()).contains("nested"));
}

#[test]
fn a_torn_layer_is_none() {
    let mut tar = Builder::new(Vec::new());
    let content: Vec<u8> = (0..253).cycle().take(5000).collect();
    append(&mut tar, Regular, "a", "", &content);
    let plain = tar.into_inner().unwrap();
    let whole = compress(&plain);
    for length in 0..whole.len() {
        let (_top, done) = unpack(&whole[..length]);
        match done {
            Err(LayerError::Read(_)) => {}
            // No frame at all is what nothing is compressed to.
            Ok(digest) if length == 0 => assert_eq!(digest, Digest::of(b"")),
            other => panic!("{length}: {other:?}"),
        }
    }
    // The tar is torn, and what it is compressed to is not.
    for length in [1, 511, 700, 2000] {
        let done = unpack(&compress(&plain[..length])).1;
        assert!(matches!(done, Err(LayerError::Read(_))), "{length}: {done:?}");
    }
}

#[test]
fn what_swells_beyond_measure_is_left_to_nobody() {
    // Behind its end, a tar may have anything.
    let mut compressed = compress(&tar_of(&[]));
    let zeros = vec![0; 16 << 20];
    for _ in 0..20 {
        compressed.extend(compress(&zeros));
    }
    let refused = unpack(&compressed).1;
    assert!(matches!(refused, Err(LayerError::Swells)), "{refused:?}");
}

#[test]
fn it_ends_when_nobody_wants_it() {
    let top = tempfile::tempdir().unwrap();
    let wanted = CancellationToken::new();
    wanted.cancel();
    let compressed = compress(&tar_of(&[(Regular, "a", "")]));
    let done = apply(&*compressed, 1 << 20, top.path(), &wanted);
    assert!(matches!(done, Err(LayerError::Read(_))), "{done:?}");
    assert_eq!(fs::read_dir(top.path()).unwrap().count(), 0);
}

/// Returns a layer of one of each, made once.
fn example() -> &'static [u8] {
    static EXAMPLE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    EXAMPLE.get_or_init(|| {
        let source = tempfile::tempdir().unwrap();
        fill(source.path());
        let file = fs::OpenOptions::new().write(true).open(source.path().join("a/b/large"));
        file.unwrap().file().set_len(1000).unwrap();
        layer_of(source.path())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever comes, nothing panics and nothing lies beside the directory; and what is said to be
    /// there has the digest of what came.
    #[test]
    fn a_strange_layer_harms_nobody(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        if is_root() {
            let mut plain = example().to_vec();
            for (place, byte) in &changes {
                let place = place.index(plain.len());
                plain[place] = *byte;
            }
            let (top, done) = unpack(&compress(&plain));
            if let Ok(digest) = done {
                prop_assert_eq!(digest, Digest::of(&plain));
            }
            prop_assert_eq!(fs::read_dir(top.path()).unwrap().count(), 1);
        }
    }
}
