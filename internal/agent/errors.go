package agent

import (
	"errors"
	"fmt"
)

// Every error that a caller gets wraps exactly one of these; internal/rpc maps them to Connect codes.
var (
	// ErrInvalid: the request is wrong whatever the state; the message names the field and the remedy.
	ErrInvalid = errors.New("invalid request")
	// ErrNotFound: no such session or exec.
	ErrNotFound = errors.New("not found")
	// ErrPrecondition: a stale owner_epoch or generation, or a workspace that is still reserved.
	ErrPrecondition = errors.New("refused")
	// ErrExists: the id was used for another request.
	ErrExists = errors.New("already used")
	// ErrExhausted: the queue is full, or there are too many sessions.
	ErrExhausted = errors.New("limit reached")
	// ErrUnavailable: no sandbox could be had, or the agent is shutting down.
	ErrUnavailable = errors.New("unavailable")
	// ErrUnimplemented: a later version of the agent will have it.
	ErrUnimplemented = errors.New("not implemented by this version")
	// ErrDataLoss: something that was durable is gone or does not verify any more.
	ErrDataLoss = errors.New("durable data is missing or does not verify")
)

// errAbandoned ends an exec's goroutine at the agent's own shutdown: the intent stays open for the next start.
var errAbandoned = errors.New("the agent is shutting down: ask again with the same exec_id")

// errNoBoundary: a receipt verifies, and does not show that nothing of its command is left (P3).
var errNoBoundary = errors.New("no proof of the command's end")

// errUnrecorded: the journal refused an intent, so the command was not handed over.
var errUnrecorded = errors.New("recording the intent")

// errShutDown: the agent is closing, and the next one goes on with what was asked.
var errShutDown = fmt.Errorf("%w: the agent is shutting down: ask again", ErrUnavailable)
