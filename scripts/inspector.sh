#!/usr/bin/env bash
# Installs the MCP Inspector's command line at the versions of tests/mcp/inspector into the cache folder, once, and prints
# the path of its script, which node runs in the script's own folder.
set -euo pipefail
source=$(cd "$(dirname "$0")/../tests/mcp/inspector" && pwd)
name=@modelcontextprotocol/inspector-cli
version=$(sed -nE "s#.*\"$name\": \"([^\"]+)\".*#\1#p" "$source/package.json")
sum=$(sha256sum "$source/package-lock.json" | cut -c1-12)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/sandbox-agent/inspector-$version-$sum
if [ ! -d "$folder" ]; then
  command -v npm >/dev/null || {
    printf 'inspector: npm is missing: run scripts/setup.sh test\n' >&2
    exit 1
  }
  printf 'installing the MCP Inspector %s (once)\n' "$version" >&2
  mkdir -p "${folder%/*}"
  # Made beside its place and moved, so that an installation that is cut short leaves nothing that looks whole. No
  # package's own scripts are run.
  made=$(mktemp -d "$folder.XXXXXX")
  trap 'rm -rf "$made"' EXIT
  cp "$source/package.json" "$source/package-lock.json" "$made/"
  (cd "$made" && npm ci --ignore-scripts --no-audit --no-fund --silent >&2)
  # Another one may have been as quick.
  mv -T "$made" "$folder" 2>/dev/null || [ -d "$folder" ]
fi
printf '%s\n' "$folder/node_modules/$name/build/cli.js"
