#!/bin/sh
# Builds and runs each engine; a folder as the argument puts the data on that file system.
set -eu
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
echo "a durable 400-byte record, µs (p50, p99) and records/s; RSS beyond an empty Go program's, MiB; binary, MiB"
echo "engine     |  1 writer             |  8 writers            |   RSS | binary"
for engine in pebble bbolt sqlite zombiezen log; do
	CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -tags "$engine" -o "$bin/$engine" .
	line=$("$bin/$engine" "$@")
	echo "$line | $(stat -c %s "$bin/$engine" | awk '{printf "%.1f", $1/1048576}')"
done
