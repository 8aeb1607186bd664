use std::io::Read as _;
use std::os::unix::fs::FileExt as _;

use fs_err as fs;

use super::*;

/// Captures a directory and lists what the tar has: path, type, and target or content.
fn check(directory: &Path, tree: Tree) -> Vec<(String, EntryType, String)> {
    let out = tempfile::tempdir().unwrap();
    let tar = out.path().join("x.tar");
    let captured = capture(directory, tree, None, &tar, &AtomicBool::new(false)).unwrap();
    let mut archive = tar::Archive::new(captured.open().unwrap());
    let mut found = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().display().to_string();
        let kind = entry.header().entry_type();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        if let Some(target) = entry.link_name().unwrap() {
            text = target.display().to_string();
        }
        found.push((path, kind, text));
    }
    found
}

fn paths(found: &[(String, EntryType, String)]) -> Vec<&str> {
    found.iter().map(|(path, ..)| &**path).collect()
}

#[test]
fn files_links_and_directories_are_captured_in_order() {
    let top = tempfile::tempdir().unwrap();
    fs::create_dir(top.path().join("d")).unwrap();
    fs::write(top.path().join("d/file"), "content").unwrap();
    fs::hard_link(top.path().join("d/file"), top.path().join("e")).unwrap();
    std::os::unix::fs::symlink("../nowhere", top.path().join("f")).unwrap();

    let found = check(top.path(), Tree::Upper);
    assert_eq!(paths(&found), ["d/", "d/file", "e", "f"]);
    assert_eq!(found[1].2, "content");
    assert_eq!((found[2].1, &*found[2].2), (EntryType::Link, "d/file"));
    assert_eq!((found[3].1, &*found[3].2), (EntryType::Symlink, "../nowhere"));
}

#[test]
fn long_and_foreign_names_survive() {
    let top = tempfile::tempdir().unwrap();
    let long = "n".repeat(200);
    fs::write(top.path().join(&long), "1").unwrap();
    fs::write(top.path().join("grün"), "2").unwrap();
    std::os::unix::fs::symlink(&long, top.path().join("z")).unwrap();

    let found = check(top.path(), Tree::Mount);
    assert_eq!(paths(&found), ["./", "grün", &*long, "z"]);
    assert_eq!(found[3].2, long);
}

#[test]
fn what_overlayfs_deleted_becomes_a_whiteout() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let top = tempfile::tempdir().unwrap();
    let device = |path: &Path| {
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, path, FileType::CharacterDevice, mode, 0).unwrap();
    };
    device(&top.path().join("gone"));
    fs::create_dir(top.path().join("new")).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    let opaque = top.path().join("new");
    if rustix::fs::setxattr(&opaque, "trusted.overlay.opaque", b"y", flags).is_err() {
        return;
    }
    fs::write(top.path().join("new/a"), "a").unwrap();

    assert_eq!(
        paths(&check(top.path(), Tree::Upper)),
        [".wh.gone", "new/", "new/.wh..wh..opq", "new/a"]
    );
    assert_eq!(paths(&check(top.path(), Tree::Mount)), ["./", "gone", "new/", "new/a"]);

    rustix::fs::setxattr(&opaque, "trusted.overlay.redirect", b"/x", flags).unwrap();
    let out = tempfile::tempdir().unwrap();
    let stop = AtomicBool::new(false);
    let refused = capture(top.path(), Tree::Upper, None, &out.path().join("x.tar"), &stop);
    assert!(refused.unwrap_err().source.to_string().contains("redirect_dir"));
}

#[test]
fn it_stops_when_told() {
    let top = tempfile::tempdir().unwrap();
    fs::write(top.path().join("a"), "a").unwrap();
    let out = tempfile::tempdir().unwrap();
    let stopped =
        capture(top.path(), Tree::Upper, None, &out.path().join("x.tar"), &AtomicBool::new(true));
    assert!(stopped.is_err());
}

