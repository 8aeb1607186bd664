//! What is looked for, and what is said about it. The table in the README is made of this.

use kybernate_packager::agent_api as api;
use prost::Message as _;

/// Most bytes of both in a refusal. They are headers, of which gRPC's client takes 16 KiB in all; one
/// is made a third longer by base64, the other is text, of which a character may become three.
const DETAILS_BYTES_MAX: usize = 5 << 10;
const WORDS_BYTES_MAX: usize = 2 << 10;

/// Most bytes of a subject: a path may have 4 KiB, and those are told in full by nobody.
const SUBJECT_BYTES_MAX: usize = 512;

/// Whether a checkpoint is taken all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Severity {
    /// It is taken; something about it should be known.
    Warn,
    /// No checkpoint is taken.
    Refuse,
}

/// One thing that is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Check {
    NotRunning,
    Runtime,
    SharedPidNamespace,
    Snapshotter,
    Terminal,
    ExecSession,
    CriuCode,
    Traced,
    FirstThread,
    StoppedProcess,
    DescriptorLimit,
    GuardPages,
    OtherUser,
    UserNamespace,
    NestedPidNamespace,
    TimeNamespace,
    NestedNamespace,
    TcpEstablished,
    TcpInFlight,
    TcpClose,
    TcpLoopback,
    ListenerAddress,
    InetSocket,
    SocketFamily,
    ExternalUnixSocket,
    ExternalFile,
    StdioFile,
    DeletedFile,
    LinkedFile,
    LinkRemap,
    OpenLink,
    UnfitFile,
    FileName,
    Inotify,
    Fanotify,
    IoUring,
    Descriptor,
    NamespaceFile,
    SecretMemory,
    Device,
    Gpu,
    GpuDriver,
    GpuPod,
    FileLock,
    Mount,
    HiddenMount,
    StagingRoom,
    Memory,
    Incomplete,
}

/// What a check says when it finds something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    pub(crate) id: &'static str,
    pub(crate) severity: Severity,
    pub(crate) reason: &'static str,
    pub(crate) remedy: &'static str,
}

/// Something that was found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    pub(crate) check: Check,
    /// Where: a process, a descriptor, an address; for people.
    pub(crate) subject: String,
}

/// Why a container cannot be checkpointed, bounded for a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Findings(Vec<Finding>);

impl Finding {
    pub(crate) fn new(check: Check, subject: impl Into<String>) -> Self {
        let mut subject = subject.into();
        if subject.len() > SUBJECT_BYTES_MAX {
            subject.truncate(subject.floor_char_boundary(SUBJECT_BYTES_MAX));
            subject.push('…');
        }
        Self { check, subject }
    }

    /// Returns what clients are told.
    pub(crate) fn to_api(&self) -> api::Finding {
        let Words { id, severity, reason, remedy } = self.check.words();
        api::Finding {
            id: id.to_owned(),
            severity: match severity {
                Severity::Warn => api::Severity::Warn,
                Severity::Refuse => api::Severity::Refuse,
            }
            .into(),
            subject: self.subject.clone(),
            reason: reason.to_owned(),
            remedy: remedy.to_owned(),
        }
    }

    /// Whether no checkpoint is taken because of it.
    pub(crate) fn refuses(&self) -> bool {
        self.check.words().severity == Severity::Refuse
    }
}

impl Findings {
    pub(crate) const fn new(found: Vec<Finding>) -> Self {
        Self(found)
    }

    /// Returns them as the details of a refusal, which programs read: a `PreflightResponse` with as
    /// many of them as a reply has room for.
    pub(crate) fn details(&self) -> Vec<u8> {
        let mut response = api::PreflightResponse::default();
        for finding in self.0.iter().map(Finding::to_api) {
            response.findings.push(finding);
            if response.encoded_len() > DETAILS_BYTES_MAX {
                response.findings.pop();
                break;
            }
        }
        response.encode_to_vec()
    }
}

impl std::fmt::Display for Findings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut bytes = 0;
        for (number, finding) in self.0.iter().enumerate() {
            let text = finding.to_string();
            bytes += text.len();
            if number > 0 && bytes > WORDS_BYTES_MAX {
                let more = self.0.len() - number;
                return write!(f, "; and {more} more, which `kyb preflight` tells");
            }
            write!(f, "{}{text}", if number > 0 { "; " } else { "" })?;
        }
        Ok(())
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Words { id, reason, remedy, .. } = self.check.words();
        write!(f, "{id}: {reason} ({}); {remedy}", self.subject)
    }
}

