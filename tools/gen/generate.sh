#!/usr/bin/env bash
# Generates the Go code of the two protos into api/ (or into the folder given). buf comes from the npm registry,
# the plugins are Go tools of this folder's own module, all at pinned versions.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$root/api}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sandbox-agent
version=$(sed -nE 's/.*"@bufbuild\/buf": "([^"]+)".*/\1/p' "$root/tools/gen/package.json")
buf=$cache/buf-$version
if [ ! -x "$buf/node_modules/.bin/buf" ]; then
  mkdir -p "$buf"
  cp "$root/tools/gen/package.json" "$buf/"
  (cd "$buf" && npm install --no-audit --no-fund --no-package-lock --silent)
fi
cd "$root"
# The template's out folders are relative: hand buf a copy that names the wanted one.
template=$(sed "s#out: api#out: $out#" buf.gen.yaml)
"$buf/node_modules/.bin/buf" lint
"$buf/node_modules/.bin/buf" generate --template "$template"