/// A mount may be somebody else's as well, who is not frozen.
#[test]
fn what_others_remove_from_a_mount_meanwhile_is_left_out() {
    let scratch = tempfile::tempdir().unwrap();
    let top = scratch.path().join("top");
    fs::create_dir(&top).unwrap();
    fs::write(top.join("kept"), "kept").unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                for number in 0..20 {
                    fs::create_dir_all(top.join(format!("{number}/within"))).unwrap();
                    fs::write(top.join(format!("{number}/file")), "x").unwrap();
                }
                for number in 0..20 {
                    fs::remove_dir_all(top.join(number.to_string())).unwrap();
                }
            }
        });
        let told = (0..200).map(|round| {
            let tar = scratch.path().join(format!("{round}.tar"));
            let captured = capture(&top, Tree::Mount, None, &tar, &AtomicBool::new(false));
            let mut archive =
                tar::Archive::new(captured.map_err(|error| format!("{error:?}"))?.open().unwrap());
            let paths =
                archive.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().into_owned());
            Ok(paths.filter(|path| path == Path::new("kept")).count())
        });
        let told: Result<Vec<usize>, String> = told.collect();
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(told, Ok(vec![1; 200]));
    });
}

#[test]
fn a_link_at_the_top_is_not_followed() {
    let top = tempfile::tempdir().unwrap();
    let link = top.path().join("link");
    std::os::unix::fs::symlink("/etc", &link).unwrap();
    let out = tempfile::tempdir().unwrap();
    let stop = AtomicBool::new(false);
    capture(&link, Tree::Mount, None, &out.path().join("x.tar"), &stop).unwrap_err();
}

#[test]
fn sizes_are_summed_up() {
    let top = tempfile::tempdir().unwrap();
    fs::create_dir(top.path().join("d")).unwrap();
    fs::write(top.path().join("d/a"), [0; 100]).unwrap();
    fs::write(top.path().join("b"), [0; 11]).unwrap();
    let found = Contents::of(top.path(), Tree::Upper);
    assert_eq!((found.bytes, found.unfit), (111, None));
    // Not what is elsewhere.
    std::os::unix::fs::symlink("d", top.path().join("link")).unwrap();
    assert_eq!(Contents::of(&top.path().join("link"), Tree::Upper).bytes, 0);
    assert_eq!(Contents::of(top.path(), Tree::Upper).bytes, 111);
}

#[test]
fn what_no_layer_can_hold_is_told_before_and_refused() {
    let refused = |prepare: &dyn Fn(&Path), tree| {
        let (top, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        prepare(top.path());
        let told = Contents::of(top.path(), tree).unfit;
        let stop = AtomicBool::new(false);
        let captured = capture(top.path(), tree, None, &out.path().join("x.tar"), &stop);
        let refused = captured.err().map(|error| error.source.to_string());
        assert_eq!(told.is_some(), refused.is_some(), "{told:?} {refused:?}");
        assert!(told.iter().zip(&refused).all(|(told, refused)| told.ends_with(refused)));
        told
    };
    // It would delete `file` of the layer below, and be gone itself.
    let marked = |top: &Path| {
        fs::create_dir(top.join("d")).unwrap();
        fs::write(top.join("d/.wh.file"), "x").unwrap();
    };
    let told = refused(&marked, Tree::Upper).unwrap();
    assert!(told.starts_with("\"/d/.wh.file\": ") && told.contains("deletion"), "{told}");
    assert_eq!(refused(&marked, Tree::Mount), None);

    let deep = |levels: usize, name: &'static str| {
        move |top: &Path| {
            let mut parent = open_directory(rustix::fs::CWD, top.as_os_str()).unwrap();
            for _ in 0..levels {
                let mode = Mode::from_raw_mode(0o700);
                rustix::fs::mkdirat(&parent, name, mode).unwrap();
                parent = open_directory(&parent, OsStr::new(name)).unwrap();
            }
        }
    };
    assert_eq!(refused(&deep(DEPTH_MAX, "d"), Tree::Upper), None);
    let told = refused(&deep(DEPTH_MAX + 2, "d"), Tree::Upper).unwrap();
    assert!(told.contains("too deeply"), "{told}");
    let long = "n".repeat(250);
    let told = refused(&deep(16, long.leak()), Tree::Mount).unwrap();
    assert!(told.contains("too long"), "{told}");
}

