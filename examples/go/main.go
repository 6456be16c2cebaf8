// Command go is a control plane in one file: it makes a session, runs commands in it and leaves nothing behind. It is
// written to be read from top to bottom, and to be started again after a crash with the same --job: nothing runs twice.
//
//	go run ./examples/go --repo /srv/project --job job-17 --keys job-17.keys
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/client"
)

func main() {
	socket := flag.String("socket", "/run/sandbox-agent/exec.sock", "the agent's unix socket")
	repo := flag.String("repo", "", "the base clone, an absolute path")
	job := flag.String("job", "", "the job's name: session, branch and exec ids are made of it")
	keys := flag.String("keys", "", "where the sandboxes' keys are stored, a file")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *socket, *repo, *job, *keys); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, socket, repo, job, keys string) error {
	// The keys that were pinned before a crash hold after it.
	ring, err := loadKeys(keys)
	if err != nil {
		return err
	}
	c := client.New(socket, client.Options{Keys: ring})
	defer c.Close()

	// The same id and the same request give the same session, however often they are sent.
	s, err := c.CreateSession(ctx, &sandboxv1.CreateSessionRequest{
		SessionId: job,
		Workspace: &sandboxv1.Workspace{Repository: repo, Branch: job},
	})
	if err != nil {
		return err
	}
	// The sandbox's key was pinned with the answer: store it before anything runs.
	if err := storeKeys(keys, ring); err != nil {
		return err
	}
	fmt.Fprintf(out, "session %s, owner epoch %d\n", s.GetSessionId(), s.GetOwnerEpoch())

	// The exec id says which step of the job this is, so that a repeated job finds what was done.
	edit := &sandboxv1.ExecRequest{
		SessionId: job, OwnerEpoch: s.GetOwnerEpoch(), ExecId: job + "-edit",
		Command: "echo hello > greeting && git add greeting && git commit -qm Greet && git log --format=%s -1",
		Labels:  map[string]string{"job": job},
	}
	res, err := c.Exec(ctx, edit)
	switch {
	case errors.Is(err, client.ErrNotStarted):
		return fmt.Errorf("nothing was done, try again with a new exec id: %w", err)
	case errors.Is(err, client.ErrUncertain):
		return fmt.Errorf("look at the worktree before anything is repeated: %w", err)
	case err != nil:
		return err
	case !res.Success():
		return fmt.Errorf("the edit failed: %s, exit code %d: %s", res.GetStatus(), res.GetExitCode(), res.GetStderr())
	}
	fmt.Fprintf(out, "edit: %s %d, receipt %d verifies\n%s", res.GetStatus(), res.GetExitCode(), res.Verified.Sequence, res.GetStdout())
	fmt.Fprintf(out, "in the base clone: %v\n", res.GetHarvest().GetRefs())

	// Output as it comes, over as many connections as it takes.
	_, err = c.Stream(ctx, &sandboxv1.StreamExecRequest{Exec: &sandboxv1.ExecRequest{
		SessionId: job, OwnerEpoch: s.GetOwnerEpoch(), ExecId: job + "-look", Command: "for i in 1 2 3; do echo $i; done; cat greeting",
	}}, func(k client.Chunk) error {
		if k.Lost > 0 {
			fmt.Fprintf(out, "[%d bytes are lost]\n", k.Lost)
		}
		_, err := out.Write(k.Data)
		return err
	})
	if err != nil {
		return err
	}

	// Nothing of the job stays: sandbox, session and worktree go, on evidence. The branch stays in the base clone.
	gone, err := c.DeleteWorkspace(ctx, &sandboxv1.DeleteWorkspaceRequest{SessionId: job, OwnerEpoch: s.GetOwnerEpoch()})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "gone, evidence complete: %v\n", gone.GetEvidence().GetComplete())
	return nil
}

func loadKeys(path string) (*client.Keyring, error) {
	ring := &client.Keyring{}
	b, err := os.ReadFile(path)
	if path == "" || errors.Is(err, fs.ErrNotExist) {
		return ring, nil
	}
	pins := map[string]client.Pin{}
	if err := errors.Join(err, json.Unmarshal(b, &pins)); err != nil {
		return nil, fmt.Errorf("reading the pinned keys: %w", err)
	}
	for id, pin := range pins {
		if err := ring.Pin(id, pin); err != nil {
			return nil, err
		}
	}
	return ring, nil
}

func storeKeys(path string, ring *client.Keyring) error {
	if path == "" {
		return nil
	}
	b, err := json.Marshal(ring.All())
	if err != nil {
		return fmt.Errorf("storing the pinned keys: %w", err)
	}
	return os.WriteFile(path, b, 0o600)
}
