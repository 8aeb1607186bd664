//! Memory by kind: how much is mapped, and how much of it is stored.

use std::collections::BTreeMap;
use std::ops::Range;

use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use super::files::Table;
use super::images::{Memory, MemoryArea};
use super::source::Source;
use crate::criu::Magic;
use crate::stored::{PAGE_BYTES, StoredError, StoredPages};

/// CRIU's bits for a mapping (`criu/include/image.h`).
mod status {
    pub(super) const STACK: u32 = 1 << 1;
    pub(super) const VSYSCALL: u32 = 1 << 2;
    pub(super) const VDSO: u32 = 1 << 3;
    pub(super) const HEAP: u32 = 1 << 5;
    pub(super) const FILE_PRIVATE: u32 = 1 << 6;
    pub(super) const FILE_SHARED: u32 = 1 << 7;
    pub(super) const ANON_SHARED: u32 = 1 << 8;
    pub(super) const ANON_PRIVATE: u32 = 1 << 9;
    pub(super) const SYSVIPC: u32 = 1 << 10;
    pub(super) const VVAR: u32 = 1 << 12;
    pub(super) const MEMFD: u32 = 1 << 14;
    /// Not a mapping of the kernel's: where another one has guard pages.
    pub(super) const GUARD: u32 = 1 << 16;
}

/// `MAP_HUGETLB` of mmap(2).
const MAP_HUGETLB: u32 = 0x4_0000;

/// What a region takes, its path aside.
const REGION_BYTES: usize = 192;

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryKind {
    /// The process's own, of no file.
    PrivateAnonymous,
    /// Grown by brk(2).
    Heap,
    /// The first thread's stack.
    Stack,
    /// A file's, with own changes.
    PrivateFile,
    /// A file's, whoever changes it.
    SharedFile,
    /// Shared between processes, of no file.
    SharedAnonymous,
    /// Of a file in memory (`memfd_create`).
    Memfd,
    /// Shared memory of System V.
    SystemV,
    /// Huge pages.
    Huge,
    /// What the kernel maps: vDSO, vvar, vsyscall.
    Kernel,
    /// Anything else: rings of sockets and asynchronous input and output, shadow stacks.
    Other,
}

/// How much memory of a kind there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KindBytes {
    /// The kind.
    pub kind: MemoryKind,
    /// Bytes of address space.
    pub mapped_bytes: u64,
    /// Bytes whose content is stored: neither zero nor only in a file. Shared memory counts with
    /// each process that maps it.
    pub stored_bytes: u64,
}

/// One mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MappedRegion {
    /// First address, in hexadecimal.
    #[serde(serialize_with = "hexadecimal")]
    #[schemars(with = "String")]
    pub start: u64,
    /// First address after it, in hexadecimal.
    #[serde(serialize_with = "hexadecimal")]
    #[schemars(with = "String")]
    pub end: u64,
    /// What may be done: `r`, `w` and `x`, or `-`.
    pub protection: String,
    /// Its kind.
    pub kind: MemoryKind,
    /// The file it maps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Bytes of address space.
    pub mapped_bytes: u64,
    /// Bytes of the process's own whose content is stored.
    pub stored_bytes: u64,
    /// Number of the shared memory that it maps.
    #[serde(skip)]
    pub(crate) shared: Option<u64>,
}

/// What the memory of all processes adds up to.
#[derive(Debug)]
pub(super) struct Accounts<'a> {
    stored: &'a StoredPages,
    own: BTreeMap<MemoryKind, Bytes>,
    /// Shared memory by what it is.
    shared: BTreeMap<(MemoryKind, u64), Bytes>,
}

/// One process's memory.
#[derive(Debug, Default)]
pub(super) struct ProcessMemory {
    pub(super) executable: Option<u32>,
    /// Where its arguments are.
    pub(super) arguments: Option<Range<u64>>,
    pub(super) kinds: Vec<KindBytes>,
    pub(super) regions: Vec<MappedRegion>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Bytes {
    mapped: u64,
    stored: u64,
}

impl<'a> Accounts<'a> {
    pub(super) const fn new(stored: &'a StoredPages) -> Self {
        Self { stored, own: BTreeMap::new(), shared: BTreeMap::new() }
    }

