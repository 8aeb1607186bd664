//! GPUs: only for checkpoints with device memory in them.

use std::collections::BTreeSet;

use kybernate_spec::checkpoint::{DeviceStorage, Gpu, GpuFacts, NodeFacts};
use kybernate_spec::gpu::{REMAP_DRIVER, STORAGE_DRIVER};
use serde::Serialize;

use super::{Answer, Outcome, Rule, Subject, equal, holds_if, not_older};
use crate::node::version;

/// One GPU takes the place of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// UUID of the GPU that the processes used.
    pub from: String,
    /// UUID of the GPU here.
    pub to: String,
}

/// What is compared.
struct Case<'a> {
    here: &'a GpuFacts,
    there: &'a GpuFacts,
    used: Vec<&'a Gpu>,
}

/// Answers one of the rules on GPUs.
pub(super) fn answer(rule: Rule, subject: &Subject<'_>, here: &NodeFacts) -> Answer {
    let case = match case(subject, here) {
        Ok(case) => case,
        Err(answer) => return answer,
    };
    match rule {
        Rule::GpuCount => {
            let (ours, theirs) = (case.here.devices.len(), case.used.len());
            let text = format!("there are {ours} GPUs here, and the processes used {theirs}");
            (holds_if(ours >= theirs), text)
        }
        Rule::GpuModel => {
            each(&case, "model", |gpu| gpu.model.clone(), |here, used| here.model == used.model)
        }
        Rule::GpuCapability => {
            let show = |gpu: &Gpu| gpu.compute_capability.clone();
            each(&case, "compute capability", show, |here, used| {
                here.compute_capability == used.compute_capability
            })
        }
        Rule::GpuMemory => {
            let show = |gpu: &Gpu| match gpu.memory_bytes {
                0 => String::new(),
                bytes => format!("{bytes} bytes"),
            };
            each(&case, "memory", show, |here, used| here.memory_bytes >= used.memory_bytes)
        }
        // Equal to the last number: the process has files of the driver mapped whose names have it.
        Rule::GpuDriver => equal("GPU driver", &case.here.driver, &case.there.driver),
        Rule::GpuCuda => not_older("CUDA", (&case.here.cuda, &case.there.cuda), 2),
        Rule::GpuStorage => storage(subject.config.device.storage, &case.here.driver),
        _ => mapping(&case),
    }
}

/// Memory that is beside the processes needs a driver that takes it from there.
fn storage(storage: DeviceStorage, driver: &str) -> Answer {
    if storage != DeviceStorage::Device {
        return (Outcome::Holds, "GPU memory is in the memory of the processes".to_owned());
    }
    match version(driver).first() {
        Some(&major) => {
            let text = format!(
                "GPU memory is in files of its own, which takes driver {STORAGE_DRIVER}; the driver here: {driver}"
            );
            (holds_if(major >= STORAGE_DRIVER), text)
        }
        None => (
            Outcome::Unknown,
            "GPU memory is in files of its own; the driver here is not known".to_owned(),
        ),
    }
}

/// Returns which GPU takes the place of which; `None` without device memory, when facts are
/// missing, and when a GPU has no partner.
pub(super) fn pairs(subject: &Subject<'_>, here: &NodeFacts) -> Option<Vec<Pair>> {
    let case = case(subject, here).ok()?;
    let (pairs, alone) = pair(&case);
    alone.is_empty().then_some(pairs)
}

/// Finds what is to be compared, or the answer of every rule.
fn case<'a>(subject: &Subject<'a>, here: &'a NodeFacts) -> Result<Case<'a>, Answer> {
    let device = &subject.config.device;
    if device.storage == DeviceStorage::None {
        return Err((Outcome::Holds, "the checkpoint holds no device memory".to_owned()));
    }
    let unknown = |text: &str| (Outcome::Unknown, text.to_owned());
    let there = subject.node()?.gpu.as_ref();
    let there = there.ok_or_else(|| unknown("the GPUs of the checkpoint are not known"))?;
    let here = here.gpu.as_ref().ok_or_else(|| unknown("the GPUs here are not known"))?;
    let used: Vec<&Gpu> = if device.gpus.is_empty() {
        there.devices.iter().collect()
    } else {
        let find = |uuid: &String| there.devices.iter().find(|gpu| gpu.uuid == *uuid);
        let found: Option<Vec<&Gpu>> = device.gpus.iter().map(find).collect();
        found.ok_or_else(|| unknown("the checkpoint does not describe a GPU that it used"))?
    };
    if used.is_empty() {
        return Err(unknown("the checkpoint does not say which GPUs it used"));
    }
    Ok(Case { here, there, used })
}

