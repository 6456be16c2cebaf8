#!/usr/bin/env bash
# Runs each fuzz target for a while: scripts/fuzz.sh 20s
# Where an input costs a run of git, making interesting ones smaller (60 s by default) would take all of it.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-20s}
found=0
while IFS=: read -r file line; do
  name=$(sed -E 's/^func (Fuzz[A-Za-z0-9_]*)\(.*/\1/' <<<"$line")
  printf '== %s in %s\n' "$name" "$(dirname "$file")"
  go test "./$(dirname "$file")" -run '^$' -fuzz "^$name\$" -fuzztime "$time" -fuzzminimizetime 20x
  found=$((found + 1))
done < <(git grep -E '^func Fuzz[A-Za-z0-9_]*\(' -- '*_test.go')
[ "$found" -gt 0 ] || {
  printf 'fuzz: there is no fuzz target\n' >&2
  exit 1
}
