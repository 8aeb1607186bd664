#!/bin/sh
# Installs what building and testing need and what is missing; says so first. As another user than
# root, or on another system than Debian, it says what to install and stops.
set -eu

cache=${KYBERNATE_CACHE:-/var/cache/kybernate}
cargo_deny=0.20.2

say() { printf 'setup: %s\n' "$*"; }

missing=
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need cc gcc
need protoc protobuf-compiler
need python3 python3
need debootstrap debootstrap
need docker-registry docker-registry
need ip iproute2
need unshare util-linux
need nsenter util-linux

if [ -n "$missing" ]; then
    packages=$(printf '%s\n' $missing | sort -u | tr '\n' ' ')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing $packages"
        # Without policy-rc.d a package's service would be started: docker-registry takes port 5000.
        policy=
        if [ ! -e /usr/sbin/policy-rc.d ]; then
            policy=/usr/sbin/policy-rc.d
            printf '#!/bin/sh\nexit 101\n' >"$policy"
            chmod 755 "$policy"
        fi
        trap '[ -z "$policy" ] || rm -f "$policy"' EXIT
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
    else
        say "please install: $packages(Debian's names), or run this as root on Debian" >&2
        exit 1
    fi
fi

if ! command -v cargo >/dev/null 2>&1; then
    say "please install Rust 1.93 or later" >&2
    exit 1
fi

if ! "$cache/tools/bin/cargo-deny" --version 2>/dev/null | grep -qF " $cargo_deny"; then
    say "building cargo-deny $cargo_deny, once, into $cache/tools (some minutes)"
    mkdir -p "$cache/tools"
    # It reads a lock file now and then: what is built in half the time is fast enough for that.
    CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_LTO=off \
        CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
        cargo install cargo-deny --version "$cargo_deny" --locked --quiet --root "$cache/tools"
fi
