package main

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/ttrpc"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/embedded"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt/verify"
)

const (
	nameReceiptd = "receiptd alone"
	nameStart    = "sandbox start"
	nameStop     = "sandbox stop"
)

// host makes sandboxes with the embedded runtime, in this process, the way that the agent does.
type host struct {
	place *place
	rt    *embedded.Runtime
	env   []string
	slot  uint32
}

// firstSlot keeps the host uid ranges of these sandboxes away from those that the agent hands out, from 0 on.
const firstSlot = 4000

func newHost(p *place, name string, slot uint32, env []string) (*host, error) {
	dir := p.path(name)
	if err := os.Mkdir(dir, 0o711); err != nil {
		return nil, err
	}
	rt, err := embedded.New(embedded.Options{StateDir: dir, CgroupParent: p.cgroup})
	if err != nil {
		return nil, err
	}
	h := &host{place: p, rt: rt, env: env, slot: firstSlot + slot}
	p.onClose(h.Close)
	return h, nil
}

// Close removes the sandboxes that are left after an error.
func (h *host) Close(ctx context.Context) error {
	ids, err := h.rt.List(ctx)
	errs := []error{err}
	for _, id := range ids {
		_, err := h.rt.Remove(ctx, runtime.Identity{SandboxID: id})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// sandbox is one that has proved itself, with the connection to its receiptd.
type sandbox struct {
	runtime.Sandbox
	spec     runtime.Spec
	conn     *ttrpc.Client
	receiptd receiptdv1.ReceiptdClient
	key      ed25519.PublicKey
	execs    int
}

// start makes a sandbox ready for a command: created, introduced, proved.
func (h *host) start(ctx context.Context, plan mounts.Plan) (*sandbox, error) {
	spec := h.spec(plan)
	if err := os.Mkdir(spec.ReceiptsDir, 0o700); err != nil {
		return nil, err
	}
	created, err := h.rt.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	conn, err := created.Dial(ctx)
	if err != nil {
		return nil, err
	}
	s := &sandbox{Sandbox: created, spec: spec, conn: ttrpc.NewClient(conn)}
	s.receiptd = receiptdv1.NewReceiptdClient(s.conn)
	if err := s.introduce(ctx, h.env); err != nil {
		return nil, err
	}
	return s, s.prove(ctx)
}

func (h *host) spec(plan mounts.Plan) runtime.Spec {
	b := make([]byte, 8)
	rand.Read(b)
	id := "sb-" + hex.EncodeToString(b)
	return runtime.Spec{
		SandboxID: id, SessionID: "bench", Generation: 1, Rootfs: "host", Network: "none", Workspace: plan,
		IDs: runtime.IDs{HostBase: 0x70000000 + h.slot*65536, Size: 65536, Pid1UID: 65000, CommandUID: 1000, CommandGID: 1000},
		// The agent's defaults.
		Resources: runtime.Resources{Pids: 512, MemoryBytes: 1 << 30, TmpBytes: 1 << 30, HomeBytes: 1 << 30},
		Dir:       filepath.Join(h.place.path(), id), ReceiptsDir: filepath.Join(h.place.path(), "receipts-"+id),
		Receiptd: filepath.Join(h.place.bin, "receiptd"), Pid1: filepath.Join(h.place.bin, "pid1"),
	}
}

func (s *sandbox) introduce(ctx context.Context, env []string) error {
	v := s.View()
	v.Dir, v.Seals = s.spec.Workspace.Worktree, s.spec.Workspace.Seals()
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		v.Env = append(v.Env, &receiptdv1.EnvVar{Name: name, Value: value})
	}
	res, err := s.receiptd.Init(ctx, &receiptdv1.InitRequest{
		Identity:    &receiptdv1.Identity{SessionId: s.spec.SessionID, SandboxId: s.spec.SandboxID, Generation: s.spec.Generation},
		AttachEpoch: 1, View: v,
		Limits: &receiptdv1.Limits{OutputBytes: 262144, Nproc: 512, Nofile: 4096, GraceMs: 2000, MaxTimeoutMs: 3600000},
	})
	s.key = res.GetPublicKey()
	return err
}

func (s *sandbox) prove(ctx context.Context) error {
	res, err := s.receiptd.Prove(ctx, &receiptdv1.ProveRequest{AttachEpoch: 1})
	if err != nil {
		return err
	}
	for _, i := range res.GetItems() {
		if !i.GetHolds() {
			return fmt.Errorf("the sandbox can't prove %s: %s: %s", i.GetPromise(), i.GetWhat(), i.GetDetail())
		}
	}
	return nil
}

// stop ends it with evidence and takes its receipts away.
func (s *sandbox) stop(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	ev, err := s.Stop(ctx)
	took := time.Since(began)
	if err == nil && !ev.Complete {
		err = fmt.Errorf("stopping %s: the evidence is not complete: %v", s.spec.SandboxID, ev.Items)
	}
	return took, errors.Join(err, s.conn.Close(), os.RemoveAll(s.spec.ReceiptsDir))
}

// exec runs a command until receiptd says that its receipt is durable.
func (s *sandbox) exec(ctx context.Context, command string) (id string, err error) {
	s.execs++
	id = fmt.Sprintf("bench-%d", s.execs)
	stream, err := s.receiptd.Exec(ctx, &receiptdv1.ExecRequest{
		AttachEpoch: 1, ExecId: id, Nonce: make([]byte, 32), Command: command, TimeoutMs: 120000,
	})
	if err != nil {
		return id, err
	}
	for {
		ev, err := stream.Recv()
		if err != nil {
			return id, err
		}
		switch x := ev.GetEvent().(type) {
		case *receiptdv1.ExecEvent_Output:
		case *receiptdv1.ExecEvent_Done:
			go drain(stream)
			return id, nil
		default:
			return id, fmt.Errorf("running %q: %v", command, x)
		}
	}
}

// drain takes the stream's closing message, which the library waits to hand over.
func drain(stream receiptdv1.Receiptd_ExecClient) {
	for {
		if _, err := stream.Recv(); err != nil {
			return
		}
	}
}

// receiptdCase is the part of an exec that happens in the sandbox: no socket of the agent's, no journal.
func receiptdCase(ctx context.Context, o options, p *place, s *session) ([]testCase, error) {
	if !o.wants(nameReceiptd) {
		return nil, nil
	}
	h, err := newHost(p, "host-exec", 0, s.env)
	if err != nil {
		return nil, err
	}
	_, plan, err := p.worktree(ctx)
	if err != nil {
		return nil, err
	}
	sb, err := h.start(ctx, plan)
	if err != nil {
		return nil, err
	}
	p.onClose(func(ctx context.Context) error { _, err := sb.stop(ctx); return err })
	return []testCase{{group: groupCommand, series: []string{nameReceiptd}, sample: one(func(ctx context.Context) (time.Duration, error) {
		began := time.Now()
		id, err := sb.exec(ctx, "true")
		took := time.Since(began)
		if err == nil {
			_, err = verify.File(filepath.Join(sb.spec.ReceiptsDir, id+".json"), sb.key)
		}
		return took, err
	})}}, nil
}

// startCase is a sandbox from nothing to ready for a command, and back to nothing.
func startCase(ctx context.Context, o options, p *place, s *session) ([]testCase, error) {
	if !o.wants(nameStart) && !o.wants(nameStop) {
		return nil, nil
	}
	h, err := newHost(p, "host-start", 1, s.env)
	if err != nil {
		return nil, err
	}
	_, plan, err := p.worktree(ctx)
	if err != nil {
		return nil, err
	}
	return []testCase{{group: groupSandbox, series: []string{nameStart, nameStop}, sample: func(ctx context.Context) ([]time.Duration, error) {
		began := time.Now()
		sb, err := h.start(ctx, plan)
		started := time.Since(began)
		if err != nil {
			return nil, err
		}
		stopped, err := sb.stop(ctx)
		return []time.Duration{started, stopped}, err
	}}}, nil
}
