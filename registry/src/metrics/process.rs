//! What the kernel says about this process, under the names that dashboards know.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

/// Reads `/proc/self` when it is asked.
#[derive(Debug)]
pub(super) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let figures = [
            ("process_resident_memory_bytes", "Resident memory", resident_bytes()),
            ("process_open_fds", "Open file descriptors", open_files()),
        ];
        for (name, help, value) in figures {
            let Some(value) = value else { continue };
            let gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value).encode(gauge)?;
        }
        Ok(())
    }
}

fn resident_bytes() -> Option<i64> {
    let statm = fs_err::read_to_string("/proc/self/statm").ok()?;
    let pages: i64 = statm.split(' ').nth(1)?.parse().ok()?;
    i64::try_from(rustix::param::page_size()).ok()?.checked_mul(pages)
}

fn open_files() -> Option<i64> {
    i64::try_from(fs_err::read_dir("/proc/self/fd").ok()?.count()).ok()
}
