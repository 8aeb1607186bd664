use proptest::prelude::*;
use serde::Deserialize;

use super::*;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Fact {
    n: u32,
}

impl Record for Fact {
    const KIND: &'static str = "fact";
}

#[test]
fn a_record_reads_as_it_was_written() {
    let bytes = encode(&Fact { n: 7 }).unwrap();
    insta::assert_snapshot!(
        str::from_utf8(&bytes).unwrap(),
        @r#"
    kybernate-fact 1 40d107bbffb4a9b9
    {"n":7}
    "#
    );
    assert_eq!(decode::<Fact>(&bytes).unwrap(), Fact { n: 7 });
}

#[test]
fn another_version_is_refused() {
    let text = String::from_utf8(encode(&Fact { n: 7 }).unwrap()).unwrap();
    let newer = text.replace("fact 1 ", "fact 2 ");
    assert!(matches!(decode::<Fact>(newer.as_bytes()), Err(RecordError::Header(_))));
}

proptest! {
    #[test]
    fn a_changed_or_cut_record_is_refused(at in 0usize..42, flip in 1u8..=255, cut in any::<bool>()) {
        let mut bytes = encode(&Fact { n: 1_000_000 }).unwrap();
        let at = at % bytes.len();
        if cut { bytes.truncate(at); } else { bytes[at] ^= flip; }
        prop_assert!(decode::<Fact>(&bytes).is_err());
    }
}
