package verify

import (
	"cmp"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/sandbox-agent/sandbox-agent/pkg/receipt"
)

// ChainReport is what the receipts of one sandbox say as a whole.
type ChainReport struct {
	// Receipts are the ones that verify, in order of their sequence.
	Receipts []receipt.Predicate
	// Removed is the beginning of the chain that was removed on purpose (retention): nobody can verify it any more, but the
	// first receipt after it names its end, and is signed. Zero: nothing was.
	Removed receipt.Removed
	// Problems are sentences, one for each thing that is wrong; none: the chain is whole, from its first receipt, or
	// the end of what was removed on purpose, to the newest that is there.
	Problems []string
	// LastSHA256 is the SHA-256 (lower-case hex) of the newest envelope. Compare it with the journal's: a receipt
	// removed from the END of a chain shows only there.
	LastSHA256 string
}

// OK says whether nothing is wrong.
func (r ChainReport) OK() bool { return len(r.Problems) == 0 }

type link struct {
	receipt.Predicate
	sha string
}

// Chain checks every receipt of a sandbox's receipts folder against its key and its kept output, and all of them
// against each other: each sequence number from 1 on is there once, and each receipt names the one before it. What was
// removed on purpose may be missing at the beginning, also in part. It fails only if the folder can't be read; what is
// wrong with the receipts is in the report.
func Chain(dir string, pub ed25519.PublicKey) (ChainReport, error) {
	ids, err := receipt.List(dir)
	if err != nil {
		return ChainReport{}, err
	}
	var r ChainReport
	if r.Removed, err = receipt.ReadRemoved(dir); err != nil {
		r.problem("what was removed on purpose is not known: %v", err)
	}
	var links []link
	for _, id := range ids {
		p, b, err := one(dir, id, pub)
		if err != nil {
			r.problem("exec %s: %v", id, err)
			continue
		}
		if err := keptOutput(dir, &p); err != nil {
			r.problem("exec %s: %v", id, err)
		}
		sum := sha256.Sum256(b)
		links = append(links, link{p, hex.EncodeToString(sum[:])})
	}
	slices.SortStableFunc(links, func(a, b link) int { return cmp.Compare(a.Sequence, b.Sequence) })
	r.follow(r.leftOver(links))
	return r, nil
}

func (r *ChainReport) problem(format string, args ...any) {
	r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
}

// leftOver takes the receipts that were to be removed, and still are there, from the front of the chain, and gives the rest.
func (r *ChainReport) leftOver(links []link) []link {
	n := 0
	for ; n < len(links) && links[n].Sequence <= r.Removed.Sequence; n++ {
		l := links[n]
		switch {
		case n > 0 && l.Sequence == links[n-1].Sequence:
			r.problem("receipt %d is there twice: execs %s and %s", l.Sequence, links[n-1].ExecID, l.ExecID)
		case l.Sequence == r.Removed.Sequence && l.sha != r.Removed.SHA256:
			r.problem("receipt %d (exec %s) is %q, but what was removed on purpose ends with %q", l.Sequence, l.ExecID, l.sha, r.Removed.SHA256)
		}
		r.Receipts, r.LastSHA256 = append(r.Receipts, l.Predicate), l.sha
	}
	return links[n:]
}

// follow walks the receipts in order, from the end of what was removed on purpose.
func (r *ChainReport) follow(links []link) {
	before := link{sha: r.Removed.SHA256}
	before.Sequence = r.Removed.Sequence
	r.LastSHA256 = cmp.Or(r.LastSHA256, r.Removed.SHA256)
	for _, l := range links {
		switch {
		case l.Sequence == before.Sequence:
			r.problem("receipt %d is there twice: execs %s and %s", l.Sequence, before.ExecID, l.ExecID)
		case l.Sequence == before.Sequence+2:
			r.problem("receipt %d is missing", before.Sequence+1)
		case l.Sequence > before.Sequence+2:
			r.problem("receipts %d to %d are missing", before.Sequence+1, l.Sequence-1)
		case l.Previous != before.sha:
			r.problem("receipt %d (exec %s) follows %q, but receipt %d is %q", l.Sequence, l.ExecID, l.Previous, before.Sequence, before.sha)
		}
		if before.SandboxID != "" && l.SandboxID != before.SandboxID {
			r.problem("receipt %d (exec %s) is of sandbox %s, the one before it of %s", l.Sequence, l.ExecID, l.SandboxID, before.SandboxID)
		}
		r.Receipts, r.LastSHA256, before = append(r.Receipts, l.Predicate), l.sha, l
	}
}
