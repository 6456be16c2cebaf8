package rpc

import "errors"

var (
	// ErrSocket: the exec socket can't be made; the message names the path and the remedy.
	ErrSocket = errors.New("exec socket")
	// errPeer: the peer's uid is not in socket.allow_uids.
	errPeer = errors.New("peer not allowed")
)
