//! The outbox, for [`crate::fuzz`].

#![expect(clippy::missing_panics_doc, reason = "to panic is what these functions are for")]

use std::path::Path;

use super::outbox;
use super::queue::Queue;
use crate::config::Config;
use crate::store::line_sum;

/// Two endpoints, of whom one wants little.
const ENDPOINTS: &str = "\
    [[notify.endpoint]]\nname = \"ci\"\nurl = \"http://127.0.0.1:1\"\n\
    [[notify.endpoint]]\nname = \"cd\"\nurl = \"http://127.0.0.1:1\"\nactions = [\"delete\"]\n";
/// Events kept.
const KEEP: usize = 3;

/// A file of events as it is found, and with checksums that fit.
pub fn outbox(bytes: &[u8]) {
    let config = Config::read(Path::new("r.toml"), ENDPOINTS);
    assert!(config.is_ok(), "the endpoints cannot be used");
    let Config { notify, .. } = config.unwrap_or_default();
    let text = String::from_utf8_lossy(bytes);
    let summed = text.split_terminator('\n');
    let summed = summed.map(|line| format!("{:016x} {line}\n", line_sum(line.as_bytes())));
    for found in [bytes, summed.collect::<String>().as_bytes()] {
        let mut queue = outbox::read(found, Queue::new(KEEP, &notify.endpoint));
        assert!(queue.entries().count() <= KEEP);
        for endpoint in 0..notify.endpoint.len() {
            let mut last = None;
            while let Some(parcel) = queue.take(endpoint) {
                assert!(last.is_none_or(|last| last < parcel.number), "it is told in order, once");
                last = Some(parcel.number);
                queue.delivered(endpoint, parcel.number, parcel.lost);
            }
        }
    }
}
