// Package hostfs is how the agent, which is root, touches folders of other users: opened once, without following a
// link, worked in by descriptor, and written as their owner. Only internal/agent and the packages below it may import
// it.
package hostfs

import "errors"

// ErrRefused: a path cannot be used as it is; the message names the path and the remedy.
var ErrRefused = errors.New("refused")
