package attack

import (
	"fmt"
	"strings"
	"time"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// The limits of the session that is attacked. Under gVisor a process takes some 4 MiB of the sandbox's memory: with 100 of them that limit is
// met first now and then, and the sandbox ends.
const (
	Pids      = 64
	MemoryMiB = 256
)

// held has a command wait until the runner has looked at it.
const held = "\nwhile [ -e gate ]; do :; done; echo tried 1"

// Table are all attacks. The ones that spoil the worktree come last.
var Table = slicesOf(boundary, secrets, reach, files, exhaustion, spoils)

func slicesOf(parts ...[]Attack) (all []Attack) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// survivor is a process that is to stay behind.
func survivor(name, start string) Attack {
	return Attack{Promise: "P3", Name: "a process stays " + name, Command: start + held, Stays: true}
}

var boundary = []Attack{
	survivor("in the background", `(exec -a {word} {helper} stay) &`),
	survivor("detached, double-forked, in a session of its own", `(setsid bash -c '(exec -a {word} {helper} stay) & disown' </dev/null >/dev/null 2>&1 &)`),
	survivor("behind nohup, holding the output open", `nohup bash -c 'exec -a {word} {helper} stay' 2>/dev/null &`),
	survivor("deaf to every signal", `(exec -a {word} {helper} stay deaf) &`),
	survivor("in a process group of its own", `set -m; (exec -a {word} {helper} stay) & set +m`),
	survivor("under a reaper of its own", `(exec -a {word} {helper} stay "under a reaper") &`),
	survivor("as threads whose leader is gone", `(exec -a {word} {helper} stay "without its leader") &`),
	survivor("traced by another one", `(exec -a {word} {helper} stay traced) &`),
	{
		Promise: "P3", Name: "a process stays and is stopped", Shared: true, Stays: true,
		Command: `bash -c 'kill -STOP $$; :' {word} &` + held,
	},
	{
		Promise: "P3", Name: "every generation is deaf to the end of the time", Stays: true, Timeout: 2 * time.Second,
		Command: `trap "" TERM HUP INT
bash -c 'trap "" TERM; (setsid bash -c "exec -a {word} {helper} stay deaf" &); exec -a {word} {helper} stay deaf' &
while :; do :; done`,
		Must:     Must{End: []sandboxv1.ExecResult_Status{sandboxv1.ExecResult_TIMED_OUT}, Unsaid: true},
		Needless: "without a sandbox there is nobody who would end it",
	},
	{Promise: "P3", Name: "processes fork their successors and end", Command: `exec -a {word} {helper} comet`},
	{Promise: "P3", Name: "a namespace of one's own", Command: `{helper} namespaces`},
	{
		Promise: "P3", Name: "signals to process 1",
		Command: `for n in $(seq 1 64); do kill -$n 1 2>/dev/null && echo got to send signal $n to process 1; done; echo tried 64`,
	},
	{
		Promise: "P3", Name: "a signal to everybody", Command: `kill -9 -1; echo tried 1`,
		Must:     Must{End: anyEnd, Unsaid: true},
		Needless: "without a sandbox it ends whatever the user has on the machine",
	},
	{
		Promise: "P3", Name: "shared memory, queues and sockets are left to the next command",
		Command: `{helper} leave`, Then: `{helper} left`,
	},
	{
		Promise: "P4", Name: "commands beside each other", AtOnce: 4,
		Command: `mkdir lock 2>/dev/null || echo got to run beside another command; sleep 0.2; rmdir lock 2>/dev/null; echo tried 1`,
	},
}

var secrets = []Attack{
	{
		Promise: "P9", Name: "reading, tracing and changing process 1",
		Command: `{helper} process 1`,
	},
	{
		Promise: "P9", Name: "seeing process 1", Concession: "pid1 is not visible",
		Command: `[ -e /proc/1/stat ] && echo got to see process 1
for n in mnt pid user net; do readlink /proc/1/ns/$n >/dev/null 2>&1 && echo got to see the number of process 1\'s $n namespace; done; echo tried 5`,
	},
	{
		Promise: "P9", Name: "looking for receipts, keys, the journal and sockets",
		Command:  `{helper} look {state} {state}/receipts {state}/keys {state}/journal {socket} /.sandbox /.sandbox/receipts /.sandbox/control /.sandbox/bin`,
		Needless: "on the node only root may look into these",
	},
	{
		Promise: "P9", Name: "writing where receipts are",
		Command: `mkdir -p {state}/receipts /.sandbox/receipts 2>/dev/null
{helper} open {state} {state}/receipts /.sandbox /.sandbox/receipts`,
		Needless: "on the node only root may write there",
	},
	{
		Promise: "P9", Name: "looking at the node's files",
		Command: `{helper} look {secret} {node} /run/containerd /run/systemd /run/dbus/system_bus_socket /sys/kernel/debug /sys/fs/cgroup/cgroup.procs`,
	},
	{
		Promise: "P9", Name: "looking at devices and the kernel",
		Command: `{helper} look /dev/mem /dev/kmsg {making} /dev/kvm /dev/vsock /dev/loop0 /dev/loop-control /dev/userfaultfd /proc/kcore /proc/kmsg /proc/timer_list
for f in /proc/keys /proc/kallsyms; do [ -n "$(head -c 1 $f 2>/dev/null)" ] && echo got what $f says; done; echo tried 2`,
	},
	{
		Promise: "P9", Name: "descriptors that the agent left open", Command: `{helper} descriptors`,
		Needless: "without an agent there are none",
	},
	{
		Promise: "P9", Name: "other processes of the node",
		Command: `grep -lsxz {canary} /proc/[0-9]*/cmdline | sed 's/^/got to see /'; echo tried 1`,
	},
	{
		Promise: "P2", Name: "a receipt of one's own making",
		Command:  `mkdir -p receipts .sandbox; for d in . receipts .sandbox /tmp; do echo '{}' > $d/{word}.json; done; echo tried 1`,
		Needless: "nobody looks for receipts there; that the agent answers for no such exec is asked",
	},
}

var reach = []Attack{
	{
		Promise: "P10", Name: "listeners of the node",
		Command: `{helper} connect tcp:{tcp} udp:{udp} abstract:{abstract} unix:{unix}`,
	},
	{
		Promise: "P10", Name: "management sockets",
		Command:  `{helper} connect unix:{socket} unix:/run/containerd/containerd.sock unix:/run/docker.sock unix:/run/systemd/private unix:/.sandbox/control/receiptd.sock tcp:127.0.0.1:10250 tcp:127.0.0.1:44772 tcp:127.0.0.1:18080`,
		Needless: "on the node only root may connect to these, and not every node has them",
	},
	{
		Promise: "P10", Name: "virtual machines' sockets",
		Command:  `{helper} connect vsock:0:1024 vsock:1:1024 vsock:2:1024 vsock:3:1024 vsock:1:1025 vsock:1:1026`,
		Needless: "not every node has a listener there",
	},
	{Promise: "P10", Name: "sockets that know no network namespace", Command: `{helper} sockets`},
	{
		Promise: "P10", Name: "system calls of a foreign ABI",
		Command: `for c in socket getpid x32; do ({helper} foreign $c) 2>/dev/null; done; echo tried 3`,
	},
}

var files = []Attack{
	{Promise: "P11", Name: "set-id files and devices", Command: `{helper} setid`},
	{
		Promise: "P11", Name: "a set-id file that stays",
		Command: `cp /bin/true stays && chmod 6755 stays; install -m 4755 /bin/true stays2; echo tried 2`,
	},
	{
		Promise: "P11", Name: "writing outside of the worktree",
		Command: `{helper} open {secret} {beside} / /usr /usr/bin /etc /etc/passwd /etc/ld.so.cache /bin/bash /home /var /run /proc/sys/kernel/core_pattern /proc/sys/kernel/hostname /proc/sysrq-trigger /proc/sys/vm/drop_caches /sys/kernel/uevent_helper /sys/fs/cgroup`,
	},
	{
		Promise: "P11", Name: "moving sealed paths away",
		Command: `mv .git y && mkdir .git; rm -rf y; echo 'gitdir: /tmp/evil' > .git; rm -f .git; ln -sf /tmp/evil .git
mv {repo}/.git {repo}/y; mkdir -p {repo}/.git/hooks; mv {repo} {repo}.old; mv {repo}/.git/hooks {repo}/.git/h; mv {repo}/.git/config {repo}/.git/c
mv {repo}/.git/objects {repo}/.git/o2; mkdir -p {repo}/.git/objects/info; echo /tmp/evil > {repo}/.git/objects/info/alternates; mv {repo}/.git/worktrees {repo}/.git/w2
echo tried 1`,
	},
	{
		Promise: "P11", Name: "writing into Git's configuration and hooks",
		Command: `for d in {repo}/.git "$(git rev-parse --git-common-dir)" "$(git rev-parse --git-dir)"; do
  printf '[core]\n\tfsmonitor = touch /tmp/pwned\n' > $d/config.worktree; printf '[core]\n\tfsmonitor = touch /tmp/pwned\n' >> $d/config
  mkdir -p $d/hooks; printf '#!/bin/sh\n' > $d/hooks/post-checkout; chmod +x $d/hooks/post-checkout; echo /tmp > $d/commondir; echo /tmp > $d/objects/info/alternates
done; git config core.hooksPath /tmp/evil; git config --worktree core.hooksPath /tmp/evil
echo tried 1`,
	},
	{
		Promise: "P11", Name: "sealed files by other names",
		Command: `for f in {repo}/.git/config .git; do
  ln $f linked && echo got a link to $f; echo x >> /proc/self/cwd/$f; exec 9<$f && echo x > /proc/self/fd/9
  chmod 666 $f && echo got to change the mode of $f; touch -d @1 $f && echo got to change the time of $f; truncate -s 0 $f; rm -f linked
done 2>/dev/null; echo tried 2`,
	},
}

// zeros is the hash of 64 MiB of nothing, between two words.
const (
	zerosMiB  = 64
	zerosHash = "{zeros}"
)

var exhaustion = []Attack{
	{
		Promise: "P13", Name: "a flood of output",
		Command:  fmt.Sprintf(`echo tried 1; head -c %d /dev/zero; printf tail`, zerosMiB<<20),
		Must:     Must{Bytes: zerosMiB<<20 + 12, SHA256: zerosHash},
		Needless: "without an agent nobody counts",
	},
	{
		Promise: "P16", Name: "processes", Command: `{helper} fork {pids}`,
	},
	{
		Promise: "P16", Name: "a bomb of shells that ends with its time", Timeout: 2 * time.Second,
		Command:  `ulimit -u 400 2>/dev/null; f() { sleep 5 & [ $1 -gt 0 ] && { f $(($1-1)) & f $(($1-1)) & }; wait; }; f 7; sleep 30`,
		Must:     Must{End: anyEnd, Unsaid: true},
		Needless: "without a sandbox there is nobody who would end it",
	},
	{
		Promise: "P16", Name: "memory", Command: `exec {helper} memory {memory}`, Concession: "a command that reaches its memory limit ends alone",
		Must: Must{End: []sandboxv1.ExecResult_Status{sandboxv1.ExecResult_EXITED, sandboxv1.ExecResult_SIGNALED, sandboxv1.ExecResult_KILLED}, Unsaid: true, OOM: true},
	},
	{Promise: "P16", Name: "the room of /dev/shm", Command: `{helper} fill /dev/shm {disk}`},
	{Promise: "P16", Name: "the room of /tmp", Command: `{helper} fill /tmp {disk}`},
	{Promise: "P16", Name: "the room of HOME", Command: `{helper} fill "$HOME" {disk}`},
	{
		Promise: "P16", Name: "the number of files in /tmp", Command: `{helper} files /tmp {files}`, Concession: "the files of /tmp, HOME and /dev/shm are bounded in number",
	},
}

// spoils leave a worktree that ordinary Git can't work with.
var spoils = []Attack{
	{
		Promise: "P12", Name: "configuration that makes trusted Git run a program",
		Command: `printf '#!/bin/sh\ntouch {beside}/ran {worktree}/ran\n' > evil; chmod +x evil
printf '* filter=evil diff=evil merge=evil\n' > .gitattributes
git config core.fsmonitor "$PWD/evil"; git config filter.evil.clean "$PWD/evil"; git config diff.evil.textconv "$PWD/evil"; git config core.hooksPath "$PWD"
echo x >> README; echo tried 1`,
		Git: [][]string{{"status"}, {"diff"}},
	},
	{
		Promise: "P12", Name: "a pipe in the place of the index",
		Command: `rm -f "$(git rev-parse --git-dir)/index"; mkfifo "$(git rev-parse --git-dir)/index"; echo tried 1`,
		Git:     [][]string{{"status"}},
	},
}

// words replaces what stands in braces.
func (a Attack) words(w map[string]string) Attack {
	var pairs []string
	for k, v := range w {
		pairs = append(pairs, "{"+k+"}", v)
	}
	r := strings.NewReplacer(pairs...)
	a.Command, a.Then, a.Must.SHA256 = r.Replace(a.Command), r.Replace(a.Then), r.Replace(a.Must.SHA256)
	return a
}
