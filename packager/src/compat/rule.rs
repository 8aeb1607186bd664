//! The rules: their names, which scripts and dashboards rely on, and how they weigh.

use std::fmt;

use serde::{Serialize, Serializer};

/// What decides, or is worth knowing, before a checkpoint is restored on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// There are facts at all.
    Facts,
    /// The CPU architecture.
    Architecture,
    /// Who made the CPU.
    CpuVendor,
    /// How the CPU saves registers: CRIU's capability `fpu`.
    CpuFpu,
    /// Instructions: CRIU's capability `ins`, and what it does not know yet.
    CpuFeatures,
    /// All other features: what CRIU's capability `cpu` has beyond the two.
    CpuFlags,
    /// The CPU's model.
    CpuModel,
    /// The kernel's version.
    Kernel,
    /// The size of a page.
    PageSize,
    /// The version of cgroups.
    Cgroup,
    /// CRIU's version.
    Criu,
    /// Which OCI runtime it is.
    RuntimeName,
    /// The OCI runtime's version.
    RuntimeVersion,
    /// containerd's version.
    Containerd,
    /// The security module.
    Lsm,
    /// Seccomp filters.
    Seccomp,
    /// A root file system is there.
    Image,
    /// It is the right one.
    ImageDigest,
    /// What of the source's node was mounted.
    Mounts,
    /// What devices of its node the source had.
    Devices,
    /// Those devices exist.
    DevicesPresent,
    /// In which namespaces of its host the source was.
    Namespaces,
    /// How many GPUs.
    GpuCount,
    /// Which GPUs.
    GpuModel,
    /// What the GPUs can do.
    GpuCapability,
    /// How much memory they have.
    GpuMemory,
    /// The GPUs' driver.
    GpuDriver,
    /// The driver's CUDA.
    GpuCuda,
    /// Which GPU takes the place of which.
    GpuUuid,
    /// Where their memory is.
    GpuStorage,
}

/// How a rule weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Nothing is restored when it is broken.
    Refuse,
    /// The restore works; the process may notice.
    Warn,
    /// Worth knowing when something goes wrong.
    Info,
}

impl Rule {
    /// Every rule, in the order of the specification.
    pub const ALL: [Self; 30] = [
        Self::Facts,
        Self::Architecture,
        Self::CpuVendor,
        Self::CpuFpu,
        Self::CpuFeatures,
        Self::CpuFlags,
        Self::CpuModel,
        Self::Kernel,
        Self::PageSize,
        Self::Cgroup,
        Self::Criu,
        Self::RuntimeName,
        Self::RuntimeVersion,
        Self::Containerd,
        Self::Lsm,
        Self::Seccomp,
        Self::Image,
        Self::ImageDigest,
        Self::Mounts,
        Self::Devices,
        Self::DevicesPresent,
        Self::Namespaces,
        Self::GpuCount,
        Self::GpuModel,
        Self::GpuCapability,
        Self::GpuMemory,
        Self::GpuDriver,
        Self::GpuCuda,
        Self::GpuUuid,
        Self::GpuStorage,
    ];

    /// Returns the identifier, as specification, messages and `kyb --json` write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Facts => "facts",
            Self::Architecture => "architecture",
            Self::CpuVendor => "cpu.vendor",
            Self::CpuFpu => "cpu.fpu",
            Self::CpuFeatures => "cpu.features",
            Self::CpuFlags => "cpu.flags",
            Self::CpuModel => "cpu.model",
            Self::Kernel => "kernel",
            Self::PageSize => "page.size",
            Self::Cgroup => "cgroup",
            Self::Criu => "criu",
            Self::RuntimeName => "runtime.name",
            Self::RuntimeVersion => "runtime.version",
            Self::Containerd => "containerd",
            Self::Lsm => "lsm",
            Self::Seccomp => "seccomp",
            Self::Image => "image",
            Self::ImageDigest => "image.digest",
            Self::Mounts => "mounts",
            Self::Devices => "devices",
            Self::DevicesPresent => "devices.present",
            Self::Namespaces => "namespaces",
            Self::GpuCount => "gpu.count",
            Self::GpuModel => "gpu.model",
            Self::GpuCapability => "gpu.capability",
            Self::GpuMemory => "gpu.memory",
            Self::GpuDriver => "gpu.driver",
            Self::GpuCuda => "gpu.cuda",
            Self::GpuUuid => "gpu.uuid",
            Self::GpuStorage => "gpu.storage",
        }
    }

    /// Returns how it weighs.
    pub const fn severity(self) -> Severity {
        match self {
            Self::CpuFlags | Self::RuntimeName | Self::RuntimeVersion => Severity::Warn,
            Self::CpuModel | Self::Containerd => Severity::Info,
            _ => Severity::Refuse,
        }
    }

    /// Whether it is about what the request gives to the new container, and not about the node.
    pub const fn is_about_the_request(self) -> bool {
        matches!(self, Self::Mounts | Self::Devices | Self::Namespaces)
    }
}

impl Severity {
    /// Returns the word for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::Warn => "warn",
            Self::Info => "info",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of the specification is the list: same rules, same order, same weight.
    #[test]
    fn the_specification_lists_the_same_rules() {
        let prose = include_str!("../../../spec/artifact.md");
        let (_, table) = prose.split_once("| rule | severity | holds when |").unwrap();
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let listed: Vec<(&str, &str)> = rows
            .map(|row| {
                let cells: Vec<&str> = row.split('|').map(str::trim).collect();
                assert!(cells[3].len() > 10, "{row}");
                (cells[1].trim_matches('`'), cells[2])
            })
            .collect();
        assert_eq!(listed, Rule::ALL.map(|rule| (rule.as_str(), rule.severity().as_str())));
    }

    #[test]
    fn no_two_rules_have_one_name() {
        for (position, rule) in Rule::ALL.iter().enumerate() {
            let before = &Rule::ALL[..position];
            assert!(before.iter().all(|other| other.as_str() != rule.as_str()), "{rule}");
        }
    }
}
