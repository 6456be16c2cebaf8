// Package kube deploys the DaemonSet on a real Kubernetes and looks at what becomes of sandboxes there: etcd, API server,
// controller manager, scheduler, kubelet and containerd of the test's own, in namespaces of their own (scripts/kube-node.sh).
// One node is brought up for the whole package: TestMain runs the test program a second time, in it. What scripts/kube.sh
// and scripts/containerd.sh build has to be there; without it the tests are skipped, or fail where tests must run.
package kube
