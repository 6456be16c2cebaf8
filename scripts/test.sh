#!/usr/bin/env bash
# go vet and all tests of the module; arguments go to "go test". The closing line is "N passed, N failed, N skipped".
set -euo pipefail
cd "$(dirname "$0")/.."

go vet ./...
# What runs inside a sandbox, and what decides, must also compile for the other architecture.
GOARCH=arm64 CGO_ENABLED=0 go vet ./api/... ./pkg/... ./cmd/receiptd/... ./cmd/pid1/...

# One package at a time: tests check that nothing is left behind on the machine (mounts, cgroups, processes), and
# would see each other's sandboxes.
#
# The programs are built once, in a folder that the ids of sandboxes can pass through.
work=$(mktemp -d /var/tmp/sandbox-agent-test-XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 0711 "$work"
go build -o "$work/testcount" ./scripts/testcount
make --no-print-directory -s build BIN="$work"
export SANDBOX_TEST_BIN_DIR=$work
# Emulated machines, and a Kubernetes node in namespaces of its own, take minutes and see nothing of this machine: their tests run
# beside the others, and are told of when those have ended.
apart=$(go list ./internal/testkit/vm ./tests/kernel ./tests/e2e/kube)
mapfile -t others < <(go list ./... | grep -vxF "$apart")
# Linking takes a third less without debug information, and each package is linked.
flags=(-p 1 -ldflags=-w -timeout 60m -json "$@")
set +e
{
  # shellcheck disable=SC2086 # the packages are words
  go test "${flags[@]}" $apart >"$work/apart.json" &
  go test "${flags[@]}" "${others[@]}"
  echo $? >"$work/others"
  wait $!
  echo $? >"$work/apart"
  cat "$work/apart.json"
} | "$work/testcount"
counted=$?
set -e
[ "$counted $(cat "$work/others") $(cat "$work/apart")" = "0 0 0" ]
