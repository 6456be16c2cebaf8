package receiptd

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"time"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec"
	"github.com/sandbox-agent/sandbox-agent/pkg/nsexec/wire"
	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// prepareDelay is how long a command may run before the next pid1 is made beside it. Most commands are shorter, and
// would have to share the processor with that.
const prepareDelay = 20 * time.Millisecond

// preparer keeps one pid1, and one receipt's space, ready.
type preparer struct {
	view  *nsexec.View
	store *receipt.Store

	mu   sync.Mutex
	next chan made // holds at most one
	busy bool      // one is being made, or waits
	// found are the seals as the first pid1 found them: those that the agent was told of, and that hold for the sandbox's life.
	found []wire.SealState
}

type made struct {
	p   *nsexec.Prepared
	err error
}

func newPreparer(v *nsexec.View, store *receipt.Store) (*preparer, error) {
	r := &preparer{view: v, store: store, next: make(chan made, 1)}
	first := r.make()
	if first.err != nil {
		return nil, first.err
	}
	r.busy = true
	r.found = first.p.Seals()
	r.next <- first
	return r, nil
}

func sealProto(s wire.SealState) *receiptdv1.SealState {
	p := &receiptdv1.SealState{Path: s.Path, MountId: s.MountID, Device: s.Device, Inode: s.Inode, ReadOnly: s.ReadOnly}
	if s.SHA256 != ([sha256.Size]byte{}) {
		p.Sha256 = hex.EncodeToString(s.SHA256[:])
	}
	return p
}

func (r *preparer) make() made {
	if err := r.store.Reserve(); err != nil {
		return made{err: err}
	}
	p, err := r.view.Prepare()
	return made{p, err}
}

// refill makes the next one in the background, unless there is one, and the receipt's space in any case.
func (r *preparer) refill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.busy {
		// An error shows in take, which asks again.
		go func() { _ = r.store.Reserve() }()
		return
	}
	r.busy = true
	go func() { r.next <- r.make() }()
}

// refillAfter makes the next one once d has passed, unless it is stopped before that.
func (r *preparer) refillAfter(d time.Duration) (stop func()) {
	t := time.AfterFunc(d, r.refill)
	return func() { t.Stop() }
}

// take gives the waiting one, or makes it. An error is not kept: the next take tries again.
func (r *preparer) take() (*nsexec.Prepared, error) {
	r.refill()
	m := <-r.next
	r.mu.Lock()
	r.busy = false
	r.mu.Unlock()
	if m.err != nil {
		return nil, m.err
	}
	// The space may have been reserved for a command that has used it since; usually this finds it in place.
	if err := r.store.Reserve(); err != nil {
		m.p.Discard()
		return nil, err
	}
	if err := r.sameSeals(m.p.Seals()); err != nil {
		m.p.Discard()
		return nil, err
	}
	return m.p, nil
}

// sameSeals compares what a pid1 found when it was prepared with what the sandbox began with. A pid1 compares from then on,
// so that without this a change between one command's end and the making of the next pid1 would be taken for the right state.
func (r *preparer) sameSeals(now []wire.SealState) error {
	if len(now) != len(r.found) {
		return fmt.Errorf("a pid1 looked at %d seals instead of %d, so nothing was started", len(now), len(r.found))
	}
	for i, was := range r.found {
		if !now[i].Same(was) {
			return fmt.Errorf("a seal was broken while the sandbox was idle, so nothing was started: %s", was.Path)
		}
	}
	return nil
}

func (r *preparer) waiting() bool { return len(r.next) > 0 }

// seals are the seals as the first pid1 found them.
func (r *preparer) seals() []*receiptdv1.SealState {
	out := make([]*receiptdv1.SealState, 0, len(r.found))
	for _, s := range r.found {
		out = append(out, sealProto(s))
	}
	return out
}
