#!/usr/bin/env bash
# Puts parts of a real demo run into README.md, between its transcript marks:
#   NO_COLOR=1 make demo | scripts/transcript.sh
# Run it in a clone whose path may stand in the README, for example /srv/sandbox-agent.
set -euo pipefail
cd "$(dirname "$0")/.."
run=$(mktemp)
trap 'rm -f "$run"' EXIT
awk '
  BEGIN { keep = "A session|An edit and a commit|A child that tries to stay|Three generations|An attempt on the control socket|The whole chain" }
  /^(CGO_ENABLED|setup:|make)/ { next }
  /^── [0-9]+  / { shown = $0 ~ keep; if (!shown && !cut) print "   […]\n"; cut = !shown }
  /^Cleaning up/ { shown = 1; cut = 0 }
  /^What next/ { exit }
  /^sandbox-agent demo/ { started = 1; shown = 1 }
  started && shown { print }
' >"$run"
grep -q '^All [0-9]* checks hold\.$' "$run" || {
  printf 'transcript: that run did not end with every check holding\n' >&2
  exit 1
}
awk -v run="$run" '
  /<!-- transcript: begin -->/ {
    print; print "```"
    while ((getline line < run) > 0) lines[++n] = line
    while (n > 0 && lines[n] == "") n--
    for (i = 1; i <= n; i++) print lines[i]
    print "```"; skip = 1; next
  }
  /<!-- transcript: end -->/ { skip = 0 }
  !skip { print }
' README.md >"$run.md"
cat "$run.md" >README.md
rm -f "$run.md"
