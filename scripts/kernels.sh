#!/usr/bin/env bash
# Fetches and unpacks the kernels that internal/testkit/vm boots (internal/testkit/vm/kernels.txt), each by its suite's
# metapackage. Those of the set "ci" are about 120 MB, those of "all" 700; with everything in the cache it does nothing, and
# needs no network. What it has got is in the cache's manifest.tsv: name, release, suite, package, version and SHA-256 of each
# package. A kernel that can't be had has no line there, is said, and makes the exit code 1; the others are fetched.
#
#   scripts/kernels.sh [--set ci|all] [--again] [CACHE]      --again: look whether the suites have newer ones
set -euo pipefail
table=$(cd "$(dirname "$0")/.." && pwd)/internal/testkit/vm/kernels.txt
set=ci again=
while [ $# -gt 0 ]; do
  case $1 in
    --set) set=$2 && shift ;;
    --again) again=1 ;;
    *) break ;;
  esac
  shift
done
cache=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/sandbox-agent/kernels}

die() {
  printf 'kernels: %s\n' "$*" >&2
  exit 1
}

case $set in ci | all) ;; *) die "there is no set \"$set\": ci or all" ;; esac

# shellcheck source=scripts/debian.sh
source "$(dirname "$0")/debian.sh"

# wanted prints the lines of the set: name, suite, package.
wanted() {
  awk -v set="$set" '!/^#/ && NF == 4 && (set == "all" || $2 == "ci") {print $1, $3, $4}' "$table"
}

mkdir -p "$cache"
# One at a time: several runs share the cache.
exec {lock}>"$cache/lock"
flock "$lock"

manifest=$cache/manifest.tsv
[ -e "$manifest" ] || : >"$manifest"
missing=()
while read -r name suite package; do
  [ -z "$again" ] && cut -f1 "$manifest" | grep -qxF "$name" || missing+=("$name $suite $package")
done < <(wanted)
[ ${#missing[@]} -gt 0 ] || exit 0

mkdir -p "$cache"/{debs,k/lib/modules}
mapfile -t suites < <(printf '%s\n' "${missing[@]}" | awk '{print $2}' | sort -u)
debian_apt "$cache" "${suites[@]}"

# field prints a field of a package in a suite.
field() {
  local lists=("$cache"/lists/*_dists_"$1"_main_binary-amd64_Packages*)
  /usr/lib/apt/apt-helper cat-file "${lists[0]}" |
    awk -v RS= -v FS='\n' -v package="Package: $2" -v field="$3: " \
      '$1 == package {for (i = 2; i <= NF; i++) if (index($i, field) == 1) print substr($i, length(field) + 1)}' | tail -1
}

# resolve prints the package of the kernel that a metapackage of a suite stands for, or the newest one that matches a pattern.
resolve() {
  local lists=("$cache"/lists/*_dists_"$1"_main_binary-amd64_Packages*)
  case $2 in
    *'*'*)
      local pattern=${2//./\\.}
      /usr/lib/apt/apt-helper cat-file "${lists[0]}" | sed -nE "s/^Package: (${pattern//\*/[^ -]*})\$/\1/p" | sort -V | tail -1
      ;;
    *) field "$1" "$2" Depends | grep -oE 'linux-image-[0-9][^ ,]*' | head -1 ;;
  esac
}

# fetch gets one kernel and prints its lines of the manifest. It is called where bash ignores "set -e".
fetch() {
  local name=$1 suite=$2 image release package deb parts=()
  image=$(resolve "$suite" "$3") || true
  [ -n "$image" ] || die "the suite $suite has no package $3"
  release=${image#linux-image-}
  # Since 7.0 an image comes in parts.
  case $release in
    [1-6].*) parts=("$image") ;;
    *) parts=("linux-binary-$release" "linux-modules-$release" "linux-base-$release") ;;
  esac
  (cd "$cache/debs" && apt-get "${apt[@]}" download "${parts[@]/%//$suite}") >&2 || return 1
  for package in "${parts[@]}"; do
    deb=$(find "$cache/debs" -name "${package}_*.deb" -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2-)
    [ -e "$cache/k/lib/modules/$release/modules.dep" ] || dpkg-deb --fsys-tarfile "$deb" | unpack || return 1
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$name" "$release" "$suite" "$package" \
      "$(dpkg-deb --field "$deb" Version)" "$(sha256sum "$deb" | cut -d' ' -f1)" || return 1
  done
  if [ -d "$cache/k/usr/lib/modules/$release" ]; then
    mkdir -p "$cache/k/lib/modules/$release"
    cp -a "$cache/k/usr/lib/modules/$release/." "$cache/k/lib/modules/$release" || return 1
    rm -rf "$cache/k/usr/lib/modules/$release"
  fi
  [ -e "$cache/k/lib/modules/$release/modules.dep" ] || depmod -b "$cache/k" "$release" || return 1
  echo "kernels: $name is $release, of $suite" >&2
}

unpack() { tar -x -C "$cache/k" --wildcards --exclude './usr/share' './*'; }

failed=()
for line in "${missing[@]}"; do
  read -r name suite package <<<"$line"
  if got=$(fetch "$name" "$suite" "$package"); then
    {
      awk -F '\t' -v name="$name" '$1 != name' "$manifest"
      printf '%s\n' "$got"
    } >"$manifest~"
    mv "$manifest~" "$manifest"
  else
    failed+=("$name")
  fi
done
[ ${#failed[@]} -eq 0 ] || die "not fetched: ${failed[*]}"
