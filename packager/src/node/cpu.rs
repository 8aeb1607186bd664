//! The CPU: as the kernel describes it, and how it saves its registers.

use fs_err as fs;
use kybernate_spec::checkpoint::CpuFacts;

use super::words;

/// Looks at the CPU this runs on.
pub(super) fn here() -> CpuFacts {
    let described = described(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
    #[cfg(target_arch = "x86_64")]
    let described =
        CpuFacts { xsave: described.features.contains("xsave").then(xsave), ..described };
    described
}

/// Reads the first processor of /proc/cpuinfo: on the machines we know all have the same features.
fn described(text: &str) -> CpuFacts {
    let value = |keys: [&str; 2]| {
        text.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            keys.contains(&key.trim()).then(|| value.trim().to_owned())
        })
    };
    CpuFacts {
        vendor: value(["vendor_id", "CPU implementer"]).unwrap_or_default(),
        model: value(["model name", "CPU part"]).unwrap_or_default(),
        features: words(&value(["flags", "Features"]).unwrap_or_default()),
        xsave: None,
    }
}

#[cfg(target_arch = "x86_64")]
fn xsave() -> kybernate_spec::checkpoint::XsaveFacts {
    /// cpuid's leaf of the extended state.
    const LEAF: u32 = 13;
    /// Supervisor states, which user code does not have: PT, PASID, CET, HDC, UINTR, LBR, HWP.
    const SUPERVISOR: u64 = 1 << 8 | 1 << 10 | 0b11 << 11 | 0b1111 << 13;
    let found =
        raw_cpuid::CpuIdReader::cpuid2(&raw_cpuid::native_cpuid::CpuIdReaderNative, LEAF, 0);
    let features = (u64::from(found.edx) << 32 | u64::from(found.eax)) & !SUPERVISOR;
    let (bytes, bytes_max) = (found.ebx, found.ecx);
    kybernate_spec::checkpoint::XsaveFacts { features, bytes, bytes_max }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_processor_speaks_for_all() {
        let text = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: EPYC\n\
                    flags\t\t: fpu avx2 avx\n\nprocessor\t: 1\nflags\t\t: none\n";
        let cpu = described(text);
        assert_eq!((&*cpu.vendor, &*cpu.model), ("AuthenticAMD", "EPYC"));
        assert_eq!(cpu.features, ["avx", "avx2", "fpu"].map(str::to_owned).into());
    }

    /// x87 and SSE have 512 bytes and a header of 64, and no CPU with XSAVE is without them.
    #[test]
    fn a_cpu_with_xsave_tells_its_frames() {
        let Some(xsave) = here().xsave else {
            assert!(!here().features.contains("xsave") || cfg!(not(target_arch = "x86_64")));
            return;
        };
        assert_eq!(xsave.features & 0b11, 0b11);
        assert!(xsave.bytes >= 576 && xsave.bytes <= xsave.bytes_max, "{xsave:?}");
    }
}
