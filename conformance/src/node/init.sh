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
# Fresh mounts: in a cgroup namespace their root is this node's own cgroup. NODE_CGROUP2 is where
# version 2 is mounted below /sys/fs/cgroup, "none" when it is not, empty when it is all there is.
cgroups=sys/fs/cgroup
mkdir -p etc
: >etc/node.cgroups
if [ -n "$NODE_CGROUP2" ]; then
    mount -t tmpfs -o mode=755 tmpfs $cgroups
    for hierarchy in $NODE_CGROUPS; do
        mkdir "$cgroups/$hierarchy"
        case $hierarchy in
        systemd) options=none,name=systemd ;;
        *) options=$hierarchy ;;
        esac
        mount -t cgroup -o "$options" cgroup "$cgroups/$hierarchy" || fail "mounting cgroup $hierarchy"
        echo "/$cgroups/$hierarchy/cgroup.procs" >>etc/node.cgroups
    done
fi
if [ "$NODE_CGROUP2" != none ]; then
    place="$cgroups${NODE_CGROUP2:+/$NODE_CGROUP2}"
    mkdir -p "$place"
    # This process is in the leaf already: only a cgroup without processes hands on controllers.
    mount -t cgroup2 cgroup2 "$place" || fail "mounting cgroup2"
    # Handed on to containers. One that cannot be is a limit that no container here has.
    for controller in $(cat "$place/cgroup.controllers"); do
        echo "+$controller" >"$place/cgroup.subtree_control" || true
    done
    echo "/$place/$NODE_CGROUP2_LEAF/cgroup.procs" >>etc/node.cgroups
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
printf '%s' "$NODE_CONTAINERD" >/etc/containerd/config.toml
# Here and now: the shell that becomes containerd may open it later than we look into it.
: >/var/lib/kybernate/containerd.log
containerd >>/var/lib/kybernate/containerd.log 2>&1 </dev/null &
containerd=$!
tries=0
until ctr --connect-timeout 1s version >/dev/null 2>&1; do
    words=$(tail -n 3 /var/lib/kybernate/containerd.log)
    kill -0 "$containerd" 2>/dev/null || fail "containerd ended: $words"
    # A try takes 20 ms or more, so this is 30 s at least.
    tries=$((tries + 1))
    [ "$tries" -lt 1500 ] || fail "containerd does not answer: $words"
done
echo ready
# A shell reaps what is re-parented to it. It ends, and with it everything in this PID namespace,
# when the other end of its input is closed.
if [ -n "$NODE_STAY" ]; then
    mkfifo /run/node.stay
    exec 0<>/run/node.stay
fi
while read -r _; do :; done
