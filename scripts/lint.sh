#!/usr/bin/env bash
# All that can be said about the code without running it. Tools are built once from the Go module proxy, at the
# versions below, into ${XDG_CACHE_HOME:-~/.cache}/sandbox-agent/tools.
set -euo pipefail
cd "$(dirname "$0")/.."

golangci=github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
govulncheck=golang.org/x/vuln/cmd/govulncheck@v1.9.0
# The vulnerability database comes as a module, so no other host is asked, and a run today and one tomorrow say the
# same. Raise the version to hear of newer ones.
vulndb=golang.org/x/vulndb@v0.0.0-20261105234957-e22db6528018

step() { printf '== %s\n' "$*"; }
mapfile -t tracked < <(git ls-files --cached --others --exclude-standard)

step gofmt
go_files=()
shell_files=()
for f in "${tracked[@]}"; do
  [ -f "$f" ] || continue
  case $f in
    *.go) go_files+=("$f") ;;
    *.sh | .ci/run) shell_files+=("$f") ;;
  esac
done
unformatted=$(gofmt -l "${go_files[@]}")
if [ -n "$unformatted" ]; then
  printf 'not formatted, run gofmt -w on:\n%s\n' "$unformatted" >&2
  exit 1
fi

step shellcheck
shellcheck "${shell_files[@]}"

step golangci-lint
"$(scripts/tool.sh "$golangci")" run ./...

step 'import rules'
go test ./tests/layout

step govulncheck
checker=$(scripts/tool.sh "$govulncheck")
db=$(cd / && go mod download -json "$vulndb" | sed -nE 's/^\t"Dir": "(.*)",?$/\1/p')
findings=$(mktemp)
trap 'rm -f "$findings"' EXIT
"$checker" -format json -db "file://$db/data/osv" ./... >"$findings"
go run ./tools/lint/vulngate tools/lint/vulnerabilities.json <"$findings"

printf 'lint: nothing to complain about\n'
