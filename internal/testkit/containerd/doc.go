// Package containerd starts a containerd of the test's own: real programs from scripts/containerd.sh, with a root, a state
// and a socket of its own, which can be killed, stopped and started again. At the test's end nothing of it is left: no
// container, no shim, no mount, or the test fails.
package containerd
