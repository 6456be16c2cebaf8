package agent

import (
	"fmt"
	"sync"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Each sandbox has host uids (and gids) of its own, so that two sandboxes, or a sandbox and a user of the node, never
// share one. systemd documents 0x70000000 and up as unused (https://systemd.io/UIDS-GIDS/).
const (
	idBase     = uint32(0x70000000)
	idsPerSlot = uint32(65536)
	maxSlots   = 4096
	// Ids inside the sandbox's user namespace.
	pid1UID    = 65000
	commandUID = 1000
	commandGID = 1000
)

// slots hands the ranges out. A slot stays taken until there is evidence that its sandbox is gone.
type slots struct {
	mu    sync.Mutex
	taken map[int]string // slot → sandbox id
	next  int
}

func newSlots() *slots { return &slots{taken: map[int]string{}} }

// take gives the least recently tried free slot: a range that was just left is not used again at once.
func (s *slots) take(sandbox string) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range maxSlots {
		slot := s.next
		s.next = (s.next + 1) % maxSlots
		if _, used := s.taken[slot]; !used {
			s.taken[slot] = sandbox
			return slot, nil
		}
	}
	return 0, fmt.Errorf("%w: all %d ranges of host uids are taken: retire sandboxes", ErrExhausted, maxSlots)
}

// claim marks a slot of the journal as taken.
func (s *slots) claim(slot int, sandbox string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if other, used := s.taken[slot]; used && other != sandbox {
		return fmt.Errorf("sandboxes %s and %s are both recorded with host uid range %d", other, sandbox, slot)
	}
	s.taken[slot] = sandbox
	s.next = (slot + 1) % maxSlots
	return nil
}

func (s *slots) release(slot int, sandbox string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[slot] == sandbox {
		delete(s.taken, slot)
	}
}

func idsOf(slot int) runtime.IDs {
	return runtime.IDs{
		HostBase: idBase + uint32(slot)*idsPerSlot, Size: idsPerSlot,
		Pid1UID: pid1UID, CommandUID: commandUID, CommandGID: commandGID,
	}
}
