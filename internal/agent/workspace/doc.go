// Package workspace looks at a session's repository and worktree on disk, before any sandbox exists: are the paths
// free of symlinks, who owns them, is the worktree a linked worktree of that repository; it creates the worktree
// where it is missing, and the scratch folder in it. It also tries whether a file system does what Git needs.
//
// Nothing here trusts a path twice: folders are opened once, with RESOLVE_NO_SYMLINKS (openat2(2)), and what is
// made in them is made by descriptor, as their owner. Git runs as the repository's owner with a pinned environment
// and a bound on time and output. Only internal/agent may import it. It keeps the workspace half of promise P11.
package workspace
