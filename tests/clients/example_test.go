package clients

import (
	"context"
	"errors"
	"fmt"
	"os"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/client"
	"github.com/sandbox-agent/sandbox-agent/internal/testkit"
)

// withSession stands for what a control plane has: an agent, and a session on somebody's repository.
func withSession(f func(ctx context.Context, c *client.Client, session string)) {
	m := &mainTB{}
	m.run(func() { f(context.Background(), host.client(), common(m).GetSessionId()) })
	m.cleanup()
}

func Example_createSession() {
	m := &mainTB{}
	defer m.cleanup()
	repository := testkit.Repo(m, owner)
	ctx := context.Background()

	c := client.New(host.Socket, client.Options{})
	s, err := c.CreateSession(ctx, &sandboxv1.CreateSessionRequest{
		SessionId: "job-18", // the caller's: the same request again gives the same session
		Workspace: &sandboxv1.Workspace{Repository: repository, Branch: "job-18"},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(s.GetState(), "generation", s.GetGeneration(), "pinned keys:", len(c.Keys().All()))
	gone, err := c.DeleteWorkspace(ctx, &sandboxv1.DeleteWorkspaceRequest{SessionId: "job-18"})
	fmt.Println("evidence complete:", gone.GetEvidence().GetComplete(), err)
	// Output:
	// READY generation 1 pinned keys: 1
	// evidence complete: true <nil>
}

func Example_exec() {
	withSession(func(ctx context.Context, c *client.Client, session string) {
		res, err := c.Exec(ctx, &sandboxv1.ExecRequest{SessionId: session, ExecId: "example-exec", Command: "echo hello; exit 3"})
		switch {
		case errors.Is(err, client.ErrNotStarted):
			fmt.Println("it certainly never ran:", err)
		case errors.Is(err, client.ErrUncertain):
			fmt.Println("it may have run, look before you repeat it:", err)
		default:
			fmt.Printf("%s %d %q, nothing of it is left: %s\n", res.GetStatus(), res.GetExitCode(), res.GetStdout(), res.Verified.Boundary.Method)
		}
	})
	// Output: EXITED 3 "hello\n", nothing of it is left: wait4
}

func Example_stream() {
	withSession(func(ctx context.Context, c *client.Client, session string) {
		res, err := c.Stream(ctx, &sandboxv1.StreamExecRequest{
			Exec: &sandboxv1.ExecRequest{SessionId: session, ExecId: "example-stream", Command: "seq 3; echo done >&2"},
		}, func(k client.Chunk) error {
			if k.Stream == sandboxv1.Stream_STDERR {
				return nil
			}
			_, err := os.Stdout.Write(k.Data)
			return err
		})
		fmt.Println(res.Success(), err)
	})
	// Output:
	// 1
	// 2
	// 3
	// true <nil>
}

func Example_cancelExec() {
	withSession(func(ctx context.Context, c *client.Client, session string) {
		started := make(chan struct{})
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = c.Stream(ctx, &sandboxv1.StreamExecRequest{
				Exec: &sandboxv1.ExecRequest{SessionId: session, ExecId: "long", Command: "echo begun; sleep 600"},
			}, func(client.Chunk) error { close(started); return nil })
		}()
		<-started
		res, err := c.CancelExec(ctx, &sandboxv1.CancelExecRequest{SessionId: session, ExecId: "long"})
		<-ended
		fmt.Println(res.GetStatus(), "evidence complete:", res.GetEvidence().GetComplete(), err)
	})
	// Output: CANCELLED evidence complete: true <nil>
}