    /// Adds a process.
    pub(super) fn process(
        &mut self,
        source: &mut Source,
        files: &Table,
        pid: u32,
    ) -> ProcessMemory {
        let image = format!("mm-{pid}.img");
        let Some(memory) = source.one::<Memory>(&image, Magic::MM) else {
            return ProcessMemory::default();
        };
        let mut memory = memory;
        let mut areas = std::mem::take(&mut memory.mappings);
        areas.retain(|area| area.status & status::GUARD == 0 && area.start < area.end);
        areas.sort_unstable_by_key(|area| area.start);
        let pagemap = format!("pagemap-{pid}.img");
        let stored = match self.count(&pagemap, &areas) {
            Ok(stored) => stored,
            Err(error) => {
                source.problem(&pagemap, kybernate_spec::chain(&error).to_string());
                vec![0; areas.len()]
            }
        };
        let mut kinds: BTreeMap<MemoryKind, Bytes> = BTreeMap::new();
        let mut objects: BTreeMap<(MemoryKind, u64), u64> = BTreeMap::new();
        let mut regions = Vec::new();
        for (area, stored) in areas.iter().zip(stored) {
            let ((kind, object), mapped) = (kind(area, &memory, files), area.end - area.start);
            kinds.entry(kind).or_default().add(Bytes { mapped, stored });
            if is_shared(kind) {
                let sum = objects.entry((kind, object)).or_default();
                *sum = sum.saturating_add(mapped);
            } else {
                self.own.entry(kind).or_default().add(Bytes { mapped, stored });
            }
            let shown = region(area, (kind, object), stored, files);
            let bytes = REGION_BYTES + shown.path.as_ref().map_or(0, String::len);
            if source.affords(&image, bytes) {
                regions.push(shown);
            }
        }
        for ((kind, id), mapped) in objects {
            let stored = self.object(source, kind, id, mapped);
            kinds.entry(kind).or_default().add(Bytes { mapped: 0, stored });
        }
        let executable = Some(memory.executable);
        let arguments = memory.arguments..memory.arguments_end;
        let arguments = (memory.arguments > 0 && !arguments.is_empty()).then_some(arguments);
        ProcessMemory { executable, arguments, kinds: listed(&kinds), regions }
    }

    /// Returns what all processes have; what several share once.
    pub(super) fn total(&self) -> Vec<KindBytes> {
        let mut kinds = self.own.clone();
        for ((kind, _), bytes) in &self.shared {
            kinds.entry(*kind).or_default().add(*bytes);
        }
        listed(&kinds)
    }

    /// Returns the stored bytes of something shared, and notes how much of it is mapped.
    fn object(&mut self, source: &mut Source, kind: MemoryKind, id: u64, mapped: u64) -> u64 {
        if let Some(known) = self.shared.get_mut(&(kind, id)) {
            known.mapped = known.mapped.max(mapped);
            return known.stored;
        }
        // What belongs to a file is stored by nobody.
        let pagemap = (kind != MemoryKind::SharedFile)
            .then(|| format!("pagemap-shmem-{id}.img"))
            .filter(|pagemap| source.has(pagemap));
        let stored = pagemap.map_or(0, |pagemap| {
            let everything = MemoryArea { end: u64::MAX, ..MemoryArea::default() };
            self.count(&pagemap, &[everything]).map_or_else(
                |error| {
                    source.problem(&pagemap, kybernate_spec::chain(&error).to_string());
                    0
                },
                |bytes| bytes.into_iter().sum(),
            )
        });
        self.shared.insert((kind, id), Bytes { mapped, stored });
        stored
    }

