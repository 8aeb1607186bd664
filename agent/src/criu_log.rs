//! The telling lines of CRIU's logs.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use fs_err as fs;

/// How much of a log is looked at, from its end: errors are the last thing CRIU writes.
const TAIL_BYTES: u64 = 64 << 10;

/// Lines quoted at most.
const LINES_MAX: usize = 6;

/// What CRIU calls an error and goes on from: it wants more rights than a container has.
const HARMLESS: &[&str] = &["RLIMIT_NOFILE for self"];

/// Returns the lines of a log that tell what went wrong, as the end of a sentence; empty when there
/// are none.
pub(crate) fn telling(log: &Path) -> String {
    let mut tail = Vec::new();
    let read = fs::File::open(log).and_then(|mut file| {
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        file.take(TAIL_BYTES).read_to_end(&mut tail)
    });
    if read.is_err() {
        return String::new();
    }
    pick(&String::from_utf8_lossy(&tail))
}

fn pick(text: &str) -> String {
    let errors: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("Error") || line.contains("FAILED"))
        .filter(|line| !HARMLESS.iter().any(|harmless| line.contains(harmless)))
        .map(message)
        .collect();
    if errors.is_empty() {
        return String::new();
    }
    let surplus = errors.len().saturating_sub(LINES_MAX);
    let errors: Vec<&str> = errors.into_iter().skip(surplus).collect();
    format!("; CRIU says: {}", errors.join("; "))
}

/// `(00.004130) pie: 1: Error (x.c:1): text` becomes `pie: 1: Error (x.c:1): text`.
fn message(line: &str) -> &str {
    match line.split_once(") ") {
        Some((time, rest)) if time.starts_with('(') => rest.trim(),
        _ => line.trim(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_quoted_without_their_times() {
        let log = "(00.1) starting\n(00.2) Error (criu/util.c:1): rlimit: Can't setup \
                   RLIMIT_NOFILE for self: Operation not permitted\n\
                   (00.3) Error (criu/sk-inet.c:9): inet: Connected TCP socket\n(00.4) end\n";
        let quoted = "; CRIU says: Error (criu/sk-inet.c:9): inet: Connected TCP socket";
        assert_eq!(pick(log), quoted);
    }

    #[test]
    fn a_log_without_errors_has_nothing_to_say() {
        assert_eq!(pick("(00.1) a\n(00.2) Dumping finished successfully\n\n"), "");
        assert_eq!(telling(Path::new("/nowhere/dump.log")), "");
    }

    #[test]
    fn only_the_last_errors_are_quoted() {
        let log: Vec<String> = (0..20).map(|n| format!("(0.{n}) Error {n}\n")).collect();
        let quoted = "; CRIU says: Error 14; Error 15; Error 16; Error 17; Error 18; Error 19";
        assert_eq!(pick(&log.concat()), quoted);
    }
}
