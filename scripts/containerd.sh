#!/usr/bin/env bash
# Builds the real container runtimes that the tests start for themselves, from their Go modules and into the cache:
# containerd with its shim and ctr, runc, the CNI plugins, gVisor. Once for each version (about 7 minutes on two cores
# for all of them); with everything in the cache it does nothing, and needs no network.
#
#   scripts/containerd.sh [-n] [containerd|runc|cni|gvisor]...      (no part: all) prints one folder for each
#
# -n builds nothing: it fails where something is missing.
set -euo pipefail
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sandbox-agent/runtimes
export GOTOOLCHAIN=local GOFLAGS=-buildvcs=false
unset GOBIN
strip=(-trimpath -ldflags "-s -w")

containerd=v2.4.2
runc=v1.5.3
cni=v1.10.0
gvisor=v0.0.0-20260905035102-160fafc42237

# install builds programs PACKAGE@VERSION into a folder.
install() {
  local out=$1
  shift
  GOBIN=$out go install "${strip[@]}" "$@" >&2
}

build_containerd() {
  local from=github.com/containerd/containerd/v2/cmd
  CGO_ENABLED=0 install "$1" {"$from/containerd","$from/containerd-shim-runc-v2","$from/ctr"}@"$containerd"
}

build_runc() {
  # As distributions build it: seccomp is a C library (libseccomp-dev).
  GOBIN=$1 CGO_ENABLED=1 go install -trimpath -tags seccomp -ldflags "-s -w" github.com/opencontainers/runc@"$runc" >&2
}

build_cni() {
  local from=github.com/containernetworking/plugins/plugins
  CGO_ENABLED=0 install "$1" "$from"/{main/bridge,main/loopback,ipam/host-local,meta/portmap,meta/firewall}@"$cni"
}

build_gvisor() {
  local module
  module=$(go mod download -json gvisor.dev/gvisor@"$gvisor" | sed -nE 's/^\t"Dir": "(.*)",?$/\1/p')
  cp -r --no-preserve=mode "$module" "$1/source"
  # The shim gives its sandbox a negative oom_score_adj, and fails where that is refused: for want of CAP_SYS_RESOURCE, in
  # a container that runs these tests. Nothing that is tested depends on it.
  sed -i 's/sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); err != nil {/sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); err != nil \&\& !os.IsPermission(err) {/' \
    "$1/source/pkg/shim/v1/manager.go"
  grep -q 'oomScoreMax); err != nil && !os.IsPermission' "$1/source/pkg/shim/v1/manager.go"
  (
    cd "$1/source"
    export CGO_ENABLED=0
    go build -trimpath -ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=$gvisor" -o "$1/runsc" ./runsc
    go build "${strip[@]}" -o "$1/containerd-shim-runsc-v1" ./shim
  ) >&2
  rm -rf "$1/source"
}

dry=
if [ "${1:-}" = -n ]; then
  dry=1
  shift
fi
[ $# -gt 0 ] || set -- containerd runc cni gvisor
for part in "$@"; do
  case $part in
    containerd | runc | cni | gvisor) ;;
    *)
      printf 'containerd: unknown part "%s": containerd, runc, cni or gvisor\n' "$part" >&2
      exit 1
      ;;
  esac
  folder=$cache/$part-${!part}
  if [ ! -e "$folder" ]; then
    if [ "$dry" ]; then
      printf '%s %s is not built: scripts/containerd.sh %s\n' "$part" "${!part}" "$part" >&2
      exit 1
    fi
    printf 'building %s %s (once)\n' "$part" "${!part}" >&2
    mkdir -p "$cache"
    # Outside of any module, so that this project's go.mod has no say; moved when it is whole, so that one that was cut
    # short is never taken for one.
    build=$(mktemp -d "$cache/build-XXXXXX")
    trap 'rm -rf "$build"' EXIT
    (cd "$build" && "build_$part" "$build")
    # Ancestors of what a user namespace starts have to be open for it.
    chmod 0755 "$build"
    mv -T "$build" "$folder" 2>/dev/null || [ -e "$folder" ] # another run may have been first
    rm -rf "$build"
  fi
  echo "$folder"
done
