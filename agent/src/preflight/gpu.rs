//! Who saves the memory of GPUs here, and what is missing where nobody does.

use super::check::Check;
use crate::gpu::{Gpus, plugin, version};

/// How paths of GPUs begin.
pub(super) const GPUS: [&str; 3] = [NVIDIA, "/dev/kfd", "/dev/dri/"];

/// Devices of NVIDIA's GPUs, and of others.
const NVIDIA: &str = "/dev/nvidia";
const OTHERS: [&str; 2] = ["/dev/kfd", "/dev/dri/"];

/// CRIU has a plugin for AMD's. No restore here takes what it saves, so none is dumped either.
const OTHERS_LACK: &str =
    "only the memory of NVIDIA's GPUs is saved here, whatever plugins CRIU has";

/// First driver that checkpoints by CRIU's plugin (`plugins/cuda/README.md`).
const PLUGIN_DRIVER: u64 = 555;

/// A kind of GPU whose memory nobody saves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unsaved {
    /// How paths of its devices begin.
    pub(super) prefix: &'static str,
    pub(super) check: Check,
    /// What was found, and what is needed.
    pub(super) lack: String,
}

/// What this node has.
#[derive(Clone, Debug)]
struct Found {
    /// Who is to save NVIDIA's GPUs.
    method: Method,
    /// The driver that is loaded, in its words; `None` when there is none, or it is not told.
    driver: Option<String>,
    cuda_plugin: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Driver,
    Plugin,
    Nobody,
}

/// Looks at this node.
pub(super) fn unsaved(gpus: &Gpus) -> Vec<Unsaved> {
    let method = match (gpus.is_asked(), gpus.is_plugin()) {
        (true, _) => Method::Driver,
        (_, true) => Method::Plugin,
        _ => Method::Nobody,
    };
    let cuda_plugin = plugin::is_here(plugin::CUDA);
    judge(&Found { method, driver: gpus.loaded(), cuda_plugin })
}

fn judge(found: &Found) -> Vec<Unsaved> {
    let mut unsaved = Vec::new();
    if let Some((check, lack)) = nvidia(found) {
        unsaved.push(Unsaved { prefix: NVIDIA, check, lack });
    }
    let other = |prefix| Unsaved { prefix, check: Check::Gpu, lack: OTHERS_LACK.to_owned() };
    unsaved.extend(OTHERS.map(other));
    unsaved
}

fn nvidia(found: &Found) -> Option<(Check, String)> {
    let needed = match found.method {
        Method::Driver => version::FIRST,
        Method::Plugin => PLUGIN_DRIVER,
        Method::Nobody => {
            let lack = match &found.driver {
                Some(driver) => {
                    format!("driver {driver} is loaded, and [gpu] method = \"none\" forbids it")
                }
                None => "no driver of NVIDIA's is loaded".to_owned(),
            };
            return Some((Check::Gpu, lack));
        }
    };
    if let Some(driver) = &found.driver
        && version::major(driver).is_some_and(|major| major < needed)
    {
        return Some((Check::GpuDriver, format!("driver {driver} is loaded, {needed} is needed")));
    }
    let missing = found.method == Method::Plugin && !found.cuda_plugin;
    missing.then(|| {
        let lack = format!(
            "[gpu] method = \"plugin\", and there is no cuda_plugin.so in {}",
            plugin::PLACES.join(", ")
        );
        (Check::Gpu, lack)
    })
}

#[cfg(test)]
mod tests {
    use kybernate_spec::gpu::{REMAP_DRIVER, STORAGE_DRIVER};

    use super::*;

    fn check(method: Method, driver: Option<&str>, cuda_plugin: bool) -> Option<(Check, String)> {
        let driver = driver.map(str::to_owned);
        nvidia(&Found { method, driver, cuda_plugin })
    }

    /// The words are constants, which cannot be put together from others.
    #[test]
    fn what_is_to_be_loaded_is_what_is_asked_for() {
        let remedy = Check::GpuDriver.words().remedy;
        for driver in [version::FIRST, REMAP_DRIVER, STORAGE_DRIVER] {
            assert!(remedy.contains(&driver.to_string()), "{remedy} does not have {driver}");
        }
    }

    #[test]
    fn what_is_missing_is_said_with_what_was_found() {
        use Method::{Driver, Nobody, Plugin};
        for (method, driver, plugins) in [
            (Driver, Some("570.86.15"), false),
            (Driver, Some("615.10"), false),
            // One that is named by the configuration need not be loaded.
            (Driver, None, false),
            (Plugin, Some("555.42.02"), true),
        ] {
            assert_eq!(check(method, driver, plugins), None, "{method:?} {driver:?}");
        }
        for (method, driver, plugins, found, told) in [
            (Driver, Some("550.54.14"), true, Check::GpuDriver, "550.54.14 is loaded, 570"),
            (Plugin, Some("550.54.14"), true, Check::GpuDriver, "550.54.14 is loaded, 555"),
            (Plugin, Some("570.86.15"), false, Check::Gpu, "no cuda_plugin.so"),
            (Nobody, Some("570.86.15"), true, Check::Gpu, "570.86.15 is loaded, and [gpu] method"),
            (Nobody, None, true, Check::Gpu, "no driver of NVIDIA's is loaded"),
        ] {
            let (check, lack) = check(method, driver, plugins).unwrap();
            assert_eq!(check, found, "{lack}");
            assert!(lack.contains(told), "{lack:?} does not mention {told:?}");
        }
    }

    /// The gate takes no dump of theirs.
    #[test]
    fn other_gpus_are_refused_whatever_there_is() {
        let found = |method, cuda_plugin| judge(&Found { method, driver: None, cuda_plugin });
        let nobody = found(Method::Nobody, true);
        let prefixes: Vec<_> = nobody.iter().map(|one| one.prefix).collect();
        assert_eq!(prefixes, GPUS);
        for method in [Method::Driver, Method::Plugin] {
            let unsaved = found(method, true);
            assert_eq!(unsaved, nobody[1..], "{method:?}");
            assert!(unsaved.iter().all(|one| one.lack.contains("NVIDIA's")));
        }
    }
}
