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

// slots hands out the node's places for sandboxes: a range of ids, and a part of the memory. A slot stays taken until
// there is evidence that its sandbox is gone.
type slots struct {
	// memoryBound is the most of memory, bytes; 0: no bound.
	memoryBound int64

	mu     sync.Mutex
	taken  map[int]occupant
	memory int64 // of all occupants together
	next   int
}

// occupant is the sandbox in a slot, with its memory limit in bytes.
type occupant struct {
	sandbox string
	memory  int64
}

func newSlots(memoryBound int64) *slots {
	return &slots{memoryBound: memoryBound, taken: map[int]occupant{}}
}

// take gives the least recently tried free slot: a range that was just left is not used again at once.
func (s *slots) take(sandbox string, memory int64) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.memoryBound > 0 && memory > s.memoryBound-s.memory {
		return 0, fmt.Errorf("%w: the sandboxes of this node have memory limits of %d bytes together, and %d more are above %d (limits.total_memory_bytes): retire sandboxes, or make this session anew with fewer resources.memory_bytes",
			ErrExhausted, s.memory, memory, s.memoryBound)
	}
	for range maxSlots {
		slot := s.next
		s.next = (s.next + 1) % maxSlots
		if _, used := s.taken[slot]; !used {
			s.taken[slot] = occupant{sandbox, memory}
			s.memory += memory
			return slot, nil
		}
	}
	return 0, fmt.Errorf("%w: all %d ranges of host uids are taken: retire sandboxes", ErrExhausted, maxSlots)
}

// claim marks a slot of the journal as taken, also beyond a bound that was lowered: its sandbox is there.
func (s *slots) claim(slot int, sandbox string, memory int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	other, used := s.taken[slot]
	if used && other.sandbox != sandbox {
		return fmt.Errorf("sandboxes %s and %s are both recorded with host uid range %d", other.sandbox, sandbox, slot)
	}
	s.taken[slot] = occupant{sandbox, memory}
	s.memory += memory - other.memory
	s.next = (slot + 1) % maxSlots
	return nil
}

func (s *slots) release(slot int, sandbox string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o := s.taken[slot]; o.sandbox == sandbox {
		s.memory -= o.memory
		delete(s.taken, slot)
	}
}

func idsOf(slot int) runtime.IDs {
	return runtime.IDs{
		HostBase: idBase + uint32(slot)*idsPerSlot, Size: idsPerSlot,
		Pid1UID: pid1UID, CommandUID: commandUID, CommandGID: commandGID,
	}
}

// reserved is the sum of the memory limits, bytes.
func (s *slots) reserved() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.memory
}
