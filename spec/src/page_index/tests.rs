use super::*;
use proptest::prelude::*;

fn chunk(offset: u64, bytes: u32) -> Chunk {
    Chunk {
        stored_offset: offset,
        stored_bytes: bytes,
        plain_bytes: bytes,
        encoding: Encoding::Raw,
        hash: [7; 32],
    }
}

fn run(first: u16, pages: u16, shard: u16, page: u16) -> Run {
    Run { first, pages, place: Place { shard, page } }
}

/// One shard of 5 MiB and one file of `length` bytes with these segments.
fn index(length: u64, all: &[&[Run]]) -> Vec<u8> {
    let mut out = Vec::new();
    write_header(&mut out, &Header { hash: ChunkHash::Blake3, shards: 1, files: 1 }).unwrap();
    write_shard(&mut out, &[chunk(0, 4 << 20), chunk(4 << 20, 1 << 20)]).unwrap();
    write_file(&mut out, "pages-1.img", length).unwrap();
    for (number, runs) in all.iter().enumerate() {
        let left = length.div_ceil(4096) - 1024 * u64::try_from(number).unwrap();
        write_segment(&mut out, u16::try_from(left.min(1024)).unwrap(), runs).unwrap();
    }
    write_end(&mut out).unwrap();
    out
}

fn read(bytes: &[u8]) -> Result<Vec<Record>, PageIndexError> {
    let mut reader = Reader::new(bytes)?;
    let mut records = Vec::new();
    while let Some(record) = reader.next_record()? {
        records.push(record);
    }
    Ok(records)
}

fn refusal(bytes: &[u8]) -> String {
    read(bytes).unwrap_err().kind.to_string()
}

#[test]
fn holes_runs_bitmaps_and_lists_survive_a_round_trip() {
    let scattered: Vec<Run> = (0..100).map(|i| run(i * 3, 1, 0, i)).collect();
    let split = [run(0, 4, 0, 0), run(9, 2, 0, 1000)];
    let whole = [run(0, 1024, 0, 256)];
    let tail = [run(0, 1, 0, 3)];
    let bytes = index(12 << 20 | 1, &[&scattered, &split, &whole, &tail]);
    let segments: Vec<_> = read(&bytes)
        .unwrap()
        .into_iter()
        .filter_map(|record| match record {
            Record::Segment(runs) => Some(runs),
            _ => None,
        })
        .collect();
    assert_eq!(segments, [scattered, split.to_vec(), whole.to_vec(), tail.to_vec()]);
}

