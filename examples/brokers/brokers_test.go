package brokers

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// broker is one of the two, run by nginx from a folder of its own.
type broker struct {
	t     *testing.T
	dir   string
	addr  string
	nginx *exec.Cmd
}

// start runs nginx with a configuration, not as root, and a test's files in the place of the site's. In these, DIR is the
// broker's folder.
func start(t *testing.T, text, listen string, files map[string]string) *broker {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Program("nginx"))
	b := &broker{t: t, dir: testkit.StateDir(t), addr: freeAddress(t)}
	require.NoError(t, os.Mkdir(filepath.Join(b.dir, "run"), 0o755))
	require.NoError(t, os.Chown(filepath.Join(b.dir, "run"), user, user))
	require.Contains(t, text, "listen "+listen+";")
	b.write("nginx.conf", strings.Replace(text, "listen "+listen+";", "listen "+b.addr+";", 1))
	for name, content := range files {
		b.write(name, strings.ReplaceAll(content, "DIR", b.dir))
	}
	b.nginx = b.run(exec.Command("nginx", "-p", b.dir+"/", "-c", "nginx.conf", "-e", "stderr"), "run/nginx.pid")
	return b
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(text)
}

// user is who the brokers run as, and whose the drop box is.
const user = 65532

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

func (b *broker) write(name, content string) {
	b.t.Helper()
	path := filepath.Join(b.dir, name)
	require.NoError(b.t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(b.t, os.WriteFile(path, []byte(content), 0o644))
}

// run starts a program, waits for the file that says that it serves, and ends it with the test.
func (b *broker) run(cmd *exec.Cmd, ready string) *exec.Cmd {
	b.t.Helper()
	log, err := os.OpenFile(filepath.Join(b.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(b.t, err)
	defer log.Close()
	require.NoError(b.t, log.Chown(user, user), "nginx opens /dev/stdout anew")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + b.dir}
	cmd.SysProcAttr = asUser()
	require.NoError(b.t, cmd.Start())
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }() // how it ended is in the log
	b.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-ended
	})
	for {
		if _, err := os.Stat(filepath.Join(b.dir, ready)); err == nil {
			return cmd
		}
		select {
		case <-ended:
			b.t.Fatalf("%s ended:\n%s", cmd.Path, b.log())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func asUser() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}, Setpgid: true}
}

// deployed is what a manifest has a container do.
type deployed struct {
	Name      string
	Command   []string
	Lifecycle struct {
		PreStop struct{ Exec struct{ Command []string } }
	}
}

func container(t *testing.T, file, name string) deployed {
	t.Helper()
	first, _, _ := strings.Cut(read(t, file), "\n---\n")
	var deployment struct {
		Spec struct {
			Template struct {
				Spec struct{ Containers []deployed }
			}
		}
	}
	require.NoError(t, yaml.Unmarshal([]byte(first), &deployment))
	for _, c := range deployment.Spec.Template.Spec.Containers {
		if c.Name == name {
			return c
		}
	}
	require.Fail(t, "no such container", "%s: %s", file, name)
	return deployed{}
}

// command is one of a manifest's, with the broker's folder in the place of what is mounted.
func (b *broker) command(argv []string) *exec.Cmd {
	b.t.Helper()
	require.NotEmpty(b.t, argv)
	var here []string
	for _, a := range argv {
		here = append(here, strings.NewReplacer("/etc/broker/", b.dir+"/", "model.conf", "nginx.conf", "git.conf", "nginx.conf", "/run/broker/", b.dir+"/run/").Replace(a))
	}
	return exec.Command(here[0], here[1:]...)
}

func (b *broker) log() string {
	text, _ := os.ReadFile(filepath.Join(b.dir, "log"))
	return string(text)
}

const (
	realKey     = "sk-the-real-key"
	placeholder = "placeholder-of-job-17"
)

// model starts the model's broker before a handler.
func model(t *testing.T, upstream http.HandlerFunc) *broker {
	t.Helper()
	s := httptest.NewServer(upstream)
	t.Cleanup(s.Close)
	return start(t, read(t, "model.conf"), "8080", map[string]string{
		"site/model-upstream.conf": "proxy_pass " + s.URL + ";\nproxy_set_header Host model.example.com;\n",
		"secrets/model-key.conf":   "proxy_set_header X-Api-Key \"" + realKey + "\";\nproxy_set_header Authorization \"\";\n",
		"secrets/model-runs.map":   "\"" + placeholder + "\" job-17;\n\"Bearer " + placeholder + "\" job-17;\n",
	})
}

