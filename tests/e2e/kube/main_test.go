package kube

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// programsEnv is set in the node, and names the folder with the programs that were built outside of it.
const programsEnv = "SANDBOX_TEST_KUBE_PROGRAMS"

// unable says why there is no node; the tests are skipped then.
var unable error

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(programsEnv) != "" || flag.Lookup("test.list").Value.String() != "" {
		os.Exit(m.Run())
	}
	code, err := inNode()
	if errors.As(err, new(unableError)) {
		unable = err
		code, err = m.Run(), nil
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// unableError says what is not there.
type unableError struct{ why string }

func (e unableError) Error() string { return e.why }

// inNode runs the tests in a node, and fails when the machine is not then as it was before.
func inNode() (code int, err error) {
	root, err := testkit.ModuleRoot()
	if err != nil {
		return 1, err
	}
	if os.Geteuid() != 0 {
		return 1, unableError{"run the tests as root"}
	}
	kube, err := built(filepath.Join(root, "scripts", "kube.sh"), "-n")
	if err != nil {
		return 1, err
	}
	if _, err := built(filepath.Join(root, "scripts", "containerd.sh"), "-n", "containerd", "runc", "cni"); err != nil {
		return 1, err
	}
	dir, err := os.MkdirTemp("/var/tmp", "sandbox-agent-e2e-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	images, err := prepare(root, dir, strings.TrimSpace(kube))
	if err != nil {
		return 1, err
	}
	before := machine()
	self, err := os.Executable()
	if err != nil {
		return 1, err
	}
	cmd := exec.Command(filepath.Join(root, "scripts", "kube-node.sh"), append([]string{filepath.Join(dir, "pause.tar"), self}, os.Args[1:]...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), programsEnv+"="+dir, imagesEnv+"="+images)
	err = cmd.Run()
	if left := slices.DeleteFunc(machine(), func(s string) bool { return slices.Contains(before, s) }); len(left) > 0 {
		return 1, fmt.Errorf("the node has left something on the machine:\n  %s", strings.Join(left, "\n  "))
	}
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// built is what a script prints of what has been built; nothing is built for a test.
func built(script string, args ...string) (string, error) {
	cmd := exec.Command(script, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", unableError{strings.TrimSpace(stderr.String())}
	}
	return string(out), nil
}

// prepare makes what takes a network, or Go: the node has neither. It answers with the folder of the images.
func prepare(root, dir, kube string) (images string, err error) {
	if err := testkit.BuildAgent(filepath.Join(dir, "sandbox-agent")); err != nil {
		return "", err
	}
	pause, err := os.ReadFile(filepath.Join(kube, "pause"))
	if err != nil {
		return "", err
	}
	if err := writePause(filepath.Join(dir, "pause.tar"), pause); err != nil {
		return "", err
	}
	return buildImages(root, dir)
}

// machine is what a node could leave: mounts, cgroups and folders of its own, and links.
func machine() (all []string) {
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && (strings.Contains(line, "sandbox-agent-kube-") || strings.HasPrefix(f[4], "/var/lib/kubelet")) {
			all = append(all, "mount "+f[4])
		}
	}
	for _, pattern := range []string{
		"/sys/fs/cgroup/*/sandbox-agent-kube-*", "/sys/fs/cgroup/sandbox-agent-kube-*", "/sys/fs/cgroup/*/kubepods", "/sys/fs/cgroup/kubepods",
		"/var/tmp/sandbox-agent-kube-*", "/var/lib/kubelet", "/var/lib/sandbox-agent", "/run/sandbox-agent", "/sys/class/net/cni*",
	} {
		found, _ := filepath.Glob(pattern)
		all = append(all, found...)
	}
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"} {
		b, _ := os.ReadFile(filepath.Join("/proc/sys", name))
		all = append(all, name+" = "+strings.TrimSpace(string(b)))
	}
	return all
}

// need skips a test, or fails it where tests must run, when there is no node.
func need(t *testing.T) {
	t.Helper()
	if unable == nil {
		return
	}
	if os.Getenv(testkit.MustRun) == "1" {
		t.Fatalf("this test needs a Kubernetes node, and %s=1 forbids to skip it: %v", testkit.MustRun, unable)
	}
	t.Skipf("this test needs a Kubernetes node: %v", unable)
}
