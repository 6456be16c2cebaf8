#!/usr/bin/env bash
# Brings a Kubernetes node up from nothing, runs a command in it, takes everything down again, and ends as the command did:
#
#   scripts/kube-node.sh IMAGES.tar COMMAND...      as root; scripts/kube.sh and scripts/containerd.sh have to have been run
#
# The node has mount, PID, network, IPC, UTS and cgroup namespaces of its own: its /run and /var/lib are its own, so that
# everything on it has its usual place, and what it leaves ends with it. IMAGES.tar is imported into containerd; it has to
# have test.local/pause:1. The command has KUBECONFIG (an administrator's), kubectl and ctr, and nothing of the machine's
# network.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

if [ "${KUBE_NODE_INSIDE:-}" = "" ]; then
  kube=$("$here/kube.sh" -n)
  mapfile -t runtimes < <("$here/containerd.sh" -n containerd runc cni)
  gvisor=$("$here/containerd.sh" -n gvisor 2>/dev/null) || true # where it is built, the node has the RuntimeClass handler runsc
  KUBE_NODE_INSIDE=$(mktemp -d /var/tmp/sandbox-agent-kube-XXXXXX)
  chmod 0711 "$KUBE_NODE_INSIDE"
  export KUBE_NODE_INSIDE KUBE_NODE_CNI=${runtimes[2]} KUBE_NODE_PATH=$kube:${runtimes[0]}:${runtimes[1]}${gvisor:+:$gvisor}
  group=$(basename "$KUBE_NODE_INSIDE")
  mapfile -t cgroups < <(awk '$3 ~ /^cgroup2?$/ && !seen[$2]++ {print $2}' /proc/mounts)
  # The kubelet sets these for the whole machine.
  sysctl -e vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys kernel.keys.root_maxbytes \
    >"$KUBE_NODE_INSIDE/sysctl"
  # shellcheck disable=SC2317 # the trap calls it
  clean() {
    sysctl -q -p "$KUBE_NODE_INSIDE/sysctl" || true
    local c
    for c in "${cgroups[@]}"; do
      # The kernel lets go of a cgroup a moment after its last process is gone.
      for _ in $(seq 50); do
        find "$c/$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
        [ -e "$c/$group" ] || break
        sleep 0.1
      done
    done
    rm -rf --one-file-system "$KUBE_NODE_INSIDE"
  }
  trap clean EXIT
  leaves=()
  for c in "${cgroups[@]}"; do
    mkdir "$c/$group"
    if [ -e "$c/cgroup.controllers" ]; then # v2: controllers are given only to a cgroup whose parent has no process
      mkdir "$c/$group/init"
      leaves+=("$c/$group/init/cgroup.procs")
    fi
    if [ -e "$c/cpuset.cpus" ] && [ -e "$c/cpuset.mems" ]; then # v1: without them no process can be in it
      cat "$c/cpuset.cpus" >"$c/$group/cpuset.cpus"
      cat "$c/cpuset.mems" >"$c/$group/cpuset.mems"
    fi
  done
  status=0
  (
    for c in "${cgroups[@]}"; do echo "$BASHPID" >"$c/$group/cgroup.procs"; done
    # shellcheck disable=SC2016 # that shell's own
    KUBE_NODE_LEAVES="${leaves[*]}" exec unshare --cgroup bash -c 'for l in $KUBE_NODE_LEAVES; do echo $$ >"$l"; done
      exec unshare --mount --propagation private --net --pid --ipc --uts --fork --kill-child --mount-proc "$@"' bash "$here/$(basename "$0")" "$@"
  ) || status=$?
  exit "$status"
fi

# From here on: process 1 of the node.
run=$KUBE_NODE_INSIDE
images=$1
shift
node=node1 address=10.88.78.1 services=10.96.0.0/16 api=10.96.0.1
export PATH=$KUBE_NODE_PATH:$PATH
unset KUBE_NODE_INSIDE KUBE_NODE_LEAVES
began=$(date +%s%N)
say() { printf 'node: %5d ms %s\n' $((($(date +%s%N) - began) / 1000000)) "$*" >&2; }

