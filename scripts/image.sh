#!/usr/bin/env bash
# Builds the two images of this project without Docker: the sandbox's, of Debian packages at the versions of
# rootfs/packages.lock, and the agent's own, of its programs and trusted Git. Into OUT go, for each, an OCI layout, the same as
# a tar archive, its software bill of materials and its list of packages. In the end every tool is run in a sandbox.
#
#   scripts/image.sh [-o OUT] [-n]          (bin/images)
#
# -n leaves the last step out, for who only compares. The packages of a lock are kept in the cache: with them there, no network
# is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
export LC_ALL=C.UTF-8 TZ=UTC GOTOOLCHAIN=local
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sandbox-agent/images
lock=rootfs/packages.lock
out=bin/images
try=1

die() {
  printf 'image: %s\n' "$*" >&2
  exit 1
}
# shellcheck source=scripts/debian.sh
source scripts/debian.sh

while getopts o:n option; do
  case $option in
    o) out=$OPTARG ;;
    n) try= ;;
    *) exit 2 ;;
  esac
done
SOURCE_DATE_EPOCH=$(sed -nE '1s/.* SOURCE_DATE_EPOCH=([0-9]+)$/\1/p' "$lock")
suite=$(sed -nE '1s/^# Debian ([a-z]+),.*/\1/p' "$lock")
if [ -z "$SOURCE_DATE_EPOCH" ] || [ -z "$suite" ]; then
  die "the first line of $lock names no suite and date: make it with scripts/image-lock.sh"
fi
export SOURCE_DATE_EPOCH

# fetch puts every package of the lock into the cache, under its checksum.
fetch() {
  local main security mirror sum file missing=()
  mkdir -p "$cache/debs"
  while read -r sum file; do
    [ -e "$cache/debs/$sum.deb" ] || missing+=("$sum $file")
  done < <(awk '/^Filename:/ {file = $2} /^SHA256:/ {print $2, file}' "$lock")
  [ ${#missing[@]} -gt 0 ] || return 0
  main=${DEBIAN_MIRROR:-$(debian_mirrors | grep -v security | head -1)} || true
  security=${DEBIAN_SECURITY_MIRROR:-$(debian_mirrors | grep security | head -1)} || true
  if [ -z "$main" ] || [ -z "$security" ]; then
    die "apt's sources name no Debian mirror, or none with security updates"
  fi
  printf 'image: fetching %d packages\n' ${#missing[@]} >&2
  for one in "${missing[@]}"; do
    read -r sum file <<<"$one"
    case $file in pool/updates/*) mirror=$security ;; *) mirror=$main ;; esac
    printf '%s/%s\n%s\n%s\n' "$mirror" "$file" "$work/debs/$sum.deb" "SHA256:$sum"
  done >"$work/wanted"
  mkdir "$work/debs"
  xargs -n 30 /usr/lib/apt/apt-helper -qq -o APT::Sandbox::User=root download-file <"$work/wanted" >&2 ||
    die "the mirror has not (any more) what $lock names: make it anew with scripts/image-lock.sh, or set DEBIAN_MIRROR and DEBIAN_SECURITY_MIRROR to an archive of $(date -u -d "@$SOURCE_DATE_EPOCH" +%F)"
  mv "$work"/debs/*.deb "$cache/debs/"
}

work=$(mktemp -d /var/tmp/sandbox-image-XXXXXX)
trap 'rm -rf "$work"' EXIT
# One after the other: tests build images beside each other.
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
fetch
exec 9>&-

printf 'image: building the programs\n' >&2
version=$(git describe --tags --always --dirty 2>/dev/null || echo unknown)
go_build() { # OUT PACKAGE VARIABLE [LINKER FLAG]...
  local to=$1 package=$2 variable=$3
  shift 3
  go build -buildvcs=false -trimpath -ldflags "-s -w -buildid= -X $variable=$version $*" -o "$to" "$package"
}
mkdir -p "$work/bin"
for name in receiptd pid1; do
  CGO_ENABLED=0 go_build "$work/bin/$name" "./cmd/$name" main.version
done
# libcontainer's nsenter is C. The C library's resolver comes with it, and is not used (GODEBUG, in the image): what it warns
# of at every link says nothing here.
CGO_ENABLED=1 go_build "$work/bin/sandbox-agent" ./cmd/sandbox-agent github.com/sandbox-agent/sandbox-agent/internal/cli.Version \
  -linkmode external "-extldflags '-static -Wl,--build-id=none'" 2> >(grep -v -E "statically linked applications requires|in function .*:$|^# |_cgo_" >&2 || true)

printf 'image: writing the images\n' >&2
rm -rf "$work/out" && mkdir -p "$work/out"
go run ./rootfs/mkimage -debs "$cache/debs" -lock "$lock" -suite "$suite" -bin "$work/bin" -version "$version" -out "$work/out"
if [ "$try" ]; then scripts/image-try.sh "$work/out"; fi

# What is there from before goes at the last moment.
mkdir -p "$out"
for name in sandbox agent; do
  rm -rf "${out:?}/$name" "$out/$name".*
  mv "$work/out/$name" "$work/out/$name".* "$out/"
done
