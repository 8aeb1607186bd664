//! `[[hooks]]`: programs that run around a checkpoint.

use std::path::Path;
use std::time::Duration;

use super::reader::Reader;
use super::{ConfigError, access};
use crate::access::glob;
use crate::hooks::{Hook, HookConfig};

/// How long a hook may take, unless it says so.
const LIMIT: Duration = Duration::from_secs(10);

/// Longest time that can be given to one: a checkpoint waits for it.
const LIMIT_MAX: Duration = Duration::from_mins(5);

/// Reads one `[[hooks]]`.
pub(super) fn hook(table: &mut Reader<'_>) -> Option<HookConfig> {
    let name = table.required("name");
    let text = table.required("when");
    let when = text.parse().ok();
    if when.is_none() && !text.is_empty() {
        let place = table.place("when");
        table.wrong(ConfigError::Bounds(place, "before, while_paused, after or failed", text));
    }
    let wanted = "a program and its arguments";
    let command = access::each(table, "command", wanted, |word| Some(word.to_owned()));
    let relative = command.first().filter(|program| !Path::new(program).is_absolute());
    if let Some(program) = relative {
        let place = table.place("command");
        table.wrong(ConfigError::RelativePath(place, program.into()));
    }
    let limit = limit(table);
    let mut globs = |key: &str, wanted: &'static str| {
        if table.has(key) {
            access::each(table, key, wanted, glob)
        } else {
            Vec::from_iter(glob("*"))
        }
    };
    let containers = globs("containers", "patterns of ids");
    let namespaces = globs("namespaces", "patterns of containerd's namespaces");
    let on_request = table.flag("on_request").unwrap_or(false);
    let hook = Hook { name, when: when?, command, limit };
    Some(HookConfig { hook, containers, namespaces, on_request })
}

fn limit(table: &mut Reader<'_>) -> Duration {
    let Some(text) = table.text("limit") else { return LIMIT };
    match humantime::parse_duration(&text) {
        Ok(time) if (Duration::from_secs(1)..=LIMIT_MAX).contains(&time) => time,
        Ok(_) | Err(_) => {
            let place = table.place("limit");
            table.wrong(ConfigError::Bounds(place, "a time like \"10s\", from 1s to 5m", text));
            LIMIT
        }
    }
}
