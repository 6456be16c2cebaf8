// Package metrics counts what the agent does, and serves that to Prometheus beside two answers for a kubelet: whether the agent is
// alive, and whether it takes work.
//
// No metric has a label whose values somebody else chooses: no session, no path of a command's, no host. What a node has of each is
// bounded by the names in this package, the states of a session and the node's own configuration.
package metrics
