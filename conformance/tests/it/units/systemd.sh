# Runs in a node: a machine inside of it, whose first process is systemd. It has PIDs, cgroups and
# mounts of its own, and a containerd that is a service there; root and network are the node's.
set -eu
while read -r procs; do
    # In version 2 a sibling of the node's leaf, in version 1 below the node's own.
    cgroup=${procs%/cgroup.procs}
    cgroup=${cgroup%/init}/machine
    mkdir "$cgroup"
    echo $$ >"$cgroup/cgroup.procs"
done </etc/node.cgroups

# What would change settings of the real machine, or look for its devices.
for unit in systemd-sysctl systemd-binfmt systemd-modules-load systemd-random-seed kmod-static-nodes \
    systemd-tmpfiles-setup-dev systemd-tmpfiles-setup-dev-early; do
    ln -sf /dev/null "/etc/systemd/system/$unit.service"
done
ln -sf /dev/null /etc/systemd/system/proc-sys-fs-binfmt_misc.automount
: >/etc/machine-id

exec unshare --cgroup --mount --pid --fork --kill-child --propagation private sh -euc '
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /mnt
for device in null zero full random urandom tty; do
    : >/mnt/$device
    mount --bind /dev/$device /mnt/$device
done
mkdir /mnt/shm /mnt/pts /mnt/mqueue
mount -t tmpfs -o mode=1777 tmpfs /mnt/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts /mnt/pts
ln -s pts/ptmx /mnt/ptmx
ln -s /proc/self/fd /mnt/fd
mount --move /mnt /dev
# No cgroups of the node under those of the machine, where they would be listed still.
umount --recursive /sys
mount -t sysfs -o ro sysfs /sys
[ "$1" = unified ] || mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
while read -r procs; do
    place=${procs%/cgroup.procs}
    case $1,$place in
    unified,*/init)
        mount -t cgroup2 cgroup2 /sys/fs/cgroup
        mkdir /sys/fs/cgroup/init
        continue ;;
    unified,*) continue ;;
    *,*/init)
        place=${place%/init}
        mkdir -p "$place"
        mount -t cgroup2 cgroup2 "$place"
        mkdir "$place/init"
        continue ;;
    *,*/systemd) options=none,name=systemd ;;
    *) options=${place##*/} ;;
    esac
    mkdir "$place"
    mount -t cgroup -o "$options" cgroup "$place"
done </etc/node.cgroups
mount -t tmpfs -o mode=755 tmpfs /run
if [ "$1" = unified ]; then
    # Who enters the machine goes by this.
    echo /sys/fs/cgroup/init/cgroup.procs >/run/node.cgroups
    mount --bind /run/node.cgroups /etc/node.cgroups
fi
mount -t tmpfs -o mode=1777 tmpfs /tmp
for owner in containerd kybernate; do
    mkdir -p /var/lib/kybernate/$owner
done
# On a real file system, as those of the node.
mount --bind /var/lib/kybernate/containerd /var/lib/containerd
mount --bind /var/lib/kybernate/kybernate /var/lib/kybernate
# Debian 13 has the last systemd that runs on cgroups of version 1, and it has to be told.
words="SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1 systemd.unified_cgroup_hierarchy=0"
[ "$1" = all ] || words=
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin "SYSTEMD_PROC_CMDLINE=$words" \
    /usr/lib/systemd/systemd --system --unit=basic.target --log-target=journal
' sh "$1"
