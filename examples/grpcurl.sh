#!/usr/bin/env bash
# The API with grpcurl: any gRPC client reaches the same handlers, over HTTP/2 without TLS on the unix socket.
#
#   SOCKET=/run/sandbox-agent/exec.sock examples/grpcurl.sh SESSION
#
# grpcurl is built once from its source (scripts/tool.sh). With -import-path and -proto it knows the API from this
# folder; without them it asks the agent (reflection).
set -euo pipefail
cd "$(dirname "$0")/.."
socket=${SOCKET:-/run/sandbox-agent/exec.sock}
session=${1:?a session that is there: sandbox-agent session create}
grpcurl=${GRPCURL:-$(scripts/tool.sh github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3)}

# A path as gRPC names it: this version's -unix takes the address for one of TCP.
target=unix://$socket
run=grpcurl-$$

call() { "$grpcurl" -plaintext -import-path api -proto sandbox/v1/sandbox.proto -d "$2" "$target" "sandbox.v1.$1"; }

# What there is, as the agent tells it.
"$grpcurl" -plaintext "$target" list

call NodeService/GetNodeInfo '{}'
call ExecService/Exec '{"session_id": "'"$session"'", "exec_id": "'"$run"'-1", "command": "echo hello; exit 3", "text": true}'
# The same again: the recorded answer, it did not run a second time.
call ExecService/Exec '{"session_id": "'"$session"'", "exec_id": "'"$run"'-1", "command": "echo hello; exit 3", "text": true}'
# Output as it comes, then the result.
call ExecService/StreamExec '{"exec": {"session_id": "'"$session"'", "exec_id": "'"$run"'-2", "command": "seq 3"}}'
# Another request under a known id is refused: grpcurl's exit code is 64 plus gRPC's, here ALREADY_EXISTS.
call ExecService/Exec '{"session_id": "'"$session"'", "exec_id": "'"$run"'-1", "command": "echo other"}' || echo "refused: $?"
