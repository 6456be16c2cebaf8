package kube

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func TestACommandOfASessionRunsWithAReceipt(t *testing.T) {
	deploy(t)
	s := newSession(t, "first")
	r := s.exec("a", "echo work >file && git add file && git commit -qm Work && id -u && ls /usr/local/libexec/sandbox-agent && jq --version")
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r)
	require.Zero(t, r.GetExitCode(), r.GetStderrText())
	require.Contains(t, r.GetStdoutText(), "\npid1\nreceiptd\njq-", "the sandbox's root file system is the image that the kubelet was asked to pull")
	require.NotEmpty(t, r.GetReceipt())

	got := s.get()
	require.Equal(t, "runc", got.GetSandbox().GetRuntime())
	require.Contains(t, containers(t), got.GetSandbox().GetId(), "the sandbox is containerd's, not the pod's")
	require.Contains(t, got.String(), deployed.rootfs.String(), "the session says which image, by digest")
	s.receiptsHold(got.GetSandbox().GetId())
	info, err := os.Stat(filepath.Join(s.worktree, "file"))
	require.NoError(t, err, "the worktree is at the same path on the node")
	require.EqualValues(t, 0o644, info.Mode().Perm())
}

func TestTheCheckOfTheReadmeFindsWhatTheNodeHas(t *testing.T) {
	deploy(t)
	kubectl(t, "-n", namespace, "rollout", "status", "daemonset/sandbox-agent")
	said, _ := command(t, "kubectl", "-n", namespace, "exec", "daemonset/sandbox-agent", "--", "sandbox-agent", "check") // a node may lack what this one needs not
	require.NotContains(t, said, "Defaulted container")
	require.Regexp(t, `(?m)^ok +runtime runc: hosts sandboxes`, said)
	require.Regexp(t, `(?m)^ok +runc: \S+/runc; \S+/containerd-shim-runc-v2; in containerd's own file system`, said, "the node's programs are seen from the pod")
	require.NotContains(t, said, "MISSING")
}

func TestTheAgentsPodHasNoMoreThanItNeeds(t *testing.T) {
	deploy(t)
	type pods struct {
		Spec struct {
			HostNetwork, HostIPC, HostPID, AutomountServiceAccountToken bool
			PriorityClassName                                           string
			Containers                                                  []struct {
				SecurityContext struct{ Privileged, ReadOnlyRootFilesystem bool }
				VolumeMounts    []struct{ MountPath string }
			}
		}
	}
	p := decode[pods](t, kubectl(t, "-n", namespace, "get", "pod", pod(t), "-o", "json"))
	require.False(t, p.Spec.HostNetwork)
	require.False(t, p.Spec.HostIPC)
	require.False(t, p.Spec.AutomountServiceAccountToken)
	require.Equal(t, "system-node-critical", p.Spec.PriorityClassName)
	require.Len(t, p.Spec.Containers, 1)
	require.True(t, p.Spec.Containers[0].SecurityContext.ReadOnlyRootFilesystem)
	for _, m := range p.Spec.Containers[0].VolumeMounts {
		require.NotContains(t, m.MountPath, "serviceaccount")
	}
}

func TestTheDaemonSetIsOnEveryNodeAndGivesWayOneAtATime(t *testing.T) {
	deploy(t)
	type probe struct{ HTTPGet struct{ Path string } }
	type daemonSet struct {
		Spec struct {
			UpdateStrategy struct {
				Type          string
				RollingUpdate struct{ MaxUnavailable, MaxSurge int }
			}
			Template struct {
				Metadata struct{ Annotations map[string]string }
				Spec     struct {
					Tolerations []map[string]string
					Containers  []struct {
						StartupProbe, ReadinessProbe, LivenessProbe probe
						Resources                                   struct{ Requests, Limits map[string]string }
					}
				}
			}
		}
	}
	d := decode[daemonSet](t, kubectl(t, "-n", namespace, "get", "daemonset", "sandbox-agent", "-o", "json")).Spec
	require.Equal(t, "RollingUpdate", d.UpdateStrategy.Type)
	require.Equal(t, 1, d.UpdateStrategy.RollingUpdate.MaxUnavailable)
	require.Zero(t, d.UpdateStrategy.RollingUpdate.MaxSurge, "two agents can't have one state folder")
	require.Equal(t, []map[string]string{{"operator": "Exists"}}, d.Template.Spec.Tolerations, "every taint")
	require.Equal(t, map[string]string{"prometheus.io/scrape": "true", "prometheus.io/port": "9464", "prometheus.io/path": "/metrics"}, only(d.Template.Metadata.Annotations, "prometheus.io/"))
	agent := d.Template.Spec.Containers[0]
	require.Equal(t, []string{"/healthz", "/readyz", "/healthz"}, []string{agent.StartupProbe.HTTPGet.Path, agent.ReadinessProbe.HTTPGet.Path, agent.LivenessProbe.HTTPGet.Path})
	require.NotEmpty(t, agent.Resources.Requests["cpu"])
	require.NotEmpty(t, agent.Resources.Requests["memory"])
	require.NotEmpty(t, agent.Resources.Limits["memory"])
	require.NotContains(t, agent.Resources.Limits, "cpu", "it would delay every command")
}

