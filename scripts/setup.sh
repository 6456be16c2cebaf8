#!/usr/bin/env bash
# Installs what this project needs from Debian's packages and checks the Go toolchain. It can be run again at any
# time, and it does nothing, without a network, when everything is there.
#
#   scripts/setup.sh [build|test|lint|generate|kernel|runtimes|kube|image]...      (no argument: build)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

say() { printf '%s\n' "$*"; }
die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# A need is a command and the Debian package that brings it. Commands are asked for, not packages: a node that got
# its Git or Node.js some other way is fine as it is.
build=(git:git curl:curl gcc:gcc make:make)
test=("${build[@]}" python3:python3 jq:jq ip:iproute2 unshare:util-linux ps:procps bwrap:bubblewrap
  nft:nftables runc:runc crun:crun gdb:gdb strace:strace cpio:cpio npm:npm
  dpkg-deb:dpkg nginx:nginx-light fcgiwrap:fcgiwrap)
lint=("${build[@]}" shellcheck:shellcheck)
generate=("${build[@]}" npm:npm)
kernel=("${test[@]}" qemu-system-x86_64:qemu-system-x86 modprobe:kmod mkfs.ext4:e2fsprogs xz:xz-utils zstd:zstd lz4:lz4)
kube=("${test[@]}" openssl:openssl sysctl:procps)
image=("${build[@]}" bwrap:bubblewrap jq:jq dpkg-deb:dpkg)
runtimes=("${build[@]}" pkg-config:pkg-config iptables:iptables)

# Files that no command stands for: the C headers and the certificates.
files=(/usr/include/stdlib.h:libc6-dev /etc/ssl/certs/ca-certificates.crt:ca-certificates)

missing=()
need_commands() {
  local pair
  for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
  done
}

[ $# -gt 0 ] || set -- build
for kind in "$@"; do
  case $kind in
    build) need_commands "${build[@]}" ;;
    test) need_commands "${test[@]}" ;;
    lint) need_commands "${lint[@]}" ;;
    generate) need_commands "${generate[@]}" ;;
    kernel) need_commands "${kernel[@]}" ;;
    kube) need_commands "${kube[@]}" ;;
    image)
      need_commands "${image[@]}"
      files+=(/usr/share/keyrings/debian-archive-keyring.gpg:debian-archive-keyring)
      ;;
    runtimes)
      need_commands "${runtimes[@]}"
      files+=(/usr/include/seccomp.h:libseccomp-dev) # runc links it
      ;;
    *) die "unknown kind \"$kind\": build, test, lint, generate, kernel, runtimes, kube or image" ;;
  esac
done
for pair in "${files[@]}"; do
  [ -e "${pair%%:*}" ] || missing+=("${pair##*:}")
done

if [ ${#missing[@]} -gt 0 ]; then
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  command -v apt-get >/dev/null ||
    die "these Debian packages are missing and there is no apt-get to install them: ${missing[*]}. Install their like, then run this again."
  [ "$(id -u)" = 0 ] ||
    die "these Debian packages are missing: ${missing[*]}. Run this as root, or install them first."
  say "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # Debian starts a service when it installs it. The tests start an nginx of their own, and nobody asked for another.
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 0755 /usr/sbin/policy-rc.d
  fi
  # A list that is already there may do; a fresh machine has none.
  apt-get install -y --no-install-recommends "${missing[@]}" >/dev/null 2>&1 || {
    apt-get update -qq
    apt-get install -y --no-install-recommends "${missing[@]}" >/dev/null
  }
fi

# Go. Debian's own is too old, and this script downloads no toolchain: it says what to do.
want=$(sed -nE 's/^go ([0-9.]+)$/\1/p' "$root/go.mod")
if ! command -v go >/dev/null; then
  # The place of the upstream archive, in case nobody added it to PATH.
  [ -x /usr/local/go/bin/go ] &&
    die "Go is in /usr/local/go/bin, which is not in PATH. Run: export PATH=\$PATH:/usr/local/go/bin"
  die "Go $want or newer is needed and there is none. Debian's golang package is too old: unpack the archive from the Go project's download page to /usr/local/go, then run: export PATH=\$PATH:/usr/local/go/bin"
fi
have=$(cd / && GOTOOLCHAIN=local go env GOVERSION)
have=${have#go}
oldest=$(printf '%s\n%s\n' "$want" "${have%%[!0-9.]*}" | sort -V | head -n 1)
[ "$oldest" = "$want" ] ||
  die "Go $want or newer is needed, $(command -v go) is $have. Debian's golang package is too old: unpack a newer archive from the Go project's download page to /usr/local/go and put /usr/local/go/bin first in PATH."
