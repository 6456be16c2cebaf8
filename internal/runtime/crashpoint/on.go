//go:build crashpoints

package crashpoint

import (
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// An agent of tests/faults. crashAtEnv says where it dies: "NAME:COUNT", at the COUNTth time that it comes to the point
// NAME, or the absolute path of a file that holds that, which is read at each point: so a test decides meanwhile.
// crashLogEnv names a file to which each point is appended, one a line, before anything happens at it.
const (
	crashAtEnv  = "SANDBOX_AGENT_CRASH_AT"
	crashLogEnv = "SANDBOX_AGENT_CRASH_LOG"
)

var crashing struct {
	sync.Mutex
	at   string
	seen int
}

// At is where the agent can be killed.
func At(name string) {
	name = strings.ReplaceAll(name, " ", "-")
	crashing.Lock()
	defer crashing.Unlock()
	if path := os.Getenv(crashLogEnv); path != "" {
		appendLine(path, name)
	}
	at := os.Getenv(crashAtEnv)
	if strings.HasPrefix(at, "/") {
		b, err := os.ReadFile(at)
		if err != nil {
			b = nil // not armed
		}
		at = strings.TrimSpace(string(b))
	}
	if at != crashing.at {
		crashing.at, crashing.seen = at, 0
	}
	want, times, _ := strings.Cut(at, ":")
	if want != name {
		return
	}
	if crashing.seen++; strconv.Itoa(crashing.seen) == times {
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}
}

func appendLine(path, line string) {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	defer f.Close()
	if _, err := f.WriteString(line + "\n"); err != nil {
		panic(err)
	}
}
