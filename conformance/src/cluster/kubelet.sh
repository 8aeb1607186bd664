# Starts a node's kubelet. Runs in the node's namespaces.
# Arguments: directory, node, address, subnet of its pods, registry, then SUBNET=NODE for other
# nodes' pods.
set -eu

kube=$1 node=$2 address=$3 pods=$4 registry=$5
shift 5

ctr -n k8s.io image import "$kube/pause.tar" >/dev/null
mkdir -p "/etc/containerd/certs.d/$registry" /etc/cni/net.d
printf 'server = "http://%s"\n[host."http://%s"]\ncapabilities = ["pull", "resolve"]\n' \
    "$registry" "$registry" >"/etc/containerd/certs.d/$registry/hosts.toml"
# On no overlay, as on a real node.
mkdir -p /var/lib/kybernate/kubelet /var/lib/kubelet
mount --bind /var/lib/kybernate/kubelet /var/lib/kubelet
[ -e /etc/resolv.conf ] || : >/etc/resolv.conf

# A kubelet wants these settings of the kernel and makes them so, for the whole machine. It is shown
# files that say so, and told to change none (protectKernelDefaults).
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    file=/run/sysctl/${setting%=*}
    mkdir -p "${file%/*}"
    echo "${setting#*=}" >"$file"
    mount --bind "$file" "/proc/sys/${setting%=*}"
done

for route in "$@"; do
    ip route replace "${route%=*}" via "${route#*=}"
done
cat >/etc/cni/net.d/10-pods.conflist <<CONFIG
{ "cniVersion": "1.0.0", "name": "pods", "plugins": [{ "type": "ptp", "ipMasq": false,
  "ipam": { "type": "host-local", "dataDir": "/run/cni/addresses",
            "ranges": [[{ "subnet": "$pods" }]], "routes": [{ "dst": "0.0.0.0/0" }] } }] }
CONFIG
cat >/etc/kubelet.yaml <<CONFIG
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $address
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
oomScoreAdj: 0
protectKernelDefaults: true
makeIPTablesUtilChains: false
imageGCHighThresholdPercent: 100
evictionHard: { memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%",
                imagefs.available: "0%", imagefs.inodesFree: "0%" }
authentication:
  anonymous: { enabled: false }
  webhook: { enabled: false }
  x509: { clientCAFile: $kube/ca.crt }
authorization: { mode: AlwaysAllow }
CONFIG
"$kube/bin/kubelet" --config /etc/kubelet.yaml --kubeconfig "$kube/kubelet-$node.conf" \
    --hostname-override "$node" --node-ip "$address" \
    >/var/lib/kybernate/kubelet.log 2>&1 </dev/null &
