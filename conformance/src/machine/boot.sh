#!/bin/busybox sh
# The first program of the machine: shows it the files of the machine around it, read-only, with a
# layer above that takes what is written and is gone with the machine, and goes on there.
set -eu
for program in mount umount modprobe mkdir cp cat ln switch_root; do
    /bin/busybox ln -s busybox "/bin/$program"
done
export PATH=/bin

mount -t devtmpfs devtmpfs /dev
exec </dev/console >/dev/console 2>&1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
for module in virtio-rng qemu_fw_cfg 9pnet_virtio 9p overlay; do modprobe "$module"; done
mkdir /around /layer /new
# Nobody writes there while this machine runs: what was read once is kept.
mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000 around /around
mount -t tmpfs -o size=90%,mode=755 tmpfs /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/around,upperdir=/layer/upper,workdir=/layer/work overlay /new
mount -t tmpfs -o mode=755 tmpfs /new/run
mkdir /new/run/machine /new/run/machine/around
mount -o move /around /new/run/machine/around
cp -a /bin /lib /new/run/machine/
given=/sys/firmware/qemu_fw_cfg/by_name/opt/kybernate
for name in second command; do cat "$given/$name/raw" >"/new/run/machine/$name.sh"; done
for place in proc sys dev; do mount -o move "/$place" "/new/$place"; done
exec switch_root /new /bin/sh /run/machine/second.sh
