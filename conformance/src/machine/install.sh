# Installs QEMU. As another user than root, or on another system than Debian, it says what to
# install and stops.
set -eu
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "please install QEMU for x86-64 (qemu-system-x86 on Debian), or run this as root there" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends qemu-system-x86 >/dev/null
