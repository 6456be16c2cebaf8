#!/usr/bin/env bash
# Fetches and unpacks the kernels that internal/testkit/vm boots: those of Debian's cloud flavour in four suites, 5.10 to the
# newest backport. About 120 MB; with everything in the cache it does nothing, and needs no network.
#
#   scripts/kernels.sh [CACHE]
set -euo pipefail
cache=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/sandbox-agent/kernels}
# Suite and version; a suite may hold several, and "" takes the newest.
declare -A version=([bullseye-security]=5.10. [bookworm-security]=6.1. [trixie-security]=6.12. [trixie-backports]='')
suites=(bullseye-security bookworm-security trixie-security trixie-backports)

die() {
  printf 'kernels: %s\n' "$*" >&2
  exit 1
}

# shellcheck source=scripts/debian.sh
source "$(dirname "$0")/debian.sh"

[ ! -e "$cache/complete" ] || exit 0
mkdir -p "$cache"/{debs,k}

debian_apt "$cache" "${suites[@]}"

# newest prints the package of the newest kernel of a version in a suite.
newest() {
  local lists=("$cache"/lists/*_dists_"$1"_main_binary-amd64_Packages*)
  /usr/lib/apt/apt-helper cat-file "${lists[0]}" |
    sed -nE "s/^Package: (linux-image-${version[$1]//./\\.}[0-9][^ ]*-cloud-amd64)\$/\1/p" | sort -V | tail -1
}

packages=()
for suite in "${suites[@]}"; do
  image=$(newest "$suite")
  [ -n "$image" ] || die "the suite $suite has no kernel ${version[$suite]}* of the cloud flavour"
  release=${image#linux-image-}
  # Since 7.0 an image comes in parts.
  case $release in
    [1-6].*) packages+=("$image") ;;
    *) packages+=("linux-binary-$release" "linux-modules-$release" "linux-base-$release") ;;
  esac
  echo "kernels: $suite has $release"
done
(cd "$cache/debs" && apt-get "${apt[@]}" download "${packages[@]}")

for deb in "$cache"/debs/*.deb; do
  dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$cache/k" --wildcards --exclude './usr/share' './*'
done
mkdir -p "$cache/k/lib/modules"
for modules in "$cache"/k/usr/lib/modules/*; do
  [ -e "$modules" ] && mv "$modules" "$cache/k/lib/modules/"
done
for modules in "$cache"/k/lib/modules/*; do
  depmod -b "$cache/k" "$(basename "$modules")"
done
touch "$cache/complete"
