// Package listeners decides what a command's packets may reach: from a list of management listeners to the rules that keep
// every command away from them (promise P10). It is pure; package internal/network puts the rules into the kernel.
//
// The rules stand on the node's side of a sandbox's interface, where nothing inside the sandbox can touch them, be it root in
// a guest. They come in two layers. Ingress rules see a packet as the sandbox sent it, and know which sandbox that was.
// Routed rules see it where the node is about to take it in or to forward it, after every translation of addresses: a
// service's address that leads to the node is caught there. What is refused is answered, with a reset or "administratively
// prohibited", so that a command fails at once instead of waiting.
//
// It imports the standard library only.
package listeners
