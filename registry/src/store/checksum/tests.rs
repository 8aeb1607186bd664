use proptest::prelude::*;

use super::*;

fn table_of(content: &[u8], cuts: &[usize]) -> ChunkTable {
    let file = tempfile::tempfile().unwrap();
    let mut sums = ChunkSums::default();
    let mut rest = content;
    for cut in cuts {
        let (head, tail) = rest.split_at(*cut.min(&rest.len()));
        sums.update(head);
        rest = tail;
    }
    sums.update(rest);
    sums.finish().write(&file).unwrap();
    let length = u64::try_from(content.len()).unwrap();
    write_header(&file, length).unwrap();
    ChunkTable::open(file, length).unwrap().unwrap()
}

#[test]
fn the_checksum_is_crc_64_nvme() {
    // The check value of the CRC catalogue.
    assert_eq!(sum(b"123456789"), 0xae8b_1486_0a79_9888);
}

#[test]
fn a_table_that_belongs_to_another_length_is_refused() {
    let file = tempfile::tempfile().unwrap();
    ChunkSums::default().finish().write(&file).unwrap();
    write_header(&file, 3 * CHUNK_LENGTH).unwrap();

    assert!(ChunkTable::open(file.try_clone().unwrap(), 3 * CHUNK_LENGTH - 1).unwrap().is_none());
    assert!(ChunkTable::open(file.try_clone().unwrap(), 2 * CHUNK_LENGTH).unwrap().is_none());
    file.write_all_at(&[2], 8).unwrap();
    assert!(ChunkTable::open(file, 3 * CHUNK_LENGTH).unwrap().is_none());
}

#[test]
fn checksums_beyond_memory_and_beyond_one_window_are_found() {
    let file = tempfile::tempfile().unwrap();
    let mut sums = ChunkSums::default();
    let chunk = vec![7; CHUNK_BYTES];
    let count = u64::try_from(PENDING_MAX).unwrap() + 3;
    // The checksum of a chunk is made once: what is tested is where it is stored.
    for _ in 0..count {
        sums.pending
            .push(sum(&chunk[..8]) + sums.first + u64::try_from(sums.pending.len()).unwrap());
        if let Some(run) = sums.spill() {
            run.write(&file).unwrap();
        }
    }
    sums.finish().write(&file).unwrap();
    write_header(&file, count * CHUNK_LENGTH).unwrap();

    let mut table = ChunkTable::open(file, count * CHUNK_LENGTH).unwrap().unwrap();
    for index in [0, 511, 512, 4095, 4096, 4098, 1] {
        assert_eq!(table.load(index).unwrap(), sum(&chunk[..8]) + index);
    }
    table.load(count).unwrap_err();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn pieces_do_not_change_the_checksums(
        length in 0usize..3 * CHUNK_BYTES,
        cuts in proptest::collection::vec(0usize..CHUNK_BYTES + 2, 0..6),
    ) {
        let content: Vec<u8> = (0..=250u8).cycle().take(length).collect();
        let mut table = table_of(&content, &cuts);
        for (index, chunk) in content.chunks(CHUNK_BYTES).enumerate() {
            prop_assert_eq!(table.load(u64::try_from(index).unwrap()).unwrap(), sum(chunk));
        }
    }
}