// only are the entries whose names begin so.
func only(all map[string]string, prefix string) map[string]string {
	some := map[string]string{}
	for name, value := range all {
		if strings.HasPrefix(name, prefix) {
			some[name] = value
		}
	}
	return some
}

// get asks for a page, and answers with it.
func get(t *testing.T, url string, status int) string {
	t.Helper()
	res, err := http.Get(url)
	require.NoError(t, err)
	b, err := io.ReadAll(res.Body)
	require.NoError(t, errors.Join(err, res.Body.Close()))
	require.Equal(t, status, res.StatusCode, "%s: %s", url, b)
	return string(b)
}

// metricsAddress is where the agent's pod serves them.
func metricsAddress(t *testing.T) string {
	t.Helper()
	return "http://" + kubectl(t, "-n", namespace, "get", "pod", pod(t), "-o", "jsonpath={.status.podIP}:9464")
}

func TestMetricsAndHealthAreServedAtThePodsAddress(t *testing.T) {
	deploy(t)
	s := newSession(t, "measured")
	require.Equal(t, sandboxv1.ExecResult_EXITED, s.exec("a", "git commit -q --allow-empty -m Work").GetStatus())
	address := metricsAddress(t)
	queued := make(chan error, 1)
	require.Equal(t, sandboxv1.ExecResult_EXITED, s.during("b", func() {
		go func() {
			_, err := s.ask("c", "true")
			queued <- err
		}()
		until(t, "one command runs and one waits", func() bool {
			m := get(t, address+"/metrics", http.StatusOK)
			return strings.Contains(m, "\nsandbox_agent_exec_queue_length 1\n") && strings.Contains(m, "\nsandbox_agent_execs_running 1\n")
		})
	}).GetStatus())
	require.NoError(t, <-queued)
	get(t, address+"/healthz", http.StatusOK)
	get(t, address+"/readyz", http.StatusOK)
	metrics := get(t, address+"/metrics", http.StatusOK)
	for _, line := range []string{
		`sandbox_start_seconds_bucket{runtime="runc",le="\+Inf"} [1-9]`,                           // sandbox start
		`exec_seconds_bucket{le="\+Inf"} [1-9]`, `exec_overhead_seconds_bucket{le="\+Inf"} [1-9]`, // exec latency
		`boundary_wait_seconds_bucket{le="\+Inf"} [1-9]`,
		`execs_total{status="EXITED"} [1-9]`, // outcomes by status
		`sessions{state="UNCERTAIN"} 0`,
		`exec_queue_length 0`,
		`harvest_seconds_count{result="\w+"} [1-9]`,
		`connections_refused_total 0`,
		`sandboxes_evicted_total{reason="idle"} 0`,
		`journal_sync_seconds_count [1-9]`,
		`filesystem_used_bytes{folder="workspaces",path="` + workspaces + `"} [1-9]`, // workspace bytes
		`build_info{version=".+"} 1`,
	} {
		require.Regexp(t, `(?m)^sandbox_agent_`+line, metrics)
	}
}

