#!/usr/bin/env bash
# Runs every tool of the sandbox image as a command runs it: in a sandbox that the agent of the other image hosts, with the image
# as its read-only root file system, an unprivileged uid, no capabilities, and a worktree with nothing in it. Fails when one
# doesn't work.
#
#   scripts/image-try.sh IMAGES [TOOLS]         the folder that scripts/image.sh made, and another list than rootfs/tools
set -euo pipefail
cd "$(dirname "$0")/.."
images=$1 tools=${2:-rootfs/tools}

die() {
  printf 'image-try: %s\n' "$*" >&2
  exit 1
}
for program in bwrap jq git; do
  command -v "$program" >/dev/null || die "$program is missing: scripts/setup.sh image"
done

work=$(mktemp -d /var/tmp/sandbox-image-try-XXXXXX)
agent='' session=''
cleanup() {
  local status=$?
  if [ "$session" ] && ! "$cli" session delete "$session" >/dev/null; then status=1; fi
  # The agent is a child of bwrap's, which ends with it.
  if [ "$agent" ]; then
    kill "$(jq '."child-pid"' "$work/started")" 2>/dev/null || true
    wait "$agent" || true
  fi
  if [ $status != 0 ] && [ -s "$work/log" ]; then tail -n 20 "$work/log" >&2; fi
  rm -rf --one-file-system "$work"
  exit $status
}
trap cleanup EXIT
chmod 0755 "$work"

# unpack puts an image's layers into a folder, the lowest first.
unpack() {
  local layout=$images/$1 manifest layer
  mkdir "$work/$1"
  manifest=$(jq -r '.manifests[0].digest' "$layout/index.json")
  for layer in $(jq -r '.layers[].digest' "$layout/blobs/${manifest/://}"); do
    tar -xzp --numeric-owner -C "$work/$1" -f "$layout/blobs/${layer/://}"
  done
}
unpack sandbox
unpack agent

# The repository is somebody's who is not root, and holds nothing.
mkdir -p "$work"/{state,run,workspaces/base}
git -C "$work/workspaces/base" init -q -b main
git -C "$work/workspaces/base" -c user.name=image -c user.email=image@localhost commit -q --allow-empty -m "Begin"
chown -R 1000:1000 "$work/workspaces"
cat >"$work/config.yaml" <<YAML
state_dir: $work/state
socket: {path: $work/run/exec.sock}
rootfs: $work/sandbox
workspace: {roots: [$work/workspaces]}
YAML

# The agent sees its own image as /, with the node's processes, devices and cgroups as in a pod that is allowed these.
bwrap --info-fd 3 --cap-add ALL --bind "$work/agent" / --bind /proc /proc --dev-bind /dev /dev --bind /sys /sys \
  --bind "$work" "$work" --setenv PATH /usr/local/bin:/usr/bin:/bin \
  /usr/local/bin/sandbox-agent serve --config "$work/config.yaml" 3>"$work/started" >"$work/log" 2>&1 &
agent=$!
for _ in $(seq 600); do
  if [ -S "$work/run/exec.sock" ]; then break; fi
  kill -0 "$agent" 2>/dev/null || die "the agent of the image ended"
  sleep 0.1
done
export SANDBOX_AGENT_SOCKET=$work/run/exec.sock
cli=$work/agent/usr/local/bin/sandbox-agent
session=$("$cli" session create --repo "$work/workspaces/base" --branch try --worktree "$work/workspaces/try")

failed=()
while IFS=$'\t' read -r name command; do
  case $name in '' | '#'*) continue ;; esac
  if output=$("$cli" exec "$session" --timeout 60s -- "set -e -o pipefail; $command" 2>&1); then
    printf '  %-16s works\n' "$name"
  else
    printf '  %-16s FAILS: %s\n' "$name" "$output" >&2
    failed+=("$name")
  fi
done <"$tools"
[ ${#failed[@]} = 0 ] || die "these don't work in a sandbox: ${failed[*]}"
