// Package rpc serves the public API (api/sandbox/v1) on the exec socket: gRPC, gRPC-Web, Connect and plain JSON over
// HTTP/1.1 and h2c reach the same handlers, and server reflection is on.
//
// It keeps the door: the peer's uid (SO_PEERCRED) must be allowed, which is asked before a byte is read (door.go);
// connections, requests and the time to send one are bounded; a panic ends one call and not the agent. Every error of
// package agent becomes a Connect code in one table (codes.go). It decides nothing else.
// Only cmd may import it.
package rpc
