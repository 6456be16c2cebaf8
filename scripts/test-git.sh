#!/usr/bin/env bash
# The tests of everything that asks Git, with each Git of scripts/gits.sh in place of the machine's; arguments go to
# "go test". GITS names some of them ("trixie sid"); without it, all. A closing line for each: "N passed, N failed,
# N skipped".
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(./pkg/gitguard ./internal/agent/gitjail ./internal/agent/workspace ./internal/agent/gitview ./tests/git ./tests/gitwork)

mapfile -t roots < <(scripts/gits.sh)
work=$(mktemp -d /var/tmp/sandbox-agent-test-XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 0711 "$work"
go build -o "$work/testcount" ./scripts/testcount
make --no-print-directory -s build BIN="$work"
# What go builds must lie where the other root file system has it too.
mkdir "$work/go"
export SANDBOX_TEST_BIN_DIR=$work GOTMPDIR=$work/go

failed=()
for root in "${roots[@]}"; do
  suite=${root##*/}
  case " ${GITS:-$suite} " in *" $suite "*) ;; *) continue ;; esac
  version=$(scripts/git-root.sh "$root" git version)
  printf '== %s of Debian %s\n' "$version" "$suite"
  go test -p 1 -count=1 -timeout 60m -exec "$PWD/scripts/git-root.sh $root" -json "$@" "${packages[@]}" | "$work/testcount" ||
    failed+=("$suite ($version)")
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'test-git: failed with %s\n' "${failed[@]}" >&2
  exit 1
fi
