# Makes a root file system of other people's programs from Debian's packages, and a tar of it.
# They are unpacked, not installed: no script of theirs runs. DIRECTORY is empty, MIRROR and
# PACKAGES say from where and what; RELEASE is Debian's name of the release.
set -eu
cd "$DIRECTORY"
mkdir -p apt/state/lists/partial apt/cache/archives/partial root/usr/bin root/usr/sbin root/usr/lib \
    root/usr/lib64 root/dev root/proc root/sys root/run root/tmp root/state root/root root/etc
: >apt/status
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] $MIRROR $RELEASE main" >apt/sources.list

# The machine's own settings but its sources: how a mirror is reached is known there.
apt() {
    apt-get -qq -o "Dir::Etc::SourceList=$DIRECTORY/apt/sources.list" -o Dir::Etc::SourceParts=- \
        -o "Dir::State=$DIRECTORY/apt/state" -o "Dir::State::status=$DIRECTORY/apt/status" \
        -o "Dir::Cache=$DIRECTORY/apt/cache" -o Acquire::Languages=none -o Debug::NoLocking=1 \
        -o APT::Sandbox::User=root -o APT::Install-Recommends=false "$@"
}
apt update
# shellcheck disable=SC2086
apt install --download-only --yes $PACKAGES

for name in bin sbin lib lib64; do ln -s "usr/$name" "root/$name"; done
find apt/cache/archives -name '*.deb' -print0 | xargs -0 -n 1 -P 2 sh -c 'dpkg-deb -x "$1" root' sh
rm -rf root/usr/share/doc root/usr/share/man root/usr/share/locale root/usr/share/info
chmod 1777 root/tmp
echo 'root:x:0:0:root:/root:/bin/sh' >root/etc/passwd
echo 'root:x:0:' >root/etc/group
tar --sort=name --mtime=@0 --numeric-owner --owner=0 --group=0 -C root -cf layer.tar .
rm -rf root apt
