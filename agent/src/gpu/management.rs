//! NVML: which GPUs there are, and which processes use them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use kybernate_spec::checkpoint::{Gpu, GpuFacts};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;

use super::Use;
use super::call::Failure;

/// The management library.
pub(super) struct Management {
    library: Nvml,
}

/// Who uses the GPUs.
#[derive(Debug, Default)]
pub(super) struct Usage {
    /// The GPUs that some processes use, with their bytes.
    pub(super) uses: Vec<Use>,
    /// Those of the processes that use one.
    pub(super) users: BTreeSet<u32>,
    /// Whether it is not known of some of them how much they have.
    pub(super) unmeasured: bool,
}

impl Management {
    /// Loads the library.
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let library = Nvml::builder().lib_path(path.as_os_str()).init();
        let wrong = |error: NvmlError| Failure::Library {
            path: path.to_owned(),
            reason: error.to_string(),
        };
        Ok(Self { library: library.map_err(wrong)? })
    }

    /// Describes the GPUs, in the driver's order.
    pub(super) fn facts(&self) -> Result<GpuFacts, NvmlError> {
        let cuda = self.library.sys_cuda_driver_version()?;
        let mut facts = GpuFacts {
            driver: self.library.sys_driver_version()?,
            // As the header writes it: 13010 is 13.1.
            cuda: format!("{}.{}", cuda / 1000, cuda % 1000 / 10),
            devices: Vec::new(),
        };
        for index in 0..self.library.device_count()? {
            let device = self.library.device_by_index(index)?;
            let capability = device.cuda_compute_capability()?;
            facts.devices.push(Gpu {
                uuid: device.uuid()?,
                model: device.name()?,
                memory_bytes: device.memory_info()?.total,
                compute_capability: format!("{}.{}", capability.major, capability.minor),
            });
        }
        Ok(facts)
    }

    /// Looks who of `pids` uses which GPU.
    pub(super) fn usage(&self, pids: &[u32]) -> Result<Usage, NvmlError> {
        let mut usage = Usage::default();
        for index in 0..self.library.device_count()? {
            let device = self.library.device_by_index(index)?;
            let (mut used, mut bytes) = (false, 0_u64);
            for process in device.running_compute_processes()? {
                if pids.contains(&process.pid) {
                    used = true;
                    usage.users.insert(process.pid);
                    match process.used_gpu_memory {
                        UsedGpuMemory::Used(part) => bytes = bytes.saturating_add(part),
                        UsedGpuMemory::Unavailable => usage.unmeasured = true,
                    }
                }
            }
            if used {
                usage.uses.push(Use { uuid: device.uuid()?, bytes });
            }
        }
        Ok(usage)
    }

    /// Returns how many bytes are free on each GPU.
    pub(super) fn free(&self) -> Result<BTreeMap<String, u64>, NvmlError> {
        let mut free = BTreeMap::new();
        for index in 0..self.library.device_count()? {
            let device = self.library.device_by_index(index)?;
            free.insert(device.uuid()?, device.memory_info()?.free);
        }
        Ok(free)
    }
}