    /// Counts the stored bytes within each of `areas`, which are in order.
    fn count(&self, pagemap: &str, areas: &[MemoryArea]) -> Result<Vec<u64>, StoredError> {
        let mut bytes = vec![0_u64; areas.len()];
        let mut pieces = self.stored.walk(pagemap)?;
        while let Some(piece) = pieces.next_piece()? {
            if piece.stored.is_none() {
                continue;
            }
            // Nothing that CRIU writes crosses the end of a mapping.
            let (mut from, end) =
                (piece.address, piece.address.saturating_add(piece.pages * PAGE_BYTES));
            let first = areas.partition_point(|area| area.end <= from);
            for (area, bytes) in areas.iter().zip(bytes.iter_mut()).skip(first) {
                if area.start >= end || from >= end {
                    break;
                }
                from = from.max(area.start);
                let to = end.min(area.end);
                *bytes = bytes.saturating_add(to.saturating_sub(from));
                from = from.max(to);
            }
        }
        Ok(bytes)
    }
}

impl Bytes {
    const fn add(&mut self, other: Self) {
        self.mapped = self.mapped.saturating_add(other.mapped);
        self.stored = self.stored.saturating_add(other.stored);
    }
}

fn listed(kinds: &BTreeMap<MemoryKind, Bytes>) -> Vec<KindBytes> {
    let one = |(kind, bytes): (&MemoryKind, &Bytes)| KindBytes {
        kind: *kind,
        mapped_bytes: bytes.mapped,
        stored_bytes: bytes.stored,
    };
    kinds.iter().map(one).collect()
}

/// Returns the kind of a mapping, and the number of the file or shared memory that it maps.
fn kind(area: &MemoryArea, memory: &Memory, files: &Table) -> (MemoryKind, u64) {
    let is = |bits| area.status & bits != 0;
    let kind = if is(status::VDSO | status::VVAR | status::VSYSCALL) {
        MemoryKind::Kernel
    } else if area.flags & MAP_HUGETLB != 0 {
        MemoryKind::Huge
    } else if is(status::HEAP) {
        MemoryKind::Heap
    } else if is(status::SYSVIPC) {
        MemoryKind::SystemV
    } else if is(status::MEMFD) {
        return match files.memfd(area.shared) {
            Some(file) if file.anonymous => (MemoryKind::SharedAnonymous, file.shared.into()),
            Some(file) => (MemoryKind::Memfd, file.shared.into()),
            None => (MemoryKind::Other, area.shared),
        };
    } else if is(status::FILE_PRIVATE) {
        MemoryKind::PrivateFile
    } else if is(status::FILE_SHARED) {
        MemoryKind::SharedFile
    } else if is(status::ANON_SHARED) {
        MemoryKind::SharedAnonymous
    } else if is(status::STACK) || (area.start..area.end).contains(&memory.stack) {
        MemoryKind::Stack
    } else if is(status::ANON_PRIVATE) {
        MemoryKind::PrivateAnonymous
    } else {
        MemoryKind::Other
    };
    (kind, area.shared)
}

const fn is_shared(kind: MemoryKind) -> bool {
    matches!(
        kind,
        MemoryKind::SharedFile
            | MemoryKind::SharedAnonymous
            | MemoryKind::Memfd
            | MemoryKind::SystemV
    )
}

fn region(
    area: &MemoryArea,
    (kind, object): (MemoryKind, u64),
    stored: u64,
    files: &Table,
) -> MappedRegion {
    let path = match kind {
        MemoryKind::PrivateFile | MemoryKind::SharedFile | MemoryKind::Memfd => {
            u32::try_from(area.shared).ok().and_then(|id| files.path(id))
        }
        _ => None,
    };
    let may = |bit: u32, letter| if area.protection & bit != 0 { letter } else { '-' };
    MappedRegion {
        start: area.start,
        end: area.end,
        protection: [may(1, 'r'), may(2, 'w'), may(4, 'x')].iter().collect(),
        kind,
        path,
        mapped_bytes: area.end - area.start,
        stored_bytes: stored,
        shared: (is_shared(kind) && kind != MemoryKind::SharedFile).then_some(object),
    }
}

/// Writes an address as debuggers do, and so that no reader of JSON rounds it.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature is serde's")]
pub(crate) fn hexadecimal<S: Serializer>(address: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{address:#x}"))
}