#[test]
fn the_stored_form_does_not_change() {
    let bytes = index(4097, &[&[run(1, 1, 0, 2)]]);
    let mut pinned = Vec::new();
    pinned.extend(b"KYBPAGES\x01\x00\x01\x00\x01\x00\x00\x00\x01\x00\x00\x00");
    pinned.extend(b"\x00\x00\x40\x00\x00\x10\x00\x00\x00\x00\x00\x00");
    pinned.extend(b"\x63\x00\x00\x00\x01");
    pinned.extend(b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x40\x00\x00\x00\x40\x00\x00");
    pinned.extend([7; 32]);
    pinned.extend(b"\x00\x00\x40\x00\x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x10\x00\x00");
    pinned.extend([7; 32]);
    pinned.extend(b"\x14\x00\x00\x00\x02\x01\x10\x00\x00\x00\x00\x00\x00pages-1.img");
    pinned.extend(b"\x09\x00\x00\x00\x06\x01\x00\x01\x00\x00\x00\x02\x00");
    pinned.extend(b"\x01\x00\x00\x00\x00");
    assert_eq!(bytes, pinned);
}

#[test]
fn the_worst_index_is_within_its_limit() {
    // Every second page stored, each alone in a shard of its own choice: 512 runs per segment.
    let runs: Vec<Run> = (0..512).map(|i| run(i * 2, 1, i % 2, i)).collect();
    let mut out = Vec::new();
    write_segment(&mut out, 1024, &runs).unwrap();
    let bytes = u64::try_from(out.len()).unwrap();
    assert!(bytes <= index_bytes_max(4 << 20) - (1 << 20), "{bytes}");
}

#[test]
fn reading_goes_on_from_a_cursor() {
    let bytes = index(12 << 20, &[&[run(0, 1024, 0, 0)], &[], &[run(3, 4, 0, 5)]]);
    let mut reader = Reader::new(&*bytes).unwrap();
    for _ in 0..3 {
        reader.next_record().unwrap();
    }
    let (cursor, shards) = (reader.cursor(), reader.shard_pages().to_vec());
    let from = usize::try_from(cursor.position()).unwrap();
    let mut resumed = Reader::resume(&bytes[from..], *reader.header(), cursor, shards);
    while let Some(record) = reader.next_record().unwrap() {
        assert_eq!(resumed.next_record().unwrap(), Some(record));
    }
    assert_eq!(resumed.next_record().unwrap(), None);
}

#[test]
fn a_page_beyond_its_shard_is_refused() {
    for wrong in [run(0, 2, 0, 1279), run(0, 1, 1, 0), run(0, 1024, 0, 1000)] {
        assert_eq!(
            refusal(&index(4 << 20, &[&[wrong]])),
            "a page lies beyond the end of its shard"
        );
    }
}

#[test]
fn overlapping_pages_are_refused() {
    for wrong in [[run(0, 4, 0, 0), run(3, 1, 0, 9)], [run(5, 1, 0, 0), run(1, 1, 0, 9)]] {
        assert!(refusal(&index(4 << 20, &[&wrong])).contains("overlap"));
    }
    assert!(refusal(&index(4096, &[&[run(0, 2, 0, 0), run(2, 0, 0, 0)]])).contains("file's end"));
}

#[test]
fn too_few_and_too_many_records_are_refused() {
    assert!(refusal(&index(8 << 20, &[&[]])).contains("ends before"));
    assert!(refusal(&index(4 << 20, &[&[], &[]])).contains("more segments"));
    let mut trailing = index(4 << 20, &[&[]]);
    trailing.push(0);
    assert_eq!(refusal(&trailing), "bytes follow its end");
}

#[test]
fn an_end_record_with_a_payload_is_refused() {
    let mut bytes = index(4 << 20, &[&[]]);
    bytes.truncate(bytes.len() - 5);
    bytes.extend(b"\x02\x00\x00\x00\x00\x00");
    assert_eq!(refusal(&bytes), "the end record has a payload");
}

#[test]
fn a_newer_version_hash_encoding_or_record_is_refused() {
    let good = index(4 << 20, &[&[]]);
    for (at, text) in [
        (8, "page index version 9 is not known to this version"),
        (10, "chunk hash 9 is not known to this version"),
        (11, "flags 9 is not known to this version"),
        (32 + 5 + 16, "chunk encoding 9 is not known to this version"),
        (good.len() - 1, "record kind 9 is not known to this version"),
    ] {
        let mut newer = good.clone();
        newer[at] = 9;
        assert_eq!(refusal(&newer), text);
    }
}

#[test]
fn every_truncation_is_refused() {
    let good = index(12 << 20, &[&[run(0, 1024, 0, 0)], &[], &[run(3, 4, 0, 5)]]);
    read(&good).unwrap();
    for length in 0..good.len() {
        assert!(read(&good[..length]).is_err(), "{length}");
    }
}

proptest! {
    #[test]
    fn a_flipped_byte_never_panics(at in 0_usize..400, value in any::<u8>()) {
        let mut bytes = index(12 << 20, &[&[run(0, 1024, 0, 0)], &[], &[run(3, 4, 0, 5)]]);
        let at = at % bytes.len();
        bytes[at] = value;
        drop(read(&bytes));
    }
}
