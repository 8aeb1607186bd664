//! What CRIU is told about one container: its configuration file is the only way to the options that
//! containerd does not know. runc hands it to CRIU when the container has the annotation
//! `org.criu.config`, for a dump and for a restore. Nothing of it comes from an artifact.

use std::io::{self, Write as _};
use std::path::{Component, Path, PathBuf};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use kybernate_packager::node::is_cgroup_v2;

use crate::config::Config;
use crate::gate::Summary;
use crate::preflight::{CriuOptions, DEFAULT_FILE, TcpPolicy};
use crate::{links, private, stage};

/// What every restored container's CRIU is told that is told no more about cgroups. They are the new
/// container's, never what the images say: those would bring limits and device rules of their own.
/// File locks are in every dump, and without a word CRIU restores the processes without them.
pub(crate) const RESTORED: &str =
    "# Written by kybernate-agent.\nmanage-cgroups=ignore\nfile-locks\n";

/// The same for a container that gets a cgroup namespace of its own ([`namespace`]): the next dump
/// says where that begins only when it is not told to leave cgroups alone.
const RESTORED_WITH_NAMESPACE: &str = "# Written by kybernate-agent.\nfile-locks\n";

/// Where container runtimes have the cgroups of version 2, below the root.
const CGROUPS: &str = "sys/fs/cgroup";

/// By which name CRIU finds them in the directory that `cgroup-yard` names.
const UNIFIED: &str = "unified";

/// At the end of lines that are there for one operation.
pub(crate) const MARK: &str = "# kybernate: for one operation";

/// First version of CRIU that can be told by a file how to lock the network. It knows how not to
/// since 3.19, but one that reads of it in a file of runc's follows a null pointer (CRIU's pull
/// request 3051; 4.1.1 was seen to).
const LOCK_FREE_CRIU: [u64; 3] = [4, 2, 1];

/// Whether a file is in a directory of the agent's, where only root can write.
pub(crate) fn is_own(config: &Config, file: &Path) -> bool {
    let plain =
        file.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    plain && [config.criu_configs(), config.volumes()].iter().any(|own| file.starts_with(own))
}

/// Returns the file of a container whose specification in containerd names none: kybernate-runc
/// names it in the bundle, which runc reads, and the agent in what it restores for kybernate-runc.
/// `volumes` is [`Config::volumes`].
pub(crate) fn given(volumes: &Path, namespace: &str, container: &str) -> PathBuf {
    volumes.join(namespace).join(container).join("criu.conf")
}

/// What CRIU is told for one dump.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    /// What to do with TCP connections. Keeping them is an option of containerd's own.
    pub(crate) tcp: TcpPolicy,
    /// CRIU's version.
    pub(crate) criu: Vec<u64>,
    /// A dump, as seen from the directory of the one that comes: only what was written to since is dumped.
    pub(crate) parent: Option<String>,
    /// Whether files are kept that have another name than the one they are held by.
    pub(crate) links: bool,
}

/// Tells CRIU what is for the dump that comes.
pub(crate) fn prepare(file: &Path, told: &Told) -> io::Result<()> {
    let Told { tcp, criu, parent, links } = told;
    let before = said(file)?;
    let mut text = without_marked(&before);
    let options = CriuOptions::parse(&text);
    // A connection that comes while the container is paused is not accepted any more: it ends as
    // those do that are closed, and must not end the dump.
    let close: &[&str] = match tcp {
        TcpPolicy::Close => &["tcp-close", "skip-in-flight"],
        TcpPolicy::Keep | TcpPolicy::Refuse => &[],
    };
    // It drops packets of everybody in the pod, and none belongs to what is dumped, unless
    // connections are. A word of the administrator's stays.
    let free = !tcp.keeps(&options) && !options.has("network-lock");
    let free = free && criu.as_slice() >= LOCK_FREE_CRIU.as_slice();
    let lock: &[&str] = if free { &["network-lock skip"] } else { &[] };
    let parent =
        parent.as_ref().map(|parent| ["track-mem".to_owned(), format!("prev-images-dir {parent}")]);
    let parent = parent.iter().flatten().map(String::as_str);
    let links: &[&str] = if *links { &[links::OPTION] } else { &[] };
    for option in close.iter().chain(lock).chain(links).copied().chain(parent) {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.extend([option, " ", MARK, "\n"]);
    }
    // One that is missing is made: not every runc does without.
    if text == before && file.exists() { Ok(()) } else { write(file, &text) }
}

