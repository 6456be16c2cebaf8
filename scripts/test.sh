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
set +e
go test -p 1 -timeout 60m -json "$@" ./... | "$work/testcount"
status=("${PIPESTATUS[@]}")
set -e
if [ "${status[0]}" != 0 ] || [ "${status[1]}" != 0 ]; then exit 1; fi
