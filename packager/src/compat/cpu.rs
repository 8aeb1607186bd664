//! CPUs, as CRIU compares them (`--cpu-cap`).

use kybernate_spec::checkpoint::NodeFacts;

use super::{Answer, Outcome, holds_if};

/// x86 features that CRIU's capability `fpu` wants to find again.
const FPU: [&str; 4] = ["fpu", "fxsr", "xsave", "xsaves"];

/// x86 features that CRIU's capability `ins` wants to find again, AVX left out, as /proc/cpuinfo
/// names them (CRIU 4.2).
const INSTRUCTIONS: [&str; 52] = [
    "fpu",
    "tsc",
    "cx8",
    "sep",
    "cmov",
    "clflush",
    "mmx",
    "fxsr",
    "sse",
    "sse2",
    "syscall",
    "mmxext",
    "rdtscp",
    "3dnowext",
    "3dnow",
    "rep_good",
    "nopl",
    "pni",
    "pclmulqdq",
    "monitor",
    "ssse3",
    "cx16",
    "sse4_1",
    "sse4_2",
    "movbe",
    "popcnt",
    "aes",
    "xsave",
    "f16c",
    "rdrand",
    "abm",
    "sse4a",
    "misalignsse",
    "3dnowprefetch",
    "xop",
    "fma4",
    "tbm",
    "fsgsbase",
    "bmi1",
    "hle",
    "bmi2",
    "erms",
    "rtm",
    "mpx",
    "rdseed",
    "adx",
    "clflushopt",
    "sha_ni",
    "xsaveopt",
    "xsavec",
    "xgetbv1",
    "tme",
];

/// More of them, from CRIU's list and beyond it: instructions that a program may have chosen, and
/// that would kill it here.
const MORE_INSTRUCTIONS: [&str; 22] = [
    "gfni",
    "vaes",
    "vpclmulqdq",
    "rdpid",
    "clzero",
    "fma",
    "lahf_lm",
    "clwb",
    "cldemote",
    "movdiri",
    "movdir64b",
    "serialize",
    "waitpkg",
    "enqcmd",
    "sha512",
    "sm3",
    "sm4",
    "cmpccxadd",
    "rao_int",
    "ptwrite",
    "user_shstk",
    "ospke",
];

/// Families of instructions, of which every year brings more.
const FAMILIES: [&str; 2] = ["avx", "amx"];

/// Registers must be saved and laid out alike.
pub(super) fn fpu(here: &NodeFacts, there: &NodeFacts) -> Answer {
    if !is_x86(there) {
        let text = format!("CRIU compares no registers on {}", there.architecture);
        return (Outcome::Holds, text);
    }
    if there.cpu.features.is_empty() || here.cpu.features.is_empty() {
        return unknown(here, "features");
    }
    let missing: Vec<&str> = FPU
        .into_iter()
        .filter(|name| there.cpu.features.contains(*name) && !here.cpu.features.contains(*name))
        .collect();
    if !missing.is_empty() {
        let text = format!("this CPU lacks {}, with which registers are saved", missing.join(", "));
        return (Outcome::Broken, text);
    }
    if !there.cpu.features.contains("xsave") {
        return (Outcome::Holds, "the checkpoint's CPU had no XSAVE".to_owned());
    }
    let (Some(ours), Some(theirs)) = (here.cpu.xsave, there.cpu.xsave) else {
        return unknown(here, "XSAVE frames");
    };
    let lacking = theirs.features & !ours.features;
    // Equal sizes, as CRIU has it: a C library that has asked for the size of a frame once would
    // write beyond it, or read less.
    let alike = (ours.bytes, ours.bytes_max) == (theirs.bytes, theirs.bytes_max);
    let text = format!(
        "XSAVE frames here have {} of {} bytes and components {:#x}, and had {} of {} bytes and \
         components {:#x} where the checkpoint was taken",
        ours.bytes, ours.bytes_max, ours.features, theirs.bytes, theirs.bytes_max, theirs.features,
    );
    (holds_if(lacking == 0 && alike), text)
}

/// Every instruction that the process may have chosen must be here.
pub(super) fn features(here: &NodeFacts, there: &NodeFacts) -> Answer {
    let x86 = is_x86(there);
    compare(here, there, |name| !x86 || is_instruction(name), "which the process may use")
}

/// What else the source's CPU had.
pub(super) fn flags(here: &NodeFacts, there: &NodeFacts) -> Answer {
    let x86 = is_x86(there);
    compare(here, there, |name| x86 && !is_instruction(name), "which are no instructions")
}

fn compare(
    here: &NodeFacts,
    there: &NodeFacts,
    counts: impl Fn(&str) -> bool,
    what: &str,
) -> Answer {
    if there.cpu.features.is_empty() || here.cpu.features.is_empty() {
        return unknown(here, "features");
    }
    let wanted: Vec<&str> =
        there.cpu.features.iter().map(String::as_str).filter(|name| counts(name)).collect();
    let missing: Vec<&str> =
        wanted.iter().copied().filter(|name| !here.cpu.features.contains(*name)).collect();
    if missing.is_empty() {
        let text = format!("this CPU has the {} features of the source's, {what}", wanted.len());
        return (Outcome::Holds, text);
    }
    let text = format!(
        "this CPU lacks {} of the {} features of the source's, {what}: {}",
        missing.len(),
        wanted.len(),
        missing.join(", ")
    );
    (Outcome::Broken, text)
}

fn unknown(here: &NodeFacts, what: &str) -> Answer {
    let known_here =
        !here.cpu.features.is_empty() && (what == "features" || here.cpu.xsave.is_some());
    let place = if known_here { "where the checkpoint was taken" } else { "here" };
    (Outcome::Unknown, format!("the CPU's {what} are not known {place}"))
}

fn is_x86(node: &NodeFacts) -> bool {
    matches!(&*node.architecture, "amd64" | "386")
}

fn is_instruction(name: &str) -> bool {
    FAMILIES.iter().any(|family| name.starts_with(family))
        || INSTRUCTIONS.contains(&name)
        || MORE_INSTRUCTIONS.contains(&name)
}
