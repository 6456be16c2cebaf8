// Package nodecheck says whether a node has what the promises stand on, and what its operator can do where it does not.
//
// Looking is apart from deciding. Probes (probe_*.go) really try each thing, for a bounded time, and leave nothing behind:
// namespaces end with the process or thread that made them, mounts are never attached anywhere else, and the one file that
// is written has no name. The kernel may load a module for a probe, as it does at the first use. What probes saw are Facts;
// Judge (judge.go) makes verdicts of them without a look at the node, by the feature table (feature.go), which
// docs/host-requirements.md shows.
//
// What takes namespaces is tried as receiptd does it: by a child that is this program again (Init), as root of a user
// namespace whose ids are nobody's on the node, with no_new_privs, with receiptd's capabilities and under its seccomp filter.
//
// The agent (CheckNode, and its refusal to start) and the command line import it.
package nodecheck
