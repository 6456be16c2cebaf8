#!/usr/bin/env bash
# Generates what is generated: the code of the protos (buf from the npm registry, plugins as Go tools) and the
# seccomp programs. With --check it does so in a copy, and fails if that differs from what is committed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

generate() {
  local in=$1
  bash "$in/tools/gen/generate.sh"
  (cd "$in/tools/seccomp" && go run . tables && go run . filters)
}

if [ "${1:-}" != --check ]; then
  generate "$root"
  exit
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/before" "$copy/after"
cd "$root"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' f; do
  if [ -e "$f" ]; then printf '%s\0' "$f"; fi
done >"$copy/files"
tar --null -T "$copy/files" -cf "$copy/tree.tar"
tar -xf "$copy/tree.tar" -C "$copy/before"
tar -xf "$copy/tree.tar" -C "$copy/after"
generate "$copy/after"
if ! diff -r "$copy/before" "$copy/after"; then
  printf 'generated code is not current: run "make generate" and commit what it changes\n' >&2
  exit 1
fi
