// Package brokers holds two brokers for sandboxes as configurations of nginx, with manifests for Kubernetes, and the tests that
// run them with a real nginx and a real Git; see docs/brokers.md. There is no program in it, and nobody imports it.
package brokers
