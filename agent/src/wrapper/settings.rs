//! What the wrapper is told: a small file, and nothing when there is none.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;
use kybernate_packager::agent_api::AGENT_SOCKET;
use serde::Deserialize;

/// Where the file is. containerd starts us with nothing but runc's command line.
pub(super) const FILE: &str = "/etc/kybernate/runc.toml";

/// The runtimes that are looked for, in this order.
const RUNTIMES: [&str; 2] = ["runc", "crun"];

/// Where they are looked for, besides `PATH`.
const DIRECTORIES: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Settings {
    /// The real runtime, an absolute path.
    pub(super) runtime: Option<PathBuf>,
    pub(super) agent_socket: PathBuf,
    /// What has been restored, until it is deleted; lost when the machine restarts, as the
    /// containers are.
    pub(super) state: PathBuf,
    /// Where the agent looks for what CRIU is told about a container: `volumes` beside its tmpfs.
    pub(super) volumes: PathBuf,
    /// Where the agent looks which pods' containers have begun: `restored` in its root.
    pub(super) restored: PathBuf,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            runtime: None,
            agent_socket: AGENT_SOCKET.into(),
            state: "/run/kybernate/runc".into(),
            volumes: "/run/kybernate/volumes".into(),
            restored: "/var/lib/kybernate/restored".into(),
        }
    }
}

impl Settings {
    /// Reads the file. One that is not there says nothing.
    pub(super) fn read() -> io::Result<Self> {
        match fs::read_to_string(FILE) {
            Ok(text) => Self::parse(&text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    fn parse(text: &str) -> io::Result<Self> {
        toml::from_str(text).map_err(|error| io::Error::other(format!("{FILE}: {error}")))
    }

    /// Returns the real runtime: never this program itself.
    pub(super) fn runtime(&self) -> io::Result<PathBuf> {
        if let Some(configured) = &self.runtime {
            return Ok(configured.clone());
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = std::env::current_exe().and_then(fs::canonicalize).ok();
        let search: Vec<PathBuf> = std::env::split_paths(&path)
            .chain(std::env::split_paths(DIRECTORIES))
            .filter(|directory| directory.is_absolute())
            .collect();
        let found = RUNTIMES.iter().find_map(|name| find(name, &search, own.as_deref()));
        found.ok_or_else(|| {
            let text =
                format!("neither runc nor crun is installed: name one as `runtime` in {FILE}");
            io::Error::new(io::ErrorKind::NotFound, text)
        })
    }
}

fn find(name: &str, directories: &[PathBuf], own: Option<&Path>) -> Option<PathBuf> {
    directories.iter().map(|directory| directory.join(name)).find(|file| {
        let real = fs::canonicalize(file).ok();
        real.is_some_and(|real| real.is_file() && Some(&*real) != own)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_differs() {
        let settings = Settings::parse("runtime = \"/opt/crun\"\n").unwrap();
        assert_eq!(settings.runtime().unwrap(), Path::new("/opt/crun"));
        assert_eq!(settings.agent_socket, Path::new(AGENT_SOCKET));
        let agent = crate::config::ServeArgs::default().validate().unwrap();
        assert_eq!(settings.volumes, agent.volumes());
        assert_eq!(settings.restored, agent.restored());
        let wrong = Settings::parse("runtme = \"/opt/crun\"\n").unwrap_err().to_string();
        assert!(wrong.contains(FILE) && wrong.contains("runtme"), "{wrong}");
    }

    #[test]
    fn the_wrapper_is_not_its_own_runtime() {
        let directory = tempfile::tempdir().unwrap();
        let (first, second) = (directory.path().join("1"), directory.path().join("2"));
        for place in [&first, &second] {
            fs::create_dir(place).unwrap();
        }
        let own = first.join("kybernate-runc");
        fs::write(&own, "").unwrap();
        std::os::unix::fs::symlink(&own, first.join("runc")).unwrap();
        fs::write(second.join("runc"), "").unwrap();
        let own = fs::canonicalize(&own).unwrap();
        let search = [first, second.clone()];
        assert_eq!(find("runc", &search, Some(&own)), Some(second.join("runc")));
        assert_eq!(find("crun", &search, Some(&own)), None);
    }
}
