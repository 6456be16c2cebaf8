// Package network connects sandboxes: it gives each one a network namespace of its own, with an interface that leads to the
// node, keeps the rules on the node's side of that interface (package listeners), and takes everything away again.
//
// A namespace is made by the runtime together with the sandbox's user namespace, which owns it: receiptd then may destroy
// the sockets that a command left (P3), and a command, which is in a user namespace below and has no capability, may do
// nothing to it. Connect binds it to a path by the sandbox's id and connects it in one of two ways: "bridge" makes a veth
// pair and routes it, by netlink and nftables alone; "cni" has the node's CNI plugins do it. Remove undoes both. What there
// may be of a sandbox is recorded before it is made, so that a crash leaves nothing that List does not name.
//
// The rules are in tables of the agent's own. Nothing else of the node's firewall is ever touched, so a firewall that drops
// what is forwarded has to let sandboxes through.
//
// It keeps promise P10 for everything that is reached over a network. It may import pkg/*, internal/runtime and nothing of
// the agent.
package network
