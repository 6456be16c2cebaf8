#!/usr/bin/env bash
# Resolves rootfs/packages into rootfs/packages.lock: every package of the sandbox image with its version and its checksum, in
# the form of a Debian package index. It asks the machine's own mirrors for what is newest in the suite today; run it to take
# security updates, and commit what it wrote.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=trixie
lock=rootfs/packages.lock

die() {
  printf 'image-lock: %s\n' "$*" >&2
  exit 1
}
# shellcheck source=scripts/debian.sh
source scripts/debian.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
debian_apt "$work/apt" "$suite" "$suite-updates" "$suite-security"
# apt counts itself as essential. Nothing is installed in a sandbox, so it is left out.
apt+=(-o 'pkgCacheGen::ForceEssential=,')

mapfile -t wanted < <(sed -E 's/#.*//; /^\s*$/d' rootfs/packages)
# "Inst NAME (VERSION …": what would be installed in an empty system.
mapfile -t chosen < <(LC_ALL=C apt-get "${apt[@]}" install -s --no-install-recommends '?essential' "${wanted[@]}" |
  sed -nE 's/^Inst ([^ ]+) \(([^ ]+) .*/\1=\2/p' | LC_ALL=C sort)
[ ${#chosen[@]} -gt 0 ] || die "apt would install nothing"

# Fields that say nothing about what is installed are left out.
apt-cache "${apt[@]}" show --no-all-versions "${chosen[@]}" | awk -v RS= '
  {
    n = split($0, lines, "\n"); keep = 0; stanza = ""
    for (i = 1; i <= n; i++) {
      if (lines[i] !~ /^ /) keep = lines[i] ~ /^(Package|Source|Version|Architecture|Multi-Arch|Essential|Protected|Priority|Section|Installed-Size|Maintainer|Homepage|Pre-Depends|Depends|Provides|Conflicts|Breaks|Replaces|Filename|Size|SHA256):/
      if (keep) stanza = stanza lines[i] "\n"
    }
    print stanza
  }' >"$work/index"
[ "$(grep -c '^SHA256:' "$work/index")" = ${#chosen[@]} ] || die "not each of the ${#chosen[@]} packages has a checksum in the mirror's index"

# The date of the images' files. It stays where the packages do, so that the images do.
if [ -e "$lock" ] && tail -n +3 "$lock" | cmp -s - "$work/index"; then
  printf 'image-lock: nothing newer in %s\n' "$suite"
  exit 0
fi
{
  printf '# Debian %s, by scripts/image-lock.sh. SOURCE_DATE_EPOCH=%s\n\n' "$suite" "$(date -u +%s)"
  cat "$work/index"
} >"$lock.new"
mv "$lock.new" "$lock"
printf 'image-lock: %d packages of %s in %s\n' ${#chosen[@]} "$suite" "$lock"
