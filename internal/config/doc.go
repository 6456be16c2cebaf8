// Package config is the agent's one configuration file: strict YAML in which every key is optional, with the
// defaults, the allowed ranges and the rules for workspace paths.
//
// It decides and touches nothing but the file that it is told to read, so that everything here is testable
// without a node. It keeps the operator's half of promise P16: each limit has a default and an upper bound.
// Everything under internal/ and cmd/ may import it; it imports nothing of this module.
package config
