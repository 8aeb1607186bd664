# What the machine does on the files of the machine around it: mounts what a booted system has,
# runs command.sh, and says how it ended. `cache` is where nodes are kept.
set -eu
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
machine=/run/machine

mkdir -p /dev/pts /dev/shm /dev/mqueue
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t mqueue mqueue /dev/mqueue
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
mount -t securityfs securityfs /sys/kernel/security
# Nodes are overlays: an upper directory must not be on one, and there are two at most, one above
# the other.
mkdir -p "$cache/testbeds"
mount -t tmpfs -o size=90%,mode=755 tmpfs "$cache/testbeds"
for root in "$machine/around$cache"/roots/*/; do
    [ ! -d "$root" ] || mount --bind "$root" "${root#"$machine/around"}"
done
mkdir -p /lib/modules
mount --bind $machine/lib/modules /lib/modules
# The kernel asks for what it needs; the machine around may have no modprobe.
echo $machine/bin/modprobe >/proc/sys/kernel/modprobe
# A device that is there from the beginning wherever devices are managed.
$machine/bin/modprobe tun
hostname second
ip link set lo up

# Ports take one writer; what runs here may open its output again by name, as it may a pipe's.
ours=" 1 "
for port in /sys/class/virtio-ports/*; do
    read -r name <"$port/name"
    case $name in
    out | err)
        mkfifo "$machine/$name"
        cat "$machine/$name" >"/dev/${port##*/}" &
        ours="$ours$! "
        ;;
    status) status=/dev/${port##*/} ;;
    esac
done
code=0
sh $machine/command.sh </dev/null >$machine/out 2>$machine/err || code=$?

# What it has left running would keep its output open. Threads of the kernel cannot be killed.
for process in /proc/[0-9]*; do
    id=${process#/proc/}
    case $ours in
    *" $id "*) ;;
    *) kill -KILL "$id" 2>/dev/null || true ;;
    esac
done
wait
echo "$code" >"$status"
exec $machine/bin/busybox poweroff -f
