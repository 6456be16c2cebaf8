#!/usr/bin/env bash
# Fetches and unpacks small root file systems with newer versions of Git than a stable Debian has: one of each suite
# below. About 60 MB each; with everything in the cache it does nothing, and needs no network. To get the newest of
# today again, remove the cache.
#
#   scripts/gits.sh [CACHE]         prints the folders
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/sandbox-agent/gits}
suites=(trixie forky sid)
# Git, what its tests call, and what a node has.
packages=(base-files base-passwd bash coreutils dash diffutils e2fsprogs findutils git grep gzip hostname libc-bin mawk
  mount perl-base procps python3 sed tar util-linux)

die() {
  printf 'gits: %s\n' "$*" >&2
  exit 1
}
# shellcheck source=scripts/debian.sh
source scripts/debian.sh

# unpack puts the packages of a suite into a folder. Their scripts are not run: what is needed of them is done here.
unpack() {
  local root=$1 deb
  # It brings the links /bin, /lib and so on, through which the others' files go.
  for deb in "$work"/archives/base-files_*.deb "$work"/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$root" --keep-directory-symlink --exclude './usr/share/doc/*' --exclude './usr/share/man/*' \
      --exclude './usr/share/locale/*' --exclude './usr/share/i18n/*'
  done
  for link in bin sbin lib lib64; do
    [ -L "$root/$link" ] || die "${root##*/} has a /$link that is no link to /usr/$link"
  done
  ln -s mawk "$root/usr/bin/awk"
  cp "$root/usr/share/base-passwd/passwd.master" "$root/etc/passwd"
  cp "$root/usr/share/base-passwd/group.master" "$root/etc/group"
  ldconfig -r "$root"
}

for suite in "${suites[@]}"; do
  if [ ! -e "$cache/$suite" ]; then
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/fetch-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    debian_apt "$work" "$suite"
    apt-get "${apt[@]}" install --download-only --no-install-recommends --yes "${packages[@]}" >&2
    mkdir -m 0755 "$work/root"
    unpack "$work/root"
    # Moved when it is whole, so that one that was cut short is never taken for one.
    mv "$work/root" "$cache/$suite"
    rm -rf "$work"
  fi
  echo "$cache/$suite"
done
