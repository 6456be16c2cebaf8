package agent

import (
	"fmt"
	"slices"
	"strings"

	receiptdv1 "github.com/sandbox-agent/sandbox-agent/api/receiptd/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// judgeProof is what a sandbox's proof comes to: every item holds, or is one that its runtime had declared, in these very
// words, not to be able to keep. The error names what doesn't. It is pure.
func judgeProof(items []*receiptdv1.ProofItem, conceded []runtime.Concession) ([]proofRecord, error) {
	var proof []proofRecord
	var broken []string
	for _, i := range items {
		r := proofRecord{Promise: i.GetPromise(), What: i.GetWhat(), Holds: i.GetHolds(), Detail: i.GetDetail()}
		r.Conceded = !r.Holds && slices.ContainsFunc(conceded, func(c runtime.Concession) bool { return c.Promise == r.Promise && c.What == r.What })
		proof = append(proof, r)
		if !r.Holds && !r.Conceded {
			broken = append(broken, fmt.Sprintf("%s (%s: %s)", r.Promise, r.What, r.Detail))
		}
	}
	switch {
	case len(broken) > 0:
		return nil, fmt.Errorf("can't prove %s", strings.Join(broken, ", "))
	case !slices.ContainsFunc(proof, func(r proofRecord) bool { return r.Holds }):
		return nil, fmt.Errorf("proved nothing at all")
	}
	return proof, nil
}
