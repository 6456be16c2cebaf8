#!/usr/bin/env bash
# Builds the Kubernetes that tests/e2e/kube starts, from its Go module (tools/kube) and into the cache: etcd, API server,
# controller manager, scheduler, kubelet and kubectl in one program, and a pause program. Once for each version (about 6
# minutes on two cores); with everything in the cache it does nothing, and needs no network. Prints the folder.
#
#   scripts/kube.sh [-n]      -n builds nothing: it fails where nothing is built
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sandbox-agent/kube
export GOTOOLCHAIN=local GOFLAGS=-buildvcs=false CGO_ENABLED=0

version=$(sed -nE 's/^\tk8s.io\/kubernetes (v[0-9.]+)$/\1/p' "$root/tools/kube/go.mod")
folder=$cache/$version
if [ ! -e "$folder" ]; then
  if [ "${1:-}" = -n ]; then
    printf 'kubernetes %s is not built: scripts/kube.sh\n' "$version" >&2
    exit 1
  fi
  printf 'building kubernetes %s (once)\n' "$version" >&2
  mkdir -p "$cache"
  # Moved when it is whole, so that one that was cut short is never taken for one.
  build=$(mktemp -d "$cache/build-XXXXXX")
  trap 'rm -rf "$build"' EXIT
  # Kubernetes' parts compare their versions, which its own build sets so.
  IFS=. read -r major minor _ <<<"${version#v}"
  set="-X k8s.io/component-base/version"
  (cd "$root/tools/kube" &&
    go build -trimpath -ldflags "-s -w $set.gitVersion=$version $set.gitMajor=$major $set.gitMinor=$minor" -o "$build/kube" . &&
    go build -trimpath -ldflags "-s -w" -o "$build/pause" ./pause) >&2
  for name in etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl; do
    ln -s kube "$build/$name"
  done
  chmod 0755 "$build"
  mv -T "$build" "$folder" 2>/dev/null || [ -e "$folder" ] # another run may have been first
  rm -rf "$build"
fi
echo "$folder"
