use super::*;

fn pack(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    write_header(&mut out, u32::try_from(files.len()).unwrap()).unwrap();
    for (name, content) in files {
        write_file(&mut out, name, content).unwrap();
    }
    out
}

fn names(bytes: &[u8]) -> Result<Vec<String>, ImagesPackError> {
    let mut names = Vec::new();
    read(bytes, |name, _| {
        names.push(name.to_owned());
        Ok(())
    })?;
    Ok(names)
}

#[test]
fn files_survive_a_round_trip() {
    let bytes = pack(&[("core-1.img", b"one"), ("pstree.img", b"")]);
    let mut seen = Vec::new();
    let total = read(&*bytes, |name, content| {
        seen.push((name.to_owned(), content.to_vec()));
        Ok(())
    });
    assert_eq!(total.unwrap(), 3);
    assert_eq!(seen, [("core-1.img".into(), b"one".to_vec()), ("pstree.img".into(), vec![])]);
}

#[test]
fn names_that_criu_does_not_read_are_refused() {
    for name in ["../../etc/passwd", "criu.conf", "parent", "pages-1.img", "dump.log", "a/b.img"] {
        let error = names(&pack(&[(name, b"")])).unwrap_err();
        assert_eq!(error.to_string(), format!("file {name:?} is none of CRIU's images"));
    }
}

#[test]
fn files_that_come_twice_or_out_of_order_are_refused() {
    for pair in [["mm-1.img", "mm-1.img"], ["mm-1.img", "fs-1.img"]] {
        assert!(names(&pack(&pair.map(|name| (name, &b""[..])))).is_err());
    }
}

#[test]
fn a_size_larger_than_the_bytes_or_the_limit_is_refused() {
    let mut bytes = pack(&[("mm-1.img", b"abc")]);
    bytes[18] = 4;
    assert!(matches!(names(&bytes), Err(ImagesPackError::Io(_))));
    bytes[18 + 7] = 0x7f;
    assert!(matches!(
        names(&bytes),
        Err(ImagesPackError::File { what: "is larger than 1 MiB", .. })
    ));
}

#[test]
fn every_truncation_and_any_trailing_byte_is_refused() {
    let mut bytes = pack(&[("core-1.img", b"one"), ("pstree.img", b"two")]);
    names(&bytes).unwrap();
    for length in 0..bytes.len() {
        assert!(names(&bytes[..length]).is_err(), "{length}");
    }
    bytes.push(0);
    assert!(names(&bytes).is_err());
}
