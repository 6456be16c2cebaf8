package egress

import (
	"encoding/pem"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit/netlab"
)

// tools is what real programs are tried with.
type tools struct {
	certificate string // of https://example.com, PEM
	commit      string // of the repository at /repo.git
}

// serveTools serves a page and a repository over HTTP at an allowed host, over both families, and at another one, and a page
// over HTTPS.
func (w *world) serveTools() tools {
	w.t.Helper()
	testkit.Need(w.t, testkit.Program("curl"), testkit.Program("getent"))
	dir := testkit.StateDir(w.t)
	git := func(args ...string) string {
		cmd := exec.Command("git", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=T", "GIT_AUTHOR_EMAIL=t@localhost", "GIT_COMMITTER_NAME=T", "GIT_COMMITTER_EMAIL=t@localhost")
		out, err := cmd.CombinedOutput()
		require.NoError(w.t, err, string(out))
		return strings.TrimSpace(string(out))
	}
	git("init", "-q", "-b", "main", "work")
	git("-C", "work", "commit", "-q", "--allow-empty", "-m", "one")
	git("clone", "-q", "--bare", "work", "repo.git")
	mux := http.NewServeMux()
	mux.Handle("/repo.git/", &cgi.Handler{
		Path: filepath.Join(git("--exec-path"), "git-http-backend"),
		Env:  []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"},
	})
	mux.HandleFunc("/page", func(rw http.ResponseWriter, r *http.Request) { _, _ = rw.Write([]byte("page of " + r.Host + "\n")) })
	serve := func(address string) *httptest.Server {
		s := httptest.NewUnstartedServer(mux)
		s.Listener.Close()
		s.Listener = w.Listen(w.World, address)
		w.t.Cleanup(s.Close)
		return s
	}
	for _, address := range []string{netlab.Web + ":8080", "[" + netlab.Web6 + "]:8080", netlab.Other + ":8081"} {
		serve(address).Start()
	}
	https := serve(netlab.Web + ":443")
	https.StartTLS()
	w.zone.Set("example.com", netlab.Web)
	return tools{
		certificate: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: https.Certificate().Raw})),
		commit:      git("-C", "work", "rev-parse", "HEAD"),
	}
}

// tools has real programs reach what is listed over both families, and be refused at once elsewhere.
func (w *world) tools(listed, open string, x tools) {
	w.t.Helper()
	require.NoError(w.t, os.WriteFile(filepath.Join(w.worktree(listed), "ca.pem"), []byte(x.certificate), 0o644))
	allowed := []struct{ command, says string }{
		{"curl -sS http://web.example:8080/page", "page of web.example:8080"},
		{"curl -sS http://six.cdn.example:8080/page", "page of six.cdn.example:8080"},
		{"curl -sS --cacert ca.pem https://example.com/page", "page of example.com"},
		{"git ls-remote http://web.example:8080/repo.git HEAD", x.commit + "\tHEAD"},
		{"git ls-remote http://six.cdn.example:8080/repo.git HEAD", x.commit + "\tHEAD"},
		{"rm -rf /tmp/repo; git clone -q http://web.example:8080/repo.git /tmp/repo && git -C /tmp/repo rev-parse HEAD", x.commit},
		{"getent ahostsv4 web.example | head -n1 | cut -d' ' -f1", netlab.Web},
		{"getent ahostsv6 six.cdn.example | head -n1 | cut -d' ' -f1", netlab.Web6},
	}
	var script, want strings.Builder
	for _, c := range allowed {
		script.WriteString(c.command + "\n")
		want.WriteString(c.says + "\n")
	}
	r := w.run(listed, script.String())
	require.Equal(w.t, want.String(), r.GetStdoutText(), r.GetStderrText())
	require.Empty(w.t, r.GetRefusedDestinations())

	elsewhere := "curl -sS http://" + netlab.Other + ":8081/page"
	require.Contains(w.t, w.run(open, elsewhere).GetStdoutText(), "page of", "control: it answers those who may")
	script.Reset()
	for _, command := range []string{
		"curl -sS http://other.example:8080/page", elsewhere, "curl -sS --resolve web.example:8081:" + netlab.Other + " http://web.example:8081/page",
		"git ls-remote http://third.example:8080/repo.git", "git clone http://" + netlab.Other + ":8082/repo.git /tmp/stolen", "getent hosts fourth.example",
	} {
		script.WriteString(command + " && echo reached\n")
	}
	r = w.run(listed, script.String()+"true")
	require.Empty(w.t, r.GetStdoutText())
	require.ElementsMatch(w.t, []string{"other.example", "third.example", "fourth.example", netlab.Other + ":8081/tcp", netlab.Other + ":8082/tcp"}, r.GetRefusedDestinations())
	require.NotContains(w.t, r.GetStderrText(), "timed out")
}
