// Package pid1 is what runs as PID 1 of one command's PID namespace, and the launcher that becomes the command.
//
// The binary is started by pkg/nsexec, inside fresh user, PID, mount, IPC and UTS namespaces, once per command and
// ahead of it. It links the standard library and x/sys/unix only, and avoids package os, whose import alone costs
// size and start-up time.
//
// Two processes of it exist in a namespace:
//
//   - pid1 mounts the command's own /proc, starts the launcher, reaps orphans, keeps the time,
//     re-checks the seals, the content of sealed files included, and reports. It keeps CAP_KILL and
//     CAP_DAC_READ_SEARCH. When it exits, the kernel ends what is left.
//   - the launcher joins the command's cgroup, gives up every privilege and waits; handed the
//     command, it executes bash in its own place. Being a process of its own, made beforehand, it costs the command
//     neither a fork nor a cgroup migration (10 ms and more on cgroup v1), and it is killable by the memory limit
//     from its first instruction on, without pid1 ever being.
//
// It keeps promises P3 (with pkg/nsexec), P9, P10 (seccomp's families) and P16 (limits reach neither pid1 nor
// receiptd).
package pid1
