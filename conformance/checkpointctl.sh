#!/bin/sh
# Builds checkpointctl, which reads the archives of CRI-O, containerd and Podman, once. Without Go, or
# without a way to the module proxy, it fails; KYBERNATE_WITHOUT_GO=1 leaves it out, and the test that
# wants it says so.
set -eu

cache=${KYBERNATE_CACHE:-/var/cache/kybernate}
module=github.com/checkpoint-restore/checkpointctl
version=v1.6.0
binary=$cache/tools/bin/checkpointctl-$version

say() { printf 'setup: %s\n' "$*" >&2; }

[ -x "$binary" ] && exit 0
if [ -n "${KYBERNATE_WITHOUT_GO:-}" ]; then
    say "KYBERNATE_WITHOUT_GO is set: checkpointctl $version is left out"
    exit 0
fi
without='or set KYBERNATE_WITHOUT_GO=1 to leave out the test that needs it'
if ! command -v go >/dev/null 2>&1; then
    say "please install Go 1.26 or later, for checkpointctl $version, $without"
    exit 1
fi
say "building checkpointctl $version, once, into $cache/tools (a minute)"
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
mkdir -p "$cache/tools/bin"
cd "$work"
cat >go.mod <<END
module tool
go 1.25
END
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=mod
if go get -tool "$module@$version" >log 2>&1 &&
    go build -trimpath -ldflags '-s -w' -o checkpointctl "$module" >>log 2>&1; then
    mv checkpointctl "$binary"
else
    tail -n 3 log >&2
    say "checkpointctl $version cannot be built here: mend that, $without"
    exit 1
fi