mount --make-rshared / # as systemd has it: mounts reach pods, and pods' mounts the node
mkdir -p "$run"/{lib,logs,pki,cni,manifests}
mount -t tmpfs -o mode=0755 tmpfs /run
mount --bind "$run/lib" /var/lib
while read -r at type options; do
  umount "$at"
  if [ "$type" = cgroup2 ]; then
    mount -t cgroup2 cgroup2 "$at"
    tr ' ' '\n' <"$at/cgroup.controllers" | sed '/./s/^/+/' | while read -r c; do echo "$c" >"$at/cgroup.subtree_control"; done
  else
    options=$(tr ',' '\n' <<<"$options" | grep -vE '^(rw|ro|nosuid|nodev|noexec|(no|rel)atime|seclabel)$' | paste -sd,)
    mount -t cgroup -o "$options" cgroup "$at"
  fi
done < <(awk '$3 ~ /^cgroup2?$/ && !seen[$2]++ {print $2, $3, $4}' /proc/mounts)
hostname "$node"
ip link set lo up
ip addr add "$address/32" dev lo # the kubelet takes no loopback address
ip addr add "$api/32" dev lo     # the Service "kubernetes", without kube-proxy

start() {
  "$@" >"$run/logs/$1.log" 2>&1 </dev/null &
}
await() {
  local seconds=$1 what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@" >/dev/null 2>&1; do
    if [ $SECONDS -ge "$end" ]; then
      say "$what: not within $seconds s"
      "$@" >&2 || true
      tail -n 20 "$run"/logs/*.log >&2
      exit 1
    fi
    sleep 0.1
  done
  say "$what"
}

key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1.key" 2>/dev/null; }
certificate() { # NAME SUBJECT ALTERNATIVES USE
  key "$1"
  openssl req -new -key "$1.key" -subj "$2" -out "$1.csr" 2>/dev/null
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out "$1.crt" -extfile \
    <(printf 'keyUsage=digitalSignature\nextendedKeyUsage=%s\n%s\n' "$4" "${3:+subjectAltName=$3}") 2>/dev/null
  cat >"$run/$1.conf" <<END
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://127.0.0.1", certificate-authority: $run/pki/ca.crt}}]
users: [{name: u, user: {client-certificate: $run/pki/$1.crt, client-key: $run/pki/$1.key}}]
END
}
from=$PWD
cd "$run/pki"
key ca
openssl req -x509 -new -key ca.key -subj /CN=test-ca -days 2 -out ca.crt
key sa
openssl ec -in sa.key -pubout -out sa.pub 2>/dev/null
certificate apiserver /CN=kube-apiserver "IP:127.0.0.1,IP:$address,IP:$api,DNS:kubernetes.default.svc" serverAuth
certificate kubelet-server "/O=system:nodes/CN=system:node:$node" "IP:$address,DNS:$node" serverAuth
certificate admin /O=system:masters/CN=admin "" clientAuth
certificate apikubelet /O=system:masters/CN=kube-apiserver-kubelet-client "" clientAuth
certificate manager /CN=system:kube-controller-manager "" clientAuth
certificate scheduler /CN=system:kube-scheduler "" clientAuth
certificate node "/O=system:nodes/CN=system:node:$node" "" clientAuth
cd "$from"
export KUBECONFIG=$run/admin.conf

# restrict_oom_score_adj: the kubelet's negative scores take CAP_SYS_RESOURCE, which a container that runs this may lack.
cat >"$run/containerd.toml" <<END
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "test.local/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["$KUBE_NODE_CNI"]
    conf_dir = "$run/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runsc]
    runtime_type = "io.containerd.runsc.v1"
[plugins.'io.containerd.nri.v1.nri']
  disable = true
[plugins.'io.containerd.internal.v1.opt']
  path = "$run/opt"
END
cat >"$run/cni/10-net.conflist" <<END
{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.77.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
start containerd -c "$run/containerd.toml"
start etcd --name n1 --data-dir "$run/etcd" --unsafe-no-fsync --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
  --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 --initial-cluster n1=http://127.0.0.1:2380
start kube-apiserver --etcd-servers=http://127.0.0.1:2379 --secure-port=443 --bind-address=0.0.0.0 --advertise-address="$address" \
  --cert-dir="$run/pki" --tls-cert-file="$run/pki/apiserver.crt" --tls-private-key-file="$run/pki/apiserver.key" \
  --client-ca-file="$run/pki/ca.crt" --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
  --service-cluster-ip-range="$services" --service-account-issuer=https://kubernetes.default.svc.cluster.local \
  --service-account-key-file="$run/pki/sa.pub" --service-account-signing-key-file="$run/pki/sa.key" \
  --kubelet-client-certificate="$run/pki/apikubelet.crt" --kubelet-client-key="$run/pki/apikubelet.key" \
  --kubelet-certificate-authority="$run/pki/ca.crt" --kubelet-preferred-address-types=InternalIP \
  --requestheader-client-ca-file="$run/pki/ca.crt" --requestheader-allowed-names=front-proxy-client \
  --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group --requestheader-extra-headers-prefix=X-Remote-Extra- \
  --allow-privileged=true --profiling=false --enable-priority-and-fairness=false
await 60 "containerd answers" ctr version
ctr -n k8s.io images import --local "$images" >"$run/logs/import.log" 2>&1 || {
  cat "$run/logs/import.log" >&2
  exit 1
}
say "images are imported"
await 120 "the API server is ready" kubectl get --raw /readyz
start kube-controller-manager --kubeconfig="$run/manager.conf" --authentication-kubeconfig="$run/manager.conf" --authorization-kubeconfig="$run/manager.conf" \
  --bind-address=127.0.0.1 --cert-dir="$run/pki" --kube-api-qps=500 --kube-api-burst=1000 --leader-elect=false --use-service-account-credentials=true \
  --flex-volume-plugin-dir="$run/volume-plugins" --service-account-private-key-file="$run/pki/sa.key" --root-ca-file="$run/pki/ca.crt" \
  --cluster-signing-cert-file="$run/pki/ca.crt" --cluster-signing-key-file="$run/pki/ca.key"
start kube-scheduler --kubeconfig="$run/scheduler.conf" --authentication-kubeconfig="$run/scheduler.conf" --authorization-kubeconfig="$run/scheduler.conf" \
  --bind-address=127.0.0.1 --cert-dir="$run/pki" --leader-elect=false
cat >"$run/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupsPerQOS: true
enforceNodeAllocatable: []
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
address: $address
readOnlyPort: 0
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $run/pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $run/pki/kubelet-server.crt
tlsPrivateKeyFile: $run/pki/kubelet-server.key
failSwapOn: false
maxOpenFiles: $(ulimit -Hn)
makeIPTablesUtilChains: false
resolvConf: ""
staticPodPath: $run/manifests
podLogsDir: $run/podlogs
volumePluginDir: $run/volume-plugins
nodeStatusUpdateFrequency: 2s
syncFrequency: 5s
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {memory.available: "1Mi", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%", imagefs.inodesFree: "0%"}
END
start kubelet --config="$run/kubelet.yaml" --kubeconfig="$run/node.conf" --hostname-override="$node" --node-ip="$address" --cert-dir="$run/pki" --v=2
await 60 "there is a default service account" kubectl get sa default
await 120 "the node has joined" kubectl get node "$node"
await 120 "the node is ready" kubectl wait --for=condition=Ready --timeout=1s "node/$node"
export KUBE_NODE_LOGS=$run/logs

# Not the shell's last command by exec: process 1 has to reap what shims leave.
status=0
"$@" || status=$?
exit "$status"