impl Severity {
    /// Returns its word.
    #[cfg(test)]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Warn => "warn",
            Self::Refuse => "refuse",
        }
    }
}

impl Check {
    /// All of them, in the order they are told.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 49] = [
        Self::NotRunning,
        Self::Runtime,
        Self::SharedPidNamespace,
        Self::Snapshotter,
        Self::Terminal,
        Self::ExecSession,
        Self::CriuCode,
        Self::Traced,
        Self::FirstThread,
        Self::StoppedProcess,
        Self::DescriptorLimit,
        Self::GuardPages,
        Self::OtherUser,
        Self::UserNamespace,
        Self::NestedPidNamespace,
        Self::TimeNamespace,
        Self::NestedNamespace,
        Self::TcpEstablished,
        Self::TcpInFlight,
        Self::TcpClose,
        Self::TcpLoopback,
        Self::ListenerAddress,
        Self::InetSocket,
        Self::SocketFamily,
        Self::ExternalUnixSocket,
        Self::ExternalFile,
        Self::StdioFile,
        Self::DeletedFile,
        Self::LinkedFile,
        Self::LinkRemap,
        Self::OpenLink,
        Self::UnfitFile,
        Self::FileName,
        Self::Inotify,
        Self::Fanotify,
        Self::IoUring,
        Self::Descriptor,
        Self::NamespaceFile,
        Self::SecretMemory,
        Self::Device,
        Self::Gpu,
        Self::GpuDriver,
        Self::GpuPod,
        Self::FileLock,
        Self::Mount,
        Self::HiddenMount,
        Self::StagingRoom,
        Self::Memory,
        Self::Incomplete,
    ];

    /// Returns what it says.
    pub(crate) const fn words(self) -> Words {
        match self {
            Self::NotRunning
            | Self::SharedPidNamespace
            | Self::Snapshotter
            | Self::Terminal
            | Self::ExecSession
            | Self::UserNamespace
            | Self::NestedPidNamespace
            | Self::TimeNamespace
            | Self::NestedNamespace
            | Self::StagingRoom
            | Self::Memory
            | Self::Incomplete => self.container(),
            Self::CriuCode
            | Self::Traced
            | Self::FirstThread
            | Self::StoppedProcess
            | Self::DescriptorLimit
            | Self::GuardPages
            | Self::OtherUser => self.process(),
            Self::Inotify | Self::Fanotify | Self::IoUring | Self::Descriptor => self.descriptor(),
            Self::TcpEstablished
            | Self::TcpInFlight
            | Self::TcpClose
            | Self::TcpLoopback
            | Self::ListenerAddress
            | Self::InetSocket
            | Self::SocketFamily
            | Self::ExternalUnixSocket => self.socket(),
            Self::Runtime
            | Self::Device
            | Self::Gpu
            | Self::GpuDriver
            | Self::GpuPod
            | Self::Mount
            | Self::HiddenMount => self.surroundings(),
            _ => self.file(),
        }
    }

    const fn process(self) -> Words {
        match self {
            Self::CriuCode => refuse(
                "criu-code",
                "a CRIU that was killed left its code in a process, and no CRIU can dump that again",
                "start the container anew",
            ),
            Self::Traced => refuse(
                "traced",
                "a process is traced, and only one can do that at a time",
                "detach the debugger",
            ),
            Self::FirstThread => refuse(
                "first-thread",
                "the first thread of a process has ended while others go on, which CRIU does not dump",
                "let it wait for the others",
            ),
            Self::StoppedProcess => refuse(
                "stopped-process",
                "a process is stopped (SIGSTOP), and with cgroups of version 1 CRIU waits for it until \
                 the deadline",
                "let it go on (SIGCONT)",
            ),
            Self::DescriptorLimit => refuse(
                "descriptor-limit",
                "a process has as many files open as it may (RLIMIT_NOFILE), and CRIU opens some in it",
                "raise its limit (prlimit --nofile), or let it close some",
            ),
            Self::GuardPages => refuse(
                "guard-pages",
                "a process has guard pages, as threads have with glibc 2.42, which CRIU before 4.2, or with a \
                 kernel before 6.16, takes for others and fails to read",
                "install CRIU 4.2 on the node, and Linux 6.16",
            ),
            _ => refuse(
                "other-user",
                "a process is not root's, and CRIU cannot read the limits of another user's without \
                 CAP_SYS_RESOURCE, which containerd lacks here",
                "give containerd that capability, or run the container as root",
            ),
        }
    }

    const fn descriptor(self) -> Words {
        match self {
            Self::Inotify => refuse(
                "inotify",
                "CRIU finds only what is watched on a tmpfs",
                "watch a tmpfs, or set force-irmap in the CRIU configuration",
            ),
            Self::Fanotify => refuse(
                "fanotify",
                "it watches by fanotify, which reaches beyond a container, and no restore takes it back",
                "close it, or watch a tmpfs by inotify",
            ),
            Self::IoUring => refuse(
                "io-uring",
                "CRIU cannot dump io_uring",
                "forbid io_uring_setup by seccomp: programs then do without",
            ),
            _ => refuse(
                "descriptor",
                "CRIU cannot dump a descriptor of this kind, or no restore takes it back, as an eBPF map",
                "close it",
            ),
        }
    }

    const fn container(self) -> Words {
        match self {
            Self::NotRunning => refuse(
                "not-running",
                "only a running container can be dumped",
                "start or resume it",
            ),
            Self::SharedPidNamespace => refuse(
                "shared-pid-namespace",
                "it shares its PID namespace with others, so that a restore could not give the \
                 processes their ids back",
                "run it in a PID namespace of its own",
            ),
            Self::Snapshotter => refuse(
                "snapshotter",
                "its snapshotter keeps no separate upper directory",
                "run it with the overlayfs snapshotter",
            ),
            Self::Terminal => refuse(
                "terminal",
                "it has a terminal, which a restore could not give back",
                "run it without one",
            ),
            Self::ExecSession => warn(
                "exec-session",
                "what was started in it from outside is no part of the checkpoint",
                "start it again in the restored container",
            ),
            Self::UserNamespace
            | Self::NestedPidNamespace
            | Self::TimeNamespace
            | Self::NestedNamespace => self.namespace(),
            Self::StagingRoom => refuse(
                "staging-room",
                "there is no room for the dump",
                "make room in the agent's root directory, or give `staging.tmpfs` more memory",
            ),
            Self::Memory => warn(
                "memory",
                "the dump does not fit into memory: it goes to disk, and the pause is longer",
                "free memory, or raise `staging.memory_share`",
            ),
            _ => warn(
                "incomplete",
                "not everything could be looked at",
                "what is left is found by CRIU, while the container is paused",
            ),
        }
    }

    const fn namespace(self) -> Words {
        match self {
            Self::UserNamespace => refuse(
                "user-namespace",
                "a process is in a user namespace of its own, which CRIU does not dump here and no \
                 restore makes",
                "run it without user namespaces",
            ),
            Self::NestedPidNamespace => refuse(
                "nested-pid-namespace",
                "CRIU cannot dump a PID namespace inside of the container's",
                "end what made it",
            ),
            Self::TimeNamespace => refuse(
                "time-namespace",
                "CRIU cannot dump a time namespace inside of the container's",
                "end what made it",
            ),
            _ => refuse(
                "nested-namespace",
                "a process is in a mount, network, IPC or UTS namespace of its own, and no restore makes \
                 one inside of the container",
                "end what made it",
            ),
        }
    }

    const fn socket(self) -> Words {
        match self {
            Self::TcpEstablished => refuse(
                "tcp-established",
                "it has established TCP connections, and none was chosen of what can become of them",
                "say --tcp keep (a restore needs the same addresses) or --tcp close",
            ),
            Self::TcpInFlight => refuse(
                "tcp-in-flight",
                "a TCP connection has not been accepted yet, and CRIU cannot dump it",
                "try again, say --tcp close, or set skip-in-flight in the CRIU configuration",
            ),
            Self::TcpClose => refuse(
                "tcp-close",
                "its TCP connections can be closed only through a CRIU configuration file of its own",
                "run it with kybernate-runc or with the annotation org.criu.config=FILE, a file in \
                 the directory criu of the agent's root, or say --tcp keep",
            ),
            Self::TcpLoopback => refuse(
                "tcp-loopback",
                "a TCP connection over loopback cannot be kept: its other end is outside of the \
                 container, or a restore makes a network of its own, where loopback is not up yet",
                "say --tcp close, or end the connection",
            ),
            Self::ListenerAddress => warn(
                "listener-address",
                "a socket is bound to an address that a restored container may not have",
                "bind it to any address or to loopback, and do not connect(2) one of UDP",
            ),
            Self::InetSocket => refuse(
                "inet-socket",
                "CRIU before 4.2 cannot dump internet and packet sockets on Linux 6.16 and later",
                "install CRIU 4.2",
            ),
            Self::SocketFamily => {
                refuse("socket-family", "CRIU does not know sockets of this family", "close it")
            }
            _ => refuse(
                "external-unix-socket",
                "a unix socket is connected to a process outside of the container",
                "close it, or set ext-unix-sk in the CRIU configuration",
            ),
        }
    }

    const fn surroundings(self) -> Words {
        match self {
            Self::Runtime => refuse(
                "runtime",
                "another runtime than runc made it, and only runc dumps and restores here",
                "run it with runc: BinaryName in the options of containerd's runtime, or `runtime` in \
                 /etc/kybernate/runc.toml",
            ),
            Self::Device => refuse(
                "device",
                "CRIU cannot dump an open device of this kind, or no restore takes it back, as a TUN or \
                 TAP device",
                "close it",
            ),
            Self::Gpu => refuse(
                "gpu",
                "a GPU is open, and nobody here saves its memory",
                "NVIDIA: load driver 570 or later, with [gpu] method = \"driver\"; others: close it",
            ),
            Self::GpuDriver => refuse(
                "gpu-driver",
                "a GPU is open, and the driver that is loaded is too old to checkpoint its memory",
                "load driver 570 or later (580 to go on with another GPU, 615 for [gpu] storage = \"device\")",
            ),
            Self::GpuPod => warn(
                "gpu-pod",
                "the agent asks the driver for its GPU memory, and pods get theirs by CRIU's plugin alone",
                "set [gpu] method = \"plugin\" before, or restore it by kyb restore",
            ),
            Self::Mount => refuse(
                "mount",
                "a file system was mounted inside of the container that CRIU cannot dump, or no restore \
                 takes back, there or at all",
                "unmount it, or have its place be a mount from outside",
            ),
            _ => refuse(
                "hidden-mount",
                "a mount hides another one, and no restore takes what cannot be seen",
                "mount each place once: --mount on /dev/shm comes on top of the default one",
            ),
        }
    }

    const fn file(self) -> Words {
        match self {
            Self::StdioFile => refuse(
                "stdio-file",
                "a standard stream is a file outside of the container",
                "let its output go to a pipe: containerd's default",
            ),
            Self::DeletedFile => refuse(
                "deleted-file",
                "a deleted file that is still open or mapped is larger than CRIU keeps",
                "raise ghost-limit in the CRIU configuration",
            ),
            Self::LinkedFile => refuse(
                "linked-file",
                "a file is open or mapped under a name that was deleted, and would not come back as the \
                 same file",
                "close it, open it by its other name, or have it on a tmpfs of the container or a mount \
                 that is captured",
            ),
            Self::LinkRemap => refuse(
                "link-remap",
                "a file is open or mapped under a name that was deleted, as a semaphore of sem_open is, \
                 and CRIU is told to keep such files only by a configuration file",
                "run it with kybernate-runc or with the annotation org.criu.config=FILE, a file in the \
                 directory criu of the agent's root, or set link-remap in /etc/criu/runc.conf",
            ),
            Self::OpenLink => refuse(
                "open-link",
                "a symbolic link itself is open (O_PATH with O_NOFOLLOW), and no restore has CRIU open one",
                "close it",
            ),
            Self::UnfitFile => refuse(
                "unfit-file",
                "it has written a file that a layer of a container image cannot hold",
                "rename it, or have it on a mount from outside",
            ),
            Self::FileName => refuse(
                "file-name",
                "a file is open, mapped or a working directory whose name is not UTF-8, and no restore \
                 judges what has such names",
                "rename it, or close it",
            ),
            Self::NamespaceFile => refuse(
                "namespace-file",
                "a namespace is open, which may be another one than the container's, and no restore \
                 takes it back",
                "close it when the namespace was entered",
            ),
            Self::SecretMemory => refuse(
                "secret-memory",
                "memory that even the kernel does not read (memfd_secret) cannot be dumped",
                "do without it",
            ),
            Self::FileLock => refuse(
                "file-lock",
                "it holds file locks, and the request wants none",
                "say --file-locks keep",
            ),
            _ => refuse("external-file", "a file outside of the container is open", "close it"),
        }
    }
}

const fn refuse(id: &'static str, reason: &'static str, remedy: &'static str) -> Words {
    Words { id, severity: Severity::Refuse, reason, remedy }
}

const fn warn(id: &'static str, reason: &'static str, remedy: &'static str) -> Words {
    Words { id, severity: Severity::Warn, reason, remedy }
}
