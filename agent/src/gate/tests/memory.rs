use std::io::{Read as _, Write as _};
use std::os::unix::fs::symlink;
use std::process::Command;

use flate2::Compression;
use flate2::write::GzEncoder;
use fs_err as fs;

use super::super::images::{RegularFile, UnixSocket};
use super::super::memory::{device, is_content};
use super::*;

/// The image of the default dump's `/dev`, of which that is the device.
const IMAGE: &str = "tmpfs-dev-4.tar.gz.img";

fn opened(name: &str) -> File {
    let regular = RegularFile { id: 7, name: name.to_owned(), ..RegularFile::default() };
    File { kind: 1, id: 7, regular: Some(regular), ..File::default() }
}

fn socket(name: &str) -> File {
    let socket = UnixSocket { name: name.as_bytes().to_vec(), directory: None };
    File { kind: 5, id: 8, socket: Some(socket), ..File::default() }
}

/// Makes a header as GNU tar does.
fn header(kind: u8, path: &[u8], target: &[u8], size: u64) -> [u8; 512] {
    let mut header = [0; 512];
    header[..path.len()].copy_from_slice(path);
    header[100..107].copy_from_slice(b"0000777");
    header[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    header[156] = kind;
    header[157..157 + target.len()].copy_from_slice(target);
    header[257..265].copy_from_slice(b"ustar  \0");
    summed(header)
}

fn summed(mut header: [u8; 512]) -> [u8; 512] {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    header
}

/// Changes a header.
fn changed(header: &[u8; 512], at: usize, bytes: &[u8]) -> [u8; 512] {
    let mut header = *header;
    header[at..at + bytes.len()].copy_from_slice(bytes);
    summed(header)
}

/// Returns the last block of a long target, which has its end.
fn blocks_of_target() -> [u8; 512] {
    let mut block = [b'x'; 512];
    block[511] = 0;
    block
}

/// Compresses blocks, with an end.
fn blocks(blocks: &[[u8; 512]]) -> Vec<u8> {
    gzip(&[blocks, &[[0; 512]; 2]].concat().concat())
}

/// Compresses entries, each of a kind, a path and a target.
fn content(entries: &[(u8, &str, &str)]) -> Vec<u8> {
    let header = |(kind, path, target): &(u8, &str, &str)| {
        header(*kind, path.as_bytes(), target.as_bytes(), 0)
    };
    blocks(&entries.iter().map(header).collect::<Vec<_>>())
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

/// Returns what is wrong with a dump that has these files open and brings this for `/dev`, and which links
/// are kept of that.
fn looked(files: &[File], content: &[u8]) -> (String, BTreeMap<String, String>) {
    let mut dump = Dump::default();
    dump.files.extend(files.iter().cloned());
    dump.mounts.push(mount(9, 4, 5, "/dev/more/shm"));
    let mut images = dump.images();
    images.push((IMAGE.to_owned(), content.to_vec()));
    match summarise(&images, &[]) {
        Ok(summary) => (judge_alone(&summary).join("; "), summary.links_in_memory),
        Err(error) => (error, BTreeMap::new()),
    }
}

const LINK: u8 = b'2';
const OUT: &str = "/proc/self/fd/126/../..";

#[test]
fn no_link_that_the_dump_brings_leads_what_is_opened() {
    let file = [opened("/dev/data/etc/shadow")];
    for path in ["./data", "./data/etc", "./data/etc/shadow"] {
        let (told, _) = looked(&file, &content(&[(LINK, path, OUT)]));
        assert!(told.contains("its own files have a link, "), "{path}: {told}");
    }
    // Nor what is mounted there.
    let (told, _) = looked(&[], &content(&[(LINK, "./more", OUT)]));
    assert!(told.contains("a link, \"/dev/more\", on the way"), "{told}");
    // By its second gzip.
    let parts =
        [header(LINK, b"./x", b"y", 0), header(LINK, b"./data", OUT.as_bytes(), 0), [0; 512]];
    let whole = parts.concat();
    let parts = [gzip(&whole[..700]), gzip(&whole[700..])].concat();
    assert!(looked(&file, &parts).0.contains("a link, "));
    let others =
        [(LINK, "./fd", "/proc/self/fd"), (LINK, "./database", OUT), (LINK, "./d", "data")];
    assert_eq!(looked(&file, &content(&others)), (String::new(), BTreeMap::new()));
    // Of what is on no other mount, links in memory say nothing.
    assert_eq!(looked(&[opened("/data/x")], &content(&[(LINK, "./data", OUT)])).0, "");
}

#[test]
fn links_are_kept_where_something_is_made() {
    let links = content(&[(LINK, "./run", OUT), (LINK, "./a/b", "../c")]);
    let kept = |links: &[(&str, &str)]| {
        links.iter().map(|(path, to)| ((*path).to_owned(), (*to).to_owned())).collect()
    };
    let all = kept(&[("/dev/run", OUT), ("/dev/a/b", "../c")]);
    assert_eq!(looked(&[socket("/var/run/x.sock")], &links), (String::new(), all));
    assert_eq!(looked(&[opened("/dev/file")], &links), (String::new(), BTreeMap::new()));
    // Each has as long a target as tar may write.
    let long = [[b'x'; 512]; 31];
    let one = |number: u32| {
        let end = blocks_of_target();
        let path = format!("./{number}");
        let link = header(LINK, path.as_bytes(), b"x", 0);
        [&[header(b'K', b"././@LongLink", b"", 1 << 14)][..], &long, &[end, link]].concat()
    };
    let many = blocks(&(0..300).flat_map(one).collect::<Vec<_>>());
    let (told, _) = looked(&[socket("/run/x.sock")], &many);
    assert!(told.contains("more links than are followed"), "{told}");
    assert_eq!(looked(&[opened("/dev/file")], &many).0, "");
}

#[test]
fn nothing_is_read_in_two_ways() {
    let file = [opened("/dev/data/x")];
    let [directory, other, hard] = [b'5', b'0', b'1'];
    for (entries, reason) in [
        (vec![(b'x', "./x", "")], "tar does not write"),
        (vec![(b'g', "./x", "")], "tar does not write"),
        (vec![(b'7', "./x", "")], "tar does not write"),
        (vec![(0, "./x", "")], "tar does not write"),
        (vec![(b'N', "./x", "")], "tar does not write"),
        (vec![(other, "../x", "")], "not below its root"),
        (vec![(other, "/x", "")], "not below its root"),
        (vec![(other, "x", "")], "not below its root"),
        (vec![(other, "./x/", "")], "not below its root"),
        (vec![(other, ".//x", "")], "not below its root"),
        (vec![(other, "./x/./y", "")], "not below its root"),
        (vec![(LINK, "./data/", OUT)], "not below its root"),
        (vec![(directory, "./x", "")], "not below its root"),
        (vec![(hard, "./x", "../x")], "not below its root"),
        (vec![(LINK, "./y", OUT), (hard, "./data", "./y")], "another name"),
        (vec![(LINK, "./d", "real"), (LINK, "./d/data", OUT)], "behind a link"),
        (vec![(LINK, "./d", "real"), (hard, "./data", "./d/x")], "another name"),
        (vec![(LINK, "./x", OUT), (LINK, "./x", "fine")], "the same name twice"),
        (vec![(directory, "./x/", ""), (LINK, "./x", "fine")], "the same name twice"),
        (vec![(b'L', "././@LongLink", "")], "a name"),
    ] {
        let entries = [&entries[..], &[(other, "./behind", "")]].concat();
        let (told, _) = looked(&file, &content(&entries));
        assert!(told.contains(reason), "{entries:?}: {told}");
    }
    let whole = content(&[(LINK, "./x", OUT)]);
    for torn in [&whole[..whole.len() - 20], b"no gzip", &gzip(&header(other, b"./x", b"", 9))] {
        let (told, _) = looked(&file, torn);
        assert!(told.contains("cannot be read"), "{told}");
    }
    // Nobody asks for what is in it.
    let mut dump = Dump::default();
    dump.mounts.push(mount(9, 1, 5, "/empty"));
    let mut images = dump.images();
    images.push(("tmpfs-dev-9.tar.gz.img".to_owned(), b"no gzip".to_vec()));
    assert!(summarise(&images, &[]).is_ok());
}

/// GNU tar takes the block behind each of these for a header, and another reader might take it for content,
/// or the other way round.
#[test]
fn no_block_is_content_to_some_and_a_header_to_others() {
    let file = [opened("/dev/data/x")];
    let led = header(LINK, b"./data", OUT.as_bytes(), 0);
    let sized = |kind, path: &[u8]| header(kind, path, b"./y", 512);
    let plain = header(b'0', b"./x", b"", 512);
    let holes = changed(&header(b'S', b"./x", b"", 0), 482, &[1]);
    let name = |bytes: &[u8]| {
        let mut block = [0; 512];
        block[..bytes.len()].copy_from_slice(bytes);
        [header(b'L', b"././@LongLink", b"", bytes.len().try_into().unwrap()), block]
    };
    let [named, text] = name(b"./data\0x\0");
    let [again, other] = name(b"./data\0");
    for (before, what) in [
        (vec![sized(b'1', b"./x")], "a link with content"),
        (vec![sized(b'2', b"./x")], "a symbolic link with content"),
        (vec![sized(b'3', b"./x")], "a device with content"),
        (vec![sized(b'5', b"./x/")], "a directory with content"),
        (vec![sized(b'6', b"./x")], "a pipe with content"),
        (vec![sized(b'0', b"./x/")], "a directory by its name"),
        (vec![holes], "holes that go on behind none"),
        (vec![changed(&plain, 124, b"+0\0\0\0\0\0\0\0\0\0\0")], "a number in base 64"),
        (vec![changed(&plain, 124, b"       1000\0")], "a number with spaces"),
        (vec![changed(&plain, 124, b"\x80\0\0\x01")], "a number that is too large"),
        (vec![changed(&plain, 257, b"ustar\x0000")], "another form"),
        (vec![changed(&plain, 50, b"x")], "a name behind its end"),
        (vec![named, text], "a long name behind its end"),
        (vec![again, other, again, other], "two long names"),
        (vec![[0; 512]], "an end before it"),
    ] {
        let (told, _) = looked(&file, &blocks(&[&before[..], &[led]].concat()));
        assert!(told.contains("the content of its tmpfs has"), "{what}: {told}");
    }
    let mut wrong = header(LINK, b"./data", OUT.as_bytes(), 0);
    wrong[0] = b',';
    assert!(looked(&file, &blocks(&[wrong])).0.contains("a header that tar does not write"));
    // What is content is none.
    assert_eq!(looked(&file, &blocks(&[plain, led])).0, "");
    assert!(looked(&file, &blocks(&[plain, led, led])).0.contains("a link, "));
    let long = [again, other, header(LINK, b"./x", b"y", 0)];
    assert!(looked(&file, &blocks(&long)).0.contains("a link, "));
}

#[test]
fn a_part_of_it_is_no_link() {
    let mut dump = Dump::default();
    let part = Mount { root: "/sub".to_owned(), device: 4, ..mount(9, 1, 5, "/data") };
    dump.mounts.push(part);
    for (path, is_refused) in [("./sub", true), ("./other", false)] {
        let mut images = dump.images();
        images.push((IMAGE.to_owned(), content(&[(LINK, path, OUT)])));
        let told = judge_alone(&summarise(&images, &[]).unwrap()).join("; ");
        assert_eq!(told.contains("a link, \"/data\", on the way"), is_refused, "{told}");
    }
}

#[test]
fn what_is_no_text_hides_no_link() {
    let links = blocks(&[header(LINK, b"./\xff", OUT.as_bytes(), 0)]);
    assert_eq!(looked(&[opened("/dev/x")], &links).0, "");
    assert!(looked(&[socket("/dev/x.sock")], &links).0.contains("what is no text"));
    let led = blocks(&[header(LINK, b"./data", b"/dev/\xff/../../proc/self/fd/126", 0)]);
    assert!(looked(&[opened("/dev/data/x")], &led).0.contains("a link, "));
    assert!(looked(&[socket("/dev/x.sock")], &led).0.contains("what is no text"));
    let socket = UnixSocket { name: b"/run/\xff/s".to_vec(), directory: None };
    let socket = File { kind: 5, id: 8, socket: Some(socket), ..File::default() };
    let (told, _) = looked(&[socket], &content(&[]));
    assert!(told.contains("by the path"), "{told}");
}

#[test]
fn images_are_called_as_criu_calls_them() {
    assert_eq!(device(IMAGE), Some(4));
    assert!(is_content(IMAGE) && !is_content("tmp.img"));
    for name in ["tmpfs-4.tar.gz.img", "tmpfs-dev-04.tar.gz.img", "tmpfs-dev-4.img", "tmpfs-dev-x"]
    {
        assert!(is_content(name) && device(name).is_none(), "{name}");
        let told = summarise(&Dump::default().images(), &[name.to_owned()]).unwrap_err();
        assert!(told.contains("is no name that CRIU gives"), "{told}");
    }
}

/// What CRIU runs (`tmpfs_dump`), with whatever it may meet.
#[test]
fn what_tar_writes_is_read() {
    let place = tempfile::tempdir().unwrap();
    let long = "long".repeat(40);
    fs::create_dir_all(place.path().join(&long).join(&long)).unwrap();
    fs::write(place.path().join(&long).join(&long).join("file"), "content").unwrap();
    symlink(format!("/{long}/{long}/file"), place.path().join(&long).join("link")).unwrap();
    fs::hard_link(place.path().join(&long).join(&long).join("file"), place.path().join("two"))
        .unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, place.path().join("fifo"), 0o600.into()).unwrap();
    let sparse = fs::File::create(place.path().join("sparse")).unwrap();
    // More parts than a header has room for.
    for part in 0..40 {
        std::os::unix::fs::FileExt::write_at(sparse.file(), b"x", part << 20).unwrap();
    }
    sparse.set_len(100 << 20).unwrap();
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--no-unquote", "--no-wildcards", "--one-file-system"]);
    tar.args(["--check-links", "--preserve-permissions", "--sparse", "--numeric-owner"]);
    let output = tar.arg("--directory").arg(place.path()).arg(".").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut plain = Vec::new();
    flate2::bufread::MultiGzDecoder::new(&*output.stdout).read_to_end(&mut plain).unwrap();
    assert!(plain.len() < 1 << 20, "it is not sparse");
    let files = [opened("/dev/two"), socket("/dev/x.sock")];
    let (told, links) = looked(&files, &output.stdout);
    assert_eq!(told, "");
    let link = (format!("/dev/{long}/link"), format!("/{long}/{long}/file"));
    assert_eq!(links, BTreeMap::from([link]));
    let (told, _) = looked(&[opened(&format!("/dev/{long}/link"))], &output.stdout);
    assert!(told.contains("its own files have a link, "), "{told}");
}
