//! runc's command line, as far as the wrapper looks at it (`runc(8)`, `runc-create(8)`).
//!
//! runc and crun take options before the command and after it, with one dash or two, with the value
//! behind `=` or in the next word. What is not understood is left to the real runtime.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

/// Options before the command that have a value: runc's and crun's.
const GLOBAL: &[&str] =
    &["root", "log", "log-format", "log-level", "criu", "rootless", "cgroup-manager"];

/// Options of `create` that have a value.
const CREATE: &[&str] =
    &["bundle", "b", "console-socket", "pidfd-socket", "pid-file", "preserve-fds"];

/// Where runtimes keep their containers when they are not told.
const ROOT: &str = "/run/runc";

/// A command line up to its command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Call<'a> {
    /// The words before the command.
    pub(super) globals: &'a [OsString],
    pub(super) command: &'a OsStr,
    /// The words after it.
    pub(super) rest: &'a [OsString],
    /// Where the runtime keeps its containers.
    pub(super) root: PathBuf,
    /// Where containerd reads what went wrong, and whether as JSON.
    pub(super) log: Option<(PathBuf, bool)>,
}

/// What `create` was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Create {
    pub(super) id: String,
    pub(super) bundle: PathBuf,
    pub(super) console_socket: Option<OsString>,
    pub(super) pid_file: Option<OsString>,
    pub(super) no_pivot: bool,
}

/// Options with their values, and the words that are none.
#[derive(Debug, Default)]
struct Words<'a> {
    options: Vec<(String, Option<OsString>)>,
    /// The first word that is no option and all behind it.
    rest: &'a [OsString],
}

impl<'a> Call<'a> {
    /// Whether `delete` is to end what runs.
    pub(super) fn is_forced(&self) -> bool {
        self.rest.iter().any(|word| {
            matches!(word.to_str(), Some("--force" | "-force" | "-f" | "--force=true" | "-f=true"))
        })
    }

    /// Splits a command line; `None` when there is no command in it.
    pub(super) fn parse(words: &'a [OsString]) -> Option<Self> {
        let split = Words::split(words, GLOBAL);
        let (command, rest) = split.rest.split_first()?;
        let globals = words.get(..words.len() - split.rest.len())?;
        let root = split.value("root").map_or_else(|| PathBuf::from(ROOT), PathBuf::from);
        let is_json = split.value("log-format").is_some_and(|format| format == "json");
        let log = split.value("log").map(|log| (PathBuf::from(log), is_json));
        Some(Self { globals, command, rest, root, log })
    }

    /// Returns the id that `start` or `delete` is about: their last word, if it can be one.
    pub(super) fn id(&self) -> Option<&'a str> {
        let id = self.rest.iter().find(|word| !word.as_bytes().starts_with(b"-"))?;
        id.to_str().filter(|id| is_id(id))
    }

    /// Returns containerd's namespace: it keeps its containers below a directory of that name.
    pub(super) fn namespace(&self) -> &str {
        self.root.file_name().and_then(OsStr::to_str).unwrap_or_default()
    }

    /// Understands the words of `create`.
    pub(super) fn create(&self) -> Option<Create> {
        let split = Words::split(self.rest, CREATE);
        let [id] = split.rest else { return None };
        let bundle = split.value("bundle").or_else(|| split.value("b"));
        Some(Create {
            id: id.to_str().filter(|id| is_id(id))?.to_owned(),
            bundle: bundle.map_or_else(|| PathBuf::from("."), PathBuf::from),
            console_socket: split.value("console-socket"),
            pid_file: split.value("pid-file"),
            no_pivot: split.options.iter().any(|(name, _)| name == "no-pivot"),
        })
    }
}

