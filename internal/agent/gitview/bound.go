package gitview

import (
	"encoding/json"
	"fmt"
	"strings"
)

// A harvest is part of an answer and of two records of the journal, which takes no record of more than 4 MiB: a session whose
// record has become too large could not even be retired. How many refs there are, what they are named, and which locks are left
// behind is for the command to choose.
const (
	// mostSaid bounds Detail, mostTold what each of the lists takes as JSON, bytes.
	mostSaid = 8 << 10
	mostTold = 128 << 10
)

// bound leaves out what is too much to tell, and says how much that is.
func (h *Harvest) bound() {
	var left []string
	leave := func(n int, what string) {
		if n > 0 {
			left = append(left, count(n, "more "+what))
		}
	}
	var n int
	h.Refs, n = within(h.Refs, mostTold)
	leave(n, "written ref")
	h.Conflicts, n = within(h.Conflicts, mostTold)
	leave(n, "conflict")
	h.Standing, n = within(h.Standing, mostTold)
	leave(n, "standing conflict")
	h.StaleLocks, n = within(h.StaleLocks, mostTold)
	leave(n, "removed lock file")
	if len(left) == 0 {
		return
	}
	if h.Detail != "" {
		h.Detail += "; "
	}
	h.Detail += fmt.Sprintf("not all is named here: there are %s", strings.Join(left, ", "))
}

// within is the beginning of a list that takes at most so many bytes as JSON, and how many are left out.
func within[T any](list []T, most int) (_ []T, left int) {
	size := 0
	for i, x := range list {
		b, err := json.Marshal(x)
		if size += len(b) + 1; err != nil || size > most {
			return list[:i], len(list) - i
		}
	}
	return list, 0
}

// cutTo is a text of at most about so many bytes.
func cutTo(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
