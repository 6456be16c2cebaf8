package hostkernel

import (
	"fmt"
	"time"

	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Evidence collects what was observed.
type Evidence struct {
	runtime.Evidence
}

// NewEvidence begins one with nothing observed.
func NewEvidence(id runtime.Identity) *Evidence {
	return &Evidence{runtime.Evidence{Runtime: id.Runtime, ContainerID: id.ContainerID}}
}

// Add notes an observation, now.
func (e *Evidence) Add(source, format string, args ...any) {
	e.Items = append(e.Items, runtime.EvidenceItem{Source: source, Detail: fmt.Sprintf(format, args...), ObservedAt: time.Now().UTC()})
}

// Completed is called once every step has been observed.
func (e *Evidence) Completed() runtime.Evidence {
	e.Complete = true
	return e.Evidence
}
