# Fetches Debian's kernel and makes the machine's first file system: busybox, what the kernel can
# load, and boot.sh. They are unpacked, not installed: no script of theirs runs. DIRECTORY is empty,
# MIRROR says from where, RELEASE is Debian's name of the release, BOOT is boot.sh's text.
set -eu
cd "$DIRECTORY"
mkdir -p apt/state/lists/partial apt/cache/archives/partial files made/first/bin
: >apt/status
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] $MIRROR $RELEASE main" >apt/sources.list

# The machine's own settings but its sources: how a mirror is reached is known there.
apt() {
    tool=$1
    shift
    "apt-$tool" -qq -o "Dir::Etc::SourceList=$DIRECTORY/apt/sources.list" -o Dir::Etc::SourceParts=- \
        -o "Dir::State=$DIRECTORY/apt/state" -o "Dir::State::status=$DIRECTORY/apt/status" \
        -o "Dir::Cache=$DIRECTORY/apt/cache" -o Acquire::Languages=none -o Debug::NoLocking=1 \
        -o APT::Sandbox::User=root "$@"
}
apt get update
# linux-image-amd64 is a name for the newest.
kernel=$(apt cache show linux-image-amd64 | sed -n 's/^Depends: \(linux-image-[^ ,]*\).*/\1/p' |
    head -n 1)
[ -n "$kernel" ] || { echo "$RELEASE has no linux-image-amd64" >&2; exit 1; }
apt get download "$kernel" busybox-static
for package in *.deb; do dpkg-deb -x "$package" files; done

first=made/first
cp files/usr/bin/busybox "$first/bin/busybox"
cp files/boot/vmlinuz-* made/vmlinuz
version=$(ls files/usr/lib/modules)
to=$first/lib/modules/$version
mkdir -p "$to"
cp "files/usr/lib/modules/$version"/modules.* "$to"
# What file systems, networks and their diagnosis need, and what these need. Unpacked here, since
# there it takes thirty times as long.
(
    cd "files/usr/lib/modules/$version"
    find kernel/crypto kernel/lib kernel/fs/9p kernel/fs/netfs kernel/fs/overlayfs kernel/net/802 \
        kernel/net/9p kernel/net/bridge kernel/net/core kernel/net/ipv4 kernel/net/ipv6 \
        kernel/net/llc kernel/net/netfilter kernel/net/netlink kernel/net/packet kernel/net/unix \
        kernel/drivers/net/dummy.ko.xz kernel/drivers/net/tun.ko.xz kernel/drivers/net/veth.ko.xz \
        kernel/drivers/block/loop.ko.xz kernel/drivers/char/hw_random/virtio-rng.ko.xz \
        kernel/drivers/firmware/qemu_fw_cfg.ko.xz -name '*.ko.xz'
) | while read -r module; do
    mkdir -p "$to/${module%/*}"
    files/usr/bin/busybox unxz -c "files/usr/lib/modules/$version/$module" >"$to/${module%.xz}"
done
files/usr/bin/busybox depmod -b "$DIRECTORY/$first" "$version"
mkdir "$first/dev" "$first/proc" "$first/sys"
printf '%s' "$BOOT" >"$first/init"
chmod 755 "$first/init"
(cd "$first" && find . | ../../files/usr/bin/busybox cpio -o -H newc 2>/dev/null) |
    gzip -1 >made/first.cpio.gz
rm -rf made/first