#[test]
fn an_attribute_that_a_tar_would_call_otherwise_is_refused() {
    let (top, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(top.path().join("a"), "a").unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    if rustix::fs::setxattr(top.path().join("a"), "user.a=b", b"c", flags).is_err() {
        println!("skipped: there are no attributes here");
        return;
    }
    let stop = AtomicBool::new(false);
    let refused = capture(top.path(), Tree::Mount, None, &out.path().join("x.tar"), &stop);
    assert!(refused.unwrap_err().source.to_string().contains("with = in its name"));
}

#[test]
fn nothing_but_a_file_is_opened_where_somebody_changes_names() {
    let top = tempfile::tempdir().unwrap();
    fs::write(top.path().join("file"), "content").unwrap();
    std::os::unix::fs::symlink("file", top.path().join("link")).unwrap();
    let parent = open_directory(rustix::fs::CWD, top.path().as_os_str()).unwrap();
    let mode = Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(&parent, "fifo", FileType::Fifo, mode, 0).unwrap();
    let mut content = String::new();
    let mut file = File::from(open_only_file(&parent, c"file").unwrap());
    file.read_to_string(&mut content).unwrap();
    assert_eq!(content, "content");
    for name in [c"link", c"fifo"] {
        open_only_file(&parent, name).unwrap_err();
    }
    let devices = open_directory(rustix::fs::CWD, OsStr::new("/dev")).unwrap();
    open_only_file(&devices, c"null").unwrap_err();
}

/// Content that differs from place to place.
fn content(length: usize, seed: u64) -> Vec<u8> {
    let words = (0_u64..).map(|word| (word + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut bytes: Vec<u8> = words.take(length.div_ceil(8)).flat_map(u64::to_be_bytes).collect();
    bytes.truncate(length);
    bytes
}

/// A tar is one thing after the other, whoever wrote which of them.
#[test]
fn large_files_between_small_ones_give_the_tar_that_one_writer_makes() {
    let top = tempfile::tempdir().unwrap();
    let sizes =
        [0, 1, 511, 512, 513, 128 << 10, (128 << 10) + 1, 3 << 20, (33 << 20) + 7, 5, 1 << 20];
    for (number, size) in sizes.into_iter().enumerate() {
        let path = top.path().join(format!("{number:02}"));
        fs::write(path, content(size, size.try_into().unwrap())).unwrap();
    }
    let out = tempfile::tempdir().unwrap();
    let tar = out.path().join("x.tar");
    capture(top.path(), Tree::Upper, None, &tar, &AtomicBool::new(false)).unwrap();

    let mut expected = tar::Builder::new(Vec::new());
    let mut archive = tar::Archive::new(fs::File::open(&tar).unwrap());
    let mut found = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        expected.append(entry.header(), &*bytes).unwrap();
        let path = top.path().join(entry.path().unwrap());
        assert!(bytes == fs::read(&path).unwrap(), "{path:?} is another one");
        found.push(bytes.len());
    }
    assert_eq!(found, sizes);
    assert!(fs::read(&tar).unwrap() == expected.into_inner().unwrap());
}

#[test]
fn holes_take_no_room_and_are_zeros_in_the_tar() {
    let top = tempfile::tempdir().unwrap();
    let (length, middle) = (40_u64 << 20, 33_u64 << 20);
    let file = fs::File::create(top.path().join("sparse")).unwrap();
    file.set_len(length).unwrap();
    let data = content(1 << 20, 3);
    file.file().write_all_at(&data, middle + 3).unwrap();
    fs::write(top.path().join("z"), "after it").unwrap();
    file.sync_all().unwrap();
    let allocated = |path: &Path| {
        use std::os::unix::fs::MetadataExt as _;
        fs::metadata(path).unwrap().blocks() * 512
    };
    let sparse = allocated(&top.path().join("sparse")) < length / 2;

    let out = tempfile::tempdir().unwrap();
    let tar = out.path().join("x.tar");
    capture(top.path(), Tree::Upper, None, &tar, &AtomicBool::new(false)).unwrap();
    if sparse {
        assert!(allocated(&tar) < length / 2, "{} bytes", allocated(&tar));
    }
    let mut archive = tar::Archive::new(fs::File::open(&tar).unwrap());
    let mut entries = archive.entries().unwrap().map(Result::unwrap);
    let mut bytes = Vec::new();
    entries.next().unwrap().read_to_end(&mut bytes).unwrap();
    let mut expected = vec![0; length.try_into().unwrap()];
    expected[usize::try_from(middle).unwrap() + 3..][..data.len()].copy_from_slice(&data);
    assert!(bytes == expected);
    let mut text = String::new();
    entries.next().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "after it");
}

/// What a tar says of a file beside its content.
#[test]
fn owners_modes_times_attributes_and_devices_survive() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let top = tempfile::tempdir().unwrap();
    let path = |name: &str| top.path().join(name);
    fs::write(path("file"), "x").unwrap();
    std::os::unix::fs::chown(path("file"), Some(70_000), Some(8)).unwrap();
    fs::set_permissions(path("file"), std::os::unix::fs::PermissionsExt::from_mode(0o4751))
        .unwrap();
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_007);
    fs::File::options().write(true).open(path("file")).unwrap().set_modified(time).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    let kept = rustix::fs::setxattr(path("file"), "user.note", b"a\0b", flags).is_ok();
    // Not part of an image.
    rustix::fs::setxattr(path("file"), "trusted.note", b"n", flags).unwrap_or_default();
    let make = |name: &str, kind, device| {
        let mode = Mode::from_raw_mode(0o640);
        rustix::fs::mknodat(rustix::fs::CWD, path(name), kind, mode, device).unwrap();
    };
    make("block", FileType::BlockDevice, rustix::fs::makedev(7, 300));
    make("char", FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    make("pipe", FileType::Fifo, 0);

    let out = tempfile::tempdir().unwrap();
    let tar = out.path().join("x.tar");
    capture(top.path(), Tree::Upper, None, &tar, &AtomicBool::new(false)).unwrap();
    let mut archive = tar::Archive::new(fs::File::open(&tar).unwrap());
    let mut told = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let extended = entry.pax_extensions().unwrap().map_or_else(Vec::new, |records| {
            let one = |record: Result<tar::PaxExtension<'_>, _>| {
                let record = record.unwrap();
                (record.key().unwrap().to_owned(), record.value_bytes().to_vec())
            };
            records.map(one).collect()
        });
        let header = entry.header();
        let number = |number: io::Result<Option<u32>>| number.ok().flatten();
        let device = (number(header.device_major()), number(header.device_minor()));
        told.push((header.entry_type(), device, header.mode().unwrap(), extended));
        if header.entry_type() == EntryType::Regular {
            assert_eq!((header.uid().unwrap(), header.gid().unwrap()), (70_000, 8));
            assert_eq!(header.mtime().unwrap(), 1_000_000_007);
        }
    }
    let note = ("SCHILY.xattr.user.note".to_owned(), b"a\0b".to_vec());
    let notes = if kept { vec![note] } else { Vec::new() };
    let nowhere = (None, None);
    assert_eq!(
        told,
        [
            (EntryType::Block, (Some(7), Some(300)), 0o640, Vec::new()),
            (EntryType::Char, (Some(1), Some(3)), 0o640, Vec::new()),
            (EntryType::Regular, nowhere, 0o4751, notes),
            (EntryType::Fifo, (Some(0), Some(0)), 0o640, Vec::new()),
        ]
    );
}

