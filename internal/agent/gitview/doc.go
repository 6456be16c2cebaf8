// Package gitview is what a session's commands see of their repository: in the isolated layout a private Git folder that
// lies at the base clone's path, in the shared one a skeleton over the base clone itself. It brings the base clone's
// changes in before a command (Refresh), and the command's work out after it (Harvest), in the jail of trusted Git.
//
// It keeps the doing half of promise P12: nothing that a command wrote is opened without looking at what it is, followed
// as a link, or believed without Git's own check. No two calls on a View may run at the same time, and none beside a
// command of its session. Only internal/agent may import it.
package gitview
