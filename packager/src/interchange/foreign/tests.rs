use proptest::prelude::*;

use super::*;

/// One member, written as it is told.
fn member(kind: EntryType, name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = Header::new_gnu();
    let field = header.as_old_mut();
    field.name = [0; 100];
    field.name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_entry_type(kind);
    header.set_size(u64::try_from(content.len()).unwrap());
    header.set_mode(0o644);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn file(name: &str, content: &[u8]) -> Vec<u8> {
    member(EntryType::Regular, name, content)
}

fn ended(members: &[Vec<u8>]) -> Vec<u8> {
    [&members.concat()[..], &[0; 1024]].concat()
}

type Found = Vec<(String, Vec<u8>)>;

fn read(bytes: &[u8]) -> Result<Found, ForeignError> {
    let mut members = Members::new(bytes);
    let mut found = Vec::new();
    while let Some(member) = members.next_file()? {
        let mut content = Vec::new();
        members.read_to_end(&mut content)?;
        let rest = bytes.iter().skip(usize::try_from(member.offset).unwrap_or(usize::MAX));
        assert!(rest.take(content.len()).eq(&content));
        found.push((member.name, content));
    }
    Ok(found)
}

fn names(bytes: &[u8]) -> Result<Vec<String>, String> {
    read(bytes)
        .map(|found| found.into_iter().map(|(name, _)| name).collect())
        .map_err(|error| kybernate_spec::chain(&error).to_string())
}

#[test]
fn files_come_with_plain_names() {
    let tar = ended(&[
        member(EntryType::Directory, "./", b""),
        member(EntryType::Directory, "checkpoint/", b""),
        file("./config.dump", b"{}"),
        file("checkpoint//pages-1.img", &[7; 700]),
    ]);
    assert_eq!(names(&tar).unwrap(), ["config.dump", "checkpoint/pages-1.img"]);
}

#[test]
fn what_leads_elsewhere_is_refused() {
    for name in ["../x", "/etc/passwd", "a/../../x", "..", "a/..", ".", "x/", "a\nb", ""] {
        let told = names(&ended(&[file(name, b"x")])).unwrap_err();
        assert!(told.contains("is called"), "{name:?}: {told}");
    }
    for (kind, word) in [
        (EntryType::Symlink, "symbolic link"),
        (EntryType::Link, "hard link"),
        (EntryType::Char, "device"),
        (EntryType::Block, "device"),
        (EntryType::Fifo, "pipe"),
        (EntryType::GNUSparse, "pieces"),
    ] {
        let told = names(&ended(&[member(kind, "pages-1.img", b"")])).unwrap_err();
        assert!(told.contains(word), "{kind:?}: {told}");
    }
}

#[test]
fn a_layer_has_links_and_no_names_that_lead_elsewhere() {
    let end = |bytes: &[u8]| {
        let mut members = Members::of_layer(bytes);
        while members.next_file()?.is_some() {}
        Ok::<_, ForeignError>(members.end())
    };
    let link = member(EntryType::Symlink, "etc/link", b"");
    let device = member(EntryType::Char, "dev/null", b"");
    let layer = ended(&[link.clone(), device, file("a", &[1; 513]), file("a", b"2")]);
    assert_eq!(end(&layer).unwrap(), u64::try_from(layer.len()).unwrap() - 1024);
    for hostile in [file("../x", b""), file("/x", b""), member(EntryType::Symlink, "a/../b", b"")] {
        end(&ended(&[link.clone(), hostile])).unwrap_err();
    }
    let sized = member(EntryType::Link, "a", b"content");
    end(&ended(&[sized])).unwrap_err();
    end(&[0; 0]).unwrap_err();
}

#[test]
fn what_comes_twice_is_refused_however_it_is_written() {
    for second in ["a", "./a", "a/./../a"] {
        names(&ended(&[file("a", b"1"), file(second, b"2")])).unwrap_err();
    }
    let told = names(&ended(&[file("x/a", b"1"), file("x//a", b"2")])).unwrap_err();
    assert!(told.contains("twice"), "{told}");
}

#[test]
fn a_tar_that_is_cut_is_refused_wherever() {
    let whole = ended(&[file("a", &[1; 600]), file("b", b"2")]);
    assert_eq!(names(&whole).unwrap().len(), 2);
    for length in (0..whole.len() - 1024).step_by(64) {
        names(&whole[..length]).unwrap_err();
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let mut huge = file("a", b"");
    let mut header = Header::new_gnu();
    header.as_mut_bytes().copy_from_slice(&huge[..512]);
    header.set_size(u64::MAX - 100);
    header.set_cksum();
    huge[..512].copy_from_slice(header.as_bytes());
    names(&ended(&[huge])).unwrap_err();
    let long = member(EntryType::GNULongName, "././@LongLink", &vec![b'x'; 70_000]);
    assert!(names(&ended(&[long, file("a", b"")])).unwrap_err().contains("70000"));
}

#[test]
fn other_tars_extensions_are_understood() {
    let record = |key: &str, value: &str| {
        let rest = format!(" {key}={value}\n");
        let length = rest.len() + 2;
        let length = if length > 9 { length } else { length - 1 };
        format!("{length}{rest}").into_bytes()
    };
    let pax = |records: &[u8]| member(EntryType::XHeader, "pax", records);
    let named = [pax(&record("path", "checkpoint/x")), file("short", b"1")];
    assert_eq!(names(&ended(&named)).unwrap(), ["checkpoint/x"]);
    let named = [member(EntryType::GNULongName, "l", b"long/name\0"), file("short", b"1")];
    assert_eq!(names(&ended(&named)).unwrap(), ["long/name"]);
    for (key, value) in [("path", "../out"), ("GNU.sparse.major", "1"), ("size", "many")] {
        names(&ended(&[pax(&record(key, value)), file("a", b"1")])).unwrap_err();
    }
    // The size in the extension is the one that counts.
    let mut large = file("a", b"");
    large.extend([5; 512]);
    assert_eq!(names(&ended(&[pax(&record("size", "512")), large])).unwrap(), ["a"]);
}

#[test]
fn it_agrees_with_the_library_on_what_that_writes() {
    let mut builder = tar::Builder::new(Vec::new());
    let long = format!("{}/file", "directory".repeat(30));
    for (name, size) in [("a", 0), ("b/c", 513), (long.as_str(), 512)] {
        let mut header = Header::new_gnu();
        header.set_size(size);
        let content = vec![3; usize::try_from(size).unwrap()];
        builder.append_data(&mut header, name, &*content).unwrap();
    }
    let whole = builder.into_inner().unwrap();
    let sizes: Vec<_> =
        read(&whole).unwrap().into_iter().map(|(name, content)| (name, content.len())).collect();
    assert_eq!(sizes, [("a".to_owned(), 0), ("b/c".to_owned(), 513), (long, 512)]);
}

proptest! {
    #[test]
    fn whatever_comes_is_read_or_refused(
        noise in prop::collection::vec(any::<u8>(), 0..2048),
        place in 0_usize..1536,
    ) {
        // Anything at all, and a good tar with something else in it.
        drop(read(&noise));
        let mut tar = ended(&[file("a/b", &[1; 300]), file("c", b"2")]);
        for (byte, other) in tar.iter_mut().skip(place).zip(&noise) {
            *byte ^= other;
        }
        if let Ok(found) = read(&tar) {
            for (name, _) in found {
                prop_assert!(!name.starts_with('/') && name.split('/').all(|part| part != ".."));
            }
        }
    }
}
