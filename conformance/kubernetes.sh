#!/bin/sh
# Builds what `kybernate-conformance cluster` starts: Kubernetes and etcd, as Go modules, once. Without
# Go, or without a way to the module proxy, it fails; KYBERNATE_WITHOUT_GO=1 leaves it out, and the tests
# that want a cluster say so.
set -eu

cache=${KYBERNATE_CACHE:-/var/cache/kybernate}
bin=$cache/tools/bin
kubernetes=v1.36.3
etcd=v3.6.16
components='kube-apiserver kube-controller-manager kube-scheduler kubectl kubelet'

say() { printf 'setup: %s\n' "$*" >&2; }

missing=
[ -x "$bin/etcd-$etcd" ] || missing=etcd
for component in $components; do
    [ -x "$bin/$component-$kubernetes" ] || missing="$missing $component"
done
[ -n "$missing" ] || exit 0
if [ -n "${KYBERNATE_WITHOUT_GO:-}" ]; then
    say "KYBERNATE_WITHOUT_GO is set: Kubernetes $kubernetes is left out"
    exit 0
fi
without='or set KYBERNATE_WITHOUT_GO=1 to leave out the tests that need it'
if ! command -v go >/dev/null 2>&1; then
    say "please install Go 1.26 or later, for Kubernetes $kubernetes, $without"
    exit 1
fi
say "building Kubernetes $kubernetes and etcd $etcd, once, into $bin (5 to 10 minutes)"
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
mkdir -p "$bin" "$work/etcd" "$work/kubernetes"
export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=mod
# What a debugger would want is thrown away in the end: not made, that is a tenth of the work less.
bare=all=-dwarf=false

fail() {
    tail -n 3 "$work/log" >&2
    say "$1 cannot be built here: mend that, $without"
    exit 1
}

# Moved when they are whole: whoever looks sees all of a program or none.
keep() {
    for file in "$1"/*; do
        mv "$file" "$bin/$(basename "$file")-$2"
    done
}

cd "$work/etcd"
printf 'module tool\ngo 1.26\n' >go.mod
{ go get -tool "go.etcd.io/etcd/server/v3@$etcd" && mkdir out &&
    go build -trimpath -gcflags "$bare" -ldflags '-s -w' -o out/etcd go.etcd.io/etcd/server/v3; } \
    >"$work/log" 2>&1 || fail "etcd $etcd"
keep out "$etcd"

# k8s.io/kubernetes names its own parts by their place in its repository; as modules they are v0.
cd "$work/kubernetes"
parts=v0.${kubernetes#v1.}
source=$(go mod download -json "k8s.io/kubernetes@$kubernetes" 2>"$work/log" |
    sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
[ -n "$source" ] || fail "Kubernetes $kubernetes"
{
    printf 'module tool\ngo 1.26.0\nrequire k8s.io/kubernetes %s\nreplace (\n' "$kubernetes"
    sed -n "s|^[[:space:]]*\(k8s.io/[^ ]*\) => ./staging/.*|    \1 => \1 $parts|p" "$source"
    printf ')\n'
} >go.mod
# Without a version nodes call themselves v0.0.0, and kubectl cannot compare.
minor=${kubernetes#v1.}
minor=${minor%%.*}
set --
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    set -- "$@" -X "$package.gitVersion=$kubernetes" -X "$package.gitMajor=1"
    set -- "$@" -X "$package.gitMinor=$minor" -X "$package.gitTreeState=clean"
done
flags="-s -w $*"
packages=
for component in $components; do
    packages="$packages k8s.io/kubernetes/cmd/$component"
done
mkdir out
# shellcheck disable=SC2086
go build -trimpath -gcflags "$bare" -ldflags "$flags" -o out/ $packages >"$work/log" 2>&1 ||
    fail "Kubernetes $kubernetes"
keep out "$kubernetes"
