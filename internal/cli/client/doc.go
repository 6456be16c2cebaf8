// Package client is the public client (package client at the module's root) as the programs on the agent's own node use
// it, and what its errors mean to a person. The command line, the Bash tool and the demo share it; it imports the public
// client, the generated one, and internal/config for a socket's longest path.
package client
