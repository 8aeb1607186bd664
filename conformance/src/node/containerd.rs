//! What a node's containerd is told.

use serde::{Deserialize, Serialize};

use crate::root::Release;

/// Who a node's containerd works for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Serves {
    /// Its own clients: `ctr` and the agent.
    #[default]
    Clients,
    /// A kubelet as well.
    Kubelet,
}

/// Reference of the image that holds a pod's namespaces; every node of a cluster imports it.
pub const PAUSE: &str = "kybernate.test/pause:1";

/// Without the CRI plugin, which takes longer to start than all the rest.
const CLIENTS: &str = r#"version = 2
disabled_plugins = ["io.containerd.grpc.v1.cri"]
"#;

/// containerd 1.7. The plugin does not load when `runc` itself is not listed.
const KUBELET_1: &str = r#"version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "@PAUSE@"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "/etc/containerd/certs.d"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kybernate]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["*.kybernate.io/*"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kybernate.options]
BinaryName = "/srv/bin/kybernate-runc"
"#;

/// containerd 2.
const KUBELET_2: &str = r#"version = 3
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "@PAUSE@"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "/etc/containerd/certs.d"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.kybernate]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["*.kybernate.io/*"]
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.kybernate.options]
BinaryName = "/srv/bin/kybernate-runc"
"#;

impl Serves {
    /// Returns containerd's configuration.
    pub(super) fn config(self, release: Release) -> String {
        let text = match (self, release) {
            (Self::Clients, _) => CLIENTS,
            (Self::Kubelet, Release::Trixie) => KUBELET_1,
            (Self::Kubelet, Release::Forky) => KUBELET_2,
        };
        text.replace("@PAUSE@", PAUSE)
    }
}
