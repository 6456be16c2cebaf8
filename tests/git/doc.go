// Package git attacks the trusted side through a repository: a command in a sandbox writes into a worktree and its Git
// folder whatever may turn a later Git call against its caller, and that call is then made. The attacks are numbered as
// in the list that the design of workspaces stands on; each is one test, in both layouts (isolated, shared), and first a
// control case: the same attack on a plain linked worktree with plain Git, where it has to succeed. What the shared
// layout can't hold by its nature is asserted as what it is, a limit.
//
// Nothing is imported from here. What the tests attack is this machine's own sandbox and nothing else.
package git