func (b *broker) request(method, path string, body io.Reader, header ...string) *http.Response {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	b.t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, method, "http://"+b.addr+path, body)
	require.NoError(b.t, err)
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	require.NoError(b.t, err, b.log())
	b.t.Cleanup(func() { resp.Body.Close() })
	return resp
}

func TestTheModelSeesTheRealKeyAndNothingThatTheSandboxSaysOfItself(t *testing.T) {
	var seen http.Header
	var host string
	b := model(t, func(w http.ResponseWriter, r *http.Request) {
		seen, host = r.Header.Clone(), r.Host
		w.Header().Set("Set-Cookie", "session=1")
		w.Header().Set("X-Accel-Redirect", "/v1/elsewhere")
		_, _ = io.WriteString(w, "answer")
	})
	resp := b.request(http.MethodPost, "/v1/messages?beta=1", strings.NewReader("{}"),
		"X-Api-Key", placeholder, "Cookie", "a=b", "X-Forwarded-For", "10.0.0.1", "Forwarded", "for=10.0.0.1", "Proxy-Authorization", "Basic x",
		"X-Forwarded-Host", "elsewhere", "X_Api_Key", "underscored", "Anthropic-Version", "2023-06-01")
	answer, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Equal(t, "answer", string(answer))
	require.Equal(t, []string{realKey}, seen.Values("X-Api-Key"))
	require.Equal(t, "model.example.com", host)
	require.Equal(t, "2023-06-01", seen.Get("Anthropic-Version"), "what is no credential goes through")
	for _, name := range []string{"Authorization", "Cookie", "X-Forwarded-For", "Forwarded", "Proxy-Authorization", "X-Forwarded-Host", "X_Api_Key"} {
		require.Empty(t, seen.Values(name), name)
	}
	require.Empty(t, resp.Header.Values("Set-Cookie"))
	require.Eventually(t, func() bool { return strings.Contains(b.log(), "run=job-17 POST /v1/messages 200") }, time.Minute, 5*time.Millisecond)
	require.NotContains(t, b.log(), placeholder)
	require.NotContains(t, b.log(), realKey)
}

func TestTheModelIsAskedForNobodyElse(t *testing.T) {
	asked := 0
	b := model(t, func(http.ResponseWriter, *http.Request) { asked++ })
	for _, c := range []struct {
		method, path string
		header       []string
		status       int
	}{
		{http.MethodPost, "/v1/messages", nil, http.StatusUnauthorized},
		{http.MethodPost, "/v1/messages", []string{"X-Api-Key", "guess"}, http.StatusUnauthorized},
		{http.MethodPost, "/v1/messages", []string{"X-Api-Key", realKey}, http.StatusUnauthorized},
		{http.MethodPost, "/v1/messages", []string{"X-Api-Key", placeholder, "Authorization", "Bearer x"}, http.StatusUnauthorized},
		{http.MethodDelete, "/v1/files/1", []string{"X-Api-Key", placeholder}, http.StatusForbidden},
		{http.MethodGet, "/admin", []string{"X-Api-Key", placeholder}, http.StatusForbidden},
		{http.MethodGet, "/v1/../admin", []string{"X-Api-Key", placeholder}, http.StatusForbidden},
		{http.MethodGet, "/v1/%2e%2e/admin", []string{"X-Api-Key", placeholder}, http.StatusForbidden},
	} {
		require.Equal(t, c.status, b.request(c.method, c.path, nil, c.header...).StatusCode, "%s %s %q", c.method, c.path, c.header)
	}
	require.Zero(t, asked)
	require.Equal(t, http.StatusOK, b.request(http.MethodGet, "/v1/models", nil, "Authorization", "Bearer "+placeholder).StatusCode)
	require.Equal(t, 1, asked)
}

func TestAnAnswerStreamsAsItComes(t *testing.T) {
	more := make(chan struct{})
	b := model(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, event := range []string{"one", "two"} {
			_, _ = fmt.Fprintf(w, "data: %s\n\n", event)
			w.(http.Flusher).Flush()
			select {
			case <-more: // the client has the first event: it was not kept until the answer's end
			case <-r.Context().Done():
				return
			}
		}
	})
	in := bufio.NewReader(b.request(http.MethodPost, "/v1/messages", strings.NewReader("{}"), "X-Api-Key", placeholder).Body)
	for _, event := range []string{"one", "two"} {
		line, err := in.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "data: "+event+"\n", line)
		_, err = in.ReadString('\n')
		require.NoError(t, err)
		more <- struct{}{}
	}
}

