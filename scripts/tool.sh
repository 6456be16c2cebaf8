#!/usr/bin/env bash
# Builds a Go tool at a pinned version into the cache folder, once, and prints the path of its executable:
#   scripts/tool.sh PACKAGE@VERSION
set -euo pipefail
package=${1%@*}
version=${1##*@}
name=${package##*/}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/sandbox-agent/tools/$name-$version
if [ ! -x "$folder/$name" ]; then
  printf 'building %s %s (once)\n' "$name" "$version" >&2
  mkdir -p "$folder"
  # Outside of any module, so that this project's go.mod has no say; built beside its place and moved, so that a
  # build that is cut short leaves nothing that looks whole.
  build=$(mktemp -d "$folder/build-XXXXXX")
  trap 'rm -rf "$build"' EXIT
  (cd "$build" && GOBIN="$build" GOFLAGS=-buildvcs=false go install -ldflags "-s -w" "$package@$version" >&2)
  mv "$build/$name" "$folder/$name"
fi
printf '%s\n' "$folder/$name"
