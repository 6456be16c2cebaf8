// Package gitwork shows that everyday Git work gives right results inside a sandbox (promise P11): the same commands
// run in a session of the real agent and in a linked worktree of an ordinary clone, and after each of them both must
// say the same about HEAD, refs, index, worktree and stashes; what the base clone then has is compared as well.
//
// sequences_test.go draws random sequences, commands_test.go has a table of every command that is promised, and what
// the layout "shared" can't do; outlive_test.go is about what stays when the sandbox, the session or the agent is gone.
// pair_test.go holds the two sides, harness_test.go the agent.
//
// Identity and dates are set in the commands' text, so equal work gives equal ids. Only tests live here; they need root.
package gitwork
