// Package client is the public API's client for a unix socket, and what its errors mean to a caller. The command line
// and the demo share it; it imports the generated client, and internal/config for a
// socket's longest path.
package client