func TestARequestStreamsAsItComes(t *testing.T) {
	got := make(chan string)
	b := model(t, func(w http.ResponseWriter, r *http.Request) {
		in := bufio.NewReader(r.Body)
		for range 2 {
			line, _ := in.ReadString('\n')
			got <- line
		}
	})
	r, w := io.Pipe()
	go func() {
		for _, line := range []string{"one\n", "two\n"} {
			_, _ = io.WriteString(w, line)
			if <-got != line { // the upstream has it before the request is whole
				_ = w.CloseWithError(io.ErrUnexpectedEOF)
				return
			}
		}
		_ = w.Close()
	}()
	require.Equal(t, http.StatusOK, b.request(http.MethodPost, "/v1/messages", r, "X-Api-Key", placeholder).StatusCode)
}

// TestARollingUpdateEndsNoStreamEarly does what a kubelet does: it runs what the manifest says, and ends what is left then.
func TestARollingUpdateEndsNoStreamEarly(t *testing.T) {
	more := make(chan struct{})
	b := model(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "one\n")
		w.(http.Flusher).Flush()
		select {
		case <-more:
			_, _ = io.WriteString(w, "two\n")
		case <-r.Context().Done():
		}
	})
	in := bufio.NewReader(b.request(http.MethodPost, "/v1/messages", strings.NewReader("{}"), "X-Api-Key", placeholder).Body)
	line, err := in.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "one\n", line)

	stop := b.command(container(t, "model.yaml", "nginx").Lifecycle.PreStop.Exec.Command)
	stop.SysProcAttr = asUser()
	stopped := make(chan error, 1)
	go func() {
		said, err := stop.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, said)
		}
		_ = b.nginx.Process.Signal(syscall.SIGTERM)
		stopped <- err
	}()
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", b.addr)
		if err == nil {
			c.Close()
		}
		return err != nil
	}, time.Minute, 5*time.Millisecond, "it takes nothing new")
	require.Empty(t, stopped, "the stream is not at its end")
	more <- struct{}{}
	rest, err := io.ReadAll(in)
	require.NoError(t, err)
	require.Equal(t, "two\n", string(rest))
	require.NoError(t, <-stopped)
	require.Equal(t, container(t, "model.yaml", "nginx").Lifecycle.PreStop.Exec.Command[2], strings.ReplaceAll(container(t, "git.yaml", "nginx").Lifecycle.PreStop.Exec.Command[2], "git.conf", "model.conf"))
}

const (
	hostCredential = "Basic aG9zdDpyZWFs" // host:real
	gitHTTPBackend = "/usr/lib/git-core/git-http-backend"
)

// gitHost is a stand-in for the Git host: git http-backend for who has its credential.
func gitHost(t *testing.T, root string) (url string, asked func() int) {
	t.Helper()
	served := 0
	backend := &cgi.Handler{Path: gitHTTPBackend, Env: []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"}}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != hostCredential {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		served++
		backend.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return s.URL, func() int { return served }
}

// gitBroker is the Git's broker, with a drop box and a host behind it, and a clone that was made through it.
type gitBroker struct {
	*broker
	dropbox, clone string
	asked          func() int
	backend        *exec.Cmd
}

// startGit starts it; with changes its configuration, to show what that is good for.
func startGit(t *testing.T, with func(string) string) *gitBroker {
	t.Helper()
	testkit.Need(t, testkit.Root, testkit.Git, testkit.Program("nginx"), testkit.Program("fcgiwrap"))
	repo := testkit.Repo(t, user)
	top := filepath.Dir(repo)
	for _, dir := range []string{"host", "dropbox"} {
		testkit.GitAs(t, user, top, "clone", "-q", "--bare", repo, filepath.Join(top, dir, "project.git"))
	}
	url, asked := gitHost(t, filepath.Join(top, "host"))
	b := start(t, with(read(t, "git.conf")), "8081", map[string]string{
		"site/git-upstream.conf":      "proxy_pass " + url + ";\n",
		"site/git-dropbox.conf":       "fastcgi_pass unix:DIR/run/fcgiwrap.sock;\nfastcgi_param GIT_PROJECT_ROOT " + filepath.Join(top, "dropbox") + ";\n",
		"secrets/git-credential.conf": "proxy_set_header Authorization \"" + hostCredential + "\";\n",
		"secrets/git-runs.map":        fmt.Sprintf("%q run-1;\n%q run-10;\n", basic("run-1:token-1"), basic("run-10:token-10")),
	})
	backend := b.run(b.command(container(t, "git.yaml", "git").Command), "run/fcgiwrap.sock")
	g := &gitBroker{broker: b, dropbox: filepath.Join(top, "dropbox", "project.git"), clone: filepath.Join(top, "clone"), asked: asked, backend: backend}
	_, err := g.git(top, "run-1:token-1", "clone", "-q", "http://"+b.addr+"/project.git", g.clone)
	require.NoError(t, err, b.log())
	_, err = g.git(g.clone, "", "-c", "user.name=Run", "-c", "user.email=run@example.com", "commit", "-q", "--allow-empty", "-m", "Work")
	require.NoError(t, err)
	return g
}

func basic(userPassword string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(userPassword))
}