impl<'a> Words<'a> {
    fn split(words: &'a [OsString], with_value: &[&str]) -> Self {
        let mut split = Words { options: Vec::new(), rest: &[] };
        let mut left = words;
        while let Some((word, behind)) = left.split_first() {
            let bytes = word.as_bytes();
            if bytes == b"--" {
                left = behind;
                break;
            }
            let Some(name) = bytes.strip_prefix(b"-").filter(|name| !name.is_empty()) else {
                break;
            };
            left = behind;
            let name = name.strip_prefix(b"-").unwrap_or(name);
            let mut parts = name.splitn(2, |byte| *byte == b'=');
            let name = String::from_utf8_lossy(parts.next().unwrap_or_default()).into_owned();
            let mut value = parts.next().map(|value| OsStr::from_bytes(value).to_owned());
            if value.is_none() && with_value.contains(&&*name) {
                let Some((next, behind)) = left.split_first() else { break };
                (value, left) = (Some(next.clone()), behind);
            }
            split.options.push((name, value));
        }
        split.rest = left;
        split
    }

    /// Returns the value of an option: the last one counts.
    fn value(&self, name: &str) -> Option<OsString> {
        let mut found = self.options.iter().rev().filter(|(option, _)| option == name);
        found.find_map(|(_, value)| value.clone())
    }
}

/// Whether runc takes it for an id, and it can be the name of a file.
fn is_id(id: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_+-.".contains(&byte);
    !id.is_empty() && id != "." && id != ".." && id.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    /// Recorded from the shims of containerd 1.7 and 2.1.
    #[test]
    fn what_containerd_asks_for_is_understood() {
        let line = words(
            "--root /run/containerd/runc/k8s.io --log /run/b/log.json --log-format json \
             --systemd-cgroup create --bundle /run/b --pid-file /run/b/init.pid --no-pivot c1",
        );
        let call = Call::parse(&line).unwrap();
        assert_eq!((call.command, call.globals.len()), (OsStr::new("create"), 7));
        assert_eq!(call.root, PathBuf::from("/run/containerd/runc/k8s.io"));
        assert_eq!(call.namespace(), "k8s.io");
        assert_eq!(call.log, Some(("/run/b/log.json".into(), true)));
        let create = call.create().unwrap();
        assert_eq!((&*create.id, create.no_pivot), ("c1", true));
        assert_eq!(create.bundle, PathBuf::from("/run/b"));
        assert_eq!(create.pid_file, Some("/run/b/init.pid".into()));

        for (line, command) in [
            ("--root /r --log /l --log-format json start c1", "start"),
            ("--root=/r delete --force c1", "delete"),
            ("-root /r state c1", "state"),
        ] {
            let line = words(line);
            let call = Call::parse(&line).unwrap();
            assert_eq!((call.command, call.id()), (OsStr::new(command), Some("c1")));
            assert_eq!(call.root, PathBuf::from("/r"));
        }
    }

    #[test]
    fn the_shapes_of_options_are_one() {
        for line in ["create -b /b c1", "create --b=/b c1", "create -bundle /b -- c1"] {
            let line = words(line);
            let create = Call::parse(&line).unwrap().create().unwrap();
            assert_eq!((create.bundle, &*create.id), (PathBuf::from("/b"), "c1"));
        }
    }

    #[test]
    fn what_is_no_command_is_left_to_the_runtime() {
        for line in ["--version", "--root", ""] {
            let line: Vec<_> = words(line).into_iter().filter(|word| !word.is_empty()).collect();
            assert_eq!(Call::parse(&line), None, "{line:?}");
        }
        for line in ["create", "create --bundle /b", "create --bundle /b a b", "create ../x"] {
            let line = words(line);
            assert_eq!(Call::parse(&line).unwrap().create(), None, "{line:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_line_panics_and_no_word_is_lost(line: Vec<String>) {
            let line: Vec<OsString> = line.into_iter().map(OsString::from).collect();
            if let Some(call) = Call::parse(&line) {
                assert!(call.globals.len() + 1 + call.rest.len() <= line.len());
                let _understood = (call.create(), call.id());
            }
        }
    }
}
