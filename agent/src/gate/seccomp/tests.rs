use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const ALLOW: u32 = 0x7fff_0000;
const LOG: u32 = 0x7ffc_0000;
const ASK: u32 = 0x7fc0_0000;
const ERRNO: u32 = 0x0005_0001;
const KILL_PROCESS: u32 = 0x8000_0000;
const KILL_THREAD: u32 = 0;
/// What no kernel knows, between two that let through.
const UNKNOWN: u32 = 0x7ffe_0000;

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const FIRST: u32 = 16;

/// Instructions: what they do, two ways, a number.
type Line = (u16, u8, u8, u32);

const fn load(offset: u32) -> Line {
    (0x20, 0, 0, offset)
}

const fn jump_equal(value: u32, there: u8, here: u8) -> Line {
    (0x15, there, here, value)
}

const fn answer(value: u32) -> Line {
    (0x06, 0, 0, value)
}

fn bytes(lines: &[Line]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (code, there, here, value) in lines {
        bytes.extend(code.to_ne_bytes());
        bytes.extend([there, here]);
        bytes.extend(value.to_ne_bytes());
    }
    bytes
}

fn refused(lines: &[Line]) -> Refused {
    Refused::by_program(&bytes(lines)).unwrap_or_default()
}

fn names(of: Refused) -> String {
    of.beyond(Refused::default()).into_iter().collect::<Vec<_>>().join(" ")
}

fn everywhere(name: &str) -> Vec<u32> {
    ARCHITECTURES.iter().filter_map(|architecture| (architecture.call)(name)).collect()
}

/// Refuses the calls of these numbers, whatever the architecture.
fn without(numbers: &[u32]) -> Vec<Line> {
    let mut lines = vec![load(NUMBER)];
    for number in numbers {
        lines.extend([jump_equal(*number, 0, 1), answer(ERRNO)]);
    }
    lines.push(answer(ALLOW));
    lines
}

#[test]
fn a_filter_that_lets_everything_through_refuses_nothing() {
    for lenient in [ALLOW, LOG, ASK, UNKNOWN] {
        assert_eq!(refused(&[answer(lenient)]), Refused::default());
    }
    for hard in [ERRNO, KILL_PROCESS, KILL_THREAD] {
        assert_eq!(refused(&[answer(hard)]), Refused::ALL);
    }
    assert_eq!(names(Refused::ALWAYS), "kexec_file_load kexec_load swapoff swapon");
}

#[test]
fn a_call_is_refused_under_every_architecture_or_it_is_not() {
    assert!(names(refused(&without(&everywhere("keyctl")))).contains("keyctl"));
    for one in everywhere("mount") {
        let others: Vec<u32> =
            everywhere("mount").into_iter().filter(|other| *other != one).collect();
        let found = refused(&without(&others));
        assert!(!found.beyond(Refused::default()).contains("mount"), "but for {one}: {found:?}");
    }
    // An architecture that is let through has all calls.
    let native = ARCHITECTURES[0].number;
    let lines = [load(ARCHITECTURE), jump_equal(native, 1, 0), answer(ALLOW), answer(ERRNO)];
    assert!(!names(refused(&lines)).contains("mount"));
}

/// A filter could refuse a call with the arguments that somebody tries, and no others.
#[test]
fn a_call_is_refused_whatever_its_arguments_or_it_is_not() {
    let lines =
        |of: u32, value: u32| [load(of), jump_equal(value, 0, 1), answer(ERRNO), answer(ALLOW)];
    let signal = 17;
    for (offset, value) in
        [(FIRST, 0), (FIRST + 4, 0), (24, 0), (8, 0), (FIRST, NEW_USER), (FIRST, NEW_USER | signal)]
    {
        assert_eq!(names(refused(&lines(offset, value))), "", "{offset} {value}");
    }
    // Whatever is loaded, both ways are hard.
    let both = [load(24), jump_equal(0, 0, 1), answer(ERRNO), answer(KILL_PROCESS)];
    assert_eq!(refused(&both), Refused::ALL);
    // One flag of several, as filters are made for that: it is computed with, and kept.
    let masked =
        |mask| [load(FIRST), (0x54, 0, 0, mask), (0x02, 0, 0, 3), (0x00, 0, 0, 0), (0x60, 0, 0, 3)];
    let lines =
        |mask| [&masked(mask)[..], &[jump_equal(0, 0, 1), answer(ALLOW), answer(ERRNO)]].concat();
    for mask in [NEW_USER, 0x7e02_0000] {
        assert_eq!(names(refused(&lines(mask))), "clone(CLONE_NEWUSER)");
    }
    assert_eq!(names(refused(&lines(0x6e02_0000))), "");
    // BPF_JSET
    let set = [load(FIRST), (0x45, 0, 1, NEW_USER), answer(ERRNO), answer(ALLOW)];
    assert_eq!(names(refused(&set)), "clone(CLONE_NEWUSER)");
}

