// Package mcp tests the tool as an AI agent's client has it: the real "sandbox-agent mcp" with the real agent behind it,
// spoken to by the official SDK's client, by the MCP Inspector's command line, and by bytes on a pipe where a client would
// not send what is tried.
package mcp
