//! What of the node a restored container gets.

use clap::Args;
use kybernate_packager::agent_api::Mount;

/// What of the node a restored container gets, by name.
#[derive(Debug, Args)]
#[command(next_help_heading = "Allowances")]
pub(super) struct Offer {
    /// Mount a directory or file of the host.
    #[arg(long = "allow-mount", value_name = "SRC:DST[:ro]", value_parser = mount)]
    pub(super) mounts: Vec<Mount>,
    /// Use a device of the host.
    #[arg(long = "allow-device", value_name = "PATH")]
    pub(super) devices: Vec<String>,
    /// Join a namespace of the host: network, pid, ipc or uts; or the network namespace at PATH, which
    /// what was dumped in a Pod's needs.
    #[arg(long = "allow-host-namespace", value_name = "NAMESPACE|network:PATH",
        value_parser = namespace)]
    pub(super) host_namespaces: Vec<String>,
}

fn namespace(text: &str) -> Result<String, String> {
    let path = text.strip_prefix("network:");
    if path.is_some_and(|path| path.starts_with('/'))
        || ["network", "pid", "ipc", "uts"].contains(&text)
    {
        return Ok(text.to_owned());
    }
    Err("it must be network, pid, ipc, uts or network:/path/of/a/namespace".to_owned())
}

fn mount(text: &str) -> Result<Mount, String> {
    let (paths, read_only) = match text.strip_suffix(":ro") {
        Some(paths) => (paths, true),
        None => (text.strip_suffix(":rw").unwrap_or(text), false),
    };
    match paths.split_once(':') {
        Some((source, destination))
            if source.starts_with('/')
                && destination.starts_with('/')
                && !destination.contains(':') =>
        {
            Ok(Mount { source: source.to_owned(), destination: destination.to_owned(), read_only })
        }
        _ => Err("it must be /host/path:/container/path, then :ro if read only".to_owned()),
    }
}
