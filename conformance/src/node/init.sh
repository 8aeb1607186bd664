# The first process of a testbed node. Runs in new mount, PID, network, IPC, UTS and cgroup
# namespaces; NODE_DIR holds the node's directories, NODE_ROOT the root it is an overlay of.
set -eu

fail() { echo "failed: $*"; exit 1; }

hostname "$NODE_NAME"
mount -t overlay overlay \
    -o "lowerdir=$NODE_ROOT,upperdir=$NODE_DIR/upper,workdir=$NODE_DIR/work" "$NODE_DIR/root" ||
    fail "mounting the node's root"
cd "$NODE_DIR/root"
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
# Fresh mounts: in a cgroup namespace their root is this node's own cgroup.
for hierarchy in $NODE_CGROUPS; do
    mkdir "sys/fs/cgroup/$hierarchy"
    case $hierarchy in
    systemd) options=none,name=systemd ;;
    *) options=$hierarchy ;;
    esac
    mount -t cgroup -o "$options" cgroup "sys/fs/cgroup/$hierarchy" || fail "mounting cgroup $hierarchy"
done
if [ -n "$NODE_CGROUP2" ]; then
    mkdir "sys/fs/cgroup/$NODE_CGROUP2"
    mount -t cgroup2 cgroup2 "sys/fs/cgroup/$NODE_CGROUP2" || fail "mounting cgroup2"
fi
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
# containerd's snapshots are overlays themselves: their upper directories must not be on one.
mkdir -p var/lib/containerd var/lib/kybernate srv/bin srv/share .old
mount --bind "$NODE_DIR/containerd" var/lib/containerd
mount --bind "$NODE_DIR/kybernate" var/lib/kybernate
mount --bind "$NODE_BIN" srv/bin
mount --bind "$NODE_SHARE" srv/share
# CRIU needs a pivoted root; a chroot is not enough.
pivot_root . .old
cd /
umount -l /.old
ip link set lo up

mkdir -p /etc/containerd
cat >/etc/containerd/config.toml <<'CONFIG'
version = 2
disabled_plugins = ["io.containerd.grpc.v1.cri"]
CONFIG
containerd >/var/lib/kybernate/containerd.log 2>&1 </dev/null &
containerd=$!
until ctr version >/dev/null 2>&1; do
    kill -0 "$containerd" 2>/dev/null || fail "containerd ended: $(tail -n 3 /var/lib/kybernate/containerd.log)"
done
echo ready
# A shell reaps what is re-parented to it. It ends, and with it everything in this PID namespace,
# when the other end of its input is closed.
if [ -n "$NODE_STAY" ]; then
    mkfifo /run/node.stay
    exec 0<>/run/node.stay
fi
while read -r _; do :; done