/// Every GPU that was used must find one here that will do; how many, and which, others say.
fn each(
    case: &Case<'_>,
    what: &str,
    show: impl Fn(&Gpu) -> String,
    will_do: impl Fn(&Gpu, &Gpu) -> bool,
) -> Answer {
    let list = |gpus: &mut dyn Iterator<Item = &Gpu>| {
        let values: BTreeSet<String> = gpus.map(&show).collect();
        let known = !values.contains("");
        let text = values.into_iter().collect::<Vec<_>>().join(", ");
        (known, if text.is_empty() { "none".to_owned() } else { text })
    };
    let (all_told, ours) = list(&mut case.here.devices.iter());
    let (source_told, theirs) = list(&mut case.used.iter().copied());
    let text =
        format!("the {what} of the GPUs here: {ours}; of the GPUs the processes used: {theirs}");
    if !all_told || !source_told {
        return (Outcome::Unknown, text);
    }
    let found = |used: &&Gpu| case.here.devices.iter().any(|here| will_do(here, used));
    (holds_if(case.used.iter().all(found)), text)
}

/// Each GPU of the source needs one of its own here, and a driver that can change them.
fn mapping(case: &Case<'_>) -> Answer {
    if case.here.devices.iter().chain(case.used.iter().copied()).any(|gpu| gpu.uuid.is_empty()) {
        return (Outcome::Unknown, "the UUID of a GPU is not known".to_owned());
    }
    let (pairs, alone) = pair(case);
    if !alone.is_empty() {
        let text = format!("no GPU here can take the place of {}", alone.join(", "));
        return (Outcome::Broken, text);
    }
    let moved: Vec<String> = pairs
        .iter()
        .filter(|pair| pair.from != pair.to)
        .map(|pair| format!("{} takes the place of {}", pair.to, pair.from))
        .collect();
    if moved.is_empty() {
        return (Outcome::Holds, "the GPUs that the processes used are here".to_owned());
    }
    let moved = moved.join(", ");
    match version(&case.here.driver).first() {
        Some(&major) if major >= REMAP_DRIVER => (Outcome::Holds, moved),
        Some(_) => {
            let driver = &case.here.driver;
            let text = format!("{moved}, which drivers before {REMAP_DRIVER} cannot do: {driver}");
            (Outcome::Broken, text)
        }
        None => (Outcome::Unknown, format!("{moved}, and the driver here is not known")),
    }
}

/// Pairs the GPUs: each with itself when it is here, the others with the smallest of their kind
/// that is free. Also returns those without a partner.
fn pair(case: &Case<'_>) -> (Vec<Pair>, Vec<String>) {
    let is_here = |gpu: &Gpu| case.here.devices.iter().any(|here| here.uuid == gpu.uuid);
    let mut free: Vec<&Gpu> = case
        .here
        .devices
        .iter()
        .filter(|here| !case.used.iter().any(|used| used.uuid == here.uuid))
        .collect();
    let (mut pairs, mut alone) = (Vec::new(), Vec::new());
    for used in &case.used {
        let from = used.uuid.clone();
        if is_here(used) {
            pairs.push(Pair { to: from.clone(), from });
            continue;
        }
        let fits = |here: &Gpu| {
            here.model == used.model
                && here.compute_capability == used.compute_capability
                && here.memory_bytes >= used.memory_bytes
        };
        let best = free.iter().enumerate().filter(|(_, here)| fits(here));
        match best.min_by_key(|(_, here)| here.memory_bytes).map(|(position, _)| position) {
            Some(position) => {
                let to = free.remove(position).uuid.clone();
                pairs.push(Pair { from, to });
            }
            None => alone.push(from),
        }
    }
    (pairs, alone)
}