// git runs Git as a sandbox does, with the run's token in a header.
func (g *gitBroker) git(dir, token string, args ...string) (string, error) {
	if token != "" {
		args = append([]string{"-c", "http.extraHeader=Authorization: " + basic(token)}, args...)
	}
	ctx, cancel := context.WithTimeout(g.t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (g *gitBroker) push(token, refspec string) (string, error) {
	return g.git(g.clone, token, "push", "http://"+g.addr+"/project.git", refspec)
}

func unchanged(conf string) string { return conf }

func TestARunFetchesWithTheHostsCredentialAndPushesToItsOwnRefs(t *testing.T) {
	g := startGit(t, unchanged)
	require.Positive(t, g.asked(), "the clone came from the host")
	out, err := g.push("run-1:token-1", "HEAD:refs/sandboxes/run-1/work")
	require.NoError(t, err, "%s\n%s", out, g.log())
	head := testkit.GitAs(t, user, g.clone, "rev-parse", "HEAD")
	require.Equal(t, head, testkit.GitAs(t, user, g.dropbox, "rev-parse", "refs/sandboxes/run-1/work"))
	config, err := os.ReadFile(filepath.Join(g.clone, ".git", "config"))
	require.NoError(t, err)
	for _, secret := range []string{"real", strings.TrimPrefix(hostCredential, "Basic "), "token-1"} {
		require.NotContains(t, string(config)+g.log(), secret)
	}
}

// TestTheLineOfThePagePushes runs it as a command of a sandbox would, with the grant that the page names: a file, in a folder of the
// grant's name.
func TestTheLineOfThePagePushes(t *testing.T) {
	page := read(t, "../../docs/brokers.md")
	line := regexp.MustCompile(`(?m)^git -c .*$`).FindString(page)
	grant := regexp.MustCompile(`--grant-file ([a-z]+/[a-z]+)=FILE`).FindStringSubmatch(page)
	require.Len(t, grant, 2, "the page says how the grant is given")
	// Sandboxes with an allow list have no search domains, so a name is a whole one.
	for service, port := range map[string]string{"model": "8080", "git": "8081"} {
		require.Contains(t, page, "http://"+service+"-broker.sandbox-brokers.svc.cluster.local:"+port)
		require.NotRegexp(t, `http://[a-z-]+\.sandbox-brokers[:/]`, page)
	}
	g := startGit(t, unchanged)
	grants := filepath.Join(g.dir, "grants")
	g.write(filepath.Join("grants", grant[1]), strings.TrimPrefix(basic("run-1:token-1"), "Basic "))
	line = strings.NewReplacer("/run/grants", grants, "git-broker.sandbox-brokers.svc.cluster.local:8081", g.addr, "job-17", "run-1").Replace(line)
	cmd := exec.CommandContext(t.Context(), "bash", "-c", line)
	cmd.Dir, cmd.SysProcAttr = g.clone, asUser()
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0"}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s\n%s\n%s", line, out, g.log())
	require.Equal(t, testkit.GitAs(t, user, g.clone, "rev-parse", "HEAD"), testkit.GitAs(t, user, g.dropbox, "rev-parse", "refs/sandboxes/run-1/work"))
}

// TestGitsContainerIsStartedAgainBesideItsOldSocket: what a pod's containers share stays when one of them is killed.
func TestGitsContainerIsStartedAgainBesideItsOldSocket(t *testing.T) {
	g := startGit(t, unchanged)
	socket := filepath.Join(g.dir, "run", "fcgiwrap.sock")
	require.NoError(t, syscall.Kill(-g.backend.Process.Pid, syscall.SIGKILL))
	require.Eventually(t, func() bool { return refuses(socket) }, time.Minute, 5*time.Millisecond)
	require.FileExists(t, socket)
	g.run(g.command(container(t, "git.yaml", "git").Command), "run/nginx.pid")
	require.Eventually(t, func() bool { return !refuses(socket) }, time.Minute, 5*time.Millisecond, g.log())
	out, err := g.push("run-1:token-1", "HEAD:refs/sandboxes/run-1/work")
	require.NoError(t, err, "%s\n%s", out, g.log())

	// It goes on for as long as nginx passes something on.
	wait := g.command(container(t, "git.yaml", "git").Lifecycle.PreStop.Exec.Command)
	wait.SysProcAttr = asUser()
	require.NoError(t, wait.Start())
	require.NoError(t, g.nginx.Process.Signal(syscall.SIGQUIT))
	require.NoError(t, wait.Wait())
	require.NoFileExists(t, filepath.Join(g.dir, "run", "nginx.pid"))
}

// refuses says that nobody listens at a socket.
func refuses(socket string) bool {
	c, err := net.Dial("unix", socket)
	if err == nil {
		c.Close()
	}
	return err != nil
}

// elsewhere are refs that are none of run-1's.
var elsewhere = []string{"HEAD:refs/heads/main", "HEAD:refs/heads/new", "HEAD:refs/tags/v1", ":refs/heads/main", "HEAD:refs/sandboxes/run-10/work", "HEAD:refs/sandboxes/run-2/work", "HEAD:refs/sandboxesx"}

func TestARunMovesNoRefButItsOwn(t *testing.T) {
	g := startGit(t, unchanged)
	before := testkit.GitAs(t, user, g.dropbox, "show-ref")
	for _, refspec := range elsewhere {
		out, err := g.push("run-1:token-1", refspec)
		require.Error(t, err, "%s: %s", refspec, out)
		require.Regexp(t, `hidden ref|does not exist|unable to delete`, out, refspec)
	}
	for _, token := range []string{"", "run-1:wrong", "run-2:token-1", "host:real"} {
		out, err := g.push(token, "HEAD:refs/sandboxes/run-1/work")
		require.Error(t, err, "%q: %s", token, out)
	}
	require.Equal(t, before, testkit.GitAs(t, user, g.dropbox, "show-ref"))
}

func TestWithoutTheHiddenRefsARunCouldMoveThem(t *testing.T) {
	g := startGit(t, func(conf string) string {
		require.Contains(t, conf, "GIT_CONFIG_VALUE_0 refs;")
		return strings.Replace(conf, "GIT_CONFIG_VALUE_0 refs;", "GIT_CONFIG_VALUE_0 refs/none;", 1)
	})
	for _, refspec := range elsewhere[:3] {
		out, err := g.push("run-1:token-1", refspec)
		require.NoError(t, err, "%s: %s", refspec, out)
	}
}

func TestTheGitBrokerServesNothingElse(t *testing.T) {
	g := startGit(t, unchanged)
	before := g.asked()
	token := basic("run-1:token-1")
	for path, status := range map[string]int{
		"/project.git/HEAD":                                       http.StatusForbidden,
		"/project.git/objects/info/packs":                         http.StatusForbidden,
		"/project.git/info/refs":                                  http.StatusForbidden,
		"/project.git/info/refs?service=git-upload-archive":       http.StatusForbidden,
		"/dropbox/project.git/info/refs?service=git-receive-pack": http.StatusNotFound,
		"/../host/project.git/info/refs?service=git-upload-pack":  http.StatusBadRequest,
		"/%2e%2e/x/project.git/info/refs?service=git-upload-pack": http.StatusBadRequest,
		"/.git/info/refs?service=git-upload-pack":                 http.StatusForbidden,
	} {
		require.Equal(t, status, g.request(http.MethodGet, path, nil, "Authorization", token).StatusCode, path)
	}
	require.Equal(t, before, g.asked())
	resp := g.request(http.MethodGet, "/project.git/info/refs?service=git-upload-pack", nil)
	require.Equal(t, http.StatusUnauthorized, resp.StatusCode)
	require.NotEmpty(t, resp.Header.Get("WWW-Authenticate"), "Git sends its credential when it is asked")
	// Two services in one query: what is read here is what is asked for behind.
	resp = g.request(http.MethodGet, "/project.git/info/refs?service=git-upload-pack&service=git-receive-pack", nil, "Authorization", token)
	require.Equal(t, "application/x-git-upload-pack-advertisement", resp.Header.Get("Content-Type"))
}
