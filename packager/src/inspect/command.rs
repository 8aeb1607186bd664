//! What ran: the arguments of the first process, out of its own memory.
//!
//! The kernel keeps where they are, and so do CRIU's images; what they are is in a page or two,
//! which are fetched alone. They are what ps(1) would have shown, also where a process has written
//! something else there.

use futures::TryStreamExt as _;
use kybernate_spec::page_index::{Encoding, PAGE_BYTES, PAGES_PER_SEGMENT};
use schemars::JsonSchema;
use serde::Serialize;

use super::{Look, Starts};
use crate::artifact::Checkpoint;
use crate::inside::{Inside, Process, secret};
use crate::store::{Store, StoreError, StoreErrorKind};
use crate::stored::{StoredAt, StoredError, StoredPages};

/// Most bytes of arguments that are fetched. Longer ones are cut.
const ARGUMENTS_BYTES_MAX: u64 = 32 << 10;

/// What stands for what was cut.
const CUT: &str = "…";

/// What the container ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ran {
    /// Program and arguments, as far as they are known; what looks like a secret is masked.
    pub command: Vec<String>,
    /// How that is known.
    pub known_from: KnownFrom,
}

/// How it is known what ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KnownFrom {
    /// The arguments were read from the first process's memory.
    Memory,
    /// The images name its program; its arguments are not known.
    Program,
    /// The container image says how it starts. What ran is not known.
    Image,
}

/// Where the arguments of the first process are.
#[derive(Debug)]
pub(super) struct Arguments {
    /// Addresses, cut to what is fetched.
    range: std::ops::Range<u64>,
    is_cut: bool,
    /// The pages they are in: where in which shard each is stored, unless it is zero.
    pages: Vec<Option<(usize, u64)>>,
}

/// Returns what ran, by what is known.
pub(super) fn ran(
    arguments: Vec<String>,
    inside: Option<&Inside>,
    starts: Option<&Starts>,
    look: Look,
) -> Option<Ran> {
    if !arguments.is_empty() {
        let shown = if look.show_secrets { arguments } else { secret::arguments(&arguments) };
        return Some(Ran { command: shown, known_from: KnownFrom::Memory });
    }
    let first = inside.and_then(|inside| inside.processes.first());
    let name = |process: &Process| Some(&process.name).filter(|name| !name.is_empty()).cloned();
    let program = first.and_then(|first| first.executable.clone().or_else(|| name(first)));
    if let Some(program) = program {
        return Some(Ran { command: vec![program], known_from: KnownFrom::Program });
    }
    let command = starts.map(|starts| starts.command.clone())?;
    (!command.is_empty()).then_some(Ran { command, known_from: KnownFrom::Image })
}

impl Arguments {
    /// Finds out where they are. Blocks.
    pub(super) fn find(inside: &Inside, stored: &StoredPages) -> Result<Option<Self>, StoredError> {
        let page = u64::from(PAGE_BYTES);
        let Some(first) = inside.processes.first() else { return Ok(None) };
        let Some(range) = first.arguments.clone() else { return Ok(None) };
        let end = range.end.min(range.start.saturating_add(ARGUMENTS_BYTES_MAX));
        let is_cut = end < range.end;
        let begin = range.start - range.start % page;
        let Some(mut pieces) = stored.walk_if_there(&format!("pagemap-{}.img", first.pid))? else {
            return Ok(None);
        };
        let mut pages = Vec::new();
        while let Some(piece) = pieces.next_piece()? {
            if piece.address >= end {
                break;
            }
            for number in 0..piece.pages {
                let address = piece.address.saturating_add(number.saturating_mul(page));
                let next = begin.saturating_add(length(&pages).saturating_mul(page));
                if address == next && address < end {
                    pages.push(piece.stored.and_then(|at| place(stored, at, number)));
                }
            }
        }
        let whole = begin.saturating_add(length(&pages).saturating_mul(page)) >= end;
        Ok(whole.then_some(Self { range: range.start..end, is_cut, pages }))
    }

