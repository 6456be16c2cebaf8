#!/usr/bin/env bash
# Runs a program on this machine with another root file system: that of a folder which scripts/gits.sh made.
#
#   scripts/git-root.sh ROOT PROGRAM [ARGUMENT]...          ("go test -exec" gives it a test's program)
#
# It is a mount namespace of its own that ends with the program, so nothing is left behind. A change of root and no
# chroot: the kernel makes no user namespace for a process in a chroot (user_namespaces(7)). The program has the
# machine's /proc, /sys with its cgroups, /dev, /tmp and /var/tmp, and this module, read-only.
set -euo pipefail
module=$(cd "$(dirname "$0")/.." && pwd)

if [ "${1-}" != --inside ]; then
  exec unshare --mount --propagation slave "$0" --inside "$PWD" "$@"
fi
dir=$2 root=$3
shift 3

# The new root is empty memory: mount points are made in it and never in the cache. It covers a folder that every
# machine has and that this program doesn't need.
new=/media
mount -t tmpfs -o mode=0755 tmpfs "$new"
for name in bin sbin lib lib64; do
  cp -P "$root/$name" "$new/$name"
done
bind() { # [--rbind] FOLDER PLACE [OPTIONS]
  local how=--bind
  if [ "$1" = --rbind ]; then how=$1 && shift; fi
  mkdir -p "$new$2"
  mount "$how" "$1" "$new$2"
  if [ -n "${3-}" ]; then mount -o "remount,bind,$3" "$new$2"; fi
}
bind "$root/usr" /usr ro
bind "$root/etc" /etc ro
for name in /proc /sys /dev; do
  bind --rbind "$name" "$name"
done
for name in /tmp /var/tmp; do
  bind "$name" "$name"
done
mkdir -p "$new"/{run,root,home,var/lib}
bind "$module" "$module" ro

cd "$new"
pivot_root . .
umount -l .
cd "$dir"
exec "$@"