/// Takes away what was said for one operation.
pub(crate) fn forget(file: &Path) -> io::Result<()> {
    let before = said(file)?;
    let text = without_marked(&before);
    if text == before { Ok(()) } else { write(file, &text) }
}

/// Returns what a file says; nothing, where it is missing.
fn said(file: &Path) -> io::Result<String> {
    match fs::read_to_string(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        read => read,
    }
}

/// Returns what is said for every operation.
fn without_marked(text: &str) -> String {
    text.split_inclusive('\n').filter(|line| !line.contains(MARK)).collect()
}

/// Writes the file of a container that is created: with what CRIU is told about all containers of
/// this node, which runc does not read for one that has a file of its own.
pub(crate) fn write_created(file: &Path) -> io::Result<()> {
    write(file, &said(Path::new(DEFAULT_FILE))?)
}

/// Makes the directory in which CRIU finds the cgroups of version 2, where a node has no others.
/// Without one it mounts them in its work directory: killed, it would leave them there, and whoever
/// removed that would remove every cgroup of the node that nobody is in.
pub(crate) fn make_yard(yard: &Path) -> io::Result<()> {
    if !is_cgroup_v2() {
        return Ok(());
    }
    private::claim(yard)?;
    // The restored processes go there too, when they see the container's root already: an absolute
    // link would lead into that.
    let depth = fs::canonicalize(yard)?.components().count() - 1;
    let target = format!("{}{CGROUPS}", "../".repeat(depth));
    match std::os::unix::fs::symlink(target, yard.join(UNIFIED)) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Writes the file of a container that is to be restored: with what its dump wants to be told, for
/// this once. It will be in `cgroup`, as a path in the hierarchy; `yard` is [`Config::cgroup_yard`].
pub(crate) fn write_restored(
    file: &Path,
    summary: &Summary,
    cgroup: Option<&str>,
    yard: &Path,
) -> io::Result<()> {
    let is_there = is_cgroup_v2() && yard.join(UNIFIED).join("cgroup.controllers").exists();
    let cgroup = cgroup.filter(|_| is_there && summary.own_cgroup.is_some());
    let namespace = cgroup.and_then(|cgroup| namespace(cgroup, yard));
    let begin = if namespace.is_some() { RESTORED_WITH_NAMESPACE } else { RESTORED };
    let mut text = begin.to_owned();
    text.extend(namespace);
    if summary.tcp_close {
        text.extend(["tcp-close ", MARK, "\n"]);
    }
    if summary.keeps_connections() {
        text.extend(["tcp-established ", MARK, "\n"]);
    }
    write(file, &text)
}

/// Returns what has CRIU make a cgroup namespace that begins at a cgroup, which the runtime has made
/// and put CRIU into (`gate/cgroups` lets only such dumps come so far of which CRIU takes nothing
/// else). runc names the same root, but for 1.1 with version 2 alone, and what runc says comes first;
/// this one is there so that CRIU never goes by the paths of the dump.
fn namespace(cgroup: &str, yard: &Path) -> Option<String> {
    // What CRIU takes from a line as it is, and for no controller's name.
    let plain = |path: &str| {
        let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
        let name = |part: &str| !matches!(part, "" | "." | "..") && part.bytes().all(letter);
        path.strip_prefix('/').is_some_and(|path| path.split('/').all(name))
    };
    let yard = yard.to_str().filter(|yard| plain(yard))?;
    plain(cgroup).then(|| {
        format!(
            "manage-cgroups=soft {MARK}\ncgroup-root {cgroup} {MARK}\ncgroup-yard {yard} {MARK}\n"
        )
    })
}

fn write(file: &Path, text: &str) -> io::Result<()> {
    if let Some(directory) = file.parent() {
        stage::make(directory)?;
    }
    let temporary = file.with_extension("new");
    let mut options = fs::OpenOptions::new();
    options.create(true).write(true).truncate(true).mode(0o600);
    options.open(&temporary)?.write_all(text.as_bytes())?;
    fs::rename(temporary, file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServeArgs;
    use crate::preflight::CriuOptions;

    fn told(tcp: TcpPolicy, criu: &[u64]) -> Told {
        Told { tcp, criu: criu.to_vec(), ..Told::default() }
    }

    #[test]
    fn links_are_made_when_they_are_needed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("job.conf");
        let prepare = |links| prepare(&file, &Told { links, ..Told::default() }).unwrap();
        prepare(true);
        assert_eq!(fs::read_to_string(&file).unwrap(), format!("link-remap {MARK}\n"));
        prepare(false);
        assert_eq!(fs::read_to_string(&file).unwrap(), "");
    }

    #[test]
    fn an_option_is_there_for_one_operation_only() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("criu/job.conf");
        let prepare = |tcp| prepare(&file, &told(tcp, &[4, 2])).unwrap();
        prepare(TcpPolicy::Refuse);
        assert_eq!(fs::read_to_string(&file).unwrap(), "", "nothing to say");
        prepare(TcpPolicy::Close);
        fs::write(&file, format!("ghost-limit 4M\n{}", fs::read_to_string(&file).unwrap()))
            .unwrap();
        let lines = || fs::read_to_string(&file).unwrap().lines().count();
        prepare(TcpPolicy::Close);
        assert_eq!(lines(), 3);
        prepare(TcpPolicy::Keep);
        assert_eq!(fs::read_to_string(&file).unwrap(), "ghost-limit 4M\n");
    }

    #[test]
    fn the_network_is_locked_for_connections_that_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("job.conf");
        let skips = |said: &str, tcp, criu: &[u64]| {
            fs::write(&file, said).unwrap();
            prepare(&file, &told(tcp, criu)).unwrap();
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.starts_with(said), "{text}");
            text.lines().any(|line| line == format!("network-lock skip {MARK}"))
        };
        let (close, refuse) = (TcpPolicy::Close, TcpPolicy::Refuse);
        for criu in [&[4, 2, 1][..], &[4, 3], &[5, 0]] {
            assert!(skips("", close, criu) && skips("ghost-limit 4M", refuse, criu));
            assert!(!skips("", TcpPolicy::Keep, criu));
        }
        // One that is not known may be as old.
        for criu in [&[][..], &[3, 17, 1], &[4, 1, 1], &[4, 2]] {
            assert!(!skips("", close, criu) && !skips("", refuse, criu), "{criu:?}");
        }
        assert!(!skips("tcp-established\n", refuse, &[4, 2, 1]), "it keeps them after all");
        assert!(skips("tcp-established\n", close, &[4, 2, 1]));
        assert!(skips("tcp-established\ntcp-close\n", refuse, &[4, 2, 1]));
        assert!(!skips("network-lock nftables\n", close, &[4, 2, 1]), "it is chosen already");
    }

    #[test]
    fn a_restore_is_told_what_became_of_connections() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("criu.conf");
        let yard = directory.path().join("none");
        let write =
            |summary: &Summary| write_restored(&file, summary, Some("/k/c"), &yard).unwrap();
        let mut summary = Summary::default();
        write(&summary);
        assert_eq!(fs::read_to_string(&file).unwrap(), RESTORED);
        summary.names.insert("tcp-stream-1a.img".to_owned());
        write(&summary);
        assert!(fs::read_to_string(&file).unwrap().contains("\ntcp-established #"));
        summary.tcp_close = true;
        write(&summary);
        assert!(fs::read_to_string(&file).unwrap().contains("\ntcp-close #"));
        // What was for one restore chooses nothing for the next dump, which removes it.
        assert!(!CriuOptions::of(&file).has("tcp-close"));
        prepare(&file, &told(TcpPolicy::Keep, &[])).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), RESTORED);
    }

    #[test]
    fn a_cgroup_namespace_is_for_who_had_one_where_cgroups_are_version_2() {
        let directory = tempfile::tempdir().unwrap();
        let (file, yard) = (directory.path().join("c/criu.conf"), directory.path().join("yard"));
        let written = |own: bool, cgroup, yard: &Path| {
            let own_cgroup = own.then_some(1);
            let summary = Summary { own_cgroup, ..Summary::default() };
            write_restored(&file, &summary, cgroup, yard).unwrap();
            fs::read_to_string(&file).unwrap()
        };
        make_yard(&yard).unwrap();
        make_yard(&yard).unwrap();
        assert_eq!(yard.exists(), is_cgroup_v2());
        let text = written(true, Some("/k/c"), &yard);
        assert_eq!(text != RESTORED, is_cgroup_v2(), "{text}");
        assert_eq!(text.contains("manage-cgroups=soft"), is_cgroup_v2(), "{text}");
        for (own, cgroup) in [(false, Some("/k/c")), (true, None), (true, Some("/k c"))] {
            assert_eq!(written(own, cgroup, &yard), RESTORED, "{own} {cgroup:?}");
        }
        assert_eq!(written(true, Some("/k/c"), &directory.path().join("none")), RESTORED);
    }

    #[test]
    fn a_namespace_is_for_one_restore_and_at_a_path_that_criu_reads_as_it_is() {
        let yard = Path::new("/run/kybernate/cgroups");
        let told = namespace("/kubepods.slice/a-b.slice/cri-containerd-1.scope", yard).unwrap();
        let before = format!("{RESTORED_WITH_NAMESPACE}{told}");
        assert!(before.contains("cgroup-root /kubepods.slice/a-b.slice/cri-containerd-1.scope #"));
        assert!(before.contains("\ncgroup-yard /run/kybernate/cgroups #"), "{before}");
        assert_eq!(without_marked(&before), RESTORED_WITH_NAMESPACE);
        for path in ["", "/", "k/c", "/k:c", "/k/../c", "/k//c", "/k/c/", "/k\nc", "/k #", "/\"k"] {
            assert_eq!(namespace(path, yard), None, "{path:?}");
        }
        assert_eq!(namespace("/k/c", Path::new("/run/my yard")), None);
    }

    #[test]
    fn a_parent_is_named_for_one_dump_only() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("job.conf");
        fs::write(&file, "ghost-limit 4M").unwrap();
        let parent = Some("../round-2".to_owned());
        prepare(&file, &Told { parent, ..told(TcpPolicy::Close, &[4, 1]) }).unwrap();
        let text = fs::read_to_string(&file).unwrap();
        let line = format!("\ntrack-mem {MARK}\nprev-images-dir ../round-2 {MARK}\n");
        assert!(text.ends_with(&line) && text.contains("\ntcp-close "), "{text}");
        forget(&file).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "ghost-limit 4M\n");
        fs::remove_file(&file).unwrap();
        forget(&file).unwrap();
        assert!(!file.exists(), "nothing was made to be forgotten");
    }

    #[test]
    fn only_files_of_the_agents_own_are_written() {
        let config = ServeArgs::default().validate().unwrap();
        let own = |file: &str| is_own(&config, Path::new(file));
        assert!(own("/var/lib/kybernate/criu/job.conf"));
        assert!(own("/run/kybernate/volumes/default/job/criu.conf"));
        for other in
            ["/etc/criu/runc.conf", "/var/lib/kybernate/criu/../agent.lock", "criu/job.conf"]
        {
            assert!(!own(other), "{other}");
        }
    }
}