    /// Fetches them. Nothing is verified by that.
    pub(super) async fn fetch(
        &self,
        store: &Store,
        checkpoint: &Checkpoint,
    ) -> Result<Vec<String>, StoreError> {
        let page = u64::from(PAGE_BYTES);
        let mut content = Vec::new();
        for place in &self.pages {
            let before = content.len();
            if let Some((shard, offset)) = place {
                let shard = checkpoint.shards.get(*shard).ok_or_else(|| missing(*shard))?;
                let mut stream = store.blob_range(shard, *offset, page).await?;
                while let Some(bytes) = stream.try_next().await? {
                    content.extend_from_slice(&bytes);
                }
            }
            // What is zero is nowhere.
            content.resize(before + usize::try_from(page).unwrap_or_default(), 0);
        }
        let skipped = usize::try_from(self.range.start % page).unwrap_or_default();
        let wanted = usize::try_from(self.range.end - self.range.start).unwrap_or_default();
        let content = content.get(skipped..).unwrap_or_default();
        let content = content.get(..wanted.min(content.len())).unwrap_or_default();
        Ok(words(content, self.is_cut))
    }
}

/// Cuts what the kernel keeps into arguments.
fn words(content: &[u8], is_cut: bool) -> Vec<String> {
    let mut words: Vec<String> = content
        .split(|byte| *byte == 0)
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    // The last one ends with a zero too, and what a process has written over them may be shorter.
    while words.last().is_some_and(String::is_empty) {
        words.pop();
    }
    if is_cut && !words.is_empty() {
        words.push(CUT.to_owned());
    }
    words
}

/// Returns the shard's number and the byte in it where a page is, when it is stored as it is.
fn place(stored: &StoredPages, at: StoredAt, number: u64) -> Option<(usize, u64)> {
    let page = u64::from(at.place.page).checked_add(number)?;
    let chunks = stored.chunks(at.place.shard);
    let chunk = chunks.get(usize::try_from(page / u64::from(PAGES_PER_SEGMENT)).ok()?)?;
    let within = page % u64::from(PAGES_PER_SEGMENT) * u64::from(PAGE_BYTES);
    let raw = chunk.encoding == Encoding::Raw;
    raw.then_some((usize::from(at.place.shard), chunk.stored_offset.checked_add(within)?))
}

fn length(pages: &[Option<(usize, u64)>]) -> u64 {
    u64::try_from(pages.len()).unwrap_or(u64::MAX)
}

fn missing(shard: usize) -> StoreError {
    let (operation, subject) = ("find shard", shard.to_string());
    StoreError { operation, subject, kind: StoreErrorKind::NotFound }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_what_ends_with_a_zero() {
        assert_eq!(words(b"python3\0-m\0\0x y\0", false), ["python3", "-m", "", "x y"]);
        assert_eq!(words(b"nginx: master process\0\0\0\0", false), ["nginx: master process"]);
        assert_eq!(words(b"a\0bc", true), ["a", "bc", CUT]);
        assert_eq!(words(&[0; 9], true), [""; 0]);
        assert_eq!(words(&[b'a', 0xff, 0], false), ["a\u{fffd}"]);
    }

    #[test]
    fn what_is_known_best_is_told() {
        let starts = Starts { command: vec!["/image".to_owned()], ..Starts::default() };
        let told = |arguments: &[&str], inside: Option<&Inside>, look| {
            let arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
            let ran = ran(arguments, inside, Some(&starts), look).unwrap();
            (ran.command.join(" "), ran.known_from)
        };
        let look = Look::default();
        let open = Look { show_secrets: true, ..look };
        let command = ["/job", "--token", "abc"];
        assert_eq!(told(&command, None, look), ("/job --token ********".into(), KnownFrom::Memory));
        assert_eq!(told(&command, None, open), ("/job --token abc".into(), KnownFrom::Memory));
        assert_eq!(told(&[], None, look), ("/image".into(), KnownFrom::Image));
        assert_eq!(ran(Vec::new(), None, None, look), None);
    }
}
