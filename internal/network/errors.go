package network

import "errors"

var (
	// ErrUnavailable: this node can't connect a sandbox that way; the message names what is missing and the remedy.
	ErrUnavailable = errors.New("no network can be had on this node")
	// ErrNotFound: nothing is recorded of the sandbox.
	ErrNotFound = errors.New("no network of this sandbox")
)
