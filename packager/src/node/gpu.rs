//! The GPUs, as NVIDIA's driver tells of them.

use fs_err as fs;
use kybernate_spec::checkpoint::{Gpu, GpuFacts};

use super::run;

/// There when the driver is loaded.
const DRIVER: &str = "/proc/driver/nvidia/version";

/// What is asked of each GPU, in this order.
const QUERY: &str = "--query-gpu=uuid,name,memory.total,compute_cap,driver_version";

/// Looks at the GPUs. `None`, with a problem, when there is a driver that does not answer.
pub(super) async fn here(problems: &mut Vec<String>) -> Option<GpuFacts> {
    if fs::metadata(DRIVER).is_err() {
        return Some(GpuFacts::default());
    }
    let listed = run("nvidia-smi", &[QUERY, "--format=csv,noheader,nounits"]).await;
    let devices = match listed.map(|text| parse(&text)) {
        Ok(Some(found)) => found,
        Ok(None) => {
            problems.push("nvidia-smi describes its GPUs in a way that is not known".to_owned());
            return None;
        }
        Err(error) => {
            problems.push(format!("the GPUs are not known: nvidia-smi cannot be used: {error}"));
            return None;
        }
    };
    let cuda = run("nvidia-smi", &["--version"]).await.ok().and_then(|text| cuda(&text));
    Some(GpuFacts { cuda: cuda.unwrap_or_default(), ..devices })
}

/// Reads lines of `uuid, name, MiB, capability, driver`.
fn parse(text: &str) -> Option<GpuFacts> {
    let mut facts = GpuFacts::default();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        // Names have commas in none of NVIDIA's products; the outer fields cannot have any.
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let [uuid, model, memory, capability, driver] = cells.as_slice() else { return None };
        let mebibytes: u64 = memory.parse().ok()?;
        (*driver).clone_into(&mut facts.driver);
        facts.devices.push(Gpu {
            uuid: (*uuid).to_owned(),
            model: (*model).to_owned(),
            memory_bytes: mebibytes.checked_mul(1 << 20)?,
            compute_capability: (*capability).to_owned(),
        });
    }
    Some(facts)
}

/// Finds `CUDA Version : 13.0` among the versions.
fn cuda(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.trim_start().starts_with("CUDA Version"))?;
    let (_, version) = line.split_once(':')?;
    Some(version.trim().to_owned())
        .filter(|version| version.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_read_from_what_nvidia_smi_prints() {
        let text = "GPU-5a17, NVIDIA H200, 143771, 9.0, 580.105.08\n\
                    GPU-77b0, NVIDIA H200, 143771, 9.0, 580.105.08\n";
        let facts = parse(text).unwrap();
        assert_eq!((&*facts.driver, facts.devices.len()), ("580.105.08", 2));
        assert_eq!(
            facts.devices[1],
            Gpu {
                uuid: "GPU-77b0".to_owned(),
                model: "NVIDIA H200".to_owned(),
                memory_bytes: 143_771 << 20,
                compute_capability: "9.0".to_owned(),
            }
        );
        assert_eq!(parse("").unwrap(), GpuFacts::default());
        assert!(parse("GPU-1, X, [N/A], 9.0, 580").is_none());
        assert!(parse("No devices were found").is_none());
    }

    #[test]
    fn the_version_of_cuda_is_one_of_the_versions() {
        let text = "NVIDIA-SMI version  : 580.105.08\nNVML version        : 580.105\n\
                    DRIVER version      : 580.105.08\nCUDA Version        : 13.0\n";
        assert_eq!(cuda(text).as_deref(), Some("13.0"));
        assert_eq!(cuda("CUDA Version        : N/A\n"), None);
    }
}
