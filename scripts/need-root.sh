#!/usr/bin/env bash
# Says plainly that a target needs root, and why.
set -euo pipefail
if [ "$(id -u)" != 0 ]; then
  printf '%s needs root: it makes namespaces, cgroups, idmapped mounts and host uid ranges on this machine. Run it as root.\n' "$1" >&2
  exit 1
fi