#[test]
fn a_mount_gets_more_names_for_its_files() {
    use std::os::unix::fs::MetadataExt as _;

    let (top, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::create_dir(top.path().join("d")).unwrap();
    fs::write(top.path().join("d/one"), "one").unwrap();
    fs::write(top.path().join("two"), "two").unwrap();
    let file = fs::metadata(top.path().join("d/one")).unwrap();
    let file = FileId { device: file.dev(), inode: file.ino() };
    let link = |place: &str, file| Link { place: place.into(), file };
    let links = [link("d/link_remap.7", file), link("link_remap.8", file)];
    let tar = out.path().join("x.tar");
    capture_linked(top.path(), &links, &tar, &AtomicBool::new(false)).unwrap();
    let to = out.path().join("to");
    fs::create_dir(&to).unwrap();
    tar::Archive::new(fs::File::open(&tar).unwrap()).unpack(&to).unwrap();
    let inode = |name: &str| fs::metadata(to.join(name)).unwrap().ino();
    assert_eq!(fs::read_to_string(to.join("d/link_remap.7")).unwrap(), "one");
    assert_eq!([inode("d/link_remap.7"), inode("link_remap.8")], [inode("d/one"); 2]);
    assert_ne!(inode("two"), inode("d/one"));
    // One that is nowhere has no name to be linked to.
    let nowhere = [link("x", FileId { inode: u64::MAX, ..file })];
    let tar = out.path().join("y.tar");
    capture_linked(top.path(), &nowhere, &tar, &AtomicBool::new(false)).unwrap_err();
}