// during starts a command that goes on until it is let go, does something meanwhile, and asks for the command's result.
func (s *session) during(execID string, do func()) *sandboxv1.ExecResult {
	s.t.Helper()
	begun, end := filepath.Join(s.worktree, execID+"-begun"), filepath.Join(s.worktree, execID+"-end")
	type answer struct {
		r   *sandboxv1.ExecResult
		err error
	}
	answers := make(chan answer, 1)
	text := fmt.Sprintf("touch %s; until [ -e %s ]; do sleep 0.05; done; echo survived", begun, end)
	go func() {
		r, err := s.ask(execID, text)
		answers <- answer{r, err}
	}()
	until(s.t, "the command has begun", func() bool { _, err := os.Stat(begun); return err == nil })
	do()
	require.NoError(s.t, os.WriteFile(end, nil, 0o600))
	// The caller's connection may have been given up: the same id has the same answer, and runs nothing again.
	a := <-answers
	if a.err != nil {
		s.t.Logf("asking again, for %v", a.err)
		return s.exec(execID, text)
	}
	return a.r
}

// outlives checks on a new session that a command, and its sandbox, go on while the agent's pod is replaced.
func outlives(t *testing.T, id string, replace func(old string)) {
	t.Helper()
	deploy(t)
	survives(t, newSession(t, id), replace)
}

func survives(t *testing.T, s *session, replace func(old string)) {
	t.Helper()
	before := s.get()
	old := pod(t)
	oldUID := uid(t, old)
	r := s.during("long", func() {
		replace(old)
		ready(t)
		require.NotEqual(t, oldUID, uid(t, pod(t)), "another pod runs the agent")
		require.Equal(t, "long", s.get().GetRunningExecId(), "the new agent knows what runs")
	})
	require.Equal(t, sandboxv1.ExecResult_EXITED, r.GetStatus(), r)
	require.Equal(t, "survived\n", r.GetStdoutText())
	require.NotEmpty(t, r.GetReceipt())
	after := s.get()
	require.Equal(t, before.GetSandbox().GetId(), after.GetSandbox().GetId(), "the sandbox is the same")
	require.Equal(t, before.GetGeneration(), after.GetGeneration())
	require.Equal(t, "next\n", s.exec("next", "echo next").GetStdoutText())
	s.receiptsHold(after.GetSandbox().GetId())
}

func TestACommandOutlivesARolloutAndItsReceiptArrives(t *testing.T) {
	outlives(t, "rollout", func(string) {
		kubectl(t, "-n", namespace, "patch", "daemonset", "sandbox-agent", "-p", `{"spec":{"template":{"metadata":{"annotations":{"rolled":"yes"}}}}}`)
	})
}

func TestACommandOutlivesAPodThatIsDeletedByForce(t *testing.T) {
	outlives(t, "force", func(old string) {
		kubectl(t, "-n", namespace, "delete", "pod", old, "--force", "--grace-period=0")
		until(t, "the DaemonSet has made another pod", func() bool {
			out, err := command(t, "kubectl", "-n", namespace, "get", "pods", "-l", "app.kubernetes.io/name=sandbox-agent", "--field-selector=status.phase=Running", "-o", "name")
			return err == nil && out != "" && !strings.Contains(out, old)
		})
	})
}

// probe runs the CronJob once, and answers whether it succeeded and with its log.
func probe(t *testing.T) (succeeded bool, said string) {
	t.Helper()
	kubectl(t, "-n", namespace, "create", "job", "--from=cronjob/sandbox-egress-probe", "try")
	type jobs struct {
		Status struct{ Succeeded, Failed int }
	}
	until(t, "the probe ends", func() bool {
		st := decode[jobs](t, kubectl(t, "-n", namespace, "get", "job", "try", "-o", "json")).Status
		succeeded = st.Succeeded == 1
		return st.Succeeded+st.Failed > 0
	})
	said = kubectl(t, "-n", namespace, "logs", "job/try", "-c", "probe")
	kubectl(t, "-n", namespace, "delete", "job", "try")
	return succeeded, said
}

func TestTheEgressProbeRunsAsACronJob(t *testing.T) {
	deploy(t)
	succeeded, said := probe(t)
	require.True(t, succeeded, said)
	require.Contains(t, said, "metadata does not")
	require.NotContains(t, said, "\nNO")
}
