#!/bin/sh
# Builds what the registry's benchmark compares with and Debian does not have, once. Without Go, or
# without a way to the module proxy, that column is left out.
set -eu

cache=${KYBERNATE_CACHE:-/var/cache/kybernate}
module=github.com/distribution/distribution/v3
version=v3.1.2
binary=$cache/tools/bin/distribution-$version

say() { printf 'bench: %s\n' "$*" >&2; }

[ -x "$binary" ] && exit 0
if ! command -v go >/dev/null 2>&1; then
    say "no Go: distribution $version is left out"
    exit 0
fi
say "building distribution $version, once, into $cache/tools (some minutes)"
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
mkdir -p "$cache/tools/bin"
cd "$work"
cat >go.mod <<END
module bench
go 1.25
END
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=mod
if go get -tool "$module/cmd/registry@$version" >log 2>&1 &&
    go build -trimpath -ldflags '-s -w' -o distribution "$module/cmd/registry" >>log 2>&1; then
    mv distribution "$binary"
else
    tail -n 3 log >&2
    say "distribution $version cannot be built here and is left out"
fi
