// Package mcp is the one tool that an AI agent gets: an MCP server with the tool "bash", for one session of one
// sandbox-agent, over one connection (standard input and output).
//
// The trusted side that starts the process binds the session; a caller of the tool gives a command and a time, and nothing
// else. Every command goes to the agent's socket: this package starts no process and can't (tests/layout), so that without
// an agent there is no shell (promise P14).
//
// Promises kept here: P7 as a caller keeps it. Each request has one exec id, made of what is this process's alone and the
// request's own id: the request delivered again, and a lost connection to the agent asked again, never run anything twice.
// What is cancelled, and what runs when the caller goes away, is ended with evidence.
//
// The parts: stdio.go is the connection, describe.go what the model is told before, arguments.go what it may give, call.go
// one request from its exec id to what became of it, answer.go what the model is told after. Only internal/cli imports it.
package mcp