#[test]
fn what_is_no_program_refuses_nothing() {
    let wrong: [&[Line]; 8] = [
        &[],
        &[load(NUMBER)],
        &[load(64), answer(ERRNO)],
        &[load(2), answer(ERRNO)],
        &[(0x60, 0, 0, 16), answer(ERRNO)],
        &[(0x05, 0, 0, u32::MAX), answer(ERRNO)],
        &[(0xf5, 0, 0, 0), answer(ERRNO)],
        &[(0x40, 0, 0, 0), answer(ERRNO)],
    ];
    for lines in wrong {
        assert_eq!(refused(lines), Refused::default(), "{lines:?}");
    }
    assert_eq!(Refused::by_program(&[6, 0, 0, 0, 0, 0, 0]), None);
    // CRIU has the number of a longer one in 16 bits, and takes what comes next from within it.
    assert_eq!(refused(&vec![answer(ERRNO); 4096]), Refused::ALL);
    for long in [4097, 65537] {
        assert_eq!(Refused::by_program(&bytes(&vec![answer(ERRNO); long])), None);
    }
    // More ways than anybody goes.
    let mut ways: Vec<Line> =
        (0..200).flat_map(|_| [load(24), jump_equal(0, 1, 0), (0x00, 0, 0, 1)]).collect();
    ways.push(answer(ERRNO));
    assert_eq!(refused(&ways), Refused::default());
}

#[test]
fn the_machine_computes_as_the_kernels_does() {
    let native = ARCHITECTURES[0].number;
    // number * 3 + 1 - (architecture >> 16 | 1) of the first architecture, compared with what it is.
    let number = everywhere("mount")[0];
    let wanted = number.wrapping_mul(3).wrapping_add(1).wrapping_sub(native >> 16 | 1) ^ 0x55;
    let lines = [
        load(ARCHITECTURE),
        (0x74, 0, 0, 16),
        (0x44, 0, 0, 1),
        (0x07, 0, 0, 0),
        load(NUMBER),
        (0x24, 0, 0, 3),
        (0x04, 0, 0, 1),
        (0x1c, 0, 0, 0),
        (0xa4, 0, 0, 0x55),
        jump_equal(wanted, 0, 1),
        answer(ERRNO),
        answer(ALLOW),
    ];
    let call = Call { number, architecture: native, first: 0 };
    let program = |lines: &[Line]| Program::parse(&bytes(lines)).unwrap();
    assert!(program(&lines).refuses(call));
    assert!(!program(&lines).refuses(Call { number: number + 1, ..call }));
    // Nothing is divided by nothing: the kernel kills.
    let divided = [load(NUMBER), (0x01, 0, 0, 0), (0x3c, 0, 0, 0), answer(ALLOW)];
    assert!(program(&divided).refuses(call));
}

fn profile(default: &str, rules: &Value) -> Refused {
    Refused::by_profile(&json!({ "defaultAction": default, "syscalls": rules }))
}

#[test]
fn a_profile_refuses_what_it_says() {
    let (errno, allow) = ("SCMP_ACT_ERRNO", "SCMP_ACT_ALLOW");
    assert_eq!(profile(errno, &Value::Null), Refused::ALL);
    assert_eq!(profile(allow, &json!([])), Refused::default());
    let denied = json!([{ "names": ["io_uring_setup", "bpf", "none-such"], "action": errno }]);
    assert_eq!(names(profile(allow, &denied)), "bpf");
    assert_eq!(names(profile("SCMP_ACT_LOG", &denied)), "bpf");
    let given = json!([{ "names": ["mount", "umount2"], "action": allow }]);
    assert_eq!(
        Refused::ALL.beyond(profile(errno, &given)),
        ["mount", "umount2"].map(str::to_owned).into()
    );
    // Some of its arguments are let through.
    let some = |action: &str| {
        let args = json!([{ "index": 1, "value": 1, "op": "SCMP_CMP_EQ" }]);
        json!([{ "names": ["bpf"], "action": action, "args": args }])
    };
    assert_eq!(Refused::ALL.beyond(profile(errno, &some(allow))), ["bpf".to_owned()].into());
    assert_eq!(names(profile(allow, &some(errno))), "");
    assert_eq!(profile(errno, &some("SCMP_ACT_KILL")), Refused::ALL);
    // Of conditions of one argument each is a rule.
    let two = |index: u32| {
        let condition =
            |index, value| json!({ "index": index, "value": value, "op": "SCMP_CMP_EQ" });
        let args = json!([condition(0, 0x1000_0011), condition(index, 17)]);
        json!([{ "names": ["clone"], "action": allow, "args": args }])
    };
    assert!(Refused::ALL.beyond(profile(errno, &two(0))).contains("clone(CLONE_NEWUSER)"));
    assert_eq!(Refused::ALL.beyond(profile(errno, &two(1))).len(), 1);
}

/// As containerd's says it, for a container that may make no namespaces.
#[test]
fn namespaces_of_users_are_refused_by_flags() {
    let clone = |mask: u64, op: &str| {
        let args = json!([{ "index": 0, "value": mask, "valueTwo": 0, "op": op }]);
        json!([{ "names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": args }])
    };
    let masked = "SCMP_CMP_MASKED_EQ";
    assert_eq!(profile("SCMP_ACT_ERRNO", &clone(0x7e02_0000, masked)), Refused::ALL);
    let only = ["clone(CLONE_NEWUSER)".to_owned()].into();
    for (mask, op) in [(0x6e02_0000, masked), (0, "SCMP_CMP_GE"), (1, "SCMP_CMP_ODD")] {
        assert_eq!(
            Refused::ALL.beyond(profile("SCMP_ACT_ERRNO", &clone(mask, op))),
            only,
            "{mask}"
        );
    }
}

proptest! {
    /// Foreign bytes are followed, and end.
    #[test]
    fn no_program_is_too_strange(
        lines in prop::collection::vec((any::<u16>(), 0..8_u8, 0..8_u8, prop_oneof![0..64_u32, any::<u32>()]), 0..64),
    ) {
        let lines: Vec<Line> = lines
            .into_iter()
            .map(|(code, there, here, value)| (if code % 2 == 0 { code & 0xff } else { code }, there, here, value))
            .collect();
        let _ = refused(&lines);
    }
}
